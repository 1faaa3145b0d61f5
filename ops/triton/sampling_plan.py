"""What the kernels that draw tokens share: keys and weights of logits, and in which bins of a row the places lie."""

from __future__ import annotations

import triton
import triton.language as tl

WINDOW: tl.constexpr = tl.constexpr(32.0)
"""Temperatures below a row's peak from which on tokens are never drawn: all of them weigh less than 2**-24 of the peak,
in vocabularies of up to four million."""
NUM_LIMITS: tl.constexpr = tl.constexpr(5)
"""Of a row's plan: its uniform, temperature, top-k and top-p, and the number of its candidates. Behind these come, for
each bin, its lower edge (a key), and the count and the weight of the tokens from there on; all in float64."""


@triton.jit
def load_logits(at: tl.tensor, exists: tl.tensor) -> tl.tensor:
    """float32; what does not exist, or is NaN, is -inf."""
    x = tl.load(at, mask=exists, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def key_of(x: tl.tensor) -> tl.tensor:
    """float32 -> int32 in the same order, zeros being equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def of_key(key: tl.tensor) -> tl.tensor:
    """The float32 that has this key, int32."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x: tl.tensor, peak: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """float32: 1 for the largest logit."""
    return tl.exp((x - peak) * inverse)


@triton.jit
def inverse_of(heat: tl.tensor) -> tl.tensor:
    """1 / temperature within float32, and no factor of an infinity that would make NaN of it."""
    return tl.minimum(tl.maximum(1.0 / heat, 1e-30), 1e30).to(tl.float32)


@triton.jit
def is_drawn(heat: tl.tensor, peak: tl.tensor) -> tl.tensor:
    """Whether a row needs more than its first largest token; with infinite logits all of the weight is on that."""
    return (heat > 0.0) & (peak > float("-inf")) & (peak < float("inf"))


@triton.jit
def row_extremes(
    peaks: tl.tensor, num_chunks: tl.constexpr, padded_chunks: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of a row: the largest logit, the smallest finite one, and which chunk first has the largest.

    Args:
        peaks: [2, num_chunks], of the row: the largest logits of its chunks, then the smallest ones.
    """
    chunk = tl.arange(0, padded_chunks)
    best = tl.load(peaks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    least = tl.load(peaks + num_chunks + chunk, mask=chunk < num_chunks, other=float("inf"))
    peak = tl.max(best, 0)
    return peak, tl.min(least, 0), tl.min(tl.where(best == peak, chunk, num_chunks - 1), 0)


@triton.jit
def tally(
    key: tl.tensor, weight: tl.tensor, edges: tl.tensor, num_edges: tl.constexpr, size: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """How many tokens have the key `edges[i]` or a larger one, int32, and what they weigh, float32.

    The sums of one call are added in one order, so that they never fall from one edge to a lower one.

    Args:
        key, weight: [size]
        edges: [num_edges], int32.
    """
    keys = tl.broadcast_to(key[None, :], [num_edges, size])
    weights = tl.broadcast_to(weight[None, :], [num_edges, size])
    is_from = keys >= edges[:, None]
    return tl.sum(is_from.to(tl.int32), 1), tl.sum(tl.where(is_from, weights, 0.0), 1)


@triton.jit
def entry(values: tl.tensor, index: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """`values[index]`, or 0 where there is no such one."""
    return tl.sum(tl.where(tl.arange(0, size) == index, values, 0), 0)


@triton.jit
def num_true(values: tl.tensor) -> tl.tensor:
    return tl.sum(values.to(tl.int32), 0)


@triton.jit
def plan_row(
    counts: tl.tensor,
    weights: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    uniform: tl.tensor,
    bins: tl.constexpr,
) -> tuple[
    tl.tensor,
    tl.tensor,
    tl.tensor,
    tl.tensor,
    tl.tensor,
    tl.tensor,
    tl.tensor,
    tl.tensor,
    tl.tensor,
    tl.tensor,
    tl.tensor,
]:
    """In which bins top-k ends, top-p may end, and the token may be.

    Where top-p ends depends on what the kept tokens of the bin weigh in which top-k ends, and so on: known are bounds.
    Nothing here is multiplied and then added: two kernels come to the same bits.

    Args:
        counts, weights: [bins], of the tokens from a bin's lower edge on, float64; the highest bin is the first.

    Returns:
        Whether top-k cuts and whether top-p does; the bin where top-k ends; the first and the last bin where top-p may
        end, and the first and the last one where the token may be; the bounds of the weight of what top-k keeps, and
        those of what top-p leaves of it.
    """
    is_k = (top_k >= 1.0) & (top_k < entry(counts, bins - 1, bins))
    is_p = top_p < 1.0
    k_bin = tl.where(is_k, num_true(counts < top_k), bins - 1)
    k_most = entry(weights, k_bin, bins)
    k_least = tl.where(is_k, entry(weights, k_bin - 1, bins), k_most)
    p_first = tl.where(is_p, tl.minimum(num_true(weights < top_p * k_least), k_bin), k_bin)
    p_last = tl.where(is_p, tl.minimum(num_true(weights < top_p * k_most), k_bin), k_bin)
    p_least = tl.where(is_p, entry(weights, p_first - 1, bins), k_least)
    p_most = tl.where(is_p, tl.minimum(entry(weights, p_last, bins), k_most), k_most)
    first = tl.minimum(num_true(weights <= uniform * p_least), p_last)
    last = tl.minimum(num_true(weights <= uniform * p_most), p_last)
    return is_k, is_p, k_bin, p_first, p_last, first, last, k_least, k_most, p_least, p_most


@triton.jit
def below_1(uniform: tl.tensor) -> tl.tensor:
    """Rounding must not push what is wanted up to the whole sum, which nothing is above."""
    return tl.minimum(uniform, 1.0 - 2.0**-52)
