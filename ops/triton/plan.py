"""The launches of a layout for one context: grids, memory that the splits of a row share, what is compiled for them.

A launch compiles its kernels if it has to, and waits for that. Under `piecework.ops.deferred.defer_compiles` a plan is
asked first whether it `is_ready`; the kernels of one that is not are compiled elsewhere, by what Triton specialises on:
once for all layers, and for all numbers of rows.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError
from ..deferred import Deferred
from .dependent import overlap_options
from .kv_store import store_rows
from .launch import Call, Grid, Way, addresses_of, is_interpreted, launch_on, quick_launch
from .layout import Kernel, Layout, Pending
from .rotary_store import NUM_WARPS, rotate_and_store
from .row_attention import attend_rows
from .tile_attention import attend_tiles

if TYPE_CHECKING:
    from ..attention import AttentionContext

_WAYS: dict[Hashable, Way | None] = {}
"""By `Call.key`: what was compiled beside the steps, as Triton itself keeps it, for the process. None: it failed, or
has no quick launch; then an ordinary launch finds what Triton has, or fails in its own words."""


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
    rotated: torch.Tensor | None
    """Gets the rotated q of each layer in turn; see `memory_for_q`."""
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
        rotated=_empty_q(layout) if layout.rotated is not None and not context.is_static else None,
        numbers=_numbers(num_reqs, start, lens, table, kernel),
    )
    _make_quick(plan)
    return plan


def memory_for_q(plan: Plan) -> torch.Tensor:
    """What a call of a plan whose store rotates has the rotated q in, until its kernels ran; contiguous.

    One for all layers of a step, which are on one stream. Not for a static context, whose scratch lives as long as the
    captures of its bucket: there each call allocates, so that a capture takes it from its pool and later kernels of the
    same capture get it again.
    """
    return plan.rotated if plan.rotated is not None else _empty_q(plan.layout)


def _empty_q(layout: Layout) -> torch.Tensor:
    assert layout.rotated is not None
    return torch.empty(layout.rotated.shape, dtype=layout.rotated.dtype, device=layout.device)


def _numbers(
    num_reqs: int, start: torch.Tensor, lens: torch.Tensor, table: torch.Tensor, kernel: Kernel
) -> tuple[int | float, ...]:
    """The arguments of an attention kernel that are no tensors."""
    return (num_reqs, start.stride(0), lens.stride(0), *table.stride(), *kernel.numbers, *kernel.last)


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
        return _no_memory(layout.device)
    num_cells = num_rows * num_columns
    num_parts = num_cells * num_splits * layout.rows.per_column
    memory = torch.empty(num_parts * (layout.padded_head_size + 2), dtype=torch.float32, device=layout.device)
    parts, sums = memory.split((num_parts * layout.padded_head_size, num_parts * 2))
    return parts, sums, torch.zeros(num_cells, dtype=torch.int32, device=layout.device)


@functools.cache
def _no_memory(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    nothing = torch.empty(0, dtype=torch.float32, device=device)
    return nothing, nothing, nothing.view(torch.int32)


def launch(plan: Plan, tensors: tuple[torch.Tensor, ...]) -> None:
    """Launches the ordinary way; from then on the plan knows the quick one, if there is one."""
    layout = plan.layout
    with launch_on(store_rows, tensors[0]):
        rotated = memory_for_q(plan) if layout.rotated is not None else None
        store, attend = _calls(plan, tensors, rotated)
        stored, attended = store.launch(), attend.launch()
        if plan.kinds not in layout.compiled:
            ways = quick_launch(stored), quick_launch(attended)
            layout.compiled[plan.kinds] = _both(*ways)
            if not is_interpreted(store_rows):
                _WAYS.update(zip((store.key, attend.key), ways, strict=True))
    _make_quick(plan)


def _calls(plan: Plan, tensors: tuple[torch.Tensor, ...], rotated: torch.Tensor | None = None) -> tuple[Call, Call]:
    """The launches of the store and of the attention kernel; without `rotated` not to be made, if the store rotates."""
    q, k, v, k_cache, v_cache, out, *angles = tensors
    layout = plan.layout
    tables = (plan.start, plan.lens, plan.table, *plan.memory)
    attend, kernel = (attend_tiles, layout.tiles) if plan.uses_tiles else (attend_rows, layout.rows)
    last = (k_cache, v_cache, plan.slots, plan.slots.stride(0), *layout.store_last)
    overlapping = overlap_options(layout.overlaps)
    if layout.rotated is None:
        store = Call(store_rows, layout.store_grid, (k, v, *last), {"num_warps": 4, **overlapping})
    else:
        turned = rotated if rotated is not None else _no_q(layout)
        options = {"num_warps": NUM_WARPS, **overlapping}
        store = Call(rotate_and_store, layout.store_grid, (turned, q, k, v, *angles, *last), options)
        q = turned
    return store, Call(attend, plan.grid, (q, k_cache, v_cache, out, *tables, *plan.numbers), kernel.options)


def _no_q(layout: Layout) -> torch.Tensor:
    """Stands for the memory of the rotated q where nothing is launched: an allocator's memory is as aligned."""
    assert layout.rotated is not None
    return torch.empty(0, dtype=layout.rotated.dtype, device=layout.device)


