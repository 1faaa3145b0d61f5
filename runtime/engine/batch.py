"""The requests that run together, and the inputs of their next step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch

from ...ops.attention import AttentionContext

FinishReason = Literal["stop", "length"]
"""`stop`: an end token came. `length`: as many tokens as asked for, or as the context has room for."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Request:
    """One prompt and what has come of it. Mutable: the engine adds a token each step."""

    index: int
    """Its place among the prompts of the call."""
    prompt_token_ids: list[int]
    max_new_tokens: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    """New tokens, the end token included."""
    blocks: list[int] = dataclasses.field(default_factory=list)
    """Its KV-cache blocks, in order; empty before it runs and after it has finished."""
    num_cached: int = 0
    """Tokens whose K and V are in the cache."""
    finish_reason: FinishReason | None = None

    @property
    def num_stored(self) -> int:
        """Tokens that the cache has to hold until the end: the last new one is never fed back."""
        return len(self.prompt_token_ids) + self.max_new_tokens - 1

    @property
    def pending(self) -> list[int]:
        """Tokens that the next step has to run: the whole prompt at first, then the newest token."""
        num_prompt = len(self.prompt_token_ids)
        if self.num_cached < num_prompt:
            return [*self.prompt_token_ids[self.num_cached :], *self.token_ids]
        return self.token_ids[self.num_cached - num_prompt :]

    def add(self, token: int, eos_token_ids: frozenset[int]) -> None:
        """Takes the token that a step yielded; the step's tokens are in the cache now."""
        self.num_cached = len(self.prompt_token_ids) + len(self.token_ids)
        self.token_ids.append(token)
        if token in eos_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.max_new_tokens:
            self.finish_reason = "length"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """What the runtime gets for one step."""

    inputs: dict[str, torch.Tensor]
    """`input_ids` and `positions`: [num_tokens], int64, request after request."""
    context: AttentionContext
    last_rows: torch.Tensor
    """[num_reqs], int64: the row of each request's last token."""


def step_inputs(requests: Sequence[Request], *, block_size: int, device: torch.device) -> StepInputs:
    """The inputs that run every pending token of the requests."""
    pending = [request.pending for request in requests]
    query_lens = [len(tokens) for tokens in pending]
    tokens = [token for request_tokens in pending for token in request_tokens]
    seq_lens = [request.num_cached + n for request, n in zip(requests, query_lens, strict=True)]
    positions = [
        position
        for request, seq_len in zip(requests, seq_lens, strict=True)
        for position in range(request.num_cached, seq_len)
    ]
    # Only the blocks in use: attention may gather as many as the longest request brings.
    tables = [request.blocks[: -(-seq_len // block_size)] for request, seq_len in zip(requests, seq_lens, strict=True)]
    context = AttentionContext.build(
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_tables=tables,
        block_size=block_size,
        device=device,
    )
    return StepInputs(
        inputs={
            "input_ids": torch.tensor(tokens, dtype=torch.int64, device=device),
            "positions": torch.tensor(positions, dtype=torch.int64, device=device),
        },
        context=context,
        last_rows=context.query_start_loc[1:].to(torch.int64) - 1,
    )
