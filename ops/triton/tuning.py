"""Sizes of the attention kernels: how much a program takes at once, and how many programs share a row."""

from __future__ import annotations

import dataclasses
import functools

import torch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Sizes that change the speed of the attention kernels and never their results beyond rounding.

    `row_*` are those of row attention (decode), `tile_*` those of tile attention (prompts).
    """

    row_tile: int
    """Cached tokens that a program takes at once; a power of two, 16 or more."""
    row_warps: int
    """Warps of a program."""
    row_stages: int
    """Tiles in flight while one is computed, plus one."""
    row_lone_stages: int
    """The same of a program that has an SM for itself."""
    row_min_chunk: int
    """Cached tokens under which a row is not split further."""
    row_programs_per_sm: int
    """Rows are split over the context until there are this many programs for each of the device's SMs, or one."""
    row_max_splits: int = 128
    """Programs that share a row and KV head at most."""
    row_splits: int = 0
    """So many splits whatever the shapes are; 0: as the two fields above say."""
    tile_m: int
    """Rows of queries (tokens times the query heads of one KV head) of a program; a power of two, 16 or more."""
    tile_n: int
    """Cached tokens that a program takes at once; a power of two, 16 or more."""
    tile_warps: int
    """Warps of a program."""
    tile_stages: int
    """Tiles in flight while one is computed, plus one."""

    def row_splits_of(self, num_cells: int, num_sms: int) -> tuple[int, bool]:
        """How many programs share a row and KV head at most, and whether each of them has an SM for itself.

        Args:
            num_cells: rows times columns of KV heads.
        """
        if self.row_splits:
            return self.row_splits, False
        lone, many = num_sms // num_cells, num_sms * self.row_programs_per_sm // num_cells
        # One with more tiles in flight is faster than several, if that leaves no more of the SMs idle.
        is_lone = self.row_lone_stages > self.row_stages and lone * self.row_programs_per_sm >= 0.9 * many > 0
        return max(1, min(lone if is_lone else many, self.row_max_splits)), is_lone


@functools.lru_cache(maxsize=256)
def pick_tuning(dtype: torch.dtype, head_size: int, group_size: int) -> Tuning:
    """The sizes for a dtype, elements of a head and query heads of one KV head.

    In bf16 with heads of 128 the best of `bench_attention.py --tune` on an H200; else what fits its registers
    and shared memory.
    """
    padded = max(16, 1 << (head_size - 1).bit_length())
    if dtype == torch.float32:  # no tensor cores multiply it exactly: factors and sums are all in registers
        return Tuning(
            row_tile=64 if padded <= 64 else 32 if padded <= 128 else 16,
            row_warps=8 if padded * min(group_size, 32) >= 2048 else 4,
            row_stages=3,
            row_lone_stages=3,
            row_min_chunk=128,
            row_programs_per_sm=4,
            tile_m=32 if group_size > 16 else 16,
            tile_n=32 if padded <= 64 else 16,
            tile_warps=8 if padded > 128 or group_size > 16 else 4,
            tile_stages=1,
        )
    return Tuning(
        row_tile=128 if padded <= 128 else 32 if padded <= 256 else 16,
        row_warps=8 if padded * min(group_size, 32) > 8192 else 4,
        row_stages=3,
        row_lone_stages=5 if padded <= 128 else 3,
        row_min_chunk=256,
        row_programs_per_sm=2,
        tile_m=64,
        tile_n=64 if padded <= 128 else 32,
        tile_warps=8 if padded > 128 else 4,
        tile_stages=2,
    )
