"""What a pool of the tape counts: the peak of what is live, as an allocator would need it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from piecework.graphs.device import Segment
from piecework.graphs.layouts import CallLayout
from piecework.graphs.tape_pool import TapePool, poison

from .tape_recording import DEVICE

KB = 256  # floats


def chain(pool: TapePool, num_kb: int, length: int = 6) -> Segment:
    """A capture whose tensors die one after the other: two are live at a time, and none is kept."""
    x = torch.zeros(num_kb * KB)
    with torch.inference_mode(), DEVICE.session(pool) as session:
        session.begin()
        for _ in range(length):
            x = x + 1
        del x
        return session.end()


def keep(pool: TapePool, num_kb: int) -> tuple[torch.Tensor, Segment]:
    """A capture whose output is kept."""
    x = torch.zeros(num_kb * KB)
    with torch.inference_mode(), DEVICE.session(pool) as session:
        session.begin()
        y = x + 1
        return y, session.end()


def test_what_died_in_a_capture_is_reused_in_it() -> None:
    pool = DEVICE.open_pool()
    assert pool.num_bytes == 0
    segment = chain(pool, 4, length=10)
    assert pool.num_bytes == 2 * 4096
    segment.replay()
    assert pool.num_bytes == 2 * 4096


def test_a_view_keeps_its_memory_live() -> None:
    pool = DEVICE.open_pool()
    x = torch.zeros(4 * KB)
    with DEVICE.session(pool) as session:
        session.begin()
        view = (x + 1)[:2]
        for _ in range(3):
            x = x + 1
        segment = session.end()
    assert pool.num_bytes == 3 * 4096
    segment.replay()
    assert torch.equal(view, torch.ones(2))


@pytest.mark.parametrize("order", [(8, 1, 2), (1, 2, 8), (2, 8, 1)])
def test_scratch_is_shared_whatever_the_order(order: tuple[int, ...]) -> None:
    pool = DEVICE.open_pool()
    segments = [chain(pool, num_kb) for num_kb in order]
    assert pool.num_bytes == 2 * 8 * 1024
    for segment in segments:
        segment.replay()


def test_what_is_kept_outside_is_no_scratch() -> None:
    pool = DEVICE.open_pool()
    first, segment = keep(pool, 8)
    second, other = keep(pool, 8)
    assert pool.num_bytes == 2 * 8 * 1024
    last = chain(pool, 8)
    assert pool.num_bytes == 4 * 8 * 1024
    segment.replay(), other.replay(), last.replay()
    assert torch.equal(first, torch.ones(8 * KB))
    assert torch.equal(first, second)


def test_what_an_outside_tensor_let_go_is_used_again() -> None:
    pool = DEVICE.open_pool()
    first, segment = keep(pool, 8)
    del first
    second, other = keep(pool, 8)
    assert pool.num_bytes == 8 * 1024
    segment.replay(), other.replay()
    assert torch.equal(second, torch.ones(8 * KB))


def test_a_released_capture_gives_back_to_the_pool_and_the_last_one_to_the_device() -> None:
    pool = DEVICE.open_pool()
    large, small = chain(pool, 8), chain(pool, 1)
    large.release()
    assert pool.num_bytes == 2 * 8 * 1024
    again = chain(pool, 8)
    assert pool.num_bytes == 2 * 8 * 1024
    again.release(), small.release(), small.release()
    assert (pool.num_captures, pool.num_bytes) == (0, 0)
    only = chain(pool, 1)
    assert pool.num_bytes == 2 * 1024
    only.release()


def test_a_kept_output_holds_its_bytes_after_the_release() -> None:
    pool = DEVICE.open_pool()
    output, segment = keep(pool, 2)
    segment.release()
    assert pool.num_bytes == 2 * 1024
    other = chain(pool, 1)
    assert pool.num_bytes == (2 + 2) * 1024
    other.release()
    del output
    assert pool.num_bytes == 0


def test_a_release_really_frees() -> None:
    pool = DEVICE.open_pool()
    segment = chain(pool, 4)
    memories = [StorageWeakRef(step.outputs[0].untyped_storage()) for step in segment._recording.steps]
    gc.collect()
    assert not any(memory.expired() for memory in memories)
    segment.release()
    assert all(memory.expired() for memory in memories)


def test_a_dropped_segment_counts_as_released() -> None:
    pool = DEVICE.open_pool()
    segment = chain(pool, 4)
    del segment
    gc.collect()
    assert (pool.num_captures, pool.num_bytes) == (0, 0)


def test_a_capture_that_is_given_up_holds_nothing() -> None:
    pool = DEVICE.open_pool()
    other = chain(pool, 1)

    def fails() -> None:
        with DEVICE.session(pool) as session:
            session.begin()
            x = torch.zeros(64 * KB)
            raise ZeroDivisionError(str(x.shape))

    with pytest.raises(ZeroDivisionError):
        fails()
    gc.collect()
    assert pool.num_captures == 1
    assert sum(block.is_live for block in pool._blocks.values()) == 0
    other.release()
    assert pool.num_bytes == 0


def test_memory_of_opaque_calls_counts() -> None:
    def function(x: torch.Tensor) -> list[Any]:
        return [x + 1, x * 2]

    pool = DEVICE.open_pool()
    x = torch.zeros(2 * KB)
    layout = CallLayout.observe([x], function(x))
    with DEVICE.session(pool) as session:
        session.begin()
        kept, _ = session.call(function, [x], layout)
        del _
        session.call(function, [kept], layout)
        segment = session.end()
    assert pool.num_bytes == 3 * 2048
    assert [block.num_bytes for block in pool._blocks.values() if block.is_live] == [2048]
    segment.replay()
    assert torch.equal(kept, torch.ones(2 * KB))


def test_inputs_and_parameters_are_no_part_of_a_pool() -> None:
    pool = DEVICE.open_pool()
    cache = torch.zeros(100 * KB)
    with DEVICE.session(pool) as session:
        session.begin()
        cache.add_(1)
        cache[: 2 * KB].mul_(2)
        segment = session.end()
    segment.replay()
    assert pool.num_bytes == 0
    assert torch.equal(cache[: 3 * KB : KB], torch.tensor([2.0, 2.0, 1.0]))


def test_an_out_tensor_that_grew_counts() -> None:
    pool = DEVICE.open_pool()
    x = torch.zeros(2 * KB)
    with DEVICE.session(pool) as session:
        session.begin()
        out = torch.empty(0)
        torch.add(x, 1, out=out)
        segment = session.end()
    assert pool.num_bytes == 2048
    segment.replay()
    assert torch.equal(out, torch.ones(2 * KB))


def test_what_is_only_allocated_counts() -> None:
    pool = DEVICE.open_pool()
    with DEVICE.session(pool) as session:
        session.begin()
        first = torch.empty(KB)
        second = first.new_empty(KB)
        segment = session.end()
    assert pool.num_bytes == 2048
    segment.release()
    del first
    assert pool.num_bytes == 1024
    assert second.isnan().all()


def test_a_pool_looks_only_at_what_is_live() -> None:
    pool = DEVICE.open_pool()
    segments = [chain(pool, 1, length=50) for _ in range(4)]
    assert len(pool._blocks) <= 2
    assert len(segments) == pool.num_captures


def test_two_pools_count_apart() -> None:
    first, second = DEVICE.open_pool(), DEVICE.open_pool()
    segments = chain(first, 2), chain(second, 4)
    assert (first.num_bytes, second.num_bytes) == (4096, 8192)
    del segments


def test_poison_of_every_dtype() -> None:
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        tensor = torch.zeros(2, dtype=dtype)
        poison(tensor)
        assert (tensor == torch.iinfo(dtype).min).all()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        tensor = torch.zeros(2).to(dtype)
        poison(tensor)
        assert tensor.float().isnan().all()
    tensor = torch.zeros(2, dtype=torch.uint8)
    poison(tensor)
    assert (tensor == 255).all()
