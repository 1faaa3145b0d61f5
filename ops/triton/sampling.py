"""Draws a token for each row of logits without sorting them, as one Triton kernel.

Where top-k ends, where top-p ends and where a row's random number falls are all one question: which is the largest
logit such that it and the larger ones together count, or weigh, enough? The bits of floats are in the order of the
floats once the negative ones are turned round, so that a search over integers answers it, two bits a pass over the row.
It ends when one token is left, or several equal ones, whose order is that of their ids.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable

import torch
import triton
import triton.language as tl

from ..deferred import deferring
from .launch import Call, is_interpreted, launch_on

_BLOCK = 4096
"""Tokens that a program takes at once."""
_WARPS = 16
_STAGES = 3
"""Blocks in flight while one is summed, plus one."""
_COMPILED: set[Hashable] = set()
"""`Call.key` of what was compiled for those who do not wait, or failed: then a launch fails in its own words."""


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    """float32 -> int32 in the same order, zeros being equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _weight(x: tl.tensor, peak: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """float32: 1 for the largest logit."""
    return tl.exp((x - peak) * inverse)


@triton.jit
def _largest(
    row: tl.tensor, vocab_size: tl.tensor, block: tl.constexpr, stages: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The largest logit, its first id, and the smallest logit."""
    lane = tl.arange(0, block)
    best = tl.full([block], float("-inf"), tl.float32)
    best_id = lane
    least = tl.full([block], float("inf"), tl.float32)
    for start in tl.range(0, vocab_size, block, num_stages=stages):
        token = start + lane
        exists = token < vocab_size
        x = tl.load(row + token, mask=exists, other=float("-inf")).to(tl.float32)
        is_better = x > best
        best = tl.where(is_better, x, best)
        best_id = tl.where(is_better, token, best_id)
        least = tl.minimum(least, tl.where(exists, x, float("inf")))
    peak = tl.max(best, 0)
    return peak, tl.min(tl.where(best == peak, best_id, vocab_size - 1), 0), tl.min(least, 0)


@triton.jit
def _weigh(
    row: tl.tensor,
    vocab_size: tl.tensor,
    peak: tl.tensor,
    inverse: tl.tensor,
    block: tl.constexpr,
    stages: tl.constexpr,
) -> tl.tensor:
    """The weight of all tokens, float64."""
    lane = tl.arange(0, block)
    total = tl.full([block], 0.0, tl.float64)
    for start in tl.range(0, vocab_size, block, num_stages=stages):
        x = tl.load(row + start + lane, mask=start + lane < vocab_size, other=float("-inf")).to(tl.float32)
        total += _weight(x, peak, inverse).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def _is_enough(count: tl.tensor, weight: tl.tensor, target: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    if kind == "count":
        return count >= target
    elif kind == "reach":
        return weight >= target
    else:
        return weight > target


@triton.jit
def _search(
    row: tl.tensor,
    vocab_size: tl.tensor,
    peak: tl.tensor,
    inverse: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    count: tl.tensor,
    weight: tl.tensor,
    target: tl.tensor,
    kind: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Narrows [low, high) to the keys of one token, or of equal ones, from which on it is enough.

    Args:
        low, high: keys, int64; from `low` on it is enough, and no token has the key `high` or a larger one.
        count, weight: of the tokens with the key `low` or a larger one.
        target: float64; what `kind` compares with.

    Returns:
        low, high, count, weight, and the count and the weight of the tokens with the key `high` or a larger one.
    """
    lane = tl.arange(0, block)
    count_above = tl.full([], 0, tl.int32)
    weight_above = tl.full([], 0.0, tl.float64)
    # The place is mostly within a few temperatures of the peak: a guess that saves passes over signs and exponents.
    key_1 = tl.minimum(tl.maximum(_key(peak - 14.0 / inverse).to(tl.int64), low + 1), high)
    key_2 = tl.minimum(tl.maximum(_key(peak - 6.0 / inverse).to(tl.int64), low + 1), high)
    key_3 = tl.minimum(tl.maximum(_key(peak - 2.0 / inverse).to(tl.int64), low + 1), high)
    while (high - low > 1) & (count - count_above > 1):
        count_1 = tl.full([block], 0, tl.int32)
        count_2 = tl.full([block], 0, tl.int32)
        count_3 = tl.full([block], 0, tl.int32)
        weight_1 = tl.full([block], 0.0, tl.float64)
        weight_2 = tl.full([block], 0.0, tl.float64)
        weight_3 = tl.full([block], 0.0, tl.float64)
        for start in tl.range(0, vocab_size, block, num_stages=stages):
            x = tl.load(row + start + lane, mask=start + lane < vocab_size, other=float("-inf")).to(tl.float32)
            key = _key(x)  # that of what does not exist is the lowest, which is below all three
            own = _weight(x, peak, inverse).to(tl.float64)
            is_1 = key >= key_1.to(tl.int32)
            is_2 = key >= key_2.to(tl.int32)
            is_3 = key >= key_3.to(tl.int32)
            count_1 += is_1.to(tl.int32)
            count_2 += is_2.to(tl.int32)
            count_3 += is_3.to(tl.int32)
            weight_1 += tl.where(is_1, own, 0.0)
            weight_2 += tl.where(is_2, own, 0.0)
            weight_3 += tl.where(is_3, own, 0.0)
        num_1, num_2, num_3 = tl.sum(count_1, 0), tl.sum(count_2, 0), tl.sum(count_3, 0)
        sum_1, sum_2, sum_3 = tl.sum(weight_1, 0), tl.sum(weight_2, 0), tl.sum(weight_3, 0)
        from_1 = _is_enough(num_1, sum_1, target, kind)
        from_2 = _is_enough(num_2, sum_2, target, kind)
        from_3 = _is_enough(num_3, sum_3, target, kind)
        high = tl.where(from_3, high, tl.where(from_2, key_3, tl.where(from_1, key_2, key_1)))
        count_above = tl.where(from_3, count_above, tl.where(from_2, num_3, tl.where(from_1, num_2, num_1)))
        weight_above = tl.where(from_3, weight_above, tl.where(from_2, sum_3, tl.where(from_1, sum_2, sum_1)))
        low = tl.where(from_3, key_3, tl.where(from_2, key_2, tl.where(from_1, key_1, low)))
        count = tl.where(from_3, num_3, tl.where(from_2, num_2, tl.where(from_1, num_1, count)))
        weight = tl.where(from_3, sum_3, tl.where(from_2, sum_2, tl.where(from_1, sum_1, weight)))
        step = tl.maximum((high - low) // 4, 1)
        key_1 = low + step
        key_2 = tl.minimum(key_1 + step, high)
        key_3 = tl.minimum(key_2 + step, high)
    return low, high, count, weight, count_above, weight_above


@triton.jit
def _token_at(
    row: tl.tensor,
    vocab_size: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    place: tl.tensor,
    otherwise: tl.tensor,
    block: tl.constexpr,
    stages: tl.constexpr,
) -> tl.tensor:
    """The id at `place` among the tokens with keys in [low, high), in the order of ids."""
    lane = tl.arange(0, block)
    found = otherwise
    num_before = tl.full([], 0, tl.int32)
    for start in tl.range(0, vocab_size, block, num_stages=stages):
        token = start + lane
        x = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        key = _key(x)
        is_one = (key >= low.to(tl.int32)) & (key < high.to(tl.int32)) & (token < vocab_size)
        num_here = tl.sum(is_one.to(tl.int32), 0)
        if (place >= num_before) & (place < num_before + num_here):
            own_place = num_before + tl.cumsum(is_one.to(tl.int32), 0) - 1
            found = tl.max(tl.where(is_one & (own_place == place), token, 0), 0)
        num_before += num_here
    return found


# Columns of one table begin anywhere: that is not worth another compile.
@triton.jit(do_not_specialize_on_alignment="uniform temperature top_k top_p out".split())
def draw_rows(
    logits: tl.tensor,
    uniform: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    out: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    block: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """One program a row; a row of temperature 0 takes one pass."""
    number = tl.program_id(0)
    row = logits + number.to(tl.int64) * row_stride
    peak, token, least = _largest(row, vocab_size, block, stages)
    heat = tl.load(temperature + number).to(tl.float64)
    # With infinite ones all of the weight is on the largest.
    if (heat > 0.0) & (peak > float("-inf")) & (peak < float("inf")):
        # Within float32, and no factor of an infinity that would make NaN of it.
        inverse = tl.minimum(tl.maximum(1.0 / heat, 1e-30), 1e30).to(tl.float32)
        first_k = tl.load(top_k + number).to(tl.float64)
        share = tl.load(top_p + number).to(tl.float64)
        low = _key(least).to(tl.int64)
        end = _key(peak).to(tl.int64) + 1
        count = tl.full([], 0, tl.int32) + vocab_size
        weight = _weigh(row, vocab_size, peak, inverse, block, stages)
        total = weight
        num_kept = count
        if (first_k >= 1.0) & (first_k < vocab_size):
            low, _, count, weight, above, weight_above = _search(
                row, vocab_size, peak, inverse, low, end, count, weight, first_k, "count", block, stages
            )
            num_kept = first_k.to(tl.int32)
            each = (weight - weight_above) / (count - above)
            total = tl.where(num_kept == count, weight, weight_above + (num_kept - above) * each)
        if share < 1.0:
            target = share * total
            low, _, count, weight, above, weight_above = _search(
                row, vocab_size, peak, inverse, low, end, count, weight, target, "reach", block, stages
            )
            each = (weight - weight_above) / (count - above)
            some = tl.where(each > 0.0, tl.ceil((target - weight_above) / each), 1.0)
            some = tl.minimum(tl.maximum(some, 1.0), (count - above).to(tl.float64)).to(tl.int32)
            num_kept = tl.minimum(num_kept, above + some)
            total = tl.where(num_kept == count, weight, weight_above + (num_kept - above) * each)
        # Rounding must not push what is wanted up to the whole sum, which nothing is above.
        target = tl.minimum(tl.load(uniform + number).to(tl.float64), 1.0 - 2.0**-52) * total
        low, high, count, weight, above, weight_above = _search(
            row, vocab_size, peak, inverse, low, end, count, weight, target, "pass", block, stages
        )
        each = (weight - weight_above) / (count - above)
        place = tl.where(each > 0.0, tl.floor((target - weight_above) / each), 0.0)
        most = (tl.minimum(num_kept, count) - above - 1).to(tl.float64)
        place = tl.maximum(tl.minimum(place, most), 0.0).to(tl.int32)
        token = _token_at(row, vocab_size, low, high, place, token, block, stages)
    tl.store(out + number, token.to(tl.int64))


def sample_rows(
    logits: torch.Tensor, uniform: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor | None:
    """`piecework.ops.sampling.sample` of float32, bfloat16 or float16, whose arguments fit. Does not wait.

    None where the kernel would have to be compiled first and nobody is to wait for that (`defer_compiles`).

    Raises:
        NotAvailableError: the tensors are not on a GPU.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    columns = [column.contiguous() for column in (uniform, temperature, top_k, top_p)]
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    block = min(_BLOCK, int(triton.next_power_of_2(vocab_size)))
    call = Call(
        kernel=draw_rows,
        grid=(num_rows, 1, 1),
        arguments=(logits, *columns, out, vocab_size, logits.stride(0), block, _STAGES),
        options={"num_warps": _WARPS},
    )
    with launch_on(draw_rows, logits):
        if num_rows:
            if not _is_ready(call):
                return None
            call.launch()
    return out


def _is_ready(call: Call) -> bool:
    """Whether a call may be launched here; has its kernel compiled if not."""
    submit = deferring()
    if submit is None or is_interpreted(call.kernel):
        return True
    key = call.key
    if key not in _COMPILED:
        submit(key, functools.partial(_compile, call, key))
    return key in _COMPILED


def _compile(call: Call, key: Hashable) -> None:
    try:
        call.compile()
    finally:
        _COMPILED.add(key)
