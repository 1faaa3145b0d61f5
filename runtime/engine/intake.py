"""From a prompt to a request: everything that would go wrong later is refused here."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import SupportsIndex

from ...errors import InputError
from .block_manager import BlockManager
from .config import ModelConfig
from .detokenizer import Detokenizer
from .params import SamplingParams
from .request import Request
from .stop import StopStrings
from .tokenizer import Tokenizer


class Intake:
    """Makes the requests of one engine."""

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, blocks: BlockManager, *, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._blocks = blocks
        self._max_model_len = max_model_len

    def request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        *,
        request_id: str,
        where: str,
        owner: object = None,
    ) -> Request:
        """The request of a prompt; `where` is what an error calls the prompt.

        Raises:
            InputError: the prompt or the params do not fit the model or the cache.
        """
        params = params if params is not None else SamplingParams()
        self._check_params(params)
        token_ids = self._token_ids(prompt, where)
        num_tokens = len(token_ids)
        room = self._max_model_len - num_tokens
        if room < 1:
            raise InputError(
                f"{where}: expected at most {self._max_model_len - 1} tokens, so that the context of "
                f"{self._max_model_len} has room for an answer, got {num_tokens}; shorten the prompt"
                + self._can_be_raised(num_tokens)
            )
        max_new_tokens = min(params.max_new_tokens, room)
        self._check_fits_alone(num_tokens, max_new_tokens, where)
        eos_token_ids = frozenset() if params.ignore_eos else self._config.eos_token_ids
        return Request(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=tuple(token_ids),
            params=params,
            max_new_tokens=max_new_tokens,
            stop_token_ids=eos_token_ids.union(params.stop_token_ids),
            detokenizer=Detokenizer(self._tokenizer.decode, token_ids),
            stop_strings=StopStrings(params.stop),
            owner=owner,
        )

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise InputError(f"params: expected SamplingParams, got {type(params).__name__}; make SamplingParams(...)")
        vocab_size = self._config.vocab_size
        if params.logprobs is not None and params.logprobs > vocab_size:
            raise InputError(
                f"logprobs: expected at most the model's vocab_size {vocab_size}, got {params.logprobs}; lower it"
            )
        unknown = [token for token in params.stop_token_ids if token >= vocab_size]
        if unknown:
            raise InputError(
                f"stop_token_ids: expected token ids from 0 to {vocab_size - 1}, got {unknown[0]}; use the tokenizer "
                f"of this checkpoint"
            )

    def _token_ids(self, prompt: str | Sequence[int], where: str) -> list[int]:
        if isinstance(prompt, (bytes, bytearray)):
            raise InputError(f"{where}: expected a text or a list of token ids, got {prompt!r}; decode the bytes first")
        if not isinstance(prompt, Sequence):
            raise InputError(f"{where}: expected a text or a list of token ids, got {prompt!r}; put ids into a list")
        token_ids = self._encode(prompt, where) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise InputError(f"{where}: expected one token or more, got an empty prompt; write something there")
        vocab_size = self._config.vocab_size
        unknown = [token for token in token_ids if not _is_id(token, vocab_size)]
        if unknown:
            raise InputError(
                f"{where}: expected token ids from 0 to {vocab_size - 1}, got {unknown[0]!r}; use the tokenizer "
                f"of this checkpoint"
            )
        return [operator.index(token) for token in token_ids]

    def _encode(self, text: str, where: str) -> list[int]:
        # An empty text may still have a token, the one that the tokenizer puts at the start of every text.
        if not text:
            return []
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise InputError(f"{where}: expected a text, got half of a surrogate pair in {text!r}; decode it as UTF-8")
        return self._tokenizer.encode(text)

    def _can_be_raised(self, num_tokens: int) -> str:
        limit = self._config.max_position_embeddings
        return f" or raise max_model_len (the model's limit is {limit})" if num_tokens < limit else ""

    def _check_fits_alone(self, num_tokens: int, max_new_tokens: int, where: str) -> None:
        # The last new token is never fed back, so the cache does not hold it.
        num_blocks = self._blocks.blocks_for(num_tokens + max_new_tokens - 1)
        if num_blocks > self._blocks.num_blocks:
            raise InputError(
                f"{where}: {num_tokens} tokens and an answer of {max_new_tokens} need {num_blocks} blocks of "
                f"{self._blocks.block_size} in the KV cache, which has {self._blocks.num_blocks}; raise num_blocks, "
                f"shorten the prompt or ask for fewer tokens"
            )


def _is_id(token: SupportsIndex, vocab_size: int) -> bool:
    """Whether it is an integer, of Python or of another library, that the model has a row for."""
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        return False
    try:
        return 0 <= operator.index(token) < vocab_size
    except TypeError:  # a tensor has the method, whatever is in it
        return False
