"""RMSNorm, alone and behind the addition to the residual, as one Triton kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .dependent import wait_for_previous
from .operators import Launcher, power_of_2, rows_of

_MAX_BLOCK = 1 << 14
"""Elements of a row that a program holds; it goes twice over the pieces of a longer one."""
_FEW_ROWS = 1024
"""Rows up to which the latency of a program counts; past that there are enough programs to fill a GPU's memory bus."""


class Blocks(NamedTuple):
    """The sizes of a launch."""

    rows_at_once: int
    block: int
    num_warps: int


def pick_blocks(num_rows: int, size: int) -> Blocks:
    """The sizes for so many rows of a size: speed depends on them, results do not beyond rounding.

    A row of up to 16384 entries is held by one program. With few rows a thread has 16 entries or fewer, so that it has
    little to do; with many it has 32, so that its loads overlap, and short rows share a program of 2048 entries.
    """
    block = min(power_of_2(size), _MAX_BLOCK)
    if num_rows <= _FEW_ROWS:
        return Blocks(1, block, max(1, min(32, block // 512)))
    rows_at_once = max(1, 2048 // block)
    return Blocks(rows_at_once, block, max(1, min(16, rows_at_once * block // 1024)))


@triton.jit
def _entries(
    x_row: tl.tensor,
    residual_row: tl.tensor,
    column: tl.tensor,
    mask: tl.tensor,
    adds: tl.constexpr,
    wide: tl.constexpr,
) -> tl.tensor:
    """x, or the sum of it and the residual, which is rounded to the dtype as the one that leaves the op is."""
    value = tl.load(x_row + column, mask=mask, other=0.0)
    if adds:
        other = tl.load(residual_row + column, mask=mask, other=0.0)
        value = (value.to(wide) + other.to(wide)).to(value.dtype)
    return value


@triton.jit
def _scaled(value: tl.tensor, factor: tl.tensor, weight: tl.tensor, wide: tl.constexpr) -> tl.tensor:
    """The normed value, rounded, times the weight, rounded: as the native body does."""
    normed = (value.to(wide) * factor).to(value.dtype)
    return (normed.to(wide) * weight.to(wide)).to(value.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def norm_rows(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    num_rows: tl.tensor,
    x_inner: tl.tensor,
    x_outer_stride: tl.tensor,
    x_inner_stride: tl.tensor,
    residual_inner: tl.tensor,
    residual_outer_stride: tl.tensor,
    residual_inner_stride: tl.tensor,
    eps: tl.constexpr,
    size: tl.constexpr,
    variance_size: tl.constexpr,
    rows_at_once: tl.constexpr,
    block: tl.constexpr,
    adds: tl.constexpr,
    is_double: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """One program `rows_at_once` rows. `out` and `total` are contiguous; without `adds` residual and total are unused.

    What is constant of a model is a constant here: eps would lose half its digits as a number, which is a float32.
    """
    wide: tl.constexpr = tl.float64 if is_double else tl.float32
    wait_for_previous(overlaps)
    # In int64: a tensor may have more entries than an int32 counts.
    row = tl.program_id(0).to(tl.int64) * rows_at_once + tl.arange(0, rows_at_once)
    exists = (row < num_rows)[:, None]
    x_row = x + ((row // x_inner) * x_outer_stride + (row % x_inner) * x_inner_stride)[:, None]
    residual_at = (row // residual_inner) * residual_outer_stride + (row % residual_inner) * residual_inner_stride
    residual_row = residual + residual_at[:, None]
    out_row = out + (row * size)[:, None]
    total_row = total + (row * size)[:, None]
    column = tl.arange(0, block)[None, :]
    if block >= size:
        mask = exists & (column < size)
        value = _entries(x_row, residual_row, column, mask, adds, wide)
        if adds:
            tl.store(total_row + column, value, mask=mask)
        factors = tl.load(weight + column, mask=column < size, other=0.0)
        counted = value.to(wide)
        if variance_size != size:
            counted = tl.where(column < variance_size, counted, 0.0)
        mean = tl.sum(counted * counted, 1) / variance_size
        tl.store(out_row + column, _scaled(value, tl.rsqrt(mean + eps)[:, None], factors, wide), mask=mask)
    else:
        squares = tl.zeros([rows_at_once, block], wide)
        for first in range(0, variance_size, block):
            mask = exists & (first + column < variance_size)
            counted = _entries(x_row, residual_row, first + column, mask, adds, wide).to(wide)
            squares += counted * counted
        factor = tl.rsqrt(tl.sum(squares, 1) / variance_size + eps)[:, None]
        for first in range(0, size, block):
            mask = exists & (first + column < size)
            # Added up again: what this program stored it might not see in its own loads.
            value = _entries(x_row, residual_row, first + column, mask, adds, wide)
            if adds:
                tl.store(total_row + first + column, value, mask=mask)
            factors = tl.load(weight + first + column, mask=first + column < size, other=0.0)
            tl.store(out_row + first + column, _scaled(value, factor, factors, wide), mask=mask)


_LAUNCHER = Launcher(norm_rows, overlaps=True)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None) -> torch.Tensor | None:
    """As `piecework.ops.norm.rms_norm`, for arguments of one dtype that fit each other. None: see `Launcher.launch`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return out if _norm(x, x, weight, out, out, eps, variance_size, adds=False) else None


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As `piecework.ops.norm.fused_add_rms_norm`; the rest as `rms_norm` here."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return (out, total) if _norm(x, residual, weight, out, total, eps, variance_size, adds=True) else None


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    eps: float,
    variance_size: int | None,
    *,
    adds: bool,
) -> bool:
    size = x.shape[-1]
    num_entries = x.numel()
    if num_entries == 0:
        return True
    num_rows = num_entries // size
    x, x_strides = rows_of(x)
    residual, residual_strides = rows_of(residual) if adds else (x, x_strides)
    rows_at_once, block, num_warps = pick_blocks(num_rows, size)
    is_double = x.dtype == torch.float64
    return _LAUNCHER.launch(
        (x, residual, weight.contiguous(), out, total),
        num_rows,
        (*x_strides, *residual_strides),
        (eps, size, variance_size or size, rows_at_once, block, adds, is_double),
        num_programs=-(-num_rows // rows_at_once),
        num_warps=num_warps,
    )
