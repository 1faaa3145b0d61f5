"""Attention of prompts over a paged cache, with or without tokens that are cached already, as one Triton kernel.

A program takes a tile of one request's new tokens with all query heads of one KV head, so that a tile of keys serves as
many rows as a tensor core multiplies at once. Keys and values come from the cache alone: the store ran before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .row_attention import multiply


@triton.jit
def _find_tile(
    index: tl.tensor,
    query_start_loc: tl.tensor,
    start_stride: tl.tensor,
    num_reqs: tl.tensor,
    tokens: tl.constexpr,
    at_once: tl.constexpr,
) -> tl.tensor:
    """The request of tile `index`, or `num_reqs` for rows of padding.

    Request `r` has the tiles from `query_start_loc[r] // tokens + r` on: as many as it can need, and at most one more.
    """
    request = tl.full([], 0, tl.int32)
    for first in range(0, num_reqs, at_once):
        # The number of requests from the second one on that begin at or before the tile.
        slot = first + 1 + tl.arange(0, at_once)
        begin = tl.load(query_start_loc + slot * start_stride, mask=slot <= num_reqs, other=0).to(tl.int32)
        request += tl.sum(((slot <= num_reqs) & (begin // tokens + slot <= index)).to(tl.int32), 0)
    return request


@triton.jit
def _attend_range(
    result: tl.tensor,
    total: tl.tensor,
    highest: tl.tensor,
    query: tl.tensor,
    position: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    k_at: tl.tensor,
    v_at: tl.tensor,
    blocks: tl.tensor,
    table_block: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    k_block: tl.constexpr,
    k_offset: tl.constexpr,
    v_block: tl.constexpr,
    v_offset: tl.constexpr,
    head_size: tl.constexpr,
    padded_head_size: tl.constexpr,
    block_size: tl.constexpr,
    tile_n: tl.constexpr,
    is_masked: tl.constexpr,
    has_window: tl.constexpr,
    interpreted: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds the keys from `low` to `high - 1`; unless `is_masked`, all rows see them all, in whole tiles."""
    element = tl.arange(0, padded_head_size)
    is_element = element < head_size
    for first in range(low, high, tile_n):
        seen = first + tl.arange(0, tile_n)
        if is_masked:
            # A slot that was never written may hold NaN: what is not seen is not read.
            is_seen = seen < high
            block = tl.load(blocks + (seen // block_size) * table_block, mask=is_seen, other=0).to(tl.int64)
        else:
            block = tl.load(blocks + (seen // block_size) * table_block).to(tl.int64)
        offset = seen % block_size
        if block_size * (k_offset + v_offset) > 2147483647:  # a cache whose blocks lie across its memory
            offset = offset.to(tl.int64)
        key_at = k_at + (block * k_block + offset * k_offset)[None, :]
        value_at = v_at + (block * v_block + offset * v_offset)[:, None]
        if is_masked:
            key = tl.load(key_at, mask=is_seen[None, :] & is_element[:, None], other=0.0)
            value = tl.load(value_at, mask=is_seen[:, None] & is_element[None, :], other=0.0)
        elif head_size != padded_head_size:
            key = tl.load(key_at, mask=is_element[:, None], other=0.0)
            value = tl.load(value_at, mask=is_element[None, :], other=0.0)
        else:
            key = tl.load(key_at)
            value = tl.load(value_at)
        score = multiply(query, key, tl.full([query.shape[0], tile_n], 0.0, tl.float32), interpreted) * scale
        if is_masked:
            is_shown = seen[None, :] <= position[:, None]
            if has_window:
                is_shown = is_shown & (seen[None, :] > position[:, None] - window)
            score = tl.where(is_shown, score, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, 1))
        base = new_highest
        if has_window:  # a row may see nothing of a tile, and have seen nothing before
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weight, 1)
        result = multiply(weight.to(query.dtype), value, result * shrink[:, None], interpreted)
        highest = new_highest
    return result, total, highest


# What changes with the step must not compile another variant within it.
@triton.jit(
    do_not_specialize="num_reqs start_stride len_stride table_request table_block scale window num_rows".split(),
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table"],
)
def attend_tiles(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    out: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_table: tl.tensor,
    num_reqs: tl.tensor,
    start_stride: tl.tensor,
    len_stride: tl.tensor,
    table_request: tl.tensor,
    table_block: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    num_rows: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    q_element: tl.constexpr,
    out_element: tl.constexpr,
    k_block: tl.constexpr,
    k_offset: tl.constexpr,
    k_head: tl.constexpr,
    k_element: tl.constexpr,
    v_block: tl.constexpr,
    v_offset: tl.constexpr,
    v_head: tl.constexpr,
    v_element: tl.constexpr,
    group_size: tl.constexpr,
    group_part: tl.constexpr,
    num_columns: tl.constexpr,
    tokens: tl.constexpr,
    head_size: tl.constexpr,
    padded_head_size: tl.constexpr,
    block_size: tl.constexpr,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    has_window: tl.constexpr,
    interpreted: tl.constexpr,
) -> None:
    """One program a (tile of `tokens` new tokens, KV head and part of its group); tiles that nobody needs do nothing.

    Args:
        scale: of the scores, times log2(e).
        window: tokens that a token attends to, itself included.
        num_rows: of q and out.
        group_part: query heads of a program, any number; num_columns: KV heads times parts of a group.
    """
    # The last tiles have the most to read: they begin first.
    index = (tl.num_programs(0) - 1 - tl.program_id(0)) // num_columns
    column = tl.program_id(0) % num_columns
    num_parts: tl.constexpr = (group_size + group_part - 1) // group_part
    kv_head = (column // num_parts).to(tl.int64)
    request = _find_tile(index, query_start_loc, start_stride, num_reqs, tokens, 256)
    begin = tl.load(query_start_loc + request * start_stride).to(tl.int32)
    is_request = request < num_reqs
    end = tl.load(query_start_loc + (request + 1) * start_stride, mask=is_request, other=0).to(tl.int32)
    if request == num_reqs:
        end = num_rows
    first_token = begin + (index - (begin // tokens + request)) * tokens
    if first_token < end:
        row = tl.arange(0, tile_m)
        element = tl.arange(0, padded_head_size)
        is_element = element < head_size
        token = first_token + row // group_part
        member = (column % num_parts) * group_part + row % group_part
        exists = (row < tokens * group_part) & (token < end) & (member < group_size)
        query_head = kv_head * group_size + member
        mask = exists[:, None] & is_element[None, :]
        out_row = token.to(tl.int64) * out_token + query_head * out_head
        out_at = out + out_row[:, None] + element[None, :] * out_element
        if is_request:
            seq_len = tl.load(seq_lens + request * len_stride).to(tl.int32)
            cached = seq_len - (end - begin)
            last_token = tl.minimum(first_token + tokens, end) - 1
            first_position = cached + first_token - begin
            last_position = cached + last_token - begin
            # Rows that do not exist see what the last one sees.
            position = tl.minimum(cached + token - begin, last_position)
            q_row = token.to(tl.int64) * q_token + query_head * q_head
            query = tl.load(q + q_row[:, None] + element[None, :] * q_element, mask=mask, other=0.0)
            k_at = k_cache + kv_head * k_head + element[:, None] * k_element
            v_at = v_cache + kv_head * v_head + element[None, :] * v_element
            blocks = block_table + request.to(tl.int64) * table_request
            highest = tl.full([tile_m], float("-inf"), tl.float32)
            total = tl.full([tile_m], 0.0, tl.float32)
            result = tl.full([tile_m, padded_head_size], 0.0, tl.float32)
            low = 0
            if has_window:
                low = tl.maximum(first_position + 1 - window, 0)
            else:
                full = (first_position + 1) // tile_n * tile_n
                result, total, highest = _attend_range(
                    result,
                    total,
                    highest,
                    query,
                    position,
                    0,
                    full,
                    k_at,
                    v_at,
                    blocks,
                    table_block,
                    scale,
                    window,
                    k_block,
                    k_offset,
                    v_block,
                    v_offset,
                    head_size,
                    padded_head_size,
                    block_size,
                    tile_n,
                    False,
                    False,
                    interpreted,
                )
                low = full
            result, total, highest = _attend_range(
                result,
                total,
                highest,
                query,
                position,
                low,
                last_position + 1,
                k_at,
                v_at,
                blocks,
                table_block,
                scale,
                window,
                k_block,
                k_offset,
                v_block,
                v_offset,
                head_size,
                padded_head_size,
                block_size,
                tile_n,
                True,
                has_window,
                interpreted,
            )
            tl.store(out_at, (result / total[:, None]).to(out.dtype.element_ty), mask=mask)
        else:
            tl.store(out_at, tl.full([tile_m, padded_head_size], 0.0, out.dtype.element_ty), mask=mask)
