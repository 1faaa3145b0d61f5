"""What the layers of a model have in common, so that the same compiled attention kernels serve them all."""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton

from ..deferred import Submit
from .dependent import overlap_options, overlaps_on
from .kv_store import store_constants, store_grid
from .launch import Grid, Way, is_interpreted
from .rotary_store import rotary_grid, rotary_last
from .row_attention import attend_rows
from .tile_attention import attend_tiles
from .tuning import Tuning, pick_tuning

NO_WINDOW = 2**31 - 1
"""A window that no request fills."""
_MAX_GROUP = 32
"""Query heads of one KV head that a program of row attention takes; more of them take more programs."""
_CPU_SMS = 4
"""In place of the number of SMs under the interpreter."""
_REDUCED_ELEMENTS = 1 << 13
"""Elements of the splits' results that are put together at once; bounds a program's registers."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One of the attention kernels, as a layout launches it."""

    num_columns: int
    """KV heads times the parts of their groups; a program takes one."""
    per_column: int
    """Query heads that a program of row attention takes; tokens that one of tile attention takes."""
    numbers: tuple[int | float, ...]
    """Arguments between those of a context and `strides`."""
    last: tuple[int, ...]
    """Last arguments: strides and constants."""
    options: dict[str, int]
    """Of the compiler."""


class Pending(NamedTuple):
    """What has to be compiled for the kinds of a context's arguments."""

    store: Hashable
    """`Call.key`."""
    attend: Hashable
    given_to: weakref.ref[Submit] | None
    """In which step it was submitted last: no other layer of that step has to. Weak: a layout outlives its users."""


class Rotated(NamedTuple):
    """What holds the rotated q: contiguous."""

    shape: tuple[int, int, int]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layout:
    """What calls have in common that the same compiled kernels serve; there is one object of each."""

    device: torch.device
    num_rows: int
    window: int
    tuning: Tuning
    overlaps: bool
    """Whether the store and row attention are launched as dependent kernels."""
    padded_head_size: int
    rotated: Rotated | None
    """What the attention kernels read in place of q, if the store rotates."""
    store_grid: Grid
    store_last: tuple[int, ...]
    """Last arguments of the store."""
    num_splits: int
    """Programs of row attention that share a row at most."""
    rows: Kernel
    tiles: Kernel
    row_options: tuple[dict[str, int], ...]
    """Of the compiler, for `rows` with this number of rows and with others."""
    compiled: dict[Any, tuple[Way, Way] | None] = dataclasses.field(default_factory=dict)
    """By the kinds of a context's arguments: how the store and the attention kernel are launched quickly."""
    pending: dict[Any, Pending] = dataclasses.field(default_factory=dict)
    """By the same: what a step did not wait for."""


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=1024)
def layout_of(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    q_shape: tuple[int, int, int],
    num_kv_heads: int,
    block_size: int,
    strides: tuple[tuple[int, ...], ...],
    alignments: tuple[int, ...],
    scale: float,
    window_size: int,
    tuning: Tuning | None,
    rotary_half: int | None = None,
) -> Layout:
    """The one layout of these arguments; `alignments` are not read, but are part of what is the same.

    Args:
        dtypes: of q, k, v, k_cache, v_cache and out, and where the store rotates of cos and sin.
        strides: of the same.
        rotary_half: `rotary_size // 2`; None: the store does not rotate.
    """
    num_rows, num_heads, head_size = q_shape
    q, k, v, k_cache, v_cache, out, *angles = strides
    cache_strides = (*k_cache, *v_cache)
    overlaps = overlaps_on(device)
    grid, store_last = _store(
        q_shape, num_kv_heads, block_size, (q, k, v, *angles), cache_strides, rotary_half, overlaps
    )
    if rotary_half is not None:
        q = (num_heads * head_size, head_size, 1)
    group_size = num_heads // num_kv_heads
    tuning = tuning or pick_tuning(dtypes[0], head_size, group_size)
    padded = max(16, int(triton.next_power_of_2(head_size)))
    window = window_size or NO_WINDOW
    numbers = (scale * math.log2(math.e), window)
    strides_last = (*q[:2], *out[:2], q[2], out[2], *cache_strides, group_size)
    sizes = (head_size, padded, block_size)

    part = min(int(triton.next_power_of_2(group_size)), _MAX_GROUP)
    num_parts = -(-group_size // part)
    padded_part = part if dtypes[0] == torch.float32 else max(16, part)  # what a tensor core takes
    reduced_at_once = max(1, min(32, _REDUCED_ELEMENTS // (part * padded)))
    row_sizes = (part, num_parts, padded_part, *sizes, tuning.row_tile, reduced_at_once)
    num_columns = num_kv_heads * num_parts
    num_splits, is_lone = tuning.row_splits_of(num_rows * num_columns, _num_sms(device))
    row_options = {
        "num_warps": tuning.row_warps,
        "num_stages": tuning.row_stages,
        **overlap_options(overlaps),
    }
    lone_options = {**row_options, "num_stages": tuning.row_lone_stages}
    rows = Kernel(
        num_columns=num_columns,
        per_column=part,
        numbers=(*numbers, tuning.row_min_chunk),
        last=(*strides_last, *row_sizes, is_interpreted(attend_rows), overlaps),
        options=lone_options if is_lone else row_options,
    )

    part = min(group_size, tuning.tile_m)
    columns = num_kv_heads * -(-group_size // part)
    tokens = tuning.tile_m // part
    tile_sizes = (part, columns, tokens, *sizes, tuning.tile_m, tuning.tile_n, window_size != 0)
    tiles = Kernel(
        num_columns=columns,
        per_column=tokens,
        numbers=(*numbers, num_rows),
        last=(*strides_last, *tile_sizes, is_interpreted(attend_tiles)),
        options={"num_warps": tuning.tile_warps, "num_stages": tuning.tile_stages},
    )

    return Layout(
        device=device,
        num_rows=num_rows,
        window=window,
        tuning=tuning,
        overlaps=overlaps,
        padded_head_size=padded,
        rotated=Rotated(q_shape, dtypes[0]) if rotary_half is not None else None,
        store_grid=grid,
        store_last=store_last,
        num_splits=num_splits,
        rows=rows,
        tiles=tiles,
        row_options=(lone_options, row_options),
    )


def _store(
    q_shape: tuple[int, int, int],
    num_kv_heads: int,
    block_size: int,
    strides: tuple[tuple[int, ...], ...],
    cache_strides: tuple[int, ...],
    rotary_half: int | None,
    overlaps: bool,
) -> tuple[Grid, tuple[int, ...]]:
    """(grid, last arguments) of the store; strides: those of q, k, v and, if it rotates, cos and sin."""
    num_rows, num_heads, head_size = q_shape
    _, k, v, *_ = strides
    if rotary_half is None:
        constants = store_constants(num_kv_heads, block_size, head_size, k[2], v[2], cache_strides, overlaps)
        return store_grid(num_rows, num_kv_heads, head_size), (*k[:2], *v[:2], *constants)
    last = rotary_last(num_heads, num_kv_heads, block_size, head_size, rotary_half, strides, cache_strides, overlaps)
    return rotary_grid(num_rows, num_heads, num_kv_heads, head_size), last
