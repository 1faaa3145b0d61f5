"""The kernel that finds the tokens of rows among their candidates: one program a row."""

from __future__ import annotations

import triton
import triton.language as tl

from .sampling_plan import (
    NUM_LIMITS,
    entry,
    inverse_of,
    is_drawn,
    key_of,
    load_logits,
    num_true,
    of_key,
    plan_row,
    row_extremes,
    tally,
    weight_of,
)


@triton.jit
def _search(
    values: tl.tensor,
    num_values: tl.tensor,
    peak: tl.tensor,
    inverse: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    count: tl.tensor,
    weight: tl.tensor,
    count_above: tl.tensor,
    weight_above: tl.tensor,
    target: tl.tensor,
    goal: tl.tensor,
    block: tl.constexpr,
    num_edges: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Narrows [low, high) to the keys of one token, or of equal ones, from which on it is enough.

    Args:
        values: [num_values]; all of the row's tokens with keys in [low, high) are among them.
        low, high: keys, int64; from `low` on it is enough, from `high` on it is not.
        count, weight: of the tokens of the row with the key `low` or a larger one, float64.
        count_above, weight_above: with the key `high` or a larger one.
        target: float64; by `goal` a count to be reached (0), a weight to be reached (1) or passed (2).

    Returns:
        low, high, count, weight, count_above and weight_above.
    """
    end = high
    count_end = count_above
    weight_end = weight_above
    index = tl.arange(0, num_edges)
    while (high - low > 1) & (count - count_above > 1):
        step = tl.maximum((high - low) // (num_edges + 1), 1)
        edges = tl.minimum(low + step * (index + 1), high)
        counts = tl.zeros([num_edges], tl.float64) + count_end
        sums = tl.zeros([num_edges], tl.float64) + weight_end
        for start in range(0, num_values, block):
            at = start + tl.arange(0, block)
            x = load_logits(values + at, at < num_values)
            key = key_of(x)
            key = tl.where(key < end, key, -0x80000000).to(tl.int32)  # what is above counts already
            num_here, sums_here = tally(key, weight_of(x, peak, inverse), edges.to(tl.int32), num_edges, block)
            counts += num_here.to(tl.float64)
            sums += sums_here.to(tl.float64)
        reached = tl.where(goal == 0, counts, sums)
        num_enough = num_true((reached > target) | ((reached == target) & (goal < 2)))
        # The edges from which on it is enough are the first ones.
        if num_enough > 0:
            low = entry(edges, num_enough - 1, num_edges)
            count = entry(counts, num_enough - 1, num_edges)
            weight = entry(sums, num_enough - 1, num_edges)
        if num_enough < num_edges:
            high = entry(edges, num_enough, num_edges)
            count_above = entry(counts, num_enough, num_edges)
            weight_above = entry(sums, num_enough, num_edges)
    return low, high, count, weight, count_above, weight_above


@triton.jit
def _place_of(
    values: tl.tensor,
    num_values: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    number: tl.tensor,
    block: tl.constexpr,
) -> tl.tensor:
    """Where the value is that is the one of this number among those with keys in [low, high)."""
    found = tl.full([], 0, tl.int32)
    num_before = tl.full([], 0, tl.int32)
    start = tl.full([], 0, tl.int32)
    while (start < num_values) & (num_before <= number):
        at = start + tl.arange(0, block)
        key = key_of(load_logits(values + at, at < num_values))
        is_one = (key >= low) & (key < high) & (at < num_values)
        own = num_before + tl.cumsum(is_one.to(tl.int32), 0) - 1
        found = tl.maximum(found, tl.max(tl.where(is_one & (own == number), at, 0), 0))
        num_before += num_true(is_one)
        start += block
    return found


@triton.jit
def _find(
    values: tl.tensor,
    num_values: tl.tensor,
    plan: tl.tensor,
    peak: tl.tensor,
    inverse: tl.tensor,
    bins: tl.constexpr,
    block: tl.constexpr,
    num_edges: tl.constexpr,
) -> tl.tensor:
    """Where the row's token is among `values`: searches for the end of top-k, then that of top-p, then the token.

    Args:
        values: [num_values], the candidates, or all of the row's logits.
        plan: that of the row.
    """
    bin = tl.arange(0, bins)
    edges = tl.load(plan + NUM_LIMITS + bin).to(tl.int64)
    counts = tl.load(plan + NUM_LIMITS + bins + bin)
    weights = tl.load(plan + NUM_LIMITS + 2 * bins + bin)
    uniform = tl.load(plan)
    top_k = tl.load(plan + 2)
    top_p = tl.load(plan + 3)
    is_k, is_p, k_bin, p_first, p_last, first, last, k_least, k_most, p_least, p_most = plan_row(
        counts, weights, top_k, top_p, uniform, bins
    )
    # What is kept so far: the first `num_kept` of what is from the key `low`, in the bin `low_bin`, on.
    low_bin = tl.full([], bins - 1, tl.int32)
    low = entry(edges, bins - 1, bins)
    high = low + 1
    count = entry(counts, bins - 1, bins)
    weight = entry(weights, bins - 1, bins)
    num_kept = count
    total = weight
    number = tl.full([], 0.0, tl.float64)
    for goal in range(3):  # one copy of the search, whose code is large
        if ((goal == 0) & is_k) | ((goal == 1) & is_p) | (goal == 2):
            target = tl.where(goal == 0, top_k, tl.where(goal == 1, top_p, uniform) * total)
            p_bin = tl.minimum(tl.maximum(num_true(weights < target), p_first), p_last)
            own_bin = tl.minimum(tl.maximum(num_true(weights <= target), first), last)
            own_bin = tl.minimum(tl.where(goal == 0, k_bin, tl.where(goal == 1, p_bin, own_bin)), low_bin)
            is_above = own_bin < low_bin
            low, high, count, weight, above, weight_above = _search(
                values,
                num_values,
                peak,
                inverse,
                tl.where(is_above, entry(edges, own_bin, bins), low),
                tl.where(own_bin == 0, key_of(peak).to(tl.int64) + 1, entry(edges, own_bin - 1, bins)),
                tl.where(is_above, entry(counts, own_bin, bins), count),
                tl.where(is_above, entry(weights, own_bin, bins), weight),
                entry(counts, own_bin - 1, bins),
                entry(weights, own_bin - 1, bins),
                target,
                goal,
                block,
                num_edges,
            )
            low_bin = own_bin
            # Several tokens are left only if they are equal: each weighs what `low` does.
            each = weight_of(of_key(low.to(tl.int32)), peak, inverse).to(tl.float64)
            some = (target - weight_above) / each
            if goal == 2:
                number = tl.maximum(tl.minimum(tl.floor(some), tl.minimum(num_kept, count) - above - 1.0), 0.0)
            else:
                some = tl.where(goal == 0, top_k - above, tl.ceil(some))
                num_kept = tl.minimum(num_kept, above + tl.minimum(tl.maximum(some, 1.0), count - above))
                total = tl.where(num_kept >= count, weight, weight_above + (num_kept - above) * each)
                total = tl.where(
                    goal == 0,
                    tl.minimum(tl.maximum(total, k_least), k_most),
                    tl.minimum(tl.maximum(total, p_least), p_most),
                )
    return _place_of(values, num_values, low, high, number.to(tl.int32), block)


@triton.jit(do_not_specialize=["num_rows"])
def draw_rows_pick(
    logits: tl.tensor,
    plan: tl.tensor,
    peaks: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    plan_size: tl.constexpr,
    num_chunks: tl.constexpr,
    padded_chunks: tl.constexpr,
    chunk: tl.constexpr,
    bins: tl.constexpr,
    capacity: tl.constexpr,
    block: tl.constexpr,
    num_edges: tl.constexpr,
) -> None:
    """The token of each row, int64; where its candidates did not fit, they are looked for among all of its logits."""
    row = tl.program_id(0).to(tl.int64)
    own = plan + row * plan_size
    all_logits = logits + row * row_stride
    heat = tl.load(own + 1)
    peak, _least, part = row_extremes(peaks + row * 2 * num_chunks, num_chunks, padded_chunks)
    if is_drawn(heat, peak):
        num_candidates = tl.load(own + 4)
        fits = num_candidates <= capacity
        from_values = values + row * capacity
        num_values = num_candidates.to(tl.int32)
        if not fits:
            from_values = all_logits
            num_values = tl.full([], 0, tl.int32) + vocab_size  # a vocabulary of 1 is a constant
        token = _find(from_values, num_values, own, peak, inverse_of(heat), bins, block, num_edges)
        if fits:
            token = tl.load(ids + row * capacity + token)
    else:
        token = part * chunk + tl.arange(0, chunk)
        x = load_logits(all_logits + token, token < vocab_size)
        token = tl.min(tl.where((x == peak) & (token < vocab_size), token, vocab_size - 1), 0)
    tl.store(out + row, token.to(tl.int64))
