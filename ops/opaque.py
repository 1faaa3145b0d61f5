"""Functional operators whose bodies no compiler looks into, for the kernels of fused ops.

Defined with `Library.define` and `Library.impl`, as split ops are: a `torch.library.custom_op` costs 8 to 12 us a call,
and this 1.3 us. No split op: a graph is not cut at one of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

_NAMESPACE = "piecework"
_LIBRARIES: dict[str, torch.library.Library] = {}
"""Name -> what defined it: an operator lives as long as its library."""


def opaque(name: str, *, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], OpOverload]:
    """Makes the decorated function the body of the operator `piecework::name`; its annotations give the schema.

    The body returns new contiguous tensors and writes into none of its arguments. What it needs of a package it imports
    when it is called: the operator is there, and can be traced, where the package is not. Defined again by a reload, it
    takes the place of the one before. A kernel that calls it says so (`operators=` of `FusedOp.kernel`), so that a
    forward which is compiled whole can have the native body in its place.

    Args:
        fake: a function of the same arguments that returns empty tensors of the right shapes, dtypes and strides.
    """

    def define(body: Callable[..., Any]) -> OpOverload:
        before = _LIBRARIES.pop(name, None)
        if before is not None:
            before._destroy()
        library = _LIBRARIES[name] = torch.library.Library(_NAMESPACE, "FRAGMENT")
        library.define(f"{name}{torch.library.infer_schema(body, mutates_args=())}")
        library.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=library)
        operator: OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
        return operator

    return define


def like_first(x: torch.Tensor, *others: object) -> torch.Tensor:
    """A fake of operators whose result is like their first argument."""
    return x.new_empty(x.shape)


def like_two(x: torch.Tensor, y: torch.Tensor, *others: object) -> tuple[torch.Tensor, torch.Tensor]:
    """A fake of operators whose two results are like their first two arguments."""
    return x.new_empty(x.shape), y.new_empty(y.shape)


def with_half(x: torch.Tensor) -> torch.Tensor:
    """A fake of operators whose result has half of the last dim."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def aligned(x: torch.Tensor) -> torch.Tensor:
    """`x` itself if it is contiguous and begins at a multiple of 16 bytes, else such a copy."""
    fits = x.is_contiguous() and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)
