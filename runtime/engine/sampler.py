"""From logits to the next tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import struct
from collections.abc import Sequence

import torch

from ...ops.sampling import sample
from .output import TokenLogprobs
from .params import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """A row of logits, and what its token depends on beside them."""

    params: SamplingParams
    place: int
    """Tokens of the answer before this one."""


class Sampler:
    """Chooses one token a row.

    A row needs one random number, which a seeded request gets from (seed, place) alone: whatever it is batched with,
    and however often it is computed again, it draws the same. The others get theirs from the sampler's own generator.
    """

    def __init__(self) -> None:
        self._random = random.Random()

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[tuple[int, TokenLogprobs | None]]:
        """The next token of each row, and its log-probabilities where they are asked for. Waits for the device.

        What draws is `piecework.ops.sampling.sample`, as the choice that is in use says (`use_choice`).

        Args:
            logits: [num_rows, vocab_size], float32 or wider.
            draws: one a row.
        """
        drawn = [row for row, draw in enumerate(draws) if draw.params.temperature > 0]
        if drawn and len(drawn) == len(draws):
            tokens = self._draw(logits, draws)
        else:
            tokens = logits.argmax(dim=-1)
        if drawn and len(drawn) < len(draws):
            rows = torch.tensor(drawn, device=logits.device)
            tokens[rows] = self._draw(logits[rows], [draws[row] for row in drawn])
        logprobs = _logprobs(logits, tokens, [draw.params.logprobs for draw in draws])
        return list(zip(tokens.tolist(), logprobs, strict=True))

    def _draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        vocab_size = logits.shape[-1]
        columns = [
            [self._uniform(draw) for draw in draws],
            [draw.params.temperature for draw in draws],
            [min(draw.params.top_k, vocab_size) for draw in draws],
            [draw.params.top_p for draw in draws],
        ]
        # One copy to the device.
        uniforms, temperatures, top_k, top_p = torch.tensor(columns, dtype=torch.float64, device=logits.device)
        return sample(logits, uniforms, temperatures, top_k, top_p)

    def _uniform(self, draw: Draw) -> float:
        seed = draw.params.seed
        return self._random.random() if seed is None else uniform(seed, draw.place)


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1) that is random in both arguments, with 53 random bits."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, place), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int | None]) -> list[TokenLogprobs | None]:
    asked = [row for row, count in enumerate(counts) if count is not None]
    result: list[TokenLogprobs | None] = [None] * len(counts)
    if not asked:
        return result
    rows = torch.tensor(asked, device=logits.device)
    logprobs = logits[rows].float().log_softmax(-1)
    chosen_ids = tokens[rows]
    chosen = logprobs.gather(-1, chosen_ids.unsqueeze(-1)).squeeze(-1).tolist()
    # Of equal logits, which bfloat16 often has, the first id is the first, as it is for argmax; topk takes any.
    best = logits[rows].sort(dim=-1, descending=True, stable=True).indices
    best = best[:, : max(count for count in counts if count is not None)]
    best_ids, best_values = best.tolist(), logprobs.gather(-1, best).tolist()
    for i, (row, token) in enumerate(zip(asked, chosen_ids.tolist(), strict=True)):
        count = counts[row]
        top = tuple(zip(best_ids[i][:count], best_values[i][:count], strict=True))
        result[row] = TokenLogprobs(token_id=token, logprob=chosen[i], top=top)
    return result
