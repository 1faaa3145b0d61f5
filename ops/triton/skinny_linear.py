"""A linear of few rows as Triton kernels that are bound by reading the weights, once.

For one to three rows each program has a few outputs and loops over the sum, in float32 on plain cores. From about four
on tensor cores multiply, with the operands swapped: tiles of the weights are the tall ones, and the rows, padded to 16,
the narrow ones. Where that gives too few programs the sum is split; the last program of a block to finish adds the
parts, always in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import wait_for_previous
from .row_attention import multiply


@triton.jit
def _load_row(
    x: tl.tensor, k: tl.tensor, in_features: tl.tensor, is_even: tl.constexpr, activates: tl.constexpr
) -> tl.tensor:
    """Elements `k` of a row, in float32: as they are, or `silu(gate) * up`, rounded as two operators of torch round."""
    if is_even:
        value = tl.load(x + k)
    else:
        value = tl.load(x + k, mask=k < in_features, other=0.0)
    if activates:
        if is_even:
            up = tl.load(x + in_features + k)
        else:
            up = tl.load(x + in_features + k, mask=k < in_features, other=0.0)
        gate = value.to(tl.float32)
        silu = (gate / (1 + tl.exp(-gate))).to(value.dtype)
        value = (silu.to(tl.float32) * up.to(tl.float32)).to(value.dtype)
    return value.to(tl.float32)


@triton.jit
def multiply_rows(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    x_row: tl.tensor,
    num_rows: tl.constexpr,
    has_bias: tl.constexpr,
    activates: tl.constexpr,
    is_even: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    unroll: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """One program a block of outputs: of all the rows, which are one to three.

    Args:
        x: rows of stride `x_row` and elements of stride 1; twice as many elements if they are activated.
        weight: [out_features, in_features], contiguous.
        bias: [out_features]; not read without one.
        out: [num_rows, out_features], contiguous.
        is_even: whether block_k divides in_features.
        overlaps: see `piecework.ops.triton.dependent`.
    """
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    is_output = n < out_features
    # What is past the end is read as the last one again, and not written. In int64: a table of tokens is large.
    weight_at = weight + tl.minimum(n, out_features - 1).to(tl.int64)[:, None] * in_features
    wait_for_previous(overlaps)
    total_0 = tl.zeros([block_n, block_k], tl.float32)
    total_1 = tl.zeros([block_n, block_k], tl.float32)
    total_2 = tl.zeros([block_n, block_k], tl.float32)
    for first in tl.range(0, in_features, block_k, loop_unroll_factor=unroll):
        k = (first + tl.arange(0, block_k))[None, :]
        # Nobody reads them again before the next step, the rows everybody.
        if is_even:
            factor = tl.load(weight_at + k, eviction_policy="evict_first").to(tl.float32)
        else:
            factor = tl.load(weight_at + k, mask=k < in_features, other=0.0, eviction_policy="evict_first")
            factor = factor.to(tl.float32)
        total_0 += factor * _load_row(x, k, in_features, is_even, activates)
        if num_rows > 1:
            total_1 += factor * _load_row(x + x_row, k, in_features, is_even, activates)
        if num_rows > 2:
            total_2 += factor * _load_row(x + 2 * x_row, k, in_features, is_even, activates)
    added = tl.zeros([block_n], tl.float32)
    if has_bias:
        added = tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + n, (tl.sum(total_0, 1) + added).to(out.dtype.element_ty), mask=is_output)
    if num_rows > 1:
        out_1 = out + out_features + n
        tl.store(out_1, (tl.sum(total_1, 1) + added).to(out.dtype.element_ty), mask=is_output)
    if num_rows > 2:
        out_2 = out + 2 * out_features + n
        tl.store(out_2, (tl.sum(total_2, 1) + added).to(out.dtype.element_ty), mask=is_output)


# What changes with the number of rows alone must not compile another variant.
@triton.jit(do_not_specialize=["num_rows", "chunk"])
def multiply_tiles(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    arrivals: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    x_row: tl.tensor,
    num_rows: tl.tensor,
    chunk: tl.tensor,
    has_bias: tl.constexpr,
    is_split: tl.constexpr,
    is_even: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    padded_rows: tl.constexpr,
    interpreted: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """One program a (block of outputs, split of the sum).

    Args:
        parts: [splits, blocks, block_n, padded_rows], float32: products of splits; not used without splits.
        arrivals: [blocks] or more, int32: splits that are done; zeros before and after.
        chunk: blocks of block_k elements of the sum that a split takes.

    The others are those of `multiply_rows`.
    """
    block = tl.program_id(0)
    split = tl.program_id(1)
    local = tl.arange(0, block_n)
    n = block * block_n + local
    row = tl.arange(0, padded_rows)
    is_row = row < num_rows
    weight_at = weight + tl.minimum(n, out_features - 1).to(tl.int64)[:, None] * in_features
    x_at = x + row.to(tl.int64)[None, :] * x_row
    low = split * chunk
    high = tl.minimum(low + chunk, tl.cdiv(in_features, block_k))
    wait_for_previous(overlaps)
    total = tl.zeros([block_n, padded_rows], tl.float32)
    for each in range(low, high):
        # Begins at a multiple of a constant, as the compiler sees: only then it loads whole vectors.
        k = each * block_k + tl.arange(0, block_k)
        if is_even:
            factor = tl.load(weight_at + k[None, :], eviction_policy="evict_first")
            value = tl.load(x_at + k[:, None], mask=is_row[None, :], other=0.0)
        else:
            is_term = k < in_features
            factor = tl.load(weight_at + k[None, :], mask=is_term[None, :], other=0.0, eviction_policy="evict_first")
            value = tl.load(x_at + k[:, None], mask=is_row[None, :] & is_term[:, None], other=0.0)
        total = multiply(factor, value, total, interpreted)
    is_last = True
    if is_split:
        num_blocks = tl.num_programs(0)
        num_splits = tl.num_programs(1)
        cell = local[:, None] * padded_rows + row[None, :]
        part_size = block_n * padded_rows
        tl.store(parts + (split * num_blocks + block) * part_size + cell, total)
        # Every thread's part must be written before the one that counts says so.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals + block, 1, sem="acq_rel", scope="gpu") == num_splits - 1
        if is_last:
            total = tl.zeros([block_n, padded_rows], tl.float32)
            for other in range(num_splits):  # past the L1 cache: other processors wrote them
                total += tl.load(parts + (other * num_blocks + block) * part_size + cell, cache_modifier=".cg")
            tl.store(arrivals + block, 0)
    if is_last:
        is_output = n < out_features
        if has_bias:
            total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
        out_at = out + row[None, :] * out_features + n[:, None]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])
