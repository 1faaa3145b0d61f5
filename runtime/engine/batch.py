"""The tensors of a step, from the requests that run in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ...ops.attention import AttentionContext
from .scheduler import Chunk


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """What the runtime gets for one step."""

    inputs: dict[str, torch.Tensor]
    """`input_ids` and `positions`: [num_tokens], int64, request after request."""
    context: AttentionContext
    last_rows: torch.Tensor
    """int64: the row of the last token of each request that gets its next token from this step."""


def step_inputs(chunks: Sequence[Chunk], *, block_size: int, device: torch.device) -> StepInputs:
    """The inputs that run the chunks, which have the blocks for them."""
    tokens: list[int] = []
    positions: list[int] = []
    last_rows: list[int] = []
    query_lens, seq_lens, tables = [], [], []
    for chunk in chunks:
        request, num_tokens = chunk.request, chunk.num_tokens
        seq_len = request.num_computed + num_tokens
        tokens += request.pending(num_tokens)
        positions += range(request.num_computed, seq_len)
        query_lens.append(num_tokens)
        seq_lens.append(seq_len)
        # Only the blocks in use: attention may gather as many as the longest request brings.
        tables.append(request.blocks[: -(-seq_len // block_size)])
        if chunk.is_last:
            last_rows.append(len(tokens) - 1)
    context = AttentionContext.build(
        query_lens=query_lens, seq_lens=seq_lens, block_tables=tables, block_size=block_size, device=device
    )
    return StepInputs(
        inputs={
            "input_ids": torch.tensor(tokens, dtype=torch.int64, device=device),
            "positions": torch.tensor(positions, dtype=torch.int64, device=device),
        },
        context=context,
        last_rows=torch.tensor(last_rows, dtype=torch.int64, device=device),
    )
