"""The engine: a checkpoint, its KV cache and a runtime; prompts in, text out."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import torch

from ...errors import ConfigError, InputError, RuntimeClosedError
from ...phases import GraphConfig, Phase, resolve
from ..runtime import Runtime
from .batch import FinishReason, Request, step_inputs
from .config import DTYPES, ModelConfig
from .kv_cache import KVCache, default_num_blocks
from .models import ARCHITECTURES, build_model
from .sampler import greedy
from .tokenizer import Tokenizer
from .weights import load_weights

OnToken = Callable[[int, int], None]
"""Called with (index of the prompt, new token id) as soon as a token is known, in the step that made it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What came of one prompt."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """New tokens, the end token included."""
    text: str
    """The new tokens as text, special tokens left out."""
    finish_reason: FinishReason
    """`stop`: an end token came; `length`: as many tokens as asked for, or as the context has room for."""


class Engine:
    """Runs a checkpoint through a `Runtime`, one batch at a time, greedily.

    A batch is prefilled in one step and then decoded together; a request that has finished leaves it. Prompts whose
    blocks do not fit beside the others wait for the next batch. Calls from several threads take turns.

    Args:
        model_dir: a Hugging Face directory: config.json, model.safetensors (or its index and shards), tokenizer.json.
        config: how the two phases execute.
        dtype: of weights and cache, a torch dtype or its name; by default the checkpoint's own.
        device: by default the current CUDA device if there is one, else the CPU.
        block_size: tokens in a block of the KV cache.
        num_blocks: blocks of the KV cache; by default 64 requests of the longest length, as far as memory allows.
        max_model_len: longest prompt plus answer, in tokens; by default the model's own limit.

    Raises:
        ModelError: the checkpoint cannot be used.
        ConfigError: an argument is not acceptable here. Both are raised before weights are read, where possible.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        config: GraphConfig | None = None,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
    ) -> None:
        config = config if config is not None else GraphConfig()
        directory = Path(model_dir)
        self.device = _device(device)
        weight_dtype = _dtype(dtype)
        _check_positive(block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len)
        resolve(config, device_type=self.device.type, cuda_available=torch.cuda.is_available())
        self.model_config = ModelConfig.from_directory(directory, frozenset(ARCHITECTURES))
        self.max_model_len = _max_model_len(max_model_len, self.model_config.max_position_embeddings)
        self.tokenizer = Tokenizer(directory)
        self.model = build_model(self.model_config)
        load_weights(self.model, directory, device=self.device, dtype=weight_dtype)
        if num_blocks is None:
            num_blocks = default_num_blocks(self.model, block_size=block_size, max_model_len=self.max_model_len)
        self.kv_cache = KVCache(self.model, num_blocks=num_blocks, block_size=block_size)
        self._lock = threading.Lock()
        self._closed = False
        example = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.runtime = Runtime(
            self.model.model,
            config,
            dynamic_dims={"input_ids": {0: "tokens"}, "positions": {0: "tokens"}},
            example_inputs={"input_ids": example, "positions": example.clone()},
        )

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 16,
        on_token: OnToken | None = None,
    ) -> list[Generation]:
        """Continues each prompt, a text or its token ids, by up to `max_new_tokens`.

        An answer ends at an end token, which belongs to it, or where the context of the model ends.

        Raises:
            InputError: a prompt is empty, too long or holds ids that the model does not know, or `max_new_tokens` is
                not positive; raised before anything runs.
        """
        requests = self._requests(prompts, max_new_tokens)
        waiting = deque(requests)
        with self._lock:
            if self._closed:
                raise RuntimeClosedError("Engine.generate: the engine was closed; make a new Engine")
            while waiting:
                self._run_batch(self._admit(waiting), on_token)
        return [self._generation(request) for request in requests]

    def close(self) -> None:
        """Closes the runtime. Waits for a running `generate`; a second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.runtime.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _requests(self, prompts: Sequence[str] | Sequence[Sequence[int]], max_new_tokens: int) -> list[Request]:
        if isinstance(prompts, str):
            raise InputError("prompts: expected a list of prompts, got one text; put it into a list")
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise InputError(f"max_new_tokens: expected 1 or more, got {max_new_tokens!r}; ask for one token at least")
        listed: list[str | Sequence[int]] = [*prompts]
        return [self._request(index, prompt, max_new_tokens) for index, prompt in enumerate(listed)]

    def _request(self, index: int, prompt: str | Sequence[int], max_new_tokens: int) -> Request:
        # An empty text may still have a token, the one that the tokenizer puts at the start of every text.
        token_ids = (self.tokenizer.encode(prompt) if prompt else []) if isinstance(prompt, str) else list(prompt)
        num_tokens = len(token_ids)
        if not token_ids:
            raise InputError(f"prompt {index}: expected one token or more, got an empty prompt; write something there")
        vocab_size = self.model_config.vocab_size
        unknown = [t for t in token_ids if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < vocab_size]
        if unknown:
            raise InputError(
                f"prompt {index}: expected token ids from 0 to {vocab_size - 1}, got {unknown[0]!r}; use the tokenizer "
                f"of this checkpoint"
            )
        room = self.max_model_len - num_tokens
        if room < 1:
            raise InputError(
                f"prompt {index}: expected at most {self.max_model_len - 1} tokens, so that the context of "
                f"{self.max_model_len} has room for an answer, got {num_tokens}; shorten the prompt"
                + self._can_be_raised(num_tokens)
            )
        request = Request(index=index, prompt_token_ids=token_ids, max_new_tokens=min(max_new_tokens, room))
        if self.kv_cache.blocks_for(request.num_stored) > self.kv_cache.num_blocks:
            raise InputError(
                f"prompt {index}: {num_tokens} tokens and an answer of {request.max_new_tokens} need "
                f"{self.kv_cache.blocks_for(request.num_stored)} blocks of {self.kv_cache.block_size} in the KV cache, "
                f"which has {self.kv_cache.num_blocks}; raise num_blocks, shorten the prompt or ask for fewer tokens"
            )
        return request

    def _can_be_raised(self, num_tokens: int) -> str:
        limit = self.model_config.max_position_embeddings
        return f" or raise max_model_len (the model's limit is {limit})" if num_tokens < limit else ""

    def _admit(self, waiting: deque[Request]) -> list[Request]:
        """Takes requests from the front of the queue, with blocks for their whole life, while the cache has room."""
        batch: list[Request] = []
        while waiting and self.kv_cache.blocks_for(waiting[0].num_stored) <= self.kv_cache.num_free_blocks:
            request = waiting.popleft()
            request.blocks = self.kv_cache.allocate(request.num_stored)
            batch.append(request)
        return batch

    def _run_batch(self, batch: list[Request], on_token: OnToken | None) -> None:
        running, phase = batch, Phase.PREFILL
        try:
            while running:
                for request, token in zip(running, self._step(phase, running), strict=True):
                    request.add(token, self.model_config.eos_token_ids)
                    if on_token is not None:
                        on_token(request.index, token)
                    if request.finish_reason is not None:
                        self.kv_cache.free(request.blocks)
                running = [request for request in running if request.finish_reason is None]
                phase = Phase.DECODE
        finally:
            for request in running:
                self.kv_cache.free(request.blocks)

    def _step(self, phase: Phase, requests: Sequence[Request]) -> list[int]:
        """Runs the pending tokens of the requests; returns the next token of each."""
        step = step_inputs(requests, block_size=self.kv_cache.block_size, device=self.device)
        hidden = self.runtime.run(phase, step.inputs, context=step.context)
        with torch.inference_mode():
            return greedy(self.model.logits(hidden[step.last_rows]))

    def _generation(self, request: Request) -> Generation:
        assert request.finish_reason is not None
        return Generation(
            prompt_token_ids=tuple(request.prompt_token_ids),
            token_ids=tuple(request.token_ids),
            text=self.tokenizer.decode(request.token_ids),
            finish_reason=request.finish_reason,
        )


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected cpu, cuda or cuda:N, got {str(device)!r}; use one of these")
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise ConfigError(f"device: expected one of {count} CUDA devices, got {found}; use cpu or another index")
        return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())
    return found


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto":
        return None
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise ConfigError(f"dtype: expected auto or one of {', '.join(DTYPES)}, got {dtype!r}; use one of these")
    return found


def _max_model_len(asked: int | None, limit: int) -> int:
    if asked is not None and asked > limit:
        raise ConfigError(
            f"max_model_len: expected at most the model's max_position_embeddings {limit}, got {asked}; lower it"
        )
    return asked if asked is not None else limit


def _check_positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name}: expected a positive integer, got {value!r}; use 1 or more")
