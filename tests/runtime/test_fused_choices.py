"""What fused ops run for a config, where that is not the choice of a compiler alone."""

from __future__ import annotations

from typing import Any

import torch

import piecework as pw
from piecework.ops import fused
from piecework.runtime.fused_choices import choose_for


def test_a_tiered_start_begins_with_what_needs_no_compile() -> None:
    """Eager code that compiled programs replace; not a phase that stays at it, nor what was asked for by name."""
    spec = fused.KernelSpec(device_type="cuda", dtype=torch.bfloat16, capability=(9, 0))

    def runs(startup: str, compiler: str, **more: Any) -> str:
        phase = {"compiler": compiler, "buckets": (1, 2)}
        config = pw.GraphConfig(prefill=phase, decode=phase, startup=startup, **more)
        return choose_for(config, ["eager"], spec)["eager"].runs["silu_and_mul"]

    assert runs("tiered", "inductor") == "native"
    assert runs("tiered", "eager") == runs("lazy", "inductor") == "triton"
    assert runs("tiered", "inductor", kernel_backend="triton") == "triton"
    [op] = [op for op in fused.fused_ops() if op.name == "silu_and_mul"]
    assert {kernel.name: kernel.compiles for kernel in op.kernels} == {
        "triton": True,
        "sgl_kernel": False,
        "flashinfer": True,
    }
