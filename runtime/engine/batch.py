"""The tensors of a step, from the requests that run in it."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

import torch

from ...ops.attention import AttentionContext
from ...ops.staging import host_integers, to_device
from .scheduler import Chunk


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """What the runtime gets for one step."""

    inputs: dict[str, torch.Tensor]
    """`input_ids` and `positions`: [num_tokens], int64, request after request."""
    context: AttentionContext
    last_rows: torch.Tensor
    """int64: the row of the last token of each request that gets its next token from this step."""


def step_inputs(
    chunks: Sequence[Chunk],
    *,
    block_size: int,
    device: torch.device,
    num_blocks: int = 0,
    max_blocks: int | None = None,
) -> StepInputs:
    """The inputs that run the chunks, which have the blocks for them; on CUDA with one copy to it a dtype.

    Args:
        num_blocks: blocks of the KV cache, which the context tells whoever checks it; 0: not known.
        max_blocks: the widest that block tables become; by default any power of two.
    """
    tokens, positions, last_rows = array("q"), array("q"), array("q")
    query_lens, seq_lens, tables = [], [], []
    for chunk in chunks:
        request, num_tokens = chunk.request, chunk.num_tokens
        seq_len = request.num_computed + num_tokens
        tokens.extend(request.pending(num_tokens))
        positions.extend(range(request.num_computed, seq_len))
        query_lens.append(num_tokens)
        seq_lens.append(seq_len)
        # Only the blocks in use: attention may gather as many as the longest request brings.
        tables.append(request.blocks[: -(-seq_len // block_size)])
        if chunk.is_last:
            last_rows.append(len(tokens) - 1)
    context = AttentionContext.build(
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_tables=tables,
        block_size=block_size,
        num_blocks=num_blocks,
        max_blocks=_table_width(max(map(len, tables), default=0), max_blocks),
    )
    ids, where, rows, slots, starts, lens, table = to_device(
        [
            *(host_integers(values) for values in (tokens, positions, last_rows)),
            *(context.slot_mapping, context.query_start_loc, context.seq_lens, context.block_table),
        ],
        device,
    )
    return StepInputs(
        inputs={"input_ids": ids, "positions": where},
        context=dataclasses.replace(
            context, slot_mapping=slots, query_start_loc=starts, seq_lens=lens, block_table=table
        ),
        last_rows=rows,
    )


def _table_width(needed: int, most: int | None) -> int:
    """A power of two, so that the steps of growing requests have few shapes; not beyond what there is room for."""
    width = 1 << max(needed - 1, 0).bit_length()
    return width if most is None else max(needed, min(width, most))
