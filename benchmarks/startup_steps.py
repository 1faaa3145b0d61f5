"""Steps of a server at its start: through our Runtime, or with plain PyTorch, compiled or not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from llama import BLOCK_SIZE, Llama
from plain_model import PlainModel
from startup_model import factory
from startup_spec import WHOLE, WHOLE_MAX_BS, Bucket, Spec
from torch.nn import functional as F

import piecework as pw
from piecework.ops.attention import AttentionContext


class Steps:
    """Does steps of one kind of model: made, then begun when the clock starts, then run."""

    def __init__(self, spec: Spec, llama: Llama) -> None:
        self.spec, self.llama = spec, llama
        self.head = llama.decoder.embed_tokens.weight
        self.inputs = {bucket: self._inputs(*bucket) for bucket in spec.buckets}

    def _inputs(self, phase: str, size: int) -> tuple[dict[str, torch.Tensor], AttentionContext]:
        return self.llama.decode_step(size, self.spec.seq_len) if phase == "decode" else self.llama.step([size], [size])

    def tokens(self, phase: str, hidden: torch.Tensor) -> list[int]:
        """The likeliest next token of each request; waits for the device, as an engine does."""
        with torch.inference_mode():
            rows = hidden if phase == "decode" else hidden[-1:]
            tokens: list[int] = F.linear(rows, self.head).argmax(-1).tolist()
        return tokens

    def begin(self) -> None:
        """Does what a server waits for until it is ready."""

    def run(self, bucket: Bucket) -> list[int]:
        """Does a step and waits for the device; returns the next tokens of its requests."""
        raise NotImplementedError

    @property
    def is_settled(self) -> bool:
        """Whether every bucket that came is at its best."""
        return True

    def is_prepared(self, bucket: Bucket) -> bool:
        """Whether the bucket had a step, where its first one takes long."""
        return True

    def state(self, bucket: Bucket) -> str:
        """What the last step of a bucket ran, so that steps of one kind can be compared."""
        return "same"

    def close(self) -> None:
        """Gives back what it holds."""


class OurSteps(Steps):
    """Through a Runtime under one of the startup policies."""

    def __init__(self, spec: Spec, llama: Llama, startup: str, compiler: str) -> None:
        super().__init__(spec, llama)
        phases = {
            "prefill": pw.PhaseConfig(compiler=compiler, buckets=spec.prefill),
            "decode": pw.PhaseConfig(compiler=compiler, buckets=spec.decode),
        }
        device = "auto" if llama.device.type == "cuda" else "tape"
        whole: dict[str, Any] = {}
        if startup == WHOLE:
            startup, whole = "tiered", {"enable_torch_compile": True, "torch_compile_max_bs": WHOLE_MAX_BS}
        config = pw.GraphConfig(**phases, startup=startup, capture_device=device, **whole)
        example = torch.zeros(2, dtype=torch.int64, device=llama.device)
        nothing = AttentionContext.build(
            query_lens=(), seq_lens=(), block_tables=(), block_size=BLOCK_SIZE, device=llama.device
        )
        most_blocks = -(-max(spec.seq_len, max(spec.prefill)) // BLOCK_SIZE)
        self._make = functools.partial(
            pw.Runtime,
            llama.decoder,
            config,
            dynamic_dims={"input_ids": {0: "tokens"}, "positions": {0: "tokens"}},
            output_dims={"": 0},
            example_inputs={"input_ids": example, "positions": example.clone()},
            example_context=nothing,
            context_sizes={"requests": max(spec.decode), "blocks": most_blocks},
            model_factory=factory(spec.shape, spec.num_layers, llama.dtype, llama.device, spec.num_blocks),
        )
        self._replays_of: dict[Bucket, float] = {}

    def begin(self) -> None:
        self.runtime = self._make()

    def run(self, bucket: Bucket) -> list[int]:
        phase, _ = bucket
        inputs, context = self.inputs[bucket]
        return self.tokens(phase, self.runtime.run(phase, inputs, context=context))

    @property
    def is_settled(self) -> bool:
        return self.runtime.settled

    def state(self, bucket: Bucket) -> str:
        replays = self.runtime.counters.by_phase_and_bucket().get(bucket, {}).get("replays", 0)
        was_replay, self._replays_of[bucket] = replays > self._replays_of.get(bucket, 0), replays
        kinds = [e.program.kind for e in self.runtime.entries if (str(e.phase), e.bucket) == bucket]
        return f"{'/'.join(kinds)}{', replayed' if was_replay else ''}"

    def close(self) -> None:
        self.runtime.close()


class PlainSteps(Steps):
    """Plain PyTorch over the same weights, each bucket with a model and, compiled, a graph of its own."""

    def __init__(self, spec: Spec, llama: Llama, *, compiled: bool) -> None:
        super().__init__(spec, llama)
        self.compiled = compiled
        # All buckets share one forward, and each is a graph of it.
        torch._dynamo.config.recompile_limit = 4 * len(spec.buckets)
        self._count: dict[Bucket, int] = dict.fromkeys(spec.buckets, 0)
        self._calls = {bucket: self._call(*bucket) for bucket in spec.buckets}

    def is_prepared(self, bucket: Bucket) -> bool:
        return not self.compiled or self._count[bucket] > 0

    def run(self, bucket: Bucket) -> list[int]:
        self._count[bucket] += 1
        return self.tokens(bucket[0], self._calls[bucket]())

    def _call(self, phase: str, size: int) -> Callable[[], torch.Tensor]:
        inputs, context = self.inputs[phase, size]
        decodes = phase == "decode"
        batch, max_len = (size, self.spec.seq_len) if decodes else (1, size)
        plain = PlainModel(self.llama.decoder, batch=batch, max_len=max_len, with_head=False)
        plain.fill_caches(self.llama.decoder, context.block_table)
        ids = inputs["input_ids"][:, None] if decodes else inputs["input_ids"][None]
        positions = inputs["positions"][:1] if decodes else inputs["positions"]
        if not self.compiled:

            def eager() -> torch.Tensor:
                with torch.inference_mode():
                    return _rows(plain(ids, positions), decodes)

            return eager
        on_cuda = self.llama.device.type == "cuda"
        how: dict[str, Any] = {"mode": "reduce-overhead"} if on_cuda else {"backend": "aot_eager"}
        model = torch.compile(plain, fullgraph=True, dynamic=False, **how)

        def step() -> torch.Tensor:
            with torch.no_grad():
                torch.compiler.cudagraph_mark_step_begin()
                return _rows(model(ids, positions), decodes)

        return step

    @property
    def is_settled(self) -> bool:
        # A compiled model compiles, records and then replays.
        return not self.compiled or min(self._count.values()) >= 3


def _rows(hidden: torch.Tensor, decodes: bool) -> torch.Tensor:
    return hidden[:, 0] if decodes else hidden[0]
