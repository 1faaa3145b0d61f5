"""What Triton compiles of rotary attention for a GPU, found out without one: nothing is launched.

Not collected by its name: `test_rotary_attention.py` runs it in a process of its own, as `triton_compiled.py`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from piecework.ops.triton.paged_attention import prepare_rotary

from .paged_reference import Batch, make_step, static_copy
from .triton_compiled import STEP, Kernel, spilled_bytes
from .triton_compiled import call as call_plain
from .triton_compiled import kernels as kernels


def call(batch: Batch, dtype: torch.dtype, *, half: int | None = None, **static: int) -> None:
    step = make_step(batch, dtype)
    context = static_copy(step.context, **static) if static else step.context
    half = batch.head_size // 2 if half is None else half
    cos, sin = torch.ones(2, step.q.shape[0], half, dtype=dtype)
    layer = (step.q, step.k, step.v, cos, sin, step.k_cache, step.v_cache, torch.empty(step.q.shape, dtype=dtype))
    prepare_rotary(*layer, step.scale, batch.window_size)(context)


def names_of_different(kernels: list[Kernel]) -> list[str]:
    return sorted(name for name, _ in {(kernel.name, kernel.compiled.hash) for kernel in kernels})


def test_steps_of_every_size_share_their_kernels(kernels: list[Kernel]) -> None:
    """A compile within a step would stall it, and within a capture break it."""
    for requests in ([(1, 0)], [(1, 6), (1, 3)], [(7, 9)], [(1, 200)] * 16, [(1, 40)] * 33):
        batch = dataclasses.replace(STEP, requests=requests)
        call(batch, torch.bfloat16)
        call(batch, torch.bfloat16, empty_slots=3, spare_blocks=1)
        call(batch, torch.bfloat16, empty_slots=40)
    assert names_of_different(kernels) == ["attend_rows", "attend_tiles", "rotate_and_store"]


def test_the_attention_kernels_are_those_of_attention_without_rotary(kernels: list[Kernel]) -> None:
    """Of a q that is contiguous there: the rotated one is."""
    for requests in ([(1, 3)], [(2, 3)]):
        batch = dataclasses.replace(STEP, requests=requests)
        call(batch, torch.bfloat16)
        step = make_step(batch, torch.bfloat16)
        before = len(kernels)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"{__package__}.triton_compiled.make_step", lambda *_, s=step: contiguous_q(s))
            call_plain(batch, torch.bfloat16)
        assert len(kernels) == before + 2
    assert names_of_different(kernels) == ["attend_rows", "attend_tiles", "rotate_and_store", "store_rows"]


def contiguous_q(step: object) -> object:
    return dataclasses.replace(step, q=step.q.contiguous())  # type: ignore[attr-defined, type-var]


@pytest.mark.parametrize(
    ("dtype", "heads", "head_size", "half"),
    [
        (torch.bfloat16, (32, 8), 128, 64),
        (torch.float16, (7, 1), 80, 16),
        (torch.bfloat16, (64, 2), 512, 128),
        (torch.float32, (8, 8), 80, 40),
        (torch.bfloat16, (4, 2), 16, 0),
    ],
    ids=str,
)
def test_every_shape_fits(
    dtype: torch.dtype, heads: tuple[int, int], head_size: int, half: int, kernels: list[Kernel], tmp_path: Path
) -> None:
    call(dataclasses.replace(STEP, requests=[(1, 3)], heads=heads, head_size=head_size), dtype, half=half)
    assert [kernel.name for kernel in kernels] == ["rotate_and_store", "attend_rows"]
    assert spilled_bytes(kernels[0].compiled.asm["ptx"], tmp_path) == 0


def test_rows_are_read_and_written_in_whole_vectors(kernels: list[Kernel]) -> None:
    """16 bytes a thread at once, in bf16 with heads of 128; nothing goes through shared memory."""
    call(dataclasses.replace(STEP, requests=[(1, 3)]), torch.bfloat16)
    kernel = kernels[0]
    ptx = kernel.compiled.asm["ptx"]
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx
    assert kernel.compiled.metadata.shared == 0
