"""Paged attention with torch's own operators that reads every length on the device: a capture can hold it whole.

For a static context, whose lengths change from replay to replay under shapes that do not. What Python decides on here
are shapes alone: no length, no mask and no index comes to the host. It gathers the whole block table for each token,
so it is the slow way to be right where no kernel serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .torch_native import attend, is_all_padding, store

if TYPE_CHECKING:
    from .attention import AttentionContext

_CACHED_TOKENS = 1 << 16
"""Cached tokens that are gathered at once; bounds the memory of a long step over long requests."""


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
    *,
    longest: int | None = None,
) -> None:
    """Stores K and V, then attends; arguments as in `piecework.ops.attention.paged_attention`.

    Args:
        longest: the most tokens that a request has, where the caller knows it: no more of the cache is gathered.

    Request slots may be empty, at the end or in between; rows that no request has become zeros.
    """
    if is_all_padding(context):
        out.zero_()
        return
    store(k, v, k_cache, v_cache, context.slot_mapping)
    block_size = k_cache.shape[1]
    table = context.block_table
    if longest is not None:
        table = table[:, : max(1, -(-longest // block_size))]  # a row of padding looks at one key
    num_reqs, num_blocks = table.shape
    num_seen = num_blocks * block_size
    if num_reqs == 0 or num_seen == 0:
        out.zero_()
        return
    request, last_seen, is_padding = _tokens(context, q.shape[0])
    positions = torch.arange(num_seen, device=q.device)
    at_once = max(1, _CACHED_TOKENS // num_seen)
    for first in range(0, q.shape[0], at_once):
        rows = slice(first, min(first + at_once, q.shape[0]))
        last = last_seen[rows, None]
        hidden = positions > last
        if window_size:
            hidden = hidden | (positions <= last - window_size)
        blocks = table[request[rows]]
        # [rows, blocks, block_size, kv_heads, head_size] -> [rows, kv_heads, tokens, head_size]
        keys = k_cache[blocks].flatten(1, 2).transpose(1, 2)
        values = v_cache[blocks].flatten(1, 2).transpose(1, 2)
        # A slot that was never written may hold NaN, and 0 * NaN is NaN: the values are masked too. The scores of
        # hidden keys are replaced, and each is of one key, so that NaN in a key goes no further.
        values = values.masked_fill(hidden[:, None, :, None], 0)
        result = attend(q[rows].unsqueeze(2), keys, values, hidden[:, None, None, None, :], scale).squeeze(2)
        out[rows].copy_(result.masked_fill_(is_padding[rows, None, None], 0))


def _tokens(context: AttentionContext, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each row: its request, the last position that it sees, which is its own, and whether no request has it."""
    start = context.query_start_loc
    row = torch.arange(num_tokens, dtype=start.dtype, device=start.device)
    # How many requests end at or before the row: empty ones are passed over wherever they are.
    request = torch.searchsorted(start[1:], row, right=True)
    is_padding = request >= context.num_reqs
    request = request.clamp(max=context.num_reqs - 1)
    position = context.seq_lens[request] - (start[request + 1] - row)
    # A row of padding looks at one key, whatever that is: with none its softmax would be over nothing.
    return request, torch.where(is_padding, 0, position), is_padding
