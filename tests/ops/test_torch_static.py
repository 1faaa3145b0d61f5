"""Paged attention that reads every length on the device, against loops in float64, and what may be captured of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from piecework.errors import NotAvailableError
from piecework.graphs.tape import TapeDevice
from piecework.ops import attention, torch_static
from piecework.ops.attention import AttentionContext, paged_attention
from piecework.ops.context import use_context
from piecework.ops.torch_native import paged_attention as torch_native
from piecework.ops.torch_static import paged_attention as static_attention

from .paged_reference import Batch, Step, batches, check, make_step, static_copy

PLAIN = Batch(
    requests=[(1, 6), (5, 0), (0, 3), (3, 8), (0, 0), (1, 0)],
    heads=(4, 2),
    head_size=8,
    block_size=4,
    window_size=0,
    padding=3,
    empty_slots=2,
    spare_blocks=1,
    seed=0,
)


@given(batches())
@settings(max_examples=60)
def test_equals_the_loops(batch: Batch) -> None:
    step = make_step(batch, torch.float64)
    static = static_copy(step.context, empty_slots=batch.empty_slots, spare_blocks=batch.spare_blocks)
    check(step, torch_native, step.context, rtol=1e-10, atol=1e-12)
    check(step, static_attention, step.context, rtol=1e-10, atol=1e-12)
    check(step, static_attention, static, rtol=1e-10, atol=1e-12)


@given(batches(max_new_tokens=1))
@settings(max_examples=30)
def test_equals_the_loops_in_decode_steps(batch: Batch) -> None:
    step = make_step(dataclasses.replace(batch, requests=[(1, old) for _, old in batch.requests]), torch.float64)
    assert step.context.is_decode
    static = static_copy(step.context, empty_slots=batch.empty_slots, spare_blocks=batch.spare_blocks)
    check(step, torch_native, step.context, rtol=1e-10, atol=1e-12)
    check(step, static_attention, static, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("at_once", [1, 100, 1000])
@pytest.mark.parametrize("window_size", [0, 3])
def test_long_steps_are_computed_in_parts(at_once: int, window_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_static, "_CACHED_TOKENS", at_once)
    step = make_step(dataclasses.replace(PLAIN, window_size=window_size), torch.float64)
    check(step, static_attention, static_copy(step.context, empty_slots=2), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_accumulates_in_float32(dtype: torch.dtype) -> None:
    step = make_step(PLAIN, dtype)
    # The error of float32 sums, and then only the rounding of the result to its own dtype.
    check(step, static_attention, static_copy(step.context), rtol=torch.finfo(dtype).eps / 2, atol=2e-6)


@pytest.mark.parametrize("requests", [[], [(0, 0)]])
def test_a_step_of_padding_alone(requests: list[tuple[int, int]]) -> None:
    step = make_step(dataclasses.replace(PLAIN, requests=requests), torch.float64)
    check(step, static_attention, step.context, rtol=0, atol=0)
    check(step, static_attention, static_copy(step.context, empty_slots=2, spare_blocks=2), rtol=0, atol=0)


def test_no_more_is_gathered_than_the_longest_request_has(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(PLAIN, torch.float64)  # lengths 7, 5, 3, 11, 0, 1: three blocks of four
    static = static_copy(step.context, empty_slots=2, spare_blocks=50)
    seen: list[int] = []
    attend = torch_static.attend
    monkeypatch.setattr(
        torch_static, "attend", lambda q, keys, *others: (seen.append(keys.shape[2]), attend(q, keys, *others))[1]
    )
    for longest, gathered in ((11, 12), (12, 12), (13, 16), (None, static.block_table.shape[1] * 4)):
        seen.clear()
        check(step, functools.partial(static_attention, longest=longest), static, rtol=1e-10, atol=1e-12)
        assert set(seen) == {gathered}


def test_a_longest_of_none_of_padding_alone() -> None:
    step = make_step(dataclasses.replace(PLAIN, requests=[(0, 0)]), torch.float64)
    static = static_copy(step.context, empty_slots=2, spare_blocks=2)
    check(step, functools.partial(static_attention, longest=0), static, rtol=0, atol=0)


# ---- what a capture would hold


class Recorder(TorchDispatchMode):
    """Notes each operator with the shapes of its arguments; refuses what would have to wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
            # Either is tagged, since a mask may be among the indices.
            waits = any(index.dtype in (torch.bool, torch.uint8) for index in args[1] if index is not None)
        else:
            waits = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))
        if waits:
            raise AssertionError(f"{func} waits for the device")
        plain = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in flat]
        self.calls.append((func, plain))
        return func(*args, **(kwargs or {}))


def recorded(implementation: Any, batch: Batch, *, empty_slots: int, spare_blocks: int) -> list[Any]:
    step = make_step(batch, torch.float32)
    context = static_copy(step.context, empty_slots=empty_slots, spare_blocks=spare_blocks)
    caches = torch.zeros(40, 4, 2, 8), torch.zeros(40, 4, 2, 8)
    out = torch.empty(step.q.shape)
    with Recorder() as recorder:
        implementation(step.q, step.k, step.v, *caches, out, step.scale, batch.window_size, context)
    return recorder.calls


