"""One request and what has come of it."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import MutableSequence

from .detokenizer import Detokenizer
from .output import FinishReason, RequestOutput, TokenLogprobs
from .params import SamplingParams
from .stop import StopStrings


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """A prompt, its answer so far and its place in the cache. Mutable, and equal to nothing but itself."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int
    """As in `params`, or as many as the context has room for."""
    stop_token_ids: frozenset[int]
    """All tokens that end the answer."""
    detokenizer: Detokenizer
    stop_strings: StopStrings
    owner: object = None
    """The call of `generate` that waits for it; None for a request that `step` reports."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    blocks: MutableSequence[int] = dataclasses.field(default_factory=lambda: array("i"))
    """Its KV-cache blocks, in order; empty while it waits and after it has finished. An array, since each step copies
    it into a tensor."""
    num_computed: int = 0
    """Tokens whose K and V are in the cache."""
    num_prefill: int = 0
    """Tokens that were known when it began to run: the prompt, and after a preemption also its tokens so far."""
    num_preemptions: int = 0

    num_tokens_out: int = 0
    num_chars_out: int = 0
    """How much of the answer the last output told."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are known, prompt and answer."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens that have to be computed before the next one can be chosen."""
        return self.num_tokens - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens are pending that were known when it began to run."""
        return self.num_computed < self.num_prefill

    def pending(self, count: int) -> list[int]:
        """The next `count` tokens to compute."""
        num_prompt = len(self.prompt_token_ids)
        start, end = self.num_computed, self.num_computed + count
        from_prompt = self.prompt_token_ids[start:end]
        return [*from_prompt, *self.token_ids[max(0, start - num_prompt) : max(0, end - num_prompt)]]

    def add(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Takes the token that a step chose."""
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token in self.stop_token_ids:
            self._finish("stop", token)
            return
        self.text += self.stop_strings.add(self.detokenizer.add(token))
        if self.stop_strings.matched is not None:
            self._finish("stop", self.stop_strings.matched)
        elif len(self.token_ids) >= self.max_new_tokens:
            self._finish("length")

    def abort(self) -> None:
        """Ends the answer where it is."""
        self._finish("abort")

    def output(self) -> RequestOutput:
        """The request as it is now; what is new counts from the call before."""
        output = RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=tuple(self.token_ids),
            text=self.text,
            new_token_ids=tuple(self.token_ids[self.num_tokens_out :]),
            new_text=self.text[self.num_chars_out :],
            logprobs=tuple(self.logprobs) if self.params.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_preemptions=self.num_preemptions,
        )
        self.num_tokens_out, self.num_chars_out = len(self.token_ids), len(self.text)
        return output

    def _finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        if self.stop_strings.matched is None:
            self.text += self.stop_strings.add(self.detokenizer.flush()) + self.stop_strings.flush()
            if reason == "length" and self.stop_strings.matched is not None:  # the last bytes were the rest of one
                reason, stop_reason = "stop", self.stop_strings.matched
        self.finish_reason, self.stop_reason = reason, stop_reason
