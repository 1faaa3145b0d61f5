"""Rotates a step's Q and K, and writes K and V into a paged cache, as one Triton kernel.

What `piecework.ops.rotary` and the store do in three kernels; at one token each of them is nothing but a launch. Q goes
to memory of its own, so that the attention kernels stay what they are without rotary, and are compiled once for both:
rotated there, each of the programs that share a row would do it again, with registers that tiles of prompts lack.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import wait_for_previous

_MAX_ELEMENTS = 1 << 11
"""Elements of Q that a program rotates, or of K, and as many of V: two vectors of 16 bytes a thread in bf16."""
NUM_WARPS = 4


@triton.jit
def _move_rotated(
    source: tl.tensor,
    target: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    exists: tl.tensor,
    source_element: tl.constexpr,
    target_element: tl.constexpr,
    cos_element: tl.constexpr,
    sin_element: tl.constexpr,
    head_size: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
    padded_rest: tl.constexpr,
) -> None:
    """Heads that begin at `source`, rotated to `target` (both [heads, 1]) in float32, and rounded to what it holds.

    Args:
        cos: where the token's row begins; sin: the same.
        exists: [heads, 1].
        half: elements of a head that are paired with as many behind them; the rest is copied.
    """
    dtype = source.dtype.element_ty
    if half > 0:
        element = tl.arange(0, padded_half)[None, :]
        is_half = element < half
        mask = exists & is_half
        c = tl.load(cos + element * cos_element, mask=is_half, other=0.0).to(tl.float32)
        s = tl.load(sin + element * sin_element, mask=is_half, other=0.0).to(tl.float32)
        first = tl.load(source + element * source_element, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + (element + half) * source_element, mask=mask, other=0.0).to(tl.float32)
        tl.store(target + element * target_element, (first * c - second * s).to(dtype), mask=mask)
        tl.store(target + (element + half) * target_element, (second * c + first * s).to(dtype), mask=mask)
    if 2 * half < head_size:
        element = 2 * half + tl.arange(0, padded_rest)[None, :]
        mask = exists & (element < head_size)
        tl.store(target + element * target_element, tl.load(source + element * source_element, mask=mask), mask=mask)


# A table of a step may begin anywhere and have any length: it is not worth another compile.
@triton.jit(do_not_specialize=["slot_stride"], do_not_specialize_on_alignment=["slot_mapping"])
def rotate_and_store(
    rotated: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slot_mapping: tl.tensor,
    slot_stride: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    cos_token: tl.tensor,
    sin_token: tl.tensor,
    q_element: tl.constexpr,
    k_element: tl.constexpr,
    v_element: tl.constexpr,
    cos_element: tl.constexpr,
    sin_element: tl.constexpr,
    k_cache_block: tl.constexpr,
    k_cache_offset: tl.constexpr,
    k_cache_head: tl.constexpr,
    k_cache_element: tl.constexpr,
    v_cache_block: tl.constexpr,
    v_cache_offset: tl.constexpr,
    v_cache_head: tl.constexpr,
    v_cache_element: tl.constexpr,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    half: tl.constexpr,
    padded_head_size: tl.constexpr,
    padded_half: tl.constexpr,
    padded_rest: tl.constexpr,
    heads_at_once: tl.constexpr,
    kv_heads_at_once: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """One program a (token, several query heads, or several KV heads behind all of those).

    A program of KV heads whose token has slot -1 does nothing; query heads are rotated for every token.

    Args:
        rotated: [num_tokens, num_heads, head_size], contiguous: gets the rotated q.
    """
    num_query_parts: tl.constexpr = (num_heads + heads_at_once - 1) // heads_at_once
    wait_for_previous(overlaps)
    # All in int64: q and a cache may have more elements than an int32 counts.
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    cos_row = cos + token * cos_token
    sin_row = sin + token * sin_token
    if part < num_query_parts:
        head = part * heads_at_once + tl.arange(0, heads_at_once)[:, None]
        _move_rotated(
            q + token * q_token + head * q_head,
            rotated + (token * num_heads + head) * head_size,
            cos_row,
            sin_row,
            head < num_heads,
            q_element,
            1,
            cos_element,
            sin_element,
            head_size,
            half,
            padded_half,
            padded_rest,
        )
    else:
        slot = tl.load(slot_mapping + token * slot_stride).to(tl.int64)
        if slot >= 0:
            block = slot // block_size
            offset = slot % block_size
            head = (part - num_query_parts) * kv_heads_at_once + tl.arange(0, kv_heads_at_once)[:, None]
            _move_rotated(
                k + token * k_token + head * k_head,
                k_cache + block * k_cache_block + offset * k_cache_offset + head * k_cache_head,
                cos_row,
                sin_row,
                head < num_kv_heads,
                k_element,
                k_cache_element,
                cos_element,
                sin_element,
                head_size,
                half,
                padded_half,
                padded_rest,
            )
            element = tl.arange(0, padded_head_size)[None, :]
            mask = (head < num_kv_heads) & (element < head_size)
            value = tl.load(v + token * v_token + head * v_head + element * v_element, mask=mask)
            v_slot = v_cache + block * v_cache_block + offset * v_cache_offset + head * v_cache_head
            tl.store(v_slot + element * v_cache_element, value, mask=mask)


def rotary_grid(num_tokens: int, num_heads: int, num_kv_heads: int, head_size: int) -> tuple[int, int, int]:
    """How many programs rotate and store so many rows."""
    parts = [triton.cdiv(heads, _heads_at_once(heads, head_size)) for heads in (num_heads, num_kv_heads)]
    return num_tokens, sum(parts), 1


def rotary_last(
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    head_size: int,
    half: int,
    strides: tuple[tuple[int, ...], ...],
    cache_strides: tuple[int, ...],
    overlaps: bool,
) -> tuple[int, ...]:
    """The last arguments of `rotate_and_store`, from `q_token` on.

    Args:
        half: `rotary_size // 2`.
        strides: those of q, k, v, cos and sin.
        cache_strides: those of k_cache, then of v_cache.
        overlaps: see `piecework.ops.triton.dependent`.
    """
    # Those of a token and of a head can be arguments of any value, those of an element are constants.
    outer = [number for each in strides for number in each[:-1]]
    padded = [int(triton.next_power_of_2(max(1, size))) for size in (head_size, half, head_size - 2 * half)]
    return (
        *outer,
        *(each[-1] for each in strides),
        *cache_strides,
        *(num_heads, num_kv_heads, block_size, head_size, half, *padded),
        *(_heads_at_once(num_heads, head_size), _heads_at_once(num_kv_heads, head_size), overlaps),
    )


def _heads_at_once(num_heads: int, head_size: int) -> int:
    at_most = max(1, _MAX_ELEMENTS // int(triton.next_power_of_2(head_size)))
    return min(int(triton.next_power_of_2(num_heads)), at_most)