@pytest.mark.parametrize("window_size", [0, 3])
def test_steps_of_the_same_shapes_make_the_same_calls(window_size: int) -> None:
    """12 rows, 6 request slots and a block table 4 wide, of requests that have nothing in common."""
    batch = dataclasses.replace(PLAIN, window_size=window_size, spare_blocks=0)
    shapes: Sequence[tuple[list[tuple[int, int]], int, int, int]] = [
        ([(1, 6), (5, 0), (0, 3), (3, 8), (0, 0), (1, 0)], 2, 0, 1),  # the longest has 11 tokens in 3 blocks
        ([(12, 0)], 0, 5, 1),
        ([(1, 14), (1, 1)], 10, 4, 0),
        ([], 12, 6, 4),
    ]
    calls = [
        recorded(
            static_attention,
            dataclasses.replace(batch, requests=requests, padding=padding),
            empty_slots=empty_slots,
            spare_blocks=spare_blocks,
        )
        for requests, padding, empty_slots, spare_blocks in shapes
    ]
    assert len(calls[0]) > 20
    assert calls[0] == calls[1] == calls[2] == calls[3]


def test_a_capture_serves_steps_of_other_lengths() -> None:
    """Its operators on the tape, replayed over new requests in the same memory; 13 rows, 8 slots, 4 blocks wide."""
    device = TapeDevice()
    tables = ("slot_mapping", "query_start_loc", "seq_lens", "block_table")

    def padded(requests: list[tuple[int, int]], seed: int) -> tuple[Step, AttentionContext]:
        padding = 13 - sum(new for new, _ in requests)
        batch = dataclasses.replace(PLAIN, requests=requests, padding=padding, spare_blocks=0, seed=seed)
        step = make_step(batch, torch.float64)
        spare = 4 - step.context.block_table.shape[1]
        return step, static_copy(step.context, empty_slots=8 - len(requests), spare_blocks=spare)

    with torch.inference_mode():
        first, static = padded(PLAIN.requests, 0)
        inputs = tuple(x.clone() for x in (first.q, first.k, first.v))
        caches = torch.full((2, 20, 4, 2, 8), float("nan"), dtype=torch.float64)
        out = torch.full(first.q.shape, float("nan"), dtype=torch.float64)
        with device.session(device.open_pool()) as session:
            session.begin()
            static_attention(*inputs, caches[0], caches[1], out, first.scale, 0, static)
            segment = session.end()
        assert out.isnan().all()
        assert caches.isnan().all()
        for seed, requests in enumerate((PLAIN.requests, [(12, 0)], [(1, 14), (1, 1)], [])):
            step, context = padded(requests, seed)
            for name in tables:
                getattr(static, name).copy_(getattr(context, name))
            for buffer, new in zip(inputs, (step.q, step.k, step.v), strict=True):
                buffer.copy_(new)
            used = len(step.k_cache)
            caches[0, :used], caches[1, :used] = step.k_cache, step.v_cache
            segment.replay()
            expected, *stored = step.expected()
            torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
            for cache, after in zip(caches, stored, strict=True):
                torch.testing.assert_close(cache[:used], after, rtol=0, atol=0, equal_nan=True)


def test_the_recorder_fires() -> None:
    """torch_native makes other calls for other lengths, and a mask as an index is refused."""
    batch = dataclasses.replace(PLAIN, requests=[(2, 0), (1, 0)], padding=0)
    step = make_step(batch, torch.float32)
    caches = torch.zeros(40, 4, 2, 8), torch.zeros(40, 4, 2, 8)
    calls = []
    for requests in ([(2, 0), (1, 0)], [(1, 1), (2, 2)]):
        context = make_step(dataclasses.replace(batch, requests=requests), torch.float32).context
        with Recorder() as recorder:
            torch_native(step.q, step.k, step.v, *caches, torch.empty(step.q.shape), 1.0, 0, context)
        calls.append(recorder.calls)
    assert calls[0] != calls[1]
    with pytest.raises(AssertionError, match="index.Tensor waits"), Recorder():
        step.q[torch.ones(3, dtype=torch.bool)]
    with pytest.raises(AssertionError, match="_local_scalar_dense.* waits"), Recorder():
        step.q[0, 0, 0].item()


def test_the_operator_takes_it_for_a_static_context(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(PLAIN, torch.float64)
    static = static_copy(step.context, empty_slots=2, spare_blocks=1)

    def through_the_operator(*args: Any) -> None:
        with use_context(args[-1]):
            paged_attention(*args[:-1])

    check(step, through_the_operator, static, rtol=1e-10, atol=1e-12)
    native, torch_static_row = attention.IMPLEMENTATIONS[2:]
    assert (native.name, torch_static_row.name) == ("torch_native", "torch_static")
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", (native,))
    with pytest.raises(NotAvailableError, match="torch_native: reads lengths on the host"):
        check(step, through_the_operator, static, rtol=0, atol=0)
