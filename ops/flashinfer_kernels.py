"""What FlashInfer's attention launches, and the store before it: compiled in a step, or beside the steps.

Under `piecework.ops.deferred.defer_compiles` a call is asked first whether it `is_ready`; what it lacks is compiled by
somebody else.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import NamedTuple

import torch

from . import torch_native
from .attention_plans import Lengths
from .deferred import Submit, deferring
from .flashinfer_pages import pages_of_step
from .flashinfer_wrapper import Memory, PlanSpec, Wrapper

ALIGNED_BYTES = 16
"""FlashInfer loads as many at once, and Triton compiles for addresses that are multiples of it."""
_BUILT: set[Hashable] = set()
"""Kinds of kernels that this process has, or that failed: their step fails then, in its own words."""


class _StoreKind(NamedTuple):
    """Stores that one compiled kernel serves."""

    dtype: torch.dtype
    block_size: int
    strides: tuple[tuple[int, ...], ...]
    are_aligned: tuple[bool, ...]
    slots: torch.dtype


def store(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes row `t` of k and v to slot `slot_mapping[t]`; -1 writes nothing."""
    if k.is_cuda:
        from .triton import kv_store

        kv_store.store(k, v, k_cache, v_cache, slot_mapping)
    else:
        torch_native.store(k, v, k_cache, v_cache, slot_mapping)


def may_plan(spec: PlanSpec, is_decode: bool) -> bool:
    """Whether a plan of that kind makes nobody wait for a compile who does not want to."""
    return deferring() is None or _kernels_of(spec, is_decode) in _BUILT


def note_built(wrapper: Wrapper) -> None:
    """A plan was made: FlashInfer has what it needs for that."""
    _BUILT.add(_kernels_of(wrapper.spec, wrapper.is_decode))


def is_ready(spec: PlanSpec, tensors: tuple[torch.Tensor, ...], slots: torch.Tensor, submit: Submit) -> bool:
    """Whether a call has nothing to compile; if it has, `submit` is given that.

    Args:
        tensors: k, v, k_cache and v_cache.
        slots: where k and v go.
    """
    ready = True
    for is_decode in (True, False):  # a prompt is followed by single rows
        key = _kernels_of(spec, is_decode)
        if key not in _BUILT:
            submit(key, functools.partial(_build, key, spec, is_decode))
            ready = False
    if not slots.is_cuda:
        return ready
    kind = _StoreKind(
        tensors[0].dtype,
        spec.block_size,
        tuple([tensor.stride() for tensor in tensors]),
        tuple([tensor.data_ptr() % ALIGNED_BYTES == 0 for tensor in tensors]),
        slots.dtype,
    )
    if kind not in _BUILT:
        submit(kind, functools.partial(_build_store, kind, tensors, slots))
        ready = False
    return ready


def _kernels_of(spec: PlanSpec, is_decode: bool) -> Hashable:
    """What tells kernels of FlashInfer apart; each is compiled at the first plan of its kind."""
    uses_tensor_cores = is_decode and spec.uses_tensor_cores
    return spec.device, spec.dtype, spec.head_size, spec.window_size > 0, is_decode, uses_tensor_cores


def _build(key: Hashable, spec: PlanSpec, is_decode: bool) -> None:
    """Has FlashInfer compile and load what calls of `spec` launch, by a call for one token on a stream of its own.

    It runs too, since whatever FlashInfer does at a first launch would else be done inside a capture.
    """
    if key in _BUILT:
        return
    try:
        stream = torch.cuda.Stream(spec.device) if spec.device.type == "cuda" else None
        with torch.cuda.stream(stream), torch.inference_mode():
            wrapper = Wrapper(spec, Memory(), is_decode=is_decode)
            pages = pages_of_step(Lengths((1,), (1,)), spec.block_size)
            wrapper.plan(pages, torch.zeros(1, dtype=torch.int32, device=spec.device), None)
            q = torch.zeros((1, spec.num_heads, spec.head_size), dtype=spec.dtype, device=spec.device)
            cache = q.new_zeros((1, spec.block_size, spec.num_kv_heads, spec.head_size))
            wrapper.run(q, (cache, cache), torch.empty_like(q))
            if stream is not None:
                stream.synchronize()  # before its memory goes
    finally:
        _BUILT.add(key)


def _build_store(kind: Hashable, tensors: tuple[torch.Tensor, ...], slots: torch.Tensor) -> None:
    from .triton.dependent import overlap_options, overlaps_on
    from .triton.kv_store import store_constants, store_grid, store_rows
    from .triton.launch import Call

    k, v, k_cache, v_cache = tensors
    _, num_kv_heads, head_size = k.shape
    cache_strides, overlaps = (*k_cache.stride(), *v_cache.stride()), overlaps_on(k.device)
    sizes = (num_kv_heads, k_cache.shape[1], head_size)
    constants = store_constants(*sizes, k.stride(2), v.stride(2), cache_strides, overlaps)
    arguments = (*tensors, slots, slots.stride(0), *k.stride()[:2], *v.stride()[:2], *constants)
    options = {"num_warps": 4, **overlap_options(overlaps)}
    try:
        Call(store_rows, store_grid(1, num_kv_heads, head_size), arguments, options).compile()
    finally:
        _BUILT.add(kind)
