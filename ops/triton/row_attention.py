"""Attention of single rows (decode) over a paged cache, split over the context, as one Triton kernel.

A row's context is cut into chunks that programs take each on their own; the last one to finish puts the parts together
(Dao and others, "Flash-Decoding for long-context inference", 2023). The softmax is computed tile by tile with a running
maximum (Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867), in powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import wait_for_previous


@triton.jit
def request_of(
    token: tl.tensor, query_start_loc: tl.tensor, start_stride: tl.tensor, num_reqs: tl.tensor, at_once: tl.constexpr
) -> tl.tensor:
    """How many requests end at or before `token`: the number of its request, or `num_reqs` for a row of padding."""
    request = tl.full([], 0, tl.int32)
    for first in range(0, num_reqs, at_once):
        slot = first + tl.arange(0, at_once)
        end = tl.load(query_start_loc + (slot + 1) * start_stride, mask=slot < num_reqs, other=2147483647)
        request += tl.sum((end <= token).to(tl.int32), 0)
    return request


@triton.jit
def multiply(left: tl.tensor, right: tl.tensor, sum_: tl.tensor, interpreted: tl.constexpr) -> tl.tensor:
    """`sum_ + left x right`, in float32, with `right` in the dtype of `left`; float32 factors are not rounded."""
    right = right.to(left.dtype)
    if interpreted:  # Triton's interpreter cannot multiply bfloat16
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sum_)
    return tl.dot(left, right, sum_, input_precision="ieee")


# What changes with the step must not compile another variant within it.
@triton.jit(
    do_not_specialize="num_reqs start_stride len_stride table_request table_block scale window min_chunk".split(),
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table"],
)
def attend_rows(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    out: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_table: tl.tensor,
    parts: tl.tensor,
    sums: tl.tensor,
    arrivals: tl.tensor,
    num_reqs: tl.tensor,
    start_stride: tl.tensor,
    len_stride: tl.tensor,
    table_request: tl.tensor,
    table_block: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    min_chunk: tl.tensor,
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
    num_parts: tl.constexpr,
    padded_part: tl.constexpr,
    head_size: tl.constexpr,
    padded_head_size: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    reduced_at_once: tl.constexpr,
    interpreted: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """One program a (row, KV head and part of its group of query heads, split of the context).

    Args:
        parts: [rows, KV heads x num_parts, splits, group_part, padded_head_size], float32: results of splits.
        sums: [rows, KV heads x num_parts, splits, 2, group_part], float32: their highest scores and sums of weights.
        arrivals: [rows, KV heads x num_parts], int32: splits that are done; zeros before and after.
        scale: of the scores, times log2(e).
        window: tokens that a token attends to, itself included.
        min_chunk: tokens under which a split takes them all.
        group_part: query heads of a program, a power of two; padded_part: the same, padded for `tl.dot`.
    """
    wait_for_previous(overlaps)
    row = tl.program_id(0)
    column = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    kv_head = (column // num_parts).to(tl.int64)
    first_member = (column % num_parts) * group_part
    # A step of one token a request is what is usual: then row and request are the same number.
    is_slot = row < num_reqs
    begin = tl.load(query_start_loc + row * start_stride, mask=is_slot, other=-1).to(tl.int32)
    end = tl.load(query_start_loc + (row + 1) * start_stride, mask=is_slot, other=-1).to(tl.int32)
    seq_len = tl.load(seq_lens + row * len_stride, mask=is_slot, other=0).to(tl.int32)
    request = row
    if (begin != row) | (end != row + 1):
        request = request_of(row, query_start_loc, start_stride, num_reqs, 256)
        is_slot = request < num_reqs
        end = tl.load(query_start_loc + (request + 1) * start_stride, mask=is_slot, other=0).to(tl.int32)
        seq_len = tl.load(seq_lens + request * len_stride, mask=is_slot, other=0).to(tl.int32)
    element = tl.arange(0, padded_head_size)
    member = tl.arange(0, padded_part)
    is_element = element < head_size
    is_member = (member < group_part) & (first_member + member < group_size)
    exists = is_member[:, None] & is_element[None, :]
    # Offsets in int64: a cache may have more elements than an int32 counts.
    query_head = kv_head * group_size + first_member + member
    out_row = out + row.to(tl.int64) * out_token
    out_at = out_row + query_head[:, None] * out_head + element[None, :] * out_element
    if request < num_reqs:
        position = seq_len - (end - row)
        first_seen = tl.maximum(position + 1 - window, 0)
        num_seen = position + 1 - first_seen
        chunk = tl.cdiv(tl.maximum(tl.cdiv(num_seen, num_splits), min_chunk), tile) * tile
        num_used = tl.cdiv(num_seen, chunk)
        if split < num_used:
            low = first_seen + split * chunk
            high = tl.minimum(low + chunk, position + 1)
            blocks = block_table + request.to(tl.int64) * table_request
            q_at = q + row.to(tl.int64) * q_token + query_head[:, None] * q_head + element[None, :] * q_element
            query = tl.load(q_at, mask=exists, other=0.0)
            k_at = k_cache + kv_head * k_head + element[:, None] * k_element
            v_at = v_cache + kv_head * v_head + element[None, :] * v_element
            highest = tl.full([padded_part], float("-inf"), tl.float32)
            total = tl.full([padded_part], 0.0, tl.float32)
            result = tl.full([padded_part, padded_head_size], 0.0, tl.float32)
            for first in range(low, high, tile):
                seen = first + tl.arange(0, tile)
                # A slot that was never written may hold NaN: what is not seen is not read.
                is_seen = seen < high
                block = tl.load(blocks + (seen // block_size) * table_block, mask=is_seen, other=0).to(tl.int64)
                offset = seen % block_size
                if block_size * (k_offset + v_offset) > 2147483647:  # a cache whose blocks lie across its memory
                    offset = offset.to(tl.int64)
                key_mask = is_seen[None, :]
                value_mask = is_seen[:, None]
                if head_size != padded_head_size:
                    key_mask = key_mask & is_element[:, None]
                    value_mask = value_mask & is_element[None, :]
                key = tl.load(k_at + (block * k_block + offset * k_offset)[None, :], mask=key_mask, other=0.0)
                value = tl.load(v_at + (block * v_block + offset * v_offset)[:, None], mask=value_mask, other=0.0)
                score = multiply(query, key, tl.full([padded_part, tile], 0.0, tl.float32), interpreted) * scale
                score = tl.where(is_seen[None, :], score, float("-inf"))
                new_highest = tl.maximum(highest, tl.max(score, 1))
                weight = tl.exp2(score - new_highest[:, None])
                shrink = tl.exp2(highest - new_highest)
                total = total * shrink + tl.sum(weight, 1)
                result = multiply(weight.to(query.dtype), value, result * shrink[:, None], interpreted)
                highest = new_highest
            if num_used == 1:
                tl.store(out_at, (result / total[:, None]).to(out.dtype.element_ty), mask=exists)
            else:
                cell = row.to(tl.int64) * tl.num_programs(1) + column
                kept = member < group_part
                part = (cell * num_splits + split) * group_part
                part_at = parts + (part + member[:, None]) * padded_head_size + element[None, :]
                tl.store(part_at, result, mask=kept[:, None])
                tl.store(sums + part * 2 + member, highest, mask=kept)
                tl.store(sums + part * 2 + group_part + member, total, mask=kept)
                # Every thread's part must be written before the one that counts says so.
                tl.debug_barrier()
                arrived = tl.atomic_add(arrivals + cell, 1, sem="acq_rel", scope="gpu")
                if arrived == num_used - 1:
                    _reduce(
                        parts,
                        sums,
                        out_row,
                        cell * num_splits,
                        num_used,
                        kv_head * group_size + first_member,
                        group_size - first_member,
                        out_head,
                        out_element,
                        head_size,
                        padded_head_size,
                        group_part,
                        reduced_at_once,
                    )
                    tl.store(arrivals + cell, 0)
    elif split == 0:
        tl.store(out_at, tl.full([padded_part, padded_head_size], 0.0, out.dtype.element_ty), mask=exists)


@triton.jit
def _reduce(
    parts: tl.tensor,
    sums: tl.tensor,
    out_row: tl.tensor,
    first_part: tl.tensor,
    num_used: tl.tensor,
    first_head: tl.tensor,
    num_members: tl.tensor,
    out_head: tl.tensor,
    out_element: tl.constexpr,
    head_size: tl.constexpr,
    padded_head_size: tl.constexpr,
    group_part: tl.constexpr,
    at_once: tl.constexpr,
) -> None:
    """Puts the results of the used splits together. Past the L1 cache: other processors wrote them."""
    member = tl.arange(0, group_part)
    element = tl.arange(0, padded_head_size)
    highest = tl.full([group_part], float("-inf"), tl.float32)
    total = tl.full([group_part], 0.0, tl.float32)
    result = tl.full([group_part, padded_head_size], 0.0, tl.float32)
    for first in range(0, num_used, at_once):
        split = first + tl.arange(0, at_once)
        is_used = split < num_used
        row = (first_part + split) * group_part
        sum_at = sums + (row * 2)[:, None] + member[None, :]
        high = tl.load(sum_at, mask=is_used[:, None], other=float("-inf"), cache_modifier=".cg")
        weights = tl.load(sum_at + group_part, mask=is_used[:, None], other=0.0, cache_modifier=".cg")
        part_at = parts + (row[:, None, None] + member[None, :, None]) * padded_head_size + element[None, None, :]
        part = tl.load(part_at, mask=is_used[:, None, None], other=0.0, cache_modifier=".cg")
        new_highest = tl.maximum(highest, tl.max(high, 0))
        grow = tl.exp2(high - new_highest[None, :])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights * grow, 0)
        result = result * shrink[:, None] + tl.sum(part * grow[:, :, None], 0)
        highest = new_highest
    out_at = out_row + (first_head + member)[:, None] * out_head + element[None, :] * out_element
    exists = (member < num_members)[:, None] & (element < head_size)[None, :]
    tl.store(out_at, (result / total[:, None]).to(out_row.dtype.element_ty), mask=exists)
