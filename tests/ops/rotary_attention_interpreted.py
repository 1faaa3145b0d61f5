"""The kernel that rotates and stores, under Triton's interpreter, on the CPU, with the attention kernels behind it.

Not collected by its name: `test_rotary_attention.py` runs it in a process of its own, as `triton_interpreted.py`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from piecework.errors import InputError
from piecework.ops import attention
from piecework.ops.attention import AttentionContext
from piecework.ops.context import use_context
from piecework.ops.registry import REGISTRY
from piecework.ops.rotary import rotary_embedding
from piecework.ops.rotary_attention import rotary_paged_attention
from piecework.ops.triton import layout, plan, tuning
from piecework.ops.triton import paged_attention as kernels
from piecework.ops.triton.paged_attention import paged_attention, prepare_rotary

from .paged_reference import Batch, batches, static_copy
from .rotary_reference import RotaryStep, check_rotary, make_rotary_step
from .triton_interpreted import PLAIN, SMALL, TOLERANCE, WAYS, Compiled, Jit
from .triton_interpreted import quick as quick_attention

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"


def rotary(*args: Any) -> None:
    *layer, context = args
    prepare_rotary(*layer)(context)


def unfused(q: Any, k: Any, v: Any, cos: Any, sin: Any, *others: Any) -> None:
    """What rotary attention is made of: the native rotary embedding, then the same attention kernels."""
    paged_attention(*rotary_embedding.native(q, k, cos, sin), v, *others)


class Way:
    """With one of the attention kernels, whatever the lengths are, and tiles of a few tokens."""

    def __init__(self, name: str) -> None:
        self.takes_tiles = "tiles" in name
        self.changes = {**SMALL, **WAYS[name]}

    def __call__(self, q: Any, k: Any, *others: Any) -> None:
        plain = tuning.pick_tuning(q.dtype, q.shape[2], q.shape[1] // k.shape[1])
        *tensors, context = others
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "takes_tiles", lambda num_rows, context: self.takes_tiles)
            prepare_rotary(q, k, *tensors, _tuning=dataclasses.replace(plain, **self.changes))(context)


def contexts(step: RotaryStep, batch: Batch) -> list[AttentionContext]:
    context = step.plain.context
    return [context, static_copy(context, empty_slots=batch.empty_slots, spare_blocks=batch.spare_blocks)]


# ---- what comes out


@given(batches())
@settings(max_examples=8)
@pytest.mark.parametrize("way", ["split rows", "tiles"])
def test_equals_the_loops(way: str, batch: Batch) -> None:
    step = make_rotary_step(batch, torch.float32)
    for context in contexts(step, batch):
        check_rotary(step, Way(way), context, tolerance=1e-5)


@given(batches())
@settings(max_examples=12)
def test_equals_rotary_embedding_and_paged_attention(batch: Batch) -> None:
    """The attention kernels being the same, all that can differ is how a product and a sum are rounded."""
    for half in {0, batch.head_size // 4, batch.head_size // 2}:
        step = make_rotary_step(batch, torch.float32, half=half)
        for context in contexts(step, batch):
            mine, theirs = step.run(rotary, context), step.run(unfused, context)
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("way", ["rows", "tiles"])
@pytest.mark.parametrize(
    ("heads", "head_size", "half"), [((3, 1), 5, 1), ((7, 1), 80, 16), ((4, 2), 64, 32), ((33, 3), 20, 0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_shape(dtype: torch.dtype, heads: tuple[int, int], head_size: int, half: int, way: str) -> None:
    batch = dataclasses.replace(PLAIN, window_size=21, heads=heads, head_size=head_size)
    step = make_rotary_step(batch, dtype, half=half)
    check_rotary(step, Way(way), contexts(step, batch)[1], tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("max_elements", [8, 32, 1 << 11])
def test_heads_are_shared_out_to_programs(max_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piecework.ops.triton.rotary_store._MAX_ELEMENTS", max_elements)
    layout.layout_of.cache_clear()
    step = make_rotary_step(dataclasses.replace(PLAIN, heads=(10, 5)), torch.float32)
    check_rotary(step, rotary, step.plain.context, tolerance=1e-5)
    grids = {8: 10 + 5, 32: 3 + 2, 1 << 11: 1 + 1}
    [made] = step.plain.context.scratch[plan.Plan]
    assert made.layout.store_grid == (made.layout.num_rows, grids[max_elements], 1)
    layout.layout_of.cache_clear()


def test_angles_in_float32_are_not_rounded_before_they_are_used() -> None:
    step = make_rotary_step(PLAIN, torch.float16)
    angles = torch.randn(step.cos.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    step = dataclasses.replace(step, cos=angles.cos().float(), sin=angles.sin().float())
    check_rotary(step, rotary, step.plain.context, tolerance=TOLERANCE[torch.float16])


def test_any_strides() -> None:
    """Elements of every tensor lie apart; heads before tokens; one row of angles for all tokens."""
    step = make_rotary_step(PLAIN, torch.float32)

    def apart(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((x, torch.full_like(x, float("nan"))), -1)[..., 0]

    q, k, v = (apart(x.transpose(0, 1).contiguous().transpose(0, 1)) for x in step.layer[:3])
    caches = {"k_cache": apart(step.plain.k_cache), "v_cache": apart(step.plain.v_cache)}
    plain = dataclasses.replace(step.plain, q=q, k=k, v=v, **caches)
    angles = {"cos": apart(step.cos)[:1].expand(step.cos.shape), "sin": apart(step.sin)[:1].expand(step.sin.shape)}
    check_rotary(RotaryStep(plain=plain, **angles), rotary, plain.context, tolerance=1e-5)


@pytest.mark.parametrize("requests", [[], [(0, 0)]])
def test_a_step_of_padding_alone(requests: list[tuple[int, int]]) -> None:
    step = make_rotary_step(dataclasses.replace(PLAIN, requests=requests), torch.float32)
    for context in contexts(step, PLAIN):
        check_rotary(step, rotary, context, tolerance=0)


def test_a_step_of_no_tokens_launches_nothing() -> None:
    step = make_rotary_step(dataclasses.replace(PLAIN, requests=[(0, 3)], padding=0), torch.float32)
    check_rotary(step, rotary, step.plain.context, tolerance=0)


def test_offsets_do_not_wrap_in_a_large_cache() -> None:
    """Two blocks behind element 2**31 of a cache. It is of int8 for its size; memory that is not touched costs none."""
    num_blocks = 2**31 // 128 + 4
    caches = torch.empty(num_blocks * 128, dtype=torch.int8).view(num_blocks, 2, 4, 2, 8)
    blocks = [num_blocks - 1, num_blocks - 3]
    k, v = torch.randint(-3, 4, (2, 6, 2, 8), dtype=torch.int8)
    q, out = torch.randn(6, 4, 8), torch.empty(6, 4, 8)
    cos, sin = torch.zeros(6, 4), torch.ones(6, 4)  # a quarter of a turn: whole numbers stay such
    context = AttentionContext.build(query_lens=[6], seq_lens=[6], block_tables=[blocks], block_size=4)
    rotary(q, k, v, cos, sin, caches[:, 0], caches[:, 1], out, 0.5, 0, context)
    assert torch.equal(caches[blocks, 0].flatten(0, 1)[:6], torch.cat((-k[..., 4:], k[..., :4]), -1))
    assert torch.equal(caches[blocks, 1].flatten(0, 1)[:6], v)


# ---- through the operator


@pytest.mark.parametrize("is_prepared", [False, True])
def test_through_the_operator(is_prepared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row called "triton" rotates itself: nobody asks for `rotary_embedding`."""
    row = dataclasses.replace(attention.IMPLEMENTATIONS[0], reject=lambda spec: None)
    assert row.name == "triton"
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", (row,))
    monkeypatch.setattr("piecework.ops.rotary_attention.rotary_embedding", None)
    step = make_rotary_step(PLAIN, torch.float32)

    def through_the_operator(*args: Any) -> None:
        with use_context(args[-1]):
            if is_prepared:
                call: Any = REGISTRY.prepares[rotary_paged_attention](*args[:-1])
                call()
            else:
                rotary_paged_attention(*args[:-1])

    for context in contexts(step, PLAIN):
        check_rotary(step, through_the_operator, context, tolerance=1e-5)


