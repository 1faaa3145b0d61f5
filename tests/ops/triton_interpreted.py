"""The Triton kernels under Triton's interpreter, on the CPU, against loops in float64.

Not collected by its name: `test_triton_kernels.py` runs it in a process of its own, since Triton decides when it is
imported whether it interprets. By hand: `TRITON_INTERPRET=1 pytest tests/ops/triton_interpreted.py`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
import triton
from hypothesis import given, settings

from piecework.ops import attention
from piecework.ops.attention import AttentionContext
from piecework.ops.attention import paged_attention as operator
from piecework.ops.context import use_context
from piecework.ops.torch_native import store as torch_store
from piecework.ops.triton import paged_attention as kernels
from piecework.ops.triton.kv_store import store
from piecework.ops.triton.paged_attention import paged_attention

from .paged_reference import Batch, batches, check, make_step, static_copy

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"

PLAIN = Batch(
    requests=[(1, 6), (4, 0), (0, 3), (2, 8), (0, 0), (1, 0)],
    heads=(4, 2),
    head_size=8,
    block_size=4,
    window_size=0,
    padding=3,
    empty_slots=2,
    spare_blocks=1,
    seed=0,
)


def test_this_is_the_interpreter() -> None:
    assert not isinstance(kernels._attend, triton.runtime.JITFunction)


@given(batches(max_new_tokens=3))
@settings(max_examples=20)
def test_equals_the_loops(batch: Batch) -> None:
    step = make_step(batch, torch.float32)
    static = static_copy(step.context, empty_slots=batch.empty_slots, spare_blocks=batch.spare_blocks)
    check(step, paged_attention, step.context, rtol=1e-5, atol=1e-5)
    check(step, paged_attention, static, rtol=1e-5, atol=1e-5)


@given(batches(max_new_tokens=1))
@settings(max_examples=20)
def test_equals_the_loops_in_decode_steps(batch: Batch) -> None:
    step = make_step(dataclasses.replace(batch, requests=[(1, old) for _, old in batch.requests]), torch.float32)
    static = static_copy(step.context, empty_slots=batch.empty_slots, spare_blocks=batch.spare_blocks)
    check(step, paged_attention, static, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window_size", [0, 1, 5])
def test_accumulates_in_float32(dtype: torch.dtype, window_size: int) -> None:
    step = make_step(dataclasses.replace(PLAIN, window_size=window_size), dtype)
    # The rounding of the result to its own dtype; the interpreter does not round to nearest.
    check(step, paged_attention, static_copy(step.context), rtol=torch.finfo(dtype).eps, atol=2e-6)


@pytest.mark.parametrize("tile", [1, 2, 128])
@pytest.mark.parametrize("window_size", [0, 3])
def test_long_requests_take_several_tiles(tile: int, window_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_MAX_TILE", tile)
    step = make_step(dataclasses.replace(PLAIN, window_size=window_size), torch.float32)
    check(step, paged_attention, step.context, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [(3, 1), (12, 1), (17, 1), (24, 2)])
def test_a_group_of_many_heads_takes_several_programs(heads: tuple[int, int]) -> None:
    step = make_step(dataclasses.replace(PLAIN, heads=heads), torch.float32)
    check(step, paged_attention, step.context, rtol=1e-5, atol=1e-5)


def test_more_requests_than_are_searched_at_once() -> None:
    requests = [(1, 2) if slot in (3, 255, 256, 290) else (0, 1) for slot in range(300)]
    step = make_step(dataclasses.replace(PLAIN, requests=requests), torch.float32)
    check(step, paged_attention, static_copy(step.context, empty_slots=300), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("requests", [[], [(0, 0)]])
def test_a_step_of_padding_alone(requests: list[tuple[int, int]]) -> None:
    step = make_step(dataclasses.replace(PLAIN, requests=requests), torch.float32)
    check(step, paged_attention, step.context, rtol=0, atol=0)
    check(step, paged_attention, static_copy(step.context, empty_slots=2), rtol=0, atol=0)


def test_a_step_of_no_tokens_launches_nothing() -> None:
    step = make_step(dataclasses.replace(PLAIN, requests=[(0, 3)], padding=0), torch.float32)
    check(step, paged_attention, step.context, rtol=0, atol=0)


def test_tables_may_have_strides_of_their_own() -> None:
    step = make_step(PLAIN, torch.float32)
    names = ("slot_mapping", "query_start_loc", "seq_lens", "block_table")
    tables = {name: getattr(step.context, name) for name in names}
    apart = {name: torch.stack((table, torch.full_like(table, 10**6)), -1)[..., 0] for name, table in tables.items()}
    assert not apart["seq_lens"].is_contiguous()
    check(step, paged_attention, step.context.as_static(apart), rtol=1e-5, atol=1e-5)


def test_offsets_do_not_wrap_in_a_large_cache() -> None:
    """Two blocks behind element 2**31 of a cache. It is of int8 for its size; memory that is not touched costs none."""
    num_blocks = 2**31 // 128 + 4
    caches = torch.empty(num_blocks * 128, dtype=torch.int8).view(num_blocks, 2, 4, 2, 8)
    blocks = [num_blocks - 1, num_blocks - 3]
    k, v = torch.randint(-3, 4, (2, 6, 2, 8), dtype=torch.int8)
    q, out = torch.randn(6, 4, 8), torch.empty(6, 4, 8)
    context = AttentionContext.build(query_lens=[6], seq_lens=[6], block_tables=[blocks], block_size=4)
    paged_attention(q, k, v, caches[:, 0], caches[:, 1], out, 0.5, 0, context)
    assert torch.equal(caches[blocks, 0].flatten(0, 1)[:6], k)
    assert torch.equal(caches[blocks, 1].flatten(0, 1)[:6], v)
    few = caches[blocks].float()
    context = AttentionContext.build(query_lens=[6], seq_lens=[6], block_tables=[[0, 1]], block_size=4)
    again = torch.empty_like(out)
    paged_attention(q, k.float(), v.float(), few[:, 0], few[:, 1], again, 0.5, 0, context)
    assert torch.equal(out, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("skipped", [(), (0,), (0, 1, 2, 3, 4)])
def test_the_store_copies_bits(dtype: torch.dtype, skipped: tuple[int, ...]) -> None:
    projection = torch.randint(-100, 100, (5, 9, 6)).to(dtype)
    k, v = projection[:, :3], projection[:, 4:7].flip(2).transpose(0, 2).contiguous().transpose(0, 2)
    slots = torch.tensor([7, 0, 11, 3, 5])
    slots[list(skipped)] = -1
    ours, theirs = torch.full((2, 2, 3, 4, 3, 6), 55, dtype=dtype)
    store(k, v, ours[0], ours[1], slots)
    torch_store(k, v, theirs[0], theirs[1], slots)
    assert torch.equal(ours, theirs)


def test_through_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of the table calls it right; on the CPU it must be asked for, interpreter or not."""
    assert attention.choose_implementation(_spec(is_static=True)).name == "torch_static"
    row = dataclasses.replace(attention.IMPLEMENTATIONS[0], reject=lambda spec: None)
    assert row.name == "triton"
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", (row,))
    step = make_step(PLAIN, torch.float32)

    def through_the_operator(*args: Any) -> None:
        with use_context(args[-1]):
            operator(*args[:-1])

    check(step, through_the_operator, static_copy(step.context, empty_slots=2), rtol=1e-5, atol=1e-5)


def _spec(**changes: Any) -> attention.AttentionSpec:
    plain = {"dtype": torch.float32, "num_heads": 4, "num_kv_heads": 2, "head_size": 8, "block_size": 4}
    return attention.AttentionSpec(device_type="cpu", cache_dtype=torch.float32, **plain, **changes)