def is_ready(plan: Plan, tensors: tuple[torch.Tensor, ...], submit: Deferred) -> bool:
    """Whether a launch of the plan has nothing to compile; if it has, `submit` is given that.

    With it, what steps of other sizes are to launch with tensors like these: a prompt is followed by single rows. Once
    it is ready the plan has its quick launch, if there is one. Kernels of Triton's interpreter are ready.
    """
    layout, kinds = plan.layout, plan.kinds
    if kinds not in layout.compiled:
        if is_interpreted(store_rows):
            return True
        pending = layout.pending.get(kinds)
        if pending is None:
            store, attend = _calls(plan, tensors)
            pending = layout.pending[kinds] = Pending(store.key, attend.key, None)
        if not (pending.store in _WAYS and pending.attend in _WAYS):
            if pending.given_to is None or pending.given_to() is not submit:
                own, others = _calls(plan, tensors), _other_sizes(plan, tensors)
                for ahead, call in (*((False, call) for call in own), *((True, call) for call in others)):
                    if (key := call.key) not in _WAYS:
                        submit(key, functools.partial(_compile, key, call), ahead=ahead)
                layout.pending[kinds] = pending._replace(given_to=weakref.ref(submit))
            return False
        ways = _both(_WAYS[pending.store], _WAYS[pending.attend])
        if ways is not None:
            layout.compiled[kinds] = ways
    _make_quick(plan)
    return True


def compile_ahead(plan: Plan, tensors: tuple[torch.Tensor, ...]) -> None:
    """Compiles what steps of other sizes are to launch with tensors like these: for a run on nothing but padding."""
    if is_interpreted(store_rows):
        return
    for call in _other_sizes(plan, tensors):
        if (key := call.key) not in _WAYS:
            _compile(key, call)


def _other_sizes(plan: Plan, tensors: tuple[torch.Tensor, ...]) -> list[Call]:
    """Launches of the attention kernels that stand for those of steps with other numbers of rows.

    Sizes alone tell them from the plan's own, so that a grid and memory that nobody allocated will do.
    """
    q, _, _, k_cache, v_cache, out, *_ = tensors
    layout = plan.layout
    q = q if layout.rotated is None else _no_q(layout)
    tables = (plan.start, plan.lens, plan.table)
    memory = _no_memory(layout.device)
    calls = []
    for attend, kernel, options in (
        *[(attend_rows, layout.rows, options) for options in layout.row_options],
        (attend_tiles, layout.tiles, layout.tiles.options),
    ):
        numbers = _numbers(plan.lens.shape[0], *tables, kernel)
        shared = memory if attend is attend_rows else ()
        calls.append(Call(attend, (1, 1, 1), (q, k_cache, v_cache, out, *tables, *shared, *numbers), options))
    return calls


def _compile(key: Hashable, call: Call) -> None:
    """Compiles it and notes its quick launch, or that it failed. Raises: whatever Triton raises, after that."""
    if key not in _WAYS:
        way = None
        try:
            way = call.compile()
        finally:
            _WAYS[key] = way


def _both(store: Way | None, attend: Way | None) -> tuple[Way, Way] | None:
    return (store, attend) if store and attend else None


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
