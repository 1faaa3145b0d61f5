"""What the engine tells: of a request, and of itself."""

from __future__ import annotations

import dataclasses
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: an end token or a stop string came. `length`: as many tokens as asked for, or as the context has room for.
`abort`: the request was taken back."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one place of an answer, from the model's own logits in float32."""

    token_id: int
    """The token that was chosen."""
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the likeliest tokens, as many as asked for, the likeliest first."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """A request as it is now, and what is new since its last output. All the `new_text`s joined are `text`."""

    request_id: str
    prompt: str | None
    """The text that was given; None if token ids were."""
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """All new tokens; one that ended the answer is the last of them."""
    text: str
    """The new tokens as text, without special tokens, the token or the string that ended it. While the request runs,
    what may be half a character or the beginning of a stop string is not in it yet."""
    new_token_ids: tuple[int, ...]
    """The tokens since the last output."""
    new_text: str
    """The text since the last output; may be empty."""
    logprobs: tuple[TokenLogprobs, ...] | None
    """One for each of `token_ids`, if asked for."""
    finish_reason: FinishReason | None
    """None while the request runs."""
    stop_reason: int | str | None
    """The token or the stop string that ended it, under the finish reason `stop`."""
    num_preemptions: int
    """How often the request lost its blocks to an older one and was computed again."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """How full the engine is."""

    num_waiting: int
    """Requests that have no blocks."""
    num_running: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    """How often a request lost its blocks to an older one, since the engine was made."""
