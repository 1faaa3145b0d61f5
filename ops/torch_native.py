"""Paged attention with torch's own operators: runs everywhere; the other implementations are tested against it.

Nothing here waits for the device: what Python decides on comes from the host copies in the context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .attention import AttentionContext

_SCORE_ROWS = 512
"""Query rows of a request that are scored at once; bounds the score matrix of a long prompt."""
_DECODE_TOKENS = 1 << 16
"""Cached tokens that a batch of single-token requests gathers at once."""


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
    """Stores K and V, then attends; arguments as in `piecework.ops.attention.paged_attention`."""
    if is_all_padding(context):
        out.zero_()
        return
    store(k, v, k_cache, v_cache, context.slot_mapping)
    if context.is_decode:
        _attend_single(q, k_cache, v_cache, out, scale, window_size, context)
    else:
        _attend_ragged(q, k_cache, v_cache, out, scale, window_size, context)
    out[context.num_tokens :].zero_()


def is_all_padding(context: AttentionContext) -> bool:
    """Whether a call is known to be all padding, without a look at the device.

    Such calls are made beside steps, to compile and to measure, and must not write even what is there already: a step
    may write it between the look at it and that.
    """
    return not context.is_static and context.num_tokens == 0


def store(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes row `t` of k and v to slot `slot_mapping[t]`; -1 writes nothing.

    A boolean mask would have to wait for the device, so a row that writes nothing repeats the first row that does
    (writing the same values twice to one slot is harmless), and if none does, all rewrite what slot 0 holds: not to be
    called beside a step that may write it, see `is_all_padding`.
    """
    if slot_mapping.shape[0] == 0:
        return
    writes = slot_mapping >= 0
    writer = writes.to(torch.int8).argmax().view(1)
    slots = torch.where(writes, slot_mapping, slot_mapping[writer]).clamp(min=0)
    block_size = k_cache.shape[1]
    where = (slots // block_size, slots % block_size)
    row_writes, any_writes = writes.view(-1, 1, 1), writes[writer].view(1, 1, 1)
    for new, cache in ((k, k_cache), (v, v_cache)):
        stand_in = torch.where(any_writes, new[writer], cache[0, :1])
        cache.index_put_(where, torch.where(row_writes, new, stand_in))


def _attend_single(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window_size: int,
    context: AttentionContext,
) -> None:
    """Attends for a batch in which every request has one new token."""
    num_reqs = context.num_reqs
    if num_reqs == 0:
        return
    # The table may be wider than the longest request.
    width = -(-max(context.seq_lens_host) // k_cache.shape[1])
    num_tokens = width * k_cache.shape[1]
    positions = torch.arange(num_tokens, device=q.device)
    at_once = max(1, _DECODE_TOKENS // max(num_tokens, 1))
    for first in range(0, num_reqs, at_once):
        rows = slice(first, min(first + at_once, num_reqs))
        blocks = context.block_table[rows, :width]
        seq_lens = context.seq_lens[rows, None]
        hidden = positions >= seq_lens
        if window_size:
            hidden |= positions < seq_lens - window_size
        # [reqs, blocks, block_size, kv_heads, head_size] -> [reqs, kv_heads, tokens, head_size]
        keys = k_cache[blocks].flatten(1, 2).transpose(1, 2)
        values = v_cache[blocks].flatten(1, 2).transpose(1, 2)
        # A slot that was never written may hold NaN, and 0 * NaN is NaN: the values are masked too.
        values = values.masked_fill(hidden[:, None, :, None], 0)
        result = attend(q[rows].unsqueeze(2), keys, values, hidden[:, None, None, None, :], scale)
        out[rows].copy_(result.squeeze(2))


def _attend_ragged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window_size: int,
    context: AttentionContext,
) -> None:
    """Attends request by request, each with any number of new tokens after any number of cached ones."""
    block_size = k_cache.shape[1]
    row = 0
    for request, (query_len, seq_len) in enumerate(zip(context.query_lens_host, context.seq_lens_host, strict=True)):
        blocks = context.block_table[request, : -(-seq_len // block_size)]
        keys = k_cache[blocks].flatten(0, 1).transpose(0, 1)[None]
        values = v_cache[blocks].flatten(0, 1).transpose(0, 1)[None]
        for first in range(0, query_len, _SCORE_ROWS):
            num_rows = min(_SCORE_ROWS, query_len - first)
            position = seq_len - query_len + first
            begin = max(0, position + 1 - window_size) if window_size else 0
            end = position + num_rows
            hidden = torch.ones(num_rows, end - begin, dtype=torch.bool, device=q.device).triu(position + 1 - begin)
            if window_size:
                hidden |= torch.ones_like(hidden).tril(position - window_size - begin)
            rows = slice(row + first, row + first + num_rows)
            seen = slice(begin, end)
            result = attend(q[rows].transpose(0, 1)[None], keys[:, :, seen], values[:, :, seen], hidden, scale)
            out[rows].copy_(result[0].transpose(0, 1))
        row += query_len


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax attention for grouped heads.

    q: [batch, num_heads, rows, head_size]; keys, values: [batch, num_kv_heads, tokens, head_size]; hidden: bool,
    true where a row must not look, broadcast to [batch, num_kv_heads, group, rows, tokens]. Returns q's shape, in
    float32 (float64 for float64 inputs).
    """
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_kv_heads, num_rows = keys.shape[1], q.shape[2]
    # The heads of a group lie along the rows, so that no key is copied for each of them.
    grouped = torch.unflatten(q.to(accumulate) * scale, 1, (num_kv_heads, -1)).flatten(2, 3)
    scores = torch.unflatten(grouped @ keys.to(accumulate).transpose(-1, -2), 2, (-1, num_rows))
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1).flatten(2, 3)
    return torch.unflatten(weights @ values.to(accumulate), 2, (-1, num_rows)).flatten(1, 2)