def test_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(attention.IMPLEMENTATIONS[0], reject=lambda spec: None)
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", (row,))
    step = make_rotary_step(PLAIN, torch.float32)
    inputs = [tensor.nan_to_num() for tensor in (*step.layer, step.plain.k_cache, step.plain.v_cache)]
    with use_context(static_copy(step.plain.context)):
        torch.library.opcheck(rotary_paged_attention, (*inputs, torch.zeros_like(step.plain.q), 0.5))


# ---- what is kept, and the quick launch


def test_layers_of_a_step_share_the_memory_of_q_and_a_static_context_keeps_none() -> None:
    step = make_rotary_step(PLAIN, torch.float32)
    own, static = contexts(step, PLAIN)
    for context in (own, static):
        for _ in range(3):
            check_rotary(step, rotary, context, tolerance=1e-5)
    for made in own.scratch[plan.Plan]:
        assert made.rotated is not None
        assert made.rotated.shape == step.plain.q.shape
        assert plan.memory_for_q(made) is made.rotated
    for made in static.scratch[plan.Plan]:
        assert made.rotated is None
        assert plan.memory_for_q(made) is not plan.memory_for_q(made)


def test_rotary_attention_and_attention_are_two_layouts() -> None:
    """Of one context, with the same q: one reads q, the other what was rotated."""
    step = make_rotary_step(PLAIN, torch.float32)
    context = static_copy(step.plain.context)
    for _ in range(2):
        check_rotary(step, rotary, context, tolerance=1e-5)
        got = step.plain.run(paged_attention, context)
        torch.testing.assert_close(got[0].double(), step.plain.expected()[0], rtol=1e-5, atol=1e-5)


