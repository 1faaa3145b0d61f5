"""Which rows and shapes of a linear take which kernel, and in which sizes: a pure function, to be tuned by measurement.

`benchmarks/bench_linear.py --tune` tries sizes out on a GPU. What it found for a shape belongs into `MEASURED`; other
shapes follow rules.
"""

from __future__ import annotations

import dataclasses
import functools

MAX_ROWS = 16
"""Rows that our kernels take at most; the width of what the tiles are multiplied with."""
MAX_LOOPED_ROWS = 3
"""Rows that are multiplied element by element at most, on plain cores. Not measured against tensor cores yet."""
MAX_SPLIT_BLOCKS = 1024
"""Blocks of outputs whose products may be split: each has a counter in the memory that a stream's splits share."""

_ROW_ELEMENTS = 2048
"""Elements of the weights that a program of the loop takes at once: 8 for each of 256 threads, 16 bytes."""
_MAX_SPLITS = 8
_MIN_CHUNK = 512
"""Elements of the sum under which it is not split further."""
_PROGRAMS_PER_SM = 2
"""The sum is split until there are so many programs for each SM."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinearTuning:
    """Sizes that change the speed of a linear and never its result beyond rounding."""

    uses_tiles: bool
    """Tensor cores multiply tiles of the weights with all rows, padded to 16; else plain cores loop over the sum."""
    block_n: int
    """Outputs of a row that a program computes; a power of two, 16 or more for tiles."""
    block_k: int
    """Elements of the sum that a program takes at once; a power of two, 16 or more."""
    num_warps: int
    """Warps of a program."""
    num_stages: int = 1
    """Of tiles: those in flight while one is computed, plus one."""
    unroll: int = 1
    """Of the loop: how many blocks it takes at once."""
    splits: int = 1
    """Of tiles: programs that share a sum, at most."""

    def chunk(self, in_features: int) -> int:
        """Blocks of the sum that a split takes."""
        return -(-self.num_blocks_of_sum(in_features) // self.splits)

    def num_blocks_of_sum(self, in_features: int) -> int:
        """Blocks of the whole sum."""
        return -(-in_features // self.block_k)


ROW_CLASSES = (1, 2, 3, 4, 8, 16)
"""Rows that are measured; other numbers of rows take what the next larger one takes."""
_ONE_ROW = LinearTuning(uses_tiles=False, block_n=1, block_k=2048, num_warps=8)
_ONE_LONG_ROW = LinearTuning(uses_tiles=False, block_n=1, block_k=1024, num_warps=4)
_TILES = LinearTuning(uses_tiles=True, block_n=64, block_k=128, num_warps=4, num_stages=6)
_SPLIT_TILES = dataclasses.replace(_TILES, splits=2)
_MANY_TILES = dataclasses.replace(_TILES, num_stages=4)

SHAPES: dict[tuple[int, int], tuple[LinearTuning | None, LinearTuning | None]] = {
    (6144, 4096): (_ONE_ROW, _TILES),
    (4096, 4096): (_ONE_ROW, _SPLIT_TILES),
    (28672, 4096): (_ONE_ROW, _MANY_TILES),
    (4096, 14336): (_ONE_LONG_ROW, _SPLIT_TILES),
    (128256, 4096): (_ONE_LONG_ROW, _MANY_TILES),
}
"""(out_features, in_features) -> for one row, for more: what was best on an H200 (benchmarks/results/gpu_linear.json),
or within 2% of it, so that five kernels serve them all, and not three times as many that would be compiled.
(28672, 4096) of several rows is as fast by torch, alone; in a step ours overlaps with its neighbours."""
MEASURED: dict[tuple[int, int, int], LinearTuning | None] = {
    (*shape, rows): one if rows == 1 else more for shape, (one, more) in SHAPES.items() for rows in ROW_CLASSES
}
"""(out_features, in_features, one of ROW_CLASSES) -> what is taken; None: torch's own linear."""


@functools.lru_cache(maxsize=4096)
def pick_tuning(
    num_rows: int, out_features: int, in_features: int, num_sms: int, activates: bool = False
) -> LinearTuning | None:
    """The kernel and the sizes for a linear of bf16 or fp16; None: torch's own linear.

    Args:
        num_sms: processors of the device, over which the work is to be spread.
        activates: whether the rows are activated while they are loaded, which each program does anew: then the loop
            alone.
    """
    if not 1 <= num_rows <= MAX_ROWS or min(out_features, in_features) < 1:
        return None
    if activates and num_rows > MAX_LOOPED_ROWS:
        return None
    measured = (out_features, in_features, next(rows for rows in ROW_CLASSES if rows >= num_rows))
    if measured in MEASURED and not activates:
        return MEASURED[measured]
    if num_rows <= MAX_LOOPED_ROWS:
        return _looped(num_rows, in_features)
    return _tiled(out_features, in_features, num_sms)


def _looped(num_rows: int, in_features: int) -> LinearTuning:
    """One output a program; two with several rows, which each program reads too."""
    block_k = min(_ROW_ELEMENTS, _power_of_two(in_features, at_least=16))
    block_n = max(1 if num_rows == 1 else 2, min(64, _ROW_ELEMENTS // block_k))
    return LinearTuning(uses_tiles=False, block_n=block_n, block_k=block_k, num_warps=8)


def _tiled(out_features: int, in_features: int, num_sms: int) -> LinearTuning:
    """64 outputs a program, as a warp group multiplies them; the sum split where that gives too few programs."""
    block_n = min(64, _power_of_two(out_features, at_least=16))
    block_k = min(128, _power_of_two(in_features, at_least=16))
    num_blocks = -(-out_features // block_n)
    splits = min(_MAX_SPLITS, _PROGRAMS_PER_SM * num_sms // num_blocks, in_features // _MIN_CHUNK)
    if num_blocks > MAX_SPLIT_BLOCKS:
        splits = 1
    return LinearTuning(
        uses_tiles=True, block_n=block_n, block_k=block_k, num_warps=4, num_stages=5, splits=max(1, splits)
    )


def _power_of_two(number: int, *, at_least: int) -> int:
    """The least power of two that is `number` or more, and `at_least`."""
    return max(at_least, 1 << (number - 1).bit_length())
