"""Rotary attention when no call may wait for the compile of its kernels, which run in Triton's interpreter.

Not collected by its name: `test_rotary_attention.py` runs it in a process of its own, as `triton_deferred.py`, whose
kernels that only note what is asked of them it uses.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from piecework.errors import KernelNotReadyError
from piecework.ops.capturing import capturing_whole
from piecework.ops.deferred import defer_compiles
from piecework.ops.triton import paged_attention as kernels
from piecework.ops.triton import plan

from .paged_reference import Batch, static_copy
from .rotary_reference import RotaryStep, make_rotary_step
from .triton_deferred import DECODE, PROMPT, Jit, World
from .triton_deferred import world as world

COMPILES = ["compile attend_rows", "compile attend_tiles", "compile rotate_and_store"]


@pytest.fixture(autouse=True)
def rotary_world(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rotate_and_store` notes too, and memory of q is found by its address."""
    monkeypatch.setattr(plan, "rotate_and_store", Jit(plan.rotate_and_store, "rotate_and_store", world))

    def noted(made: plan.Plan, memory_for_q: Any = kernels.memory_for_q) -> torch.Tensor:
        memory = memory_for_q(made)
        world.tensors[memory.data_ptr()] = memory
        return memory

    monkeypatch.setattr(kernels, "memory_for_q", noted)


def call(world: World, step: RotaryStep, context: Any = None, *, deferred: bool = True) -> list[str]:
    """One call, which must be right; what the kernels did."""
    before, expected = len(world.log), step.expected()
    out = torch.full_like(step.plain.q, float("nan"))
    layer = (*step.layer, step.plain.k_cache.clone(), step.plain.v_cache.clone(), out)
    world.tensors.update({tensor.data_ptr(): tensor for tensor in layer})
    run = kernels.prepare_rotary(*layer, step.plain.scale, step.plain.window_size)
    context = step.plain.context if context is None else context
    if deferred:
        with defer_compiles(world.submit):
            run(context)
    else:
        run(context)
    torch.testing.assert_close((out.double(), *layer[5:7]), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    return world.log[before:]


def quick(kind: str) -> list[str]:
    return ["quick rotate_and_store", f"quick attend_{kind}"]


@pytest.mark.parametrize(("batch", "kind"), [(PROMPT, "tiles"), (DECODE, "rows")], ids=["prompt", "decode"])
@pytest.mark.parametrize("is_static", [False, True])
def test_no_call_compiles(batch: Batch, kind: str, is_static: bool, world: World) -> None:
    """Until somebody has compiled, torch's operators do the call; then the kernels do, without an ordinary launch."""
    step = make_rotary_step(batch, torch.float32, half=16)
    context = static_copy(step.plain.context) if is_static else step.plain.context
    for _ in range(2):
        assert call(world, step, context) == []
    compiles = world.compile_all()
    assert sorted(set(compiles)) == COMPILES, "nothing is launched in the other thread"
    assert compiles[:2] == ["compile rotate_and_store", f"compile attend_{kind}"], "what is waited for comes first"
    for _ in range(2):
        assert call(world, step, context) == quick(kind)
    assert world.compile_all() == []


def test_steps_of_other_sizes_are_compiled_for_ahead(world: World) -> None:
    call(world, make_rotary_step(PROMPT, torch.float32))
    world.compile_all()
    num_submits = world.num_submits
    for requests in (DECODE.requests, DECODE.requests * 5):
        step = make_rotary_step(dataclasses.replace(DECODE, requests=requests), torch.float32)
        assert call(world, step) == quick("rows")
        assert call(world, step, static_copy(step.plain.context)) == quick("rows")
    assert world.num_submits == num_submits


def test_what_is_compiled_is_what_an_ordinary_launch_takes(world: World) -> None:
    """The memory of q stands in for by nothing at all when a kernel is compiled elsewhere: of the same kind."""
    step = make_rotary_step(DECODE, torch.float32)
    call(world, step)
    world.compile_all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "has_hooks", lambda: True)
        assert call(world, step) == ["ordinary rotate_and_store", "ordinary attend_rows"]


def test_a_run_on_nothing_but_padding_compiles_what_steps_of_all_sizes_need(world: World) -> None:
    nothing = make_rotary_step(dataclasses.replace(PROMPT, requests=[], padding=8), torch.float32)
    done = call(world, nothing, deferred=False)
    assert sorted({line for line in done if "ordinary" not in line}) == COMPILES
    for batch, kind in ((PROMPT, "tiles"), (DECODE, "rows")):
        assert call(world, make_rotary_step(batch, torch.float32)) == quick(kind)
    assert world.num_submits == 0


def test_the_attention_kernels_of_a_contiguous_q_serve_both(world: World) -> None:
    step = make_rotary_step(DECODE, torch.float32)
    call(world, step)
    world.compile_all()
    world.call(dataclasses.replace(step.plain, q=step.plain.q.contiguous()))
    assert world.compile_all() == ["compile store_rows"]


@pytest.mark.parametrize("is_static", [False, True])
def test_a_capture_is_told_to_come_again(is_static: bool, world: World) -> None:
    step = make_rotary_step(DECODE, torch.float32)
    context = static_copy(step.plain.context) if is_static else step.plain.context
    out, caches = torch.full_like(step.plain.q, 7.0), (step.plain.k_cache.clone(), step.plain.v_cache.clone())
    run = kernels.prepare_rotary(*step.layer, *caches, out, step.plain.scale, 0)
    with capturing_whole(), defer_compiles(world.submit), pytest.raises(KernelNotReadyError, match="capture again"):
        run(context)
    assert out.eq(7.0).all()
    torch.testing.assert_close(caches, (step.plain.k_cache, step.plain.v_cache), rtol=0, atol=0, equal_nan=True)
    assert world.compile_all() != [], "a capture asks for the kernels too"
    with capturing_whole():
        assert call(world, step, context) == quick("rows")