def test_tensors_on_several_devices_are_refused() -> None:
    step = make_rotary_step(PLAIN, torch.float32)
    layer = (*step.layer[:4], step.sin.to("meta"), step.plain.k_cache, step.plain.v_cache, torch.empty(11, 4, 8))
    with pytest.raises(InputError, match="expected all tensors on one device, got cpu, meta; move them to one"):
        prepare_rotary(*layer, 0.5, 0)


def quick(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, torch.Tensor], list[str]]:
    tensors, log = quick_attention(monkeypatch)
    monkeypatch.setattr(plan, "rotate_and_store", Jit(plan.rotate_and_store, tensors, log))

    def noted(made: plan.Plan, memory_for_q: Any = kernels.memory_for_q) -> torch.Tensor:
        memory = memory_for_q(made)
        tensors[memory.data_ptr()] = memory
        return memory

    monkeypatch.setattr(kernels, "memory_for_q", noted)
    return tensors, log


@pytest.mark.parametrize("requests", [[(1, 6), (1, 400)], [(1, 6), (9, 40)]], ids=["rows", "tiles"])
def test_layers_of_one_layout_launch_what_the_first_compiled(
    requests: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two launches a layer, as attention without rotary."""
    tensors, log = quick(monkeypatch)
    batch = dataclasses.replace(PLAIN, requests=requests, head_size=64, heads=(4, 2))
    step = make_rotary_step(batch, torch.float32, half=16)
    want = step.expected()
    layers = []
    for _ in range(3):
        caches, out = (step.plain.k_cache.clone(), step.plain.v_cache.clone()), torch.empty_like(step.plain.q)
        layer = (*[tensor.clone() for tensor in step.layer], *caches, out)
        tensors.update({tensor.data_ptr(): tensor for tensor in layer})
        layers.append((layer, prepare_rotary(*layer, step.plain.scale, 0)))
    context = step.plain.context
    for index, each in enumerate([context, static_copy(context), context]):
        log.clear()
        for layer, call in layers:
            layer[-1].fill_(float("nan"))
            call(each)
        if index == 0:
            assert log == ["ordinary"] * 2 + ["quick"] * 4
        if index == 2:
            assert log == ["quick"] * 6
        for (*_, k_cache, v_cache, out), _ in layers:
            got = (out.double(), k_cache, v_cache)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("why", ["another triton", "another launcher", "a profiler"])
def test_what_cannot_be_launched_quickly_goes_the_ordinary_way(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, log = quick(monkeypatch)
    step = make_rotary_step(dataclasses.replace(PLAIN, requests=[(1, 6)], padding=0), torch.float32)
    caches, out = (step.plain.k_cache.clone(), step.plain.v_cache.clone()), torch.empty_like(step.plain.q)
    call = prepare_rotary(*step.layer, *caches, out, step.plain.scale, 0)
    if why == "another triton":
        monkeypatch.delattr(Compiled, "run")
    elif why == "a profiler":
        monkeypatch.setattr(kernels, "has_hooks", lambda: True)
    else:
        monkeypatch.setattr(Compiled, "run", lambda self, grid, stream: None)
    for _ in range(3):
        call(step.plain.context)
    assert log == ["ordinary"] * 6
    torch.testing.assert_close(out.double(), step.expected()[0], rtol=1e-5, atol=1e-5)
