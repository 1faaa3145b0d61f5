"""From logits to the next tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import struct
from collections.abc import Sequence

import torch

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

        Args:
            logits: [num_rows, vocab_size], float32 or wider.
            draws: one a row.
        """
        tokens = logits.argmax(dim=-1)
        drawn = [row for row, draw in enumerate(draws) if draw.params.temperature > 0]
        if drawn:
            rows = torch.tensor(drawn, device=logits.device)
            tokens[rows] = self._draw(logits[rows], [draws[row] for row in drawn])
        logprobs = _logprobs(logits, tokens, [draw.params.logprobs for draw in draws])
        return list(zip(tokens.tolist(), logprobs, strict=True))

    def _draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(-1)

        probabilities, token_ids = distribution(
            logits,
            temperature=column([draw.params.temperature for draw in draws]),
            top_k=column([min(draw.params.top_k, logits.shape[-1]) for draw in draws]),
            top_p=column([draw.params.top_p for draw in draws]),
        )
        summed = probabilities.cumsum(-1)
        wanted = column([self._uniform(draw) for draw in draws]) * summed[:, -1:]
        # The first whose sum is above; rounding may push what is wanted up to the whole sum, where there is none.
        last = (probabilities > 0).sum(-1, keepdim=True) - 1
        found = torch.searchsorted(summed, wanted, right=True).minimum(last).clamp(min=0)
        return token_ids.gather(-1, found).squeeze(-1)

    def _uniform(self, draw: Draw) -> float:
        seed = draw.params.seed
        return self._random.random() if seed is None else uniform(seed, draw.place)


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1) that is random in both arguments, with 53 random bits."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, place), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def distribution(
    logits: torch.Tensor, *, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What tokens are drawn from: temperature, then top-k, then top-p of what is left.

    Args:
        logits: [num_rows, vocab_size].
        temperature: [num_rows, 1], above 0.
        top_k: [num_rows, 1]; 0 for all.
        top_p: [num_rows, 1], above 0; 1 for all. The token that reaches it still belongs to the set.

    Returns:
        Probabilities, float64, the likeliest first and 0 for what cannot be drawn, not normalised after top-p; and
        the token ids in this order. Both [num_rows, vocab_size].
    """
    # Always sorted, also where nothing is cut: a row must not come out otherwise because of what is beside it.
    values, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    scaled = (values.double() - values[:, :1].double()) / temperature  # the largest is 0: no overflow in exp
    rank = torch.arange(logits.shape[-1], device=logits.device)
    scaled = scaled.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
    probabilities = scaled.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    return probabilities.masked_fill((top_p < 1) & (before >= top_p) & (rank > 0), 0), token_ids


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
