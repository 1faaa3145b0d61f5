"""What a step's integers cost on their way to the device: no wait, and as few copies as there are dtypes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from piecework.ops.attention import AttentionContext
from piecework.ops.staging import to_device

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_only")]

BATCH = {"query_lens": (3, 1, 0), "seq_lens": (3, 9, 0), "block_tables": ([7, 3], [5, 6, 1], []), "block_size": 4}
FIELDS = ("slot_mapping", "query_start_loc", "seq_lens", "block_table")


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_tensors_arrive_in_two_copies_without_waiting() -> None:
    tensors = [
        torch.arange(5),
        torch.arange(6, dtype=torch.int32).view(2, 3),
        torch.empty(0, dtype=torch.int64),
        torch.tensor([7], dtype=torch.int32),
        torch.arange(12)[::4],
    ]
    with no_waiting():
        moved = to_device(tensors, "cuda")
    for got, given in zip(moved, tensors, strict=True):
        assert got.is_cuda
        assert (got.dtype, got.shape) == (given.dtype, given.shape)
        assert torch.equal(got.cpu(), given)
    assert all(tensor.data_ptr() % 256 == 0 for tensor in moved)
    assert len({tensor.untyped_storage().data_ptr() for tensor in moved}) == 2


def test_many_steps_in_flight_keep_their_own_values() -> None:
    """Pinned memory comes back from the copies: not before they have run, though the host is far ahead of them."""
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(30):
        busy = busy @ busy
    moved = [
        to_device([torch.full((1000,), step), torch.full((7,), step, dtype=torch.int32)], "cuda") for step in range(100)
    ]
    for step, (wide, narrow) in enumerate(moved):
        assert torch.equal(wide.cpu(), torch.full((1000,), step))
        assert torch.equal(narrow.cpu(), torch.full((7,), step, dtype=torch.int32))


def test_a_context_is_the_same_as_on_the_cpu() -> None:
    on_cpu = AttentionContext.build(**BATCH, num_blocks=8)
    with no_waiting():
        context = AttentionContext.build(**BATCH, num_blocks=8, device="cuda")
    for field in FIELDS:
        assert torch.equal(getattr(context, field).cpu(), getattr(on_cpu, field))
        assert getattr(context, field).dtype == getattr(on_cpu, field).dtype
    context.check()
