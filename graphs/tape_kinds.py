"""What a tape does with an operator, as its schema and its kernels tell."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

TORCHS_OWN = ("aten", "prim", "prims")
# Composite operators that look at data when they run on a CPU, and do not on a GPU: recorded as they are.
_WHOLE = {aten.one_hot.default}
_ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


class Kind(enum.Enum):
    """What a tape does with an operator."""

    DECOMPOSE = "taken apart"
    VIEW = "made, of the same memory"
    METADATA = "made, with the tensor itself changed"
    ALLOCATE = "allocated and poisoned"
    INSPECT = "asked, since it tells nothing of the data"
    RECORD = "written down"


@functools.cache
def kind_of(func: OpOverload) -> Kind:
    """What a tape does with an operator that it does not refuse."""
    returns = func._schema.returns
    written = any(is_written(argument) for argument in func._schema.arguments)
    if func in _ALLOCATIONS:
        return Kind.ALLOCATE
    if func is aten.lift_fresh.default:  # of torch.tensor([...]), which each step makes anew and may write
        return Kind.RECORD
    if func not in _WHOLE and _is_composite(func):
        return Kind.DECOMPOSE
    if torch.Tag.inplace_view in func.tags:
        return Kind.METADATA
    if not written and func.is_view and func.namespace in TORCHS_OWN:
        return Kind.VIEW
    if not written and func.namespace == "profiler":
        return Kind.INSPECT
    if returns and not written and func.namespace in TORCHS_OWN:
        if not any("Tensor" in str(returned.type) for returned in returns):
            return Kind.INSPECT
    return Kind.RECORD


def _is_composite(func: OpOverload) -> bool:
    """Whether calling it on a CPU runs its composite kernel."""
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    return has("CompositeImplicitAutograd") and not has("CPU")


@functools.cache
def functional_of(func: OpOverload) -> OpOverload | None:
    """The overload that returns what this one writes to its `out=`."""
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments if not is_written(argument)]
    for name in func.overloadpacket.overloads():
        other: OpOverload = getattr(func.overloadpacket, name)
        arguments = other._schema.arguments
        if not any(map(is_written, arguments)) and [(a.name, str(a.type)) for a in arguments] == wanted:
            return other
    return None


def is_written(argument: Any) -> bool:
    """Whether an argument of a schema is written to."""
    return argument.alias_info is not None and argument.alias_info.is_write


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Changes each tensor in the arguments or the results of an operator."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list):
        return [map_tensors(change, item) for item in value]
    if isinstance(value, tuple):
        return tuple(map_tensors(change, item) for item in value)
    if isinstance(value, Mapping):
        return {name: map_tensors(change, item) for name, item in value.items()}
    return value
