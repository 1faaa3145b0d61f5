"""Which rows and shapes of a linear take which kernel, and in which sizes: a pure function.

Its rules are what `benchmarks/bench_linear.py --tune` found on an H200 for the linears of Llama-3-8B
(benchmarks/results/gpu_linear.json), in bf16: the best sizes, or within 2% of them, with few different kernels to
compile. One row is looped over on plain cores; from two on tensor cores were as fast or faster.
"""

from __future__ import annotations

import dataclasses
import functools

MAX_ROWS = 16
"""Rows that our kernels take at most; the width of what the tiles are multiplied with."""
MAX_LOOPED_ROWS = 3
"""Rows that are multiplied element by element at most, on plain cores."""
MAX_SPLIT_BLOCKS = 1024
"""Blocks of outputs whose products may be split: each has a counter in the memory that a stream's splits share."""

_ROW_ELEMENTS = 2048
"""Elements of the weights that a program of the loop takes at once: 8 for each of 256 threads, 16 bytes."""
_LONG_ROW = 8192
"""Elements of a sum from which half as many threads are faster."""
_MAX_SPLITS = 8
_MIN_CHUNK = 512
"""Elements of the sum under which it is not split further."""


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
    if num_rows == 1 or activates:
        return _looped(num_rows, in_features) if num_rows <= MAX_LOOPED_ROWS else None
    return _tiled(out_features, in_features, num_sms)


def _looped(num_rows: int, in_features: int) -> LinearTuning:
    """One output a program; two with several rows, which each program reads too."""
    is_long = num_rows == 1 and in_features > _LONG_ROW
    block_k = min(_ROW_ELEMENTS >> is_long, _power_of_two(in_features, at_least=16))
    block_n = 1 if is_long else max(1 if num_rows == 1 else 2, min(64, _ROW_ELEMENTS // block_k))
    return LinearTuning(uses_tiles=False, block_n=block_n, block_k=block_k, num_warps=4 if is_long else 8)


def _tiled(out_features: int, in_features: int, num_sms: int) -> LinearTuning:
    """64 outputs a program, as a warp group multiplies them; the sum split as long as no program waits for an SM.

    A program that has an SM for itself has more tiles in flight.
    """
    block_n = min(64, _power_of_two(out_features, at_least=16))
    block_k = min(128, _power_of_two(in_features, at_least=16))
    num_blocks = -(-out_features // block_n)
    splits = max(1, min(_MAX_SPLITS, num_sms // num_blocks, in_features // _MIN_CHUNK))
    if num_blocks > MAX_SPLIT_BLOCKS:
        splits = 1
    num_stages = 6 if num_blocks * splits <= num_sms else 4
    sizes = {"block_n": block_n, "block_k": block_k, "num_warps": 4, "num_stages": num_stages, "splits": splits}
    return LinearTuning(uses_tiles=True, **sizes)


def _power_of_two(number: int, *, at_least: int) -> int:
    """The least power of two that is `number` or more, and `at_least`."""
    return max(at_least, 1 << (number - 1).bit_length())
