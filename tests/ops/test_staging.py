"""A step's integers on their way to the device."""

from __future__ import annotations

from array import array

import pytest
import torch

from piecework.ops import staging
from piecework.ops.staging import host_integers, to_device

INTS = {torch.int64: "q", torch.int32: "i"}


@pytest.mark.parametrize("dtype", INTS, ids=str)
@pytest.mark.parametrize("values", [[], [3], [-1, 2**31 - 1, 0]], ids=len)
def test_host_integers(dtype: torch.dtype, values: list[int]) -> None:
    tensor = host_integers(array(INTS[dtype], values))
    assert (tensor.dtype, tensor.tolist()) == (dtype, values)


def mixed() -> list[torch.Tensor]:
    return [
        torch.arange(5),
        torch.arange(6, dtype=torch.int32).view(2, 3),
        torch.empty(0, dtype=torch.int64),
        torch.tensor([7], dtype=torch.int32),
        torch.arange(12)[::4],
        torch.empty(3, 0, dtype=torch.int32),
        torch.tensor([9, 8]),
    ]


def test_nothing_is_copied_on_the_cpu() -> None:
    tensors = mixed()
    assert all(a is b for a, b in zip(to_device(tensors, "cpu"), tensors, strict=True))


def test_one_copy_a_dtype_and_every_tensor_aligned() -> None:
    """What CUDA gets, but from memory that is not pinned."""
    tensors = mixed()
    moved = staging._in_one_copy(tensors, torch.device("cpu"), pin_memory=False)
    for got, given in zip(moved, tensors, strict=True):
        assert (got.dtype, got.shape) == (given.dtype, given.shape)
        assert torch.equal(got, given)
        assert got.is_contiguous()
    for dtype in INTS:
        of_dtype = [tensor for tensor in moved if tensor.dtype == dtype]
        assert len({tensor.untyped_storage().data_ptr() for tensor in of_dtype}) == 1
        assert all(tensor.storage_offset() * dtype.itemsize % 256 == 0 for tensor in of_dtype if tensor.numel())
    moved[0].fill_(-1)  # they share nothing with what they were made from, nor with each other
    assert tensors[0].tolist() == [0, 1, 2, 3, 4]
    assert moved[6].tolist() == [9, 8]
