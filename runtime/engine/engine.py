"""The engine: a checkpoint, its KV cache, a scheduler and a runtime; prompts in, text out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

import torch

from ...errors import InputError, RuntimeClosedError
from ...ops.attention import AttentionContext, check_attention_backend
from ...phases import GraphConfig, resolve
from ..building import start_workers
from ..runtime import Runtime
from .arguments import (
    check_positive,
    device_of,
    directory_of,
    dtype_of,
    max_model_len_of,
    reachable_buckets,
    step_limits_of,
)
from .batch import step_inputs
from .block_manager import BlockManager
from .config import ModelConfig
from .factory import engine_factory
from .intake import Intake
from .kv_cache import allocate_kv_cache, default_num_blocks
from .models import ARCHITECTURES, build_model
from .output import EngineState, RequestOutput
from .params import SamplingParams
from .request import Request
from .sampler import Draw, Sampler
from .scheduler import Scheduler
from .tokenizer import Tokenizer
from .turns import Turns
from .weights import load_weights

T = TypeVar("T")

OnOutput = Callable[[int, RequestOutput], None]
"""Called with (index of the prompt, what is new) after each step that gave the prompt a token."""


class LLMEngine:
    """Runs a checkpoint through a `Runtime`, with all requests that there are in one batch.

    Either `generate`, or `add_request` and then `step` until `has_unfinished` is false. A step runs all requests for
    which there is room, whoever sent them; who waits for a request gets its output.

    Threads: every method may be called from any thread. One lock is held for a step or for a shorter call, and threads
    get it in turn: a request can be added while others run, and concurrent calls of `generate` share their steps.

    Errors: if a step raises, its requests keep their blocks and are as before, and the next `step` tries them again;
    `abort` those that should not be. `generate` aborts its own requests before it raises.

    Args:
        model_dir: a Hugging Face directory: config.json, model.safetensors (or its index and shards), tokenizer.json;
            by default the small model that comes with the package.
        config: how the two phases execute. A default ladder ends at the largest step that there can be.
        dtype: of weights and cache, a torch dtype or its name; by default the checkpoint's own.
        device: by default the current CUDA device if there is one, else the CPU.
        block_size: tokens in a block of the KV cache.
        num_blocks: blocks of the KV cache; by default 64 requests of the longest length, as far as memory allows.
        max_model_len: longest prompt plus answer, in tokens; by default the model's own limit.
        max_num_seqs: requests in one step at most; by default 256.
        max_num_batched_tokens: tokens in one step at most, at least `max_num_seqs`; by default 8192 or
            `max_model_len`, whichever is more.
        enable_chunked_prefill: whether a prompt may be cut to fill a step up to `max_num_batched_tokens`. Without it,
            a prompt waits until it fits as a whole.

    Raises:
        ModelError: the checkpoint cannot be used, or its tokenizer is not made for it.
        ConfigError: an argument is not acceptable here. Both are raised before weights are read, where possible.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        config: GraphConfig | None = None,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_chunked_prefill: bool = True,
    ) -> None:
        config = config if config is not None else GraphConfig()
        self.directory = directory_of(model_dir)
        self.device = device_of(device)
        weight_dtype = dtype_of(dtype)
        check_positive(block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len)
        check_positive(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        resolve(config, device_type=self.device.type, cuda_available=torch.cuda.is_available())
        self.model_config = ModelConfig.from_directory(self.directory, frozenset(ARCHITECTURES))
        known_dtype = weight_dtype or self.model_config.dtype
        check_attention_backend(
            config.attention_backend, self.device.type, dtype=known_dtype, head_size=self.model_config.head_size
        )
        self.max_model_len = max_model_len_of(max_model_len, self.model_config.max_position_embeddings)
        self.max_num_seqs, self.max_num_batched_tokens = step_limits_of(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            max_model_len=self.max_model_len,
        )
        config = reachable_buckets(
            config, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens
        )
        self.tokenizer = Tokenizer(self.directory)
        self.tokenizer.check_fits(self.model_config.vocab_size)
        # A compile worker takes as long to start as many weights take to load.
        workers = start_workers(config, self.device)
        self.model = build_model(self.model_config)
        load_weights(self.model, self.directory, device=self.device, dtype=weight_dtype)
        if num_blocks is None:
            num_blocks = default_num_blocks(
                self.model,
                self.model_config,
                block_size=block_size,
                max_model_len=self.max_model_len,
                reserved_bytes=workers.reserved_bytes if workers is not None else 0,
            )
        allocate_kv_cache(self.model, self.model_config, num_blocks=num_blocks, block_size=block_size)
        self._blocks = BlockManager(num_blocks=num_blocks, block_size=block_size)
        self._scheduler = Scheduler(
            self._blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
        )
        self._intake = Intake(self.tokenizer, self.model_config, self._blocks, max_model_len=self.max_model_len)
        self._sampler = Sampler()
        self._requests: dict[str, Request] = {}
        """Every request whose last output was not taken yet."""
        self._unread: dict[str, Request] = {}
        """Those of them that have something new to tell."""
        self._numbers = itertools.count()
        self._lock = Turns()
        self._closed = False
        self._max_blocks = self._blocks.blocks_for(self.max_model_len)
        """Blocks of the longest request."""
        example = torch.zeros(2, dtype=torch.int64, device=self.device)
        with self._own_dtype():
            self.runtime = Runtime(
                self.model.model,
                config,
                dynamic_dims={"input_ids": {0: "tokens"}, "positions": {0: "tokens"}},
                output_dims={"": 0},
                example_inputs={"input_ids": example, "positions": example.clone()},
                context_sizes={"requests": self.max_num_seqs, "blocks": self._max_blocks},
                example_context=AttentionContext.build(
                    query_lens=(),
                    seq_lens=(),
                    block_tables=(),
                    block_size=block_size,
                    num_blocks=num_blocks,
                    device=self.device,
                ),
                model_factory=engine_factory(
                    self.model_config,
                    dtype=next(self.model.parameters()).dtype,
                    device=self.device,
                    num_blocks=num_blocks,
                    block_size=block_size,
                ),
                workers=workers,
            )

    def add_request(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> str:
        """Puts a prompt, a text or its token ids, at the end of the queue; `step` reports what comes of it.

        Returns:
            The request's id: `request_id`, or one that is made up.

        Raises:
            InputError: the prompt is empty, too long for the context or for the whole cache, or holds ids that the
                model does not know; the params do not fit the model; or a request of this id is there already.
        """
        with self._lock:
            self._check_open("add_request")
            request = self._intake.request(prompt, params, request_id=self._new_id(request_id), where="prompt")
            self._add(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Runs one step of all requests that there is room for, and reports on those of `add_request`.

        Returns:
            An output for each request that has got something new: a token, in most cases, or its end. None for a
            request that waits or whose prompt is not computed yet.

        Raises:
            Whatever `Runtime.run` raises; the requests are then as before.
        """
        with self._lock:
            self._check_open("step")
            self._run_step()
            return self._take(None)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request of `add_request` runs, waits, or has an output that no `step` has returned yet."""
        with self._lock:
            return any(request.owner is None for request in self._requests.values())

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_output: OnOutput | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt, a text or its token ids; returns the last output of each, in the same order.

        Args:
            params: for all prompts, or one for each; by default greedy, 16 tokens.
            on_output: called in this thread, with no lock held. If it raises, the requests are aborted.

        Raises:
            InputError: as from `add_request`, before anything runs.
        """
        if isinstance(prompts, (str, bytes)):
            raise InputError("prompts: expected a list of prompts, got one text; put it into a list")
        listed: list[str | Sequence[int]] = _listed("prompts", prompts)
        each = _params_for(params, len(listed))
        owner = object()
        with self._lock:
            self._check_open("generate")
            requests = [
                self._intake.request(prompt, own, request_id=self._new_id(None), where=f"prompt {i}", owner=owner)
                for i, (prompt, own) in enumerate(zip(listed, each, strict=True))
            ]
            for request in requests:
                self._add(request)
        index_of = {request.request_id: index for index, request in enumerate(requests)}
        finished: dict[int, RequestOutput] = {}
        try:
            while len(finished) < len(requests):
                for output in self._advance(owner):
                    if on_output is not None:
                        on_output(index_of[output.request_id], output)
                    if output.finish_reason is not None:
                        finished[index_of[output.request_id]] = output
        finally:
            with self._lock:
                for request in requests:
                    self._drop(request)
        return [finished[index] for index in range(len(requests))]

    def abort(self, request_id: str) -> bool:
        """Ends a request; its last output has the finish reason `abort`.

        Returns:
            False if there is no such request or it has finished already, which may happen at any time.
        """
        with self._lock:
            request = self._requests.get(request_id)
            if request is None or request.finish_reason is not None:
                return False
            request.abort()
            self._scheduler.remove(request)
            self._unread[request.request_id] = request
            return True

    @property
    def state(self) -> EngineState:
        """How full the engine is now."""
        with self._lock:
            return EngineState(
                num_waiting=len(self._scheduler.waiting),
                num_running=len(self._scheduler.running),
                num_blocks=self._blocks.num_blocks,
                num_free_blocks=self._blocks.num_free_blocks,
                num_preemptions=self._scheduler.num_preemptions,
            )

    def close(self) -> None:
        """Drops all requests and closes the runtime. Waits for a running step, whose `generate` then raises.

        A second call does nothing.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for request in list(self._requests.values()):
                self._drop(request)
            self.runtime.close()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Everything below runs with the lock held, except `_advance`, which takes it.

    def _check_open(self, where: str) -> None:
        if self._closed:
            raise RuntimeClosedError(f"LLMEngine.{where}: the engine was closed; make a new LLMEngine")

    def _new_id(self, asked: str | None) -> str:
        if asked is None:
            return next(name for name in map("request-{}".format, self._numbers) if name not in self._requests)
        if not isinstance(asked, str):
            raise InputError(f"request_id: expected a text, got {asked!r}; make it one with str(...)")
        if asked in self._requests:
            raise InputError(f"request_id: expected one that no request has, got {asked!r}; choose another")
        return asked

    def _add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._scheduler.add(request)

    def _advance(self, owner: object) -> list[RequestOutput]:
        """The new outputs of a call of `generate`, after a step if there are none yet."""
        with self._lock:
            self._check_open("generate")
            if not any(request.owner is owner for request in self._unread.values()):
                self._run_step()
            return self._take(owner)

    def _run_step(self) -> None:
        """One step. Nothing of a request changes before all of the step's tokens are known."""
        schedule = self._scheduler.schedule()
        if schedule is None:
            return
        step = step_inputs(
            schedule.chunks,
            block_size=self._blocks.block_size,
            device=self.device,
            num_blocks=self._blocks.num_blocks,
            max_blocks=self._max_blocks,
        )
        ready = [chunk.request for chunk in schedule.chunks if chunk.is_last]
        tokens = []
        with self._own_dtype():
            hidden = self.runtime.run(schedule.phase, step.inputs, context=step.context)
            if ready:
                draws = [Draw(params=request.params, place=len(request.token_ids)) for request in ready]
                with torch.inference_mode(), self.runtime.beside_steps():
                    tokens = self._sampler.sample(self.model.logits(hidden[step.last_rows]), draws)
        for request, (token, logprobs) in zip(ready, tokens, strict=True):
            request.add(token, logprobs)
            self._unread[request.request_id] = request
            if request.finish_reason is not None:
                self._scheduler.remove(request)
        for chunk in schedule.chunks:
            chunk.request.num_computed += chunk.num_tokens

    def _own_dtype(self) -> torch.autocast:
        """Inside, an autocast of the caller is off: weights and cache are of one dtype, and so is what runs."""
        return torch.autocast(self.device.type, enabled=False)

    def _drop(self, request: Request) -> None:
        """Forgets a request, wherever it is; nobody is told of it any more."""
        self._scheduler.remove(request)
        self._unread.pop(request.request_id, None)
        self._requests.pop(request.request_id, None)

    def _take(self, owner: object) -> list[RequestOutput]:
        """The outputs of whoever `owner` is, each told once."""
        taken = [request for request in self._unread.values() if request.owner is owner]
        for request in taken:
            del self._unread[request.request_id]
            if request.finish_reason is not None:
                del self._requests[request.request_id]
        return [request.output() for request in taken]


def _params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    listed = _listed("params", params)
    if len(listed) != count:
        raise InputError(f"params: expected one for each of {count} prompts, got {len(listed)}; give one, or one each")
    return listed


def _listed(name: str, values: Iterable[T]) -> list[T]:
    if not isinstance(values, Iterable) or isinstance(values, Mapping):
        raise InputError(f"{name}: expected a list, got {type(values).__name__}; put it into a list")
    return list(values)
