"""Paged attention as one Triton kernel over a paged cache: simple enough to be right, for decode above all.

Every length is read on the device and the grid depends on shapes alone, so that a capture can hold a launch: see
`piecework.ops.attention.AttentionContext.is_static`. A prompt works too, but each of its tokens reads the cache alone.
The softmax is computed tile by tile with a running maximum (Milakov and Gimelshein, "Online normalizer calculation for
softmax", arXiv 1805.02867).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .kv_store import store
from .launch import launch_on

if TYPE_CHECKING:
    from ..attention import AttentionContext

_NO_WINDOW = 2**31 - 1
_MAX_GROUP = 8
"""Query heads of one KV head that a program takes; more of them take more programs."""
_MAX_TILE = 128
"""Cached tokens that a program takes at once."""
_TILE_ELEMENTS = 1 << 13
"""Products of queries and keys that a program holds at once, and twice the elements of keys; bounds its registers."""


@triton.jit
def _request_of(
    token: tl.tensor, query_start_loc: tl.tensor, start_stride: tl.tensor, num_reqs: tl.tensor, at_once: tl.constexpr
) -> tl.tensor:
    """How many requests end at or before `token`: the number of its request, or `num_reqs` for a row of padding."""
    request = tl.full([], 0, tl.int32)
    for first in range(0, num_reqs, at_once):
        slot = first + tl.arange(0, at_once)
        end = tl.load(query_start_loc + (slot + 1) * start_stride, mask=slot < num_reqs, other=2147483647)
        request += tl.sum((end <= token).to(tl.int32), 0)
    return request


# What changes with the step must not compile another variant within it.
@triton.jit(
    do_not_specialize=["num_reqs", "start_stride", "len_stride", "table_request", "table_block", "window"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table"],
)
def _attend(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    out: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_table: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    num_reqs: tl.tensor,
    start_stride: tl.tensor,
    len_stride: tl.tensor,
    table_request: tl.tensor,
    table_block: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    q_element: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    out_element: tl.tensor,
    k_block: tl.tensor,
    k_offset: tl.tensor,
    k_head: tl.tensor,
    k_element: tl.tensor,
    v_block: tl.tensor,
    v_offset: tl.tensor,
    v_head: tl.tensor,
    v_element: tl.tensor,
    group_size: tl.constexpr,
    padded_group: tl.constexpr,
    head_size: tl.constexpr,
    padded_head_size: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """One program a (token, KV head, part of the head's group of query heads)."""
    token = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    member = tl.program_id(2) * padded_group + tl.arange(0, padded_group)
    element = tl.arange(0, padded_head_size)
    is_element = element < head_size
    exists = (member < group_size)[:, None] & is_element[None, :]
    # Offsets in int64: a cache may have more elements than an int32 counts.
    query_head = kv_head * group_size + member
    row = token.to(tl.int64)
    out_at = out + row * out_token + query_head[:, None] * out_head + element[None, :] * out_element
    request = _request_of(token, query_start_loc, start_stride, num_reqs, 256)
    if request < num_reqs:
        request_end = tl.load(query_start_loc + (request + 1) * start_stride).to(tl.int32)
        position = tl.load(seq_lens + request * len_stride).to(tl.int32) - (request_end - token)
        first_seen = tl.maximum(position + 1 - window, 0)
        blocks = block_table + request.to(tl.int64) * table_request
        q_at = q + row * q_token + query_head[:, None] * q_head + element[None, :] * q_element
        query = tl.load(q_at, mask=exists, other=0.0).to(tl.float32) * scale
        highest = tl.full([padded_group], float("-inf"), tl.float32)
        total = tl.full([padded_group], 0.0, tl.float32)
        result = tl.full([padded_group, padded_head_size], 0.0, tl.float32)
        for first in range(first_seen, position + 1, tile):
            seen = first + tl.arange(0, tile)
            is_seen = seen <= position
            block = tl.load(blocks + (seen // block_size) * table_block, mask=is_seen, other=0).to(tl.int64)
            offset = (seen % block_size).to(tl.int64)
            # A slot that was never written may hold NaN: what is not seen is not read.
            is_read = is_seen[:, None] & is_element[None, :]
            k_at = k_cache + kv_head * k_head + (block * k_block + offset * k_offset)[:, None]
            key = tl.load(k_at + element[None, :] * k_element, mask=is_read, other=0.0).to(tl.float32)
            score = tl.sum(query[:, None, :] * key[None, :, :], 2)
            score = tl.where(is_seen[None, :], score, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(score, 1))
            weight = tl.exp(score - new_highest[:, None])
            shrink = tl.exp(highest - new_highest)
            v_at = v_cache + kv_head * v_head + (block * v_block + offset * v_offset)[:, None]
            value = tl.load(v_at + element[None, :] * v_element, mask=is_read, other=0.0).to(tl.float32)
            result = result * shrink[:, None] + tl.sum(weight[:, :, None] * value[None, :, :], 1)
            total = total * shrink + tl.sum(weight, 1)
            highest = new_highest
        tl.store(out_at, (result / total[:, None]).to(out.dtype.element_ty), mask=exists)
    else:
        tl.store(out_at, tl.full([padded_group, padded_head_size], 0.0, out.dtype.element_ty), mask=exists)


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

    Request slots may be empty; rows that no request has become zeros. Computes in float32; allocates nothing and does
    not wait for the device.

    Raises:
        NotAvailableError: the tensors are not on a GPU.
    """
    store(k, v, k_cache, v_cache, context.slot_mapping)
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = k.shape[1]
    if num_tokens == 0 or num_heads == 0 or head_size == 0:
        return
    group_size = num_heads // num_kv_heads
    padded_group = min(triton.next_power_of_2(group_size), _MAX_GROUP)
    padded_head_size = triton.next_power_of_2(head_size)
    tables = (context.query_start_loc, context.seq_lens, context.block_table)
    with launch_on(_attend, q):
        _attend[(num_tokens, num_kv_heads, triton.cdiv(group_size, padded_group))](
            *(q, k_cache, v_cache, out, *tables, scale, window_size or _NO_WINDOW, context.num_reqs),
            *(stride for table in tables for stride in table.stride()),
            *(*q.stride(), *out.stride(), *k_cache.stride(), *v_cache.stride()),
            group_size=group_size,
            padded_group=padded_group,
            head_size=head_size,
            padded_head_size=padded_head_size,
            block_size=k_cache.shape[1],
            tile=max(1, min(_MAX_TILE, _TILE_ELEMENTS // (max(padded_group, 2) * padded_head_size))),
            num_warps=4,
        )
