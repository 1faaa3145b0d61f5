"""SiLU-and-mul as one Triton kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .dependent import wait_for_previous
from .operators import Launcher, power_of_2, rows_of

_FEW_ENTRIES = 1 << 17
"""Entries of the result up to which the latency of a program counts."""


class Blocks(NamedTuple):
    """The sizes of a launch."""

    block: int
    num_warps: int


def pick_blocks(num_rows: int, size: int) -> Blocks:
    """The sizes for so many rows of results of a size: speed depends on them, results do not.

    A thread has 8 entries, 16 bytes of a 16-bit dtype; of few entries each program takes 256, so that many processors
    share them, of many 1024.
    """
    block = min(power_of_2(size), 256 if num_rows * size <= _FEW_ENTRIES else 1024)
    return Blocks(block, max(1, block // 256))


@triton.jit(do_not_specialize=["num_rows"])
def silu_and_mul_rows(
    gate_up: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    inner: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
    is_double: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """One program a (row, block of its results); the row's blocks come one after the other. `out` is contiguous."""
    wide: tl.constexpr = tl.float64 if is_double else tl.float32
    num_blocks: tl.constexpr = (size + block - 1) // block
    wait_for_previous(overlaps)
    program = tl.program_id(0)
    # In int64: a tensor may have more entries than an int32 counts.
    row = (program // num_blocks).to(tl.int64)
    column = (program % num_blocks) * block + tl.arange(0, block)
    mask = column < size
    gate_at = gate_up + (row // inner) * outer_stride + (row % inner) * inner_stride + column
    gate = tl.load(gate_at, mask=mask, other=0.0)
    up = tl.load(gate_at + size, mask=mask, other=0.0)
    wide_gate = gate.to(wide)
    silu = (wide_gate / (1.0 + tl.exp(-wide_gate))).to(gate.dtype)
    tl.store(out + row * size + column, (silu.to(wide) * up.to(wide)).to(gate.dtype), mask=mask)


_LAUNCHER = Launcher(silu_and_mul_rows, overlaps=True)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor | None:
    """As `piecework.ops.activation.silu_and_mul`, for an even last dim. None: see `Launcher.launch`."""
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    num_entries = out.numel()
    if num_entries == 0:
        return out
    num_rows = num_entries // size
    gate_up, strides = rows_of(gate_up)
    block, num_warps = pick_blocks(num_rows, size)
    launched = _LAUNCHER.launch(
        (gate_up, out),
        num_rows,
        strides,
        (size, block, gate_up.dtype == torch.float64),
        num_programs=num_rows * -(-size // block),
        num_warps=num_warps,
    )
    return out if launched else None
