"""Writes a step's K and V into a paged cache, as one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch_on


# A table of a step may begin anywhere and have any length: it is not worth another compile.
@triton.jit(do_not_specialize=["slot_stride"], do_not_specialize_on_alignment=["slot_mapping"])
def _store(
    k: tl.tensor,
    v: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slot_mapping: tl.tensor,
    slot_stride: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    k_element: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    v_element: tl.tensor,
    k_cache_block: tl.tensor,
    k_cache_offset: tl.tensor,
    k_cache_head: tl.tensor,
    k_cache_element: tl.tensor,
    v_cache_block: tl.tensor,
    v_cache_offset: tl.tensor,
    v_cache_head: tl.tensor,
    v_cache_element: tl.tensor,
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    padded_head_size: tl.constexpr,
) -> None:
    """One program a (token, KV head); a program whose token has slot -1 does nothing."""
    # All in int64: a cache may have more elements than an int32 counts.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + token * slot_stride).to(tl.int64)
    if slot >= 0:
        block = slot // block_size
        offset = slot % block_size
        element = tl.arange(0, padded_head_size)
        exists = element < head_size
        key = tl.load(k + token * k_token + head * k_head + element * k_element, mask=exists)
        value = tl.load(v + token * v_token + head * v_head + element * v_element, mask=exists)
        k_slot = k_cache + block * k_cache_block + offset * k_cache_offset + head * k_cache_head
        v_slot = v_cache + block * v_cache_block + offset * v_cache_offset + head * v_cache_head
        tl.store(k_slot + element * k_cache_element, key, mask=exists)
        tl.store(v_slot + element * v_cache_element, value, mask=exists)


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
    with launch_on(_store, k):
        if num_tokens == 0 or head_size == 0:
            return
        _store[(num_tokens, num_kv_heads)](
            *(k, v, k_cache, v_cache, slot_mapping, slot_mapping.stride(0)),
            *(*k.stride(), *v.stride(), *k_cache.stride(), *v_cache.stride()),
            block_size=k_cache.shape[1],
            head_size=head_size,
            padded_head_size=triton.next_power_of_2(head_size),
            num_warps=1,
        )
