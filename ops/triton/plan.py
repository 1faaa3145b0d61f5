"""The launches of a layout for one context: grids, and the memory that the splits of a row share."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError
from .kv_store import store_rows
from .launch import Grid, addresses_of, launch_on, quick_launch
from .layout import Layout
from .row_attention import attend_rows
from .tile_attention import attend_tiles

if TYPE_CHECKING:
    from ..attention import AttentionContext


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Plan:
    """A layout's launches for one context: for these very tensors of it."""

    layout: Layout
    kinds: tuple[Any, ...]
    """Key into `Layout.compiled`."""
    uses_tiles: bool
    grid: Grid
    slots: torch.Tensor
    start: torch.Tensor
    lens: torch.Tensor
    table: torch.Tensor
    memory: tuple[torch.Tensor, ...]
    """What splits share: arguments of the attention kernel after `start`, `lens` and `table`."""
    numbers: tuple[int | float, ...]
    """The arguments after those."""
    quick: tuple[Any, ...] | None = None
    """(run, grid and so on) of the store, then of the attention kernel; None until an ordinary launch was made."""


def find_plan(layout: Layout, context: AttentionContext) -> Plan:
    """The launches of a layout for a context, made if they are new; its scratch has them from then on.

    Copies of a context share its scratch and may have other tensors. All their plans stay: a capture may hold the
    addresses of what is in them.
    """
    plans: list[Plan] = context.scratch.setdefault(Plan, [])
    mine = (context.slot_mapping, context.query_start_loc, context.seq_lens, context.block_table)
    for plan in plans:
        theirs = (plan.slots, plan.start, plan.lens, plan.table)
        if plan.layout is layout and all(map(operator.is_, mine, theirs)):
            break
    else:
        plan = _plan(layout, context)
        # Memory that a capture gives is zero at its replays only: no other call may rely on it.
        if layout.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return plan
        plans.append(plan)
    context.scratch[layout] = plan
    return plan


def _plan(layout: Layout, context: AttentionContext) -> Plan:
    """Makes the launches of a layout for a context."""
    start, lens, table = context.query_start_loc, context.seq_lens, context.block_table
    slots, num_reqs = context.slot_mapping, context.num_reqs
    devices = {tensor.device for tensor in (slots, start, lens, table)}
    if devices != {layout.device}:  # their addresses are launched as they are
        raise InputError(
            f"paged_attention: expected a context on {layout.device}, where q is, got one on "
            f"{', '.join(sorted(map(str, devices)))}; build it with device=q.device"
        )
    uses_tiles = takes_tiles(layout.num_rows, context)
    memory: tuple[torch.Tensor, ...] = ()
    if uses_tiles:
        kernel = layout.tiles
        # A request's tiles begin with it: each request, and the rows of padding after the last one, may add one.
        num_tiles = layout.num_rows // kernel.per_column + num_reqs + 1
        grid = (num_tiles * kernel.num_columns, 1, 1)
    else:
        kernel = layout.rows
        grid = (layout.num_rows, kernel.num_columns, _num_splits(layout, context))
        memory = _split_memory(layout, grid)
    plan = Plan(
        layout=layout,
        kinds=(uses_tiles, slots.dtype, start.dtype, lens.dtype, table.dtype),
        uses_tiles=uses_tiles,
        grid=grid,
        slots=slots,
        start=start,
        lens=lens,
        table=table,
        memory=memory,
        numbers=(
            *(num_reqs, start.stride(0), lens.stride(0), *table.stride()),
            *(*kernel.numbers, *kernel.last),
        ),
    )
    _make_quick(plan)
    return plan


def takes_tiles(num_rows: int, context: AttentionContext) -> bool:
    """Whether requests may have several new tokens, as far as it is known without reading the device."""
    if context.is_static:
        return num_rows > context.num_reqs
    return max(context.query_lens_host, default=0) > 1


def _num_splits(layout: Layout, context: AttentionContext) -> int:
    """Programs that share a row: for a static context from shapes alone, else no more than its lengths need."""
    splits = layout.num_splits
    if not context.is_static:
        longest = min(max(context.seq_lens_host, default=0), layout.window)
        splits = max(1, min(splits, -(-longest // layout.tuning.row_min_chunk)))
    return splits


def _split_memory(layout: Layout, grid: Grid) -> tuple[torch.Tensor, ...]:
    """(parts, sums, arrivals) of `attend_rows`, which leaves the arrivals at zero."""
    num_rows, num_columns, num_splits = grid
    if num_splits == 1:  # then the kernel touches none of them
        nothing = _nothing_on(layout.device)
        return nothing, nothing, nothing.view(torch.int32)
    num_cells = num_rows * num_columns
    num_parts = num_cells * num_splits * layout.rows.per_column
    memory = torch.empty(num_parts * (layout.padded_head_size + 2), dtype=torch.float32, device=layout.device)
    parts, sums = memory.split((num_parts * layout.padded_head_size, num_parts * 2))
    return parts, sums, torch.zeros(num_cells, dtype=torch.int32, device=layout.device)


@functools.cache
def _nothing_on(device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32, device=device)


def launch(plan: Plan, tensors: tuple[torch.Tensor, ...]) -> None:
    """Launches the ordinary way; from then on the plan knows the quick one, if there is one."""
    q, k, v, k_cache, v_cache, out = tensors
    layout = plan.layout
    tables = (plan.start, plan.lens, plan.table, *plan.memory)
    attend, kernel = (attend_tiles, layout.tiles) if plan.uses_tiles else (attend_rows, layout.rows)
    with launch_on(store_rows, q):
        store_arguments = (k, v, k_cache, v_cache, plan.slots, plan.slots.stride(0), *layout.store_last)
        stored = store_rows[layout.store_grid](*store_arguments, num_warps=4)
        attended = attend[plan.grid](q, k_cache, v_cache, out, *tables, *plan.numbers, **kernel.options)
        if plan.kinds not in layout.compiled:
            store_way, attend_way = quick_launch(stored), quick_launch(attended)
            layout.compiled[plan.kinds] = (store_way, attend_way) if store_way and attend_way else None
    _make_quick(plan)


def _make_quick(plan: Plan) -> None:
    layout = plan.layout
    ways = layout.compiled.get(plan.kinds)
    if ways is None:
        return
    (store, store_middle, _), (attend, middle, _) = ways
    slots, *others = addresses_of(plan.slots, plan.start, plan.lens, plan.table, *plan.memory)
    store_last = (slots, plan.slots.stride(0), *layout.store_last)
    last = (*others, *plan.numbers)
    plan.quick = (store, *layout.store_grid[:2], store_middle, store_last, attend, plan.grid, middle, last)


def forget_quick(plan: Plan) -> None:
    """From now on such plans are launched the ordinary way."""
    plan.layout.compiled[plan.kinds] = plan.quick = None
