"""Kernels of many programs a row that lead to few candidates for its token: one a chunk of the row's tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from .sampling_plan import (
    NUM_LIMITS,
    WINDOW,
    below_1,
    entry,
    inverse_of,
    is_drawn,
    key_of,
    load_logits,
    plan_row,
    row_extremes,
    tally,
    weight_of,
)


# Columns of one table begin anywhere: that is not worth another compile.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment="uniform temperature top_k top_p".split())
def draw_rows_peaks(
    logits: tl.tensor,
    uniform: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    plan: tl.tensor,
    peaks: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    plan_size: tl.constexpr,
    num_chunks: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """Each chunk's largest logit and smallest finite one; and the rows' limits, into the plan.

    Args:
        plan: [num_rows, plan_size], float64
        peaks: [num_rows, 2, num_chunks], float32
    """
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    part = tl.program_id(0) % num_chunks
    token = part * chunk + tl.arange(0, chunk)
    x = load_logits(logits + row * row_stride + token, token < vocab_size)
    out = peaks + row * 2 * num_chunks + part
    tl.store(out, tl.max(x, 0))
    tl.store(out + num_chunks, tl.min(tl.where(x > float("-inf"), x, float("inf")), 0))
    if part == 0:
        own = plan + row * plan_size
        tl.store(own, below_1(tl.load(uniform + row).to(tl.float64)))
        tl.store(own + 1, tl.load(temperature + row).to(tl.float64))
        tl.store(own + 2, tl.load(top_k + row).to(tl.float64))
        tl.store(own + 3, tl.load(top_p + row).to(tl.float64))


@triton.jit(do_not_specialize=["num_rows"])
def draw_rows_tally(
    logits: tl.tensor,
    plan: tl.tensor,
    peaks: tl.tensor,
    counts: tl.tensor,
    weights: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    plan_size: tl.constexpr,
    num_chunks: tl.constexpr,
    padded_chunks: tl.constexpr,
    chunk: tl.constexpr,
    bins: tl.constexpr,
    edges_at_once: tl.constexpr,
) -> None:
    """Counts and weighs the tokens of a chunk that are at the lower edge of each bin, or above it.

    The bins cut what is between the row's peak and its smallest finite logit, or the end of the window, into equal
    parts. Their edges go into the plan.

    Args:
        counts, weights: [num_rows, bins, num_chunks], int32 and float32
    """
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    part = tl.program_id(0) % num_chunks
    own = plan + row * plan_size
    heat = tl.load(own + 1)
    peak, least, _part = row_extremes(peaks + row * 2 * num_chunks, num_chunks, padded_chunks)
    if is_drawn(heat, peak):
        inverse = inverse_of(heat)
        token = part * chunk + tl.arange(0, chunk)
        x = load_logits(logits + row * row_stride + token, token < vocab_size)
        key = key_of(x)
        weight = weight_of(x, peak, inverse)
        floor = tl.maximum(least, peak - WINDOW / inverse)
        out = row * bins * num_chunks + part
        for first in range(0, bins, edges_at_once):
            bin = first + tl.arange(0, edges_at_once)
            edge = tl.maximum(peak - (peak - floor) * ((bin + 1).to(tl.float32) / bins), floor)
            edge_key = key_of(tl.where(bin == bins - 1, floor, edge))
            count, sums = tally(key, weight, edge_key, edges_at_once, chunk)
            tl.store(counts + out + bin * num_chunks, count)
            tl.store(weights + out + bin * num_chunks, sums)
            if part == 0:
                tl.store(own + NUM_LIMITS + bin, edge_key.to(tl.float64))


@triton.jit
def _is_chosen(
    bin: tl.tensor,
    k_first: tl.tensor,
    k_last: tl.tensor,
    p_first: tl.tensor,
    p_last: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
) -> tl.tensor:
    of_k = (bin >= k_first) & (bin <= k_last)
    of_p = (bin >= p_first) & (bin <= p_last)
    return (of_k | of_p | ((bin >= first) & (bin <= last))).to(tl.int32)


@triton.jit
def _is_between(key: tl.tensor, edges: tl.tensor, first: tl.tensor, last: tl.tensor, bins: tl.constexpr) -> tl.tensor:
    """Whether the keys are in one of the bins from `first` to `last`."""
    low = entry(edges, last, bins)
    high = tl.where(first == 0, 0x7FFFFFFF, entry(edges, first - 1, bins))
    return (key >= low) & (key < high)


@triton.jit(do_not_specialize=["num_rows"])
def draw_rows_gather(
    logits: tl.tensor,
    plan: tl.tensor,
    peaks: tl.tensor,
    counts: tl.tensor,
    weights: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    plan_size: tl.constexpr,
    num_chunks: tl.constexpr,
    padded_chunks: tl.constexpr,
    chunk: tl.constexpr,
    bins: tl.constexpr,
    capacity: tl.constexpr,
) -> None:
    """Writes the tokens of the bins in which a place of the row may be, in the order of ids, if all of them fit.

    The rest of the plan is written too.

    Args:
        values: [num_rows, capacity], of the dtype of the logits
        ids: [num_rows, capacity], int32
    """
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    part = tl.program_id(0) % num_chunks
    own = plan + row * plan_size
    peak, _least, _part = row_extremes(peaks + row * 2 * num_chunks, num_chunks, padded_chunks)
    if is_drawn(tl.load(own + 1), peak):
        bin = tl.arange(0, bins)
        other = tl.arange(0, padded_chunks)
        at = (row * bins + bin[:, None]) * num_chunks + other[None, :]
        exists = tl.broadcast_to(other[None, :] < num_chunks, [bins, padded_chunks])
        all_counts = tl.load(counts + at, mask=exists, other=0)
        all_weights = tl.load(weights + at, mask=exists, other=0.0)
        counts_from = tl.sum(all_counts, 1).to(tl.float64)
        weights_from = tl.sum(all_weights.to(tl.float64), 1)
        is_k, is_p, k_bin, p_first, p_last, first, last, _k_least, _k_most, _p_least, _p_most = plan_row(
            counts_from, weights_from, tl.load(own + 2), tl.load(own + 3), tl.load(own), bins
        )
        # Without a cut nothing is looked for but the token.
        k_first, k_last = tl.where(is_k, k_bin, first), tl.where(is_k, k_bin, last)
        p_first, p_last = tl.where(is_p, p_first, first), tl.where(is_p, p_last, last)
        # Counts begin at the peak: those of a bin are its own less those of the bin above.
        chosen = _is_chosen(bin, k_first, k_last, p_first, p_last, first, last)
        below = _is_chosen(bin + 1, k_first, k_last, p_first, p_last, first, last)
        factor = chosen - tl.where(bin == bins - 1, 0, below)
        num_each = tl.sum(all_counts * factor[:, None], 0)
        num_candidates = tl.sum(num_each, 0)
        if part == 0:
            tl.store(own + 4, num_candidates.to(tl.float64))
            tl.store(own + NUM_LIMITS + bins + bin, counts_from)
            tl.store(own + NUM_LIMITS + 2 * bins + bin, weights_from)
        if (num_candidates <= capacity) & (entry(num_each, part, padded_chunks) > 0):
            edges = tl.load(own + NUM_LIMITS + bin).to(tl.int32)
            token = part * chunk + tl.arange(0, chunk)
            x = load_logits(logits + row * row_stride + token, token < vocab_size)
            key = key_of(x)
            is_one = _is_between(key, edges, first, last, bins)
            is_one |= _is_between(key, edges, p_first, p_last, bins)
            is_one |= _is_between(key, edges, k_first, k_last, bins)
            before = tl.sum(tl.where(other < part, num_each, 0), 0)
            place = row * capacity + before + tl.cumsum(is_one.to(tl.int32), 0) - 1
            tl.store(values + place, x.to(values.dtype.element_ty), mask=is_one)
            tl.store(ids + place, token, mask=is_one)
