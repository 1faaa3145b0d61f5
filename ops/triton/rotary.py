"""Rotary embedding of q and k as one Triton kernel, which can norm each head before."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .dependent import wait_for_previous
from .operators import Launcher, power_of_2

_FEW_ENTRIES = 1 << 17
"""Entries of q and k up to which the latency of a program counts."""


class Blocks(NamedTuple):
    """The sizes of a launch."""

    heads_at_once: int
    num_warps: int


def pick_blocks(num_tokens: int, num_heads: int, head_size: int) -> Blocks:
    """The sizes for so many tokens with so many heads, those of q and k together: speed depends on them alone.

    A program has heads of q or of k of one token: 512 entries if there are few in all, so that many processors share
    them, else 2048. A thread has 16.
    """
    at_most = 512 if num_tokens * num_heads * head_size <= _FEW_ENTRIES else 2048
    padded = power_of_2(head_size)
    heads_at_once = min(power_of_2(num_heads), max(1, at_most // padded))
    return Blocks(heads_at_once, max(1, min(8, heads_at_once * padded // 512)))


@triton.jit
def _normed(value: tl.tensor, factor: tl.tensor, weight: tl.tensor, wide: tl.constexpr) -> tl.tensor:
    """The normed value, rounded, times the weight, rounded: as the native body does."""
    normed = (value.to(wide) * factor).to(value.dtype)
    return (normed.to(wide) * weight.to(wide)).to(value.dtype)


@triton.jit
def _rotate(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    head_stride: tl.tensor,
    first_head: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: tl.constexpr,
    num_heads: tl.constexpr,
    head_size: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
    padded_rest: tl.constexpr,
    heads_at_once: tl.constexpr,
    norms: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    """Some heads of one token. x: its first head; out: the same of the result; cos, sin: [1, padded_half], wide."""
    head = first_head + tl.arange(0, heads_at_once)[:, None]
    pair = tl.arange(0, padded_half)[None, :]
    rest = 2 * half + tl.arange(0, padded_rest)[None, :]
    is_head = head < num_heads
    mask = is_head & (pair < half)
    rest_mask = is_head & (rest < head_size)
    x_head = x + head.to(tl.int64) * head_stride
    out_head = out + head * head_size
    first = tl.load(x_head + pair, mask=mask, other=0.0)
    second = tl.load(x_head + half + pair, mask=mask, other=0.0)
    if norms:
        squares = tl.sum(first.to(wide) * first.to(wide) + second.to(wide) * second.to(wide), 1)
        if 2 * half < head_size:
            unturned = tl.load(x_head + rest, mask=rest_mask, other=0.0)
            squares += tl.sum(unturned.to(wide) * unturned.to(wide), 1)
        factor = tl.rsqrt(squares / head_size + eps)[:, None]
        first = _normed(first, factor, tl.load(weight + pair, mask=pair < half, other=0.0), wide)
        second = _normed(second, factor, tl.load(weight + half + pair, mask=pair < half, other=0.0), wide)
        if 2 * half < head_size:
            unturned = _normed(unturned, factor, tl.load(weight + rest, mask=rest < head_size, other=0.0), wide)
            tl.store(out_head + rest, unturned, mask=rest_mask)
    elif 2 * half < head_size:
        tl.store(out_head + rest, tl.load(x_head + rest, mask=rest_mask, other=0.0), mask=rest_mask)
    left, right = first.to(wide), second.to(wide)
    tl.store(out_head + pair, (left * cos - right * sin).to(first.dtype), mask=mask)
    tl.store(out_head + half + pair, (right * cos + left * sin).to(first.dtype), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def rotate_heads(
    q: tl.tensor,
    k: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    num_rows: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    cos_token: tl.tensor,
    sin_token: tl.tensor,
    eps: tl.constexpr,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_size: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
    padded_rest: tl.constexpr,
    heads_at_once: tl.constexpr,
    norms: tl.constexpr,
    is_double: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """One program a (token, some heads of q or some of k). The results are contiguous; without `norms` no weights."""
    wide: tl.constexpr = tl.float64 if is_double else tl.float32
    wait_for_previous(overlaps)
    q_columns: tl.constexpr = (num_heads + heads_at_once - 1) // heads_at_once
    k_columns: tl.constexpr = (num_kv_heads + heads_at_once - 1) // heads_at_once
    program = tl.program_id(0)
    # In int64: a tensor may have more entries than an int32 counts.
    token = (program // (q_columns + k_columns)).to(tl.int64)
    column = program % (q_columns + k_columns)
    pair = tl.arange(0, padded_half)[None, :]
    turn_cos = tl.load(cos + token * cos_token + pair, mask=pair < half, other=0.0).to(wide)
    turn_sin = tl.load(sin + token * sin_token + pair, mask=pair < half, other=0.0).to(wide)
    if column < q_columns:
        _rotate(
            q + token * q_token,
            q_weight,
            q_out + token * (num_heads * head_size),
            q_head,
            column * heads_at_once,
            turn_cos,
            turn_sin,
            eps,
            num_heads,
            head_size,
            half,
            padded_half,
            padded_rest,
            heads_at_once,
            norms,
            wide,
        )
    else:
        _rotate(
            k + token * k_token,
            k_weight,
            k_out + token * (num_kv_heads * head_size),
            k_head,
            (column - q_columns) * heads_at_once,
            turn_cos,
            turn_sin,
            eps,
            num_kv_heads,
            head_size,
            half,
            padded_half,
            padded_rest,
            heads_at_once,
            norms,
            wide,
        )


_LAUNCHER = Launcher(rotate_heads, overlaps=True)
Pair = tuple[torch.Tensor, torch.Tensor]


def rotary_embedding(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair | None:
    """As `piecework.ops.rotary.rotary_embedding`, for shapes that fit each other. None: see `Launcher.launch`."""
    return _turn(q, k, None, cos, sin, 0.0)


def qk_norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> Pair | None:
    """As `piecework.ops.rotary.qk_norm_rotary`, for weights in the dtypes of `q` and `k`. None: as above."""
    return _turn(q, k, (q_weight.contiguous(), k_weight.contiguous()), cos, sin, eps)


def _turn(
    q: torch.Tensor, k: torch.Tensor, weights: Pair | None, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> Pair | None:
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = k.shape[1]
    dtypes = {q.dtype, k.dtype, cos.dtype, sin.dtype}
    is_double = torch.float64 in dtypes
    if is_double and len(dtypes) > 1:  # not every Triton rounds float64 to bfloat16, its interpreter for one
        return None
    results = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if num_tokens == 0 or head_size == 0 or num_heads + num_kv_heads == 0:
        return results
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    half = cos.shape[1]
    heads_at_once, num_warps = pick_blocks(num_tokens, num_heads + num_kv_heads, head_size)
    columns = -(-num_heads // heads_at_once) - (-num_kv_heads // heads_at_once)
    launched = _LAUNCHER.launch(
        (q, k, *(weights or (q, k)), cos, sin, *results),
        num_tokens,
        (*q.stride()[:2], *k.stride()[:2], cos.stride(0), sin.stride(0)),
        (
            eps,
            num_heads,
            num_kv_heads,
            head_size,
            half,
            power_of_2(half),
            power_of_2(head_size - 2 * half),
            heads_at_once,
            weights is not None,
            is_double,
        ),
        num_programs=num_tokens * columns,
        num_warps=num_warps,
    )
    return results if launched else None
