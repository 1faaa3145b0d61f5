"""Writes a step's K and V into a paged cache, as one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dependent import overlap_options, overlaps_on, wait_for_previous
from .launch import launch_on

_MAX_ELEMENTS = 1 << 12
"""Elements of K that a program moves, and as many of V."""


# A table of a step may begin anywhere and have any length: it is not worth another compile.
@triton.jit(do_not_specialize=["slot_stride"], do_not_specialize_on_alignment=["slot_mapping"])
def store_rows(
    k: tl.tensor,
    v: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slot_mapping: tl.tensor,
    slot_stride: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    k_element: tl.constexpr,
    v_element: tl.constexpr,
    k_cache_block: tl.constexpr,
    k_cache_offset: tl.constexpr,
    k_cache_head: tl.constexpr,
    k_cache_element: tl.constexpr,
    v_cache_block: tl.constexpr,
    v_cache_offset: tl.constexpr,
    v_cache_head: tl.constexpr,
    v_cache_element: tl.constexpr,
    num_kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    padded_head_size: tl.constexpr,
    heads_at_once: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """One program a (token, several KV heads); a program whose token has slot -1 does nothing."""
    wait_for_previous(overlaps)
    # All in int64: a cache may have more elements than an int32 counts.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token * slot_stride).to(tl.int64)
    if slot >= 0:
        block = slot // block_size
        offset = slot % block_size
        head = tl.program_id(1).to(tl.int64) * heads_at_once + tl.arange(0, heads_at_once)[:, None]
        element = tl.arange(0, padded_head_size)[None, :]
        exists = (head < num_kv_heads) & (element < head_size)
        key = tl.load(k + token * k_token + head * k_head + element * k_element, mask=exists)
        value = tl.load(v + token * v_token + head * v_head + element * v_element, mask=exists)
        k_slot = k_cache + block * k_cache_block + offset * k_cache_offset
        v_slot = v_cache + block * v_cache_block + offset * v_cache_offset
        tl.store(k_slot + head * k_cache_head + element * k_cache_element, key, mask=exists)
        tl.store(v_slot + head * v_cache_head + element * v_cache_element, value, mask=exists)


def store_grid(num_tokens: int, num_kv_heads: int, head_size: int) -> tuple[int, int, int]:
    """How many programs store so many rows."""
    return num_tokens, triton.cdiv(num_kv_heads, _heads_at_once(num_kv_heads, head_size)), 1


def store_constants(
    num_kv_heads: int,
    block_size: int,
    head_size: int,
    k_element: int,
    v_element: int,
    cache_strides: tuple[int, ...],
    overlaps: bool,
) -> tuple[int, ...]:
    """The last arguments of `store_rows`; cache_strides: those of k_cache, then of v_cache."""
    padded = triton.next_power_of_2(head_size)
    at_once = _heads_at_once(num_kv_heads, head_size)
    return (k_element, v_element, *cache_strides, num_kv_heads, block_size, head_size, padded, at_once, overlaps)


def _heads_at_once(num_kv_heads: int, head_size: int) -> int:
    at_most = max(1, _MAX_ELEMENTS // int(triton.next_power_of_2(head_size)))
    return min(int(triton.next_power_of_2(num_kv_heads)), at_most)


def store(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes row `t` of k and v to slot `slot_mapping[t]`; -1 writes nothing. Any strides; does not wait.

    Args:
        k: [num_tokens, num_kv_heads, head_size].
        v: like `k`.
        k_cache: [num_blocks, block_size, num_kv_heads, head_size], in the dtype of `k`.
        v_cache: like `k_cache`.
        slot_mapping: [num_tokens], integers; slots that are not -1 are distinct and exist.

    Raises:
        NotAvailableError: the tensors are not on a GPU.
    """
    num_tokens, num_kv_heads, head_size = k.shape
    with launch_on(store_rows, k):
        if num_tokens == 0 or num_kv_heads == 0 or head_size == 0:
            return
        constants = store_constants(
            num_kv_heads,
            k_cache.shape[1],
            head_size,
            k.stride(2),
            v.stride(2),
            (*k_cache.stride(), *v_cache.stride()),
            overlaps := overlaps_on(k.device),
        )
        store_rows[store_grid(num_tokens, num_kv_heads, head_size)](
            *(k, v, k_cache, v_cache, slot_mapping, slot_mapping.stride(0)),
            *(*k.stride()[:2], *v.stride()[:2], *constants),
            num_warps=4,
            **overlap_options(overlaps),
        )
