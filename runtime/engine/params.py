"""How the tokens of one request are chosen, and when it ends."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from ...errors import InputError

_MAX_SEED = 2**64 - 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends; greedy by default.

    Temperature, top-k and top-p are applied in this order; log-probabilities are of the model's own logits, before
    any of them.

    Raises:
        InputError: a field is out of its range; the message begins with its name.
    """

    max_new_tokens: int = 16
    """The longest answer, in tokens; 1 or more. It ends earlier where the context of the model ends."""
    temperature: float = 0.0
    """0 takes the likeliest token; above, logits are divided by it before a token is drawn."""
    top_k: int = 0
    """Only this many of the likeliest tokens can be drawn; 0 for all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability can be drawn; above 0, 1 for all."""
    seed: int | None = None
    """0 to 2**64 - 1: the draws depend on it and on the place in the answer alone, not on other requests. None: draws
    that come out differently each time."""
    stop: Sequence[str] = ()
    """Texts that end the answer; it is cut before the first of them. Kept as a tuple."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the answer, beside the model's own end tokens. Kept as a tuple."""
    ignore_eos: bool = False
    """Whether the model's own end tokens are tokens like all others."""
    logprobs: int | None = None
    """For each token also its log-probability, and this many of the likeliest tokens with theirs; 0 for its own alone,
    None for none at all."""

    def __post_init__(self) -> None:
        _check_int("max_new_tokens", self.max_new_tokens, least=1)
        # No float holds a longer integer, and a step that failed of it would fail again and again.
        _check_number("temperature", self.temperature, "0 or more", lambda value: 0 <= value <= sys.float_info.max)
        _check_int("top_k", self.top_k, least=0)
        _check_number("top_p", self.top_p, "more than 0 and at most 1", lambda value: 0 < value <= 1)
        if self.seed is not None:
            _check_int("seed", self.seed, least=0, most=_MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, least=0)
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos: expected True or False, got {self.ignore_eos!r}; use one of these")
        stop, stop_token_ids = _listed("stop", self.stop), _listed("stop_token_ids", self.stop_token_ids)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InputError(f"stop: expected texts of one character or more, got {text!r}; remove or correct it")
        for token in stop_token_ids:
            _check_int("stop_token_ids", token, least=0)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)


def _check_int(field: str, value: object, *, least: int, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise InputError(f"{field}: expected {allowed}, got {value!r}; use an integer in this range")


def _check_number(field: str, value: Any, allowed: str, holds: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not holds(value):
        raise InputError(f"{field}: expected {allowed}, got {value!r}; use a number in this range")


def _listed(field: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, set, frozenset)):
        raise InputError(f"{field}: expected a list, got {value!r}; put it into a list")
    return tuple(value)
