"""A step's small integer tensors, from Python numbers to the device: as few copies as there are dtypes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

_ALIGNED_BYTES = 256
"""Where each tensor begins in what is copied at once: as if it had been allocated alone, so that kernels see no kind of
address that they would not see otherwise."""

_CODES = {torch.int32: "i", torch.int64: "q"}


def host_integers(values: array[int]) -> torch.Tensor:
    """A tensor over the memory of an array of type "i" (int32) or "q" (int64), which must not change any more.

    An array is filled and read several times as fast as `torch.tensor` reads a list.
    """
    [dtype] = [dtype for dtype, code in _CODES.items() if code == values.typecode]
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)


def to_device(tensors: Sequence[torch.Tensor], device: torch.device | str) -> list[torch.Tensor]:
    """Brings host tensors to the device; on CUDA in one copy for each dtype that they have, without waiting for it.

    Returns:
        In the same order. On CUDA those of one dtype are views of one tensor that only they hold; on the CPU they are
        the same objects.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    return _in_one_copy(tensors, device, pin_memory=True)


def _in_one_copy(tensors: Sequence[torch.Tensor], device: torch.device, *, pin_memory: bool) -> list[torch.Tensor]:
    moved = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        of_dtype = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        step = max(1, _ALIGNED_BYTES // dtype.itemsize)
        sizes: list[int] = []  # of each tensor, and of the gap behind it
        for index in of_dtype:
            size = tensors[index].numel()
            sizes += (size, -size % step)
        # Pinned memory comes from torch's cache, which gives it to nobody else before the copy from it has run.
        host = torch.empty(sum(sizes), dtype=dtype, pin_memory=pin_memory)
        for place, index in zip(host.split(sizes)[::2], of_dtype, strict=True):
            place.copy_(tensors[index].flatten())
        # A copy even to the CPU, where `to` alone would return pageable memory as it is.
        there = host.to(device, non_blocking=pin_memory, copy=True)
        for place, index in zip(there.split(sizes)[::2], of_dtype, strict=True):
            moved[index] = place if tensors[index].dim() == 1 else place.view(tensors[index].shape)
    return moved
