"""What Triton compiles for a GPU when steps of all sizes come, found out without one: nothing is launched.

Not collected by its name: `test_triton_kernels.py` runs it in a process of its own, in which Triton takes an H100 or
H200 for its device. The interpreter accepts much that the compiler does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from piecework.ops.triton import kv_store, paged_attention

from .paged_reference import Batch, make_step, static_copy

STEP = Batch(
    requests=[],
    heads=(32, 8),
    head_size=128,
    block_size=16,
    window_size=0,
    padding=0,
    empty_slots=0,
    spare_blocks=0,
    seed=0,
)


class Hopper:
    """As much of a Triton driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """(kernel, hash of what was compiled for it) of each call: launches only compile."""
    found: set[tuple[str, str]] = set()
    run = JITFunction.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        assert len(kernel.asm["cubin"]) > 1000
        found.add((self.fn.__name__, kernel.hash))
        return kernel

    monkeypatch.setattr(JITFunction, "run", warm_up)
    for module in (kv_store, paged_attention):
        monkeypatch.setattr(module, "launch_on", lambda kernel, tensor: contextlib.nullcontext())
    driver.set_active(Hopper())  # for the rest of this process: there may be no driver to go back to
    return found


def call(batch: Batch, dtype: torch.dtype, **static: int) -> None:
    step = make_step(batch, dtype)
    context = static_copy(step.context, **static) if static else step.context
    out = torch.empty(step.q.shape, dtype=dtype)
    arguments = (step.q, step.k, step.v, step.k_cache, step.v_cache, out, step.scale, batch.window_size, context)
    paged_attention.paged_attention(*arguments)


def test_steps_of_every_size_share_one_kernel(compiled: set[tuple[str, str]]) -> None:
    """A compile within a step would stall it, and within a capture break it."""
    for requests in ([(1, 0)], [(1, 6), (1, 3)], [(7, 9)], [(1, 200)] * 16, [(1, 40)] * 33):
        for window_size in (0, 1, 16):
            batch = dataclasses.replace(STEP, requests=requests, window_size=window_size)
            call(batch, torch.bfloat16)
            call(batch, torch.bfloat16, empty_slots=3, spare_blocks=1)
    assert sorted(name for name, _ in compiled) == ["_attend", "_store"]


@pytest.mark.parametrize(
    ("dtype", "heads", "head_size"),
    [
        (torch.float32, (8, 8), 64),
        (torch.float16, (8, 8), 64),
        (torch.bfloat16, (5, 1), 80),
        (torch.float32, (64, 2), 256),
        (torch.bfloat16, (1, 1), 512),
    ],
)
def test_every_shape_compiles(
    dtype: torch.dtype, heads: tuple[int, int], head_size: int, compiled: set[tuple[str, str]]
) -> None:
    batch = dataclasses.replace(STEP, requests=[(2, 3)], heads=heads, head_size=head_size)
    call(batch, dtype)
    assert sorted(name for name, _ in compiled) == ["_attend", "_store"]
