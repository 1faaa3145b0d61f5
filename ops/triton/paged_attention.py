"""Paged attention as Triton kernels over a paged cache: a store, then one of two attention kernels.

Every length is read on the device and the grids depend on shapes alone, so that a capture can hold a launch: see
`piecework.ops.attention.AttentionContext.is_static`.

Three things are told apart, so that a launch costs little Python. A `Layout` is what the layers of a model have in
common: shapes, strides, kinds of addresses. A `Plan` is a layout with one context: grids, the addresses of the
context's tensors, memory that the splits of a row share; it lives in `context.scratch`. A layer adds its addresses.
The store may rotate K before it stores it, and Q to memory that the attention kernel then reads (`prepare_rotary`).

Under `piecework.ops.deferred.defer_compiles` no call waits for a compile: until the kernels are ready, torch's own
operators do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ...errors import InputError, KernelNotReadyError
from .. import torch_native, torch_static
from ..capturing import is_capturing_whole
from ..deferred import deferring
from ..rotary import rotary_embedding
from .kv_store import store_rows
from .launch import addresses_of, check_device, has_hooks
from .layout import layout_of
from .plan import compile_ahead, find_plan, forget_quick, is_ready, launch, memory_for_q
from .tuning import Tuning

if TYPE_CHECKING:
    from ..attention import AttentionContext

_ALIGNMENT = 256
"""Bytes. Addresses that are equal modulo this are of one kind, whatever Triton makes of them."""


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window_size: int,
    context: AttentionContext,
) -> None:
    """Stores K and V, then attends; arguments as in `piecework.ops.attention.paged_attention`.

    Request slots may be empty; rows that no request has become zeros. Accumulates in float32; does not wait for the
    device. Allocates at the first call with a context and layout: the memory lives in `context.scratch`, so that calls
    with one context belong on one stream.

    Raises:
        InputError: the tensors, or those of the context, are on several devices.
        KernelNotReadyError: under `defer_compiles`, in a capture: the kernels are not compiled yet.
        NotAvailableError: the tensors are not on a GPU.
    """
    prepare(q, k, v, k_cache, v_cache, out, scale, window_size)(context)


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window_size: int,
    *,
    _tuning: Tuning | None = None,
) -> Callable[[AttentionContext], None]:
    """Does once what depends on these tensors alone, and returns what makes `paged_attention` for a context.

    The tensors must keep their addresses for as long as the callable is used; it holds them.

    Raises:
        InputError: the tensors, or those of the context, are on several devices.
        KernelNotReadyError: from the callable, as `paged_attention`.
        NotAvailableError: the tensors are not on a GPU.
    """
    return _prepare((q, k, v, k_cache, v_cache, out), scale, window_size, _tuning)


def prepare_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window_size: int,
    *,
    _tuning: Tuning | None = None,
) -> Callable[[AttentionContext], None]:
    """As `prepare`, for `piecework.ops.rotary_attention.rotary_paged_attention`: the store rotates q and k.

    Raises: as `prepare`.
    """
    return _prepare((q, k, v, k_cache, v_cache, out, cos, sin), scale, window_size, _tuning)


def _prepare(
    tensors: tuple[torch.Tensor, ...], scale: float, window_size: int, tuning: Tuning | None
) -> Callable[[AttentionContext], None]:
    """tensors: q, k, v, k_cache, v_cache and out, then cos and sin if the store rotates."""
    q, k, _, k_cache, _, _, *angles = tensors
    check_device(store_rows, q)
    if len({tensor.device for tensor in tensors}) > 1:
        devices = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
        raise InputError(f"paged_attention: expected all tensors on one device, got {devices}; move them to one")
    if not q.numel():
        return _nothing
    addresses = addresses_of(*tensors)
    layout = layout_of(
        q.device,
        tuple([tensor.dtype for tensor in tensors]),
        q.shape,
        k.shape[1],
        k_cache.shape[1],
        tuple([tensor.stride() for tensor in tensors]),
        tuple([address % _ALIGNMENT for address in addresses]),
        scale,
        window_size,
        tuning,
        angles[0].shape[1] if angles else None,
    )
    q_at, k_at, v_at, k_cache_at, v_cache_at, out_at, *angles_at = addresses
    rotates = bool(angles)
    stored_at = (q_at, k_at, v_at, *angles_at, k_cache_at, v_cache_at) if rotates else addresses[1:5]
    device = q.device.index
    is_only_device = not q.is_cuda or torch.cuda.device_count() == 1
    # That of Triton's driver, which to ask would start the driver: it compiles a module of its own.
    stream_of = torch._C._cuda_getCurrentRawStream if q.is_cuda else _no_stream

    def run(context: AttentionContext) -> None:
        plan = context.scratch.get(layout)
        if (
            plan is None
            or plan.slots is not context.slot_mapping
            or plan.start is not context.query_start_loc
            or plan.lens is not context.seq_lens
            or plan.table is not context.block_table
        ):
            plan = find_plan(layout, context)
        quick = plan.quick
        if quick is None or has_hooks() or not (is_only_device or torch.cuda.current_device() == device):
            if quick is None and (submit := deferring()) is not None:
                if not is_ready(plan, tensors, submit):
                    _attend_without(tensors, scale, window_size, context)
                    return
                quick = plan.quick
            if quick is None or has_hooks() or not (is_only_device or torch.cuda.current_device() == device):
                launch(plan, tensors)
                if quick is None and not (context.is_static or context.query_lens_host):  # before there are steps
                    compile_ahead(plan, tensors)
                return
        store, store_0, store_1, store_middle, store_last, attend, grid, middle, last = quick
        read_at, first = q_at, stored_at
        if rotates:
            rotated = memory_for_q(plan)  # held until both are launched
            read_at = rotated.data_ptr()
            first = (read_at, *stored_at)
        stream = stream_of(device)
        try:
            store(store_0, store_1, 1, stream, *store_middle, *first, *store_last)
            attend(*grid, stream, *middle, read_at, k_cache_at, v_cache_at, out_at, *last)
        except TypeError:  # another Triton, whose launcher takes something else; a store twice is a store
            forget_quick(plan)
            launch(plan, tensors)

    return run


def _attend_without(
    tensors: tuple[torch.Tensor, ...], scale: float, window_size: int, context: AttentionContext
) -> None:
    """Does a call without these kernels, with torch's own operators; may wait for the device.

    Raises: KernelNotReadyError in a capture.
    """
    q, k, v, k_cache, v_cache, out, *angles = tensors
    if is_capturing_whole() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise KernelNotReadyError(
            "paged_attention: expected its Triton kernels to be compiled before a capture, got one while that is left "
            "to others (defer_compiles); capture again later, or outside of defer_compiles to wait for the compile"
        )
    if angles:
        q, k = rotary_embedding.native(q, k, *angles)
    arguments = (q, k, v, k_cache, v_cache, out, scale, window_size, context)
    if context.is_static:  # which would be all that its block table has room for, were the device not asked
        longest = int(context.seq_lens.max()) if context.num_reqs else 0
        torch_static.paged_attention(*arguments, longest=longest)
    else:
        torch_native.paged_attention(*arguments)


def _nothing(context: AttentionContext) -> None:
    """There are no rows."""


def _no_stream(device: int | None) -> int:
    return 0
