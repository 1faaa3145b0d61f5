"""Copies between a capture's scratch and the buffers, with as few kernels as there can be: each costs a launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .layouts import TensorLayout

Pair = tuple[torch.Tensor, torch.Tensor]
"""Where to, and from where."""

_MAX_BYTES = 1 << 20
"""Of a tensor that shares a kernel. It gives a block of threads 65,536 elements, which is few blocks for a copy that
is long; a launch saved is nothing there."""
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
SHARED_DTYPES = frozenset((*_FLOATS, *_INTEGERS))
"""Those for which `torch._foreach_copy_` has a kernel in each torch: it may refuse others."""


def copy_all(pairs: Iterable[Pair]) -> None:
    """Copies each source to its destination, in order where that matters.

    Those of one dtype and device that lie in memory alike, without gaps, share a kernel.
    """
    pairs = [(to, source) for to, source in pairs if to.numel()]
    together: dict[tuple[torch.dtype, torch.device], list[Pair]] = {}
    for to, source in pairs if _are_independent(pairs) else ():
        if _is_plain(to, source):
            together.setdefault((to.dtype, to.device), []).append((to, source))
    shared = [group for group in together.values() if len(group) > 1]
    done = {id(to) for group in shared for to, _ in group}
    for group in shared:
        torch._foreach_copy_([to for to, _ in group], [source for _, source in group])
    for to, source in pairs:
        if id(to) not in done:
            to.copy_(source)


def _are_independent(pairs: Sequence[Pair]) -> bool:
    """Whether they may be made in any order."""
    written = [to.untyped_storage().data_ptr() for to, _ in pairs]
    read = {source.untyped_storage().data_ptr() for _, source in pairs}
    return len(set(written)) == len(written) and read.isdisjoint(written)


def _is_plain(to: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether torch's `_foreach_copy_` on CUDA copies it in its own kernel (2.11 to 2.14), and that pays."""
    return (
        to.dtype in SHARED_DTYPES
        and (to.dtype, to.device, to.shape) == (source.dtype, source.device, source.shape)
        and to.numel() * to.itemsize <= _MAX_BYTES
        and all(a == b for a, b, n in zip(to.stride(), source.stride(), to.shape, strict=True) if n > 1)
        and TensorLayout.of(to).dense().stride == to.stride()
    )
