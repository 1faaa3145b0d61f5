"""A model whose split op any backend can capture, and the plain forward at a bucket's size to compare with.

`PIECEWORK_GPU_TESTS_ON=tape` runs what needs no CUDA on the CPU, to try the tests themselves out.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

import piecework as pw
from piecework.graphs.cuda_pool import CaptureStream


def pytest_configure(config: pytest.Config) -> None:
    # Where pytest-xdist is not installed too; groups stay together under --dist loadgroup.
    config.addinivalue_line("markers", "xdist_group(name): tests that one worker is to run")


ON_TAPE = os.environ.get("PIECEWORK_GPU_TESTS_ON") == "tape"
DEVICE = "cpu" if ON_TAPE else "cuda"
CAPTURE_DEVICE = "tape" if ON_TAPE else "cuda"

VOCAB, HIDDEN, NUM_SLOTS = 64, 64, 512
SPARE = NUM_SLOTS
"""The slot of padded rows; what it holds is seen by padded rows alone."""

BACKENDS = (("full", "eager"), ("full", "aot_eager"), ("breakable", "eager"), ("tc_piecewise", "aot_eager"))
DECODE, PREFILL = (1, 2, 4, 8, 16), (64, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepContext:
    """Where each token's row goes, and which row it sees."""

    slots: torch.Tensor = pw.context_field(pad=SPARE)
    """[tokens], int64: distinct, but for padded rows."""
    sources: torch.Tensor = pw.context_field(pad=SPARE)
    """[tokens], int64."""


@pw.split_op(mutates_args=("cache", "out"), name="piecework_gpu::mix", capturable=True)
def mix(x: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
    """Stores each row at its slot, then gives each token its row and the one that it sees."""
    context = pw.get_context(StepContext)
    cache.index_copy_(0, context.slots, x)
    torch.add(x, cache.index_select(0, context.sources), alpha=0.5, out=out)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = torch.nn.Linear(2 * HIDDEN, HIDDEN)
        self.register_buffer("cache", torch.zeros(NUM_SLOTS + 1, 2 * HIDDEN), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        out = torch.empty_like(y)
        mix(y, self.cache, out)
        return torch.nn.functional.layer_norm(x + self.down(torch.tanh(out)), (HIDDEN,))


class Toy(torch.nn.Module):
    """Two layers; every row depends on rows of earlier steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, HIDDEN)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + positions[:, None] * 0.01
        for layer in self.layers:
            x = layer(x)
        return x


class GpuKit:
    """What the tests here share: modules of tests cannot import each other."""

    device, on_tape, backends, hidden = DEVICE, ON_TAPE, BACKENDS, HIDDEN
    Toy, Layer = Toy, Layer
    mix = staticmethod(mix)
    dynamic_dims: Mapping[str, Any] = {"input_ids": {0: "tokens"}, "positions": 0}

    def model(self, model: torch.nn.Module | None = None) -> torch.nn.Module:
        """`model`, or a Toy, on the device."""
        return (model or Toy()).to(DEVICE).eval().requires_grad_(False)

    def config(self, backend: str, compiler: str = "eager", **options: Any) -> pw.GraphConfig:
        phase = {"backend": backend, "compiler": compiler, "max_padding_waste": 1.0}
        return pw.GraphConfig(
            prefill=pw.PhaseConfig(**phase, buckets=options.pop("prefill", PREFILL)),
            decode=pw.PhaseConfig(**phase, buckets=options.pop("decode", DECODE)),
            capture_device=CAPTURE_DEVICE,
            **options,
        )

    def runtime(self, model: torch.nn.Module, backend: str, compiler: str = "eager", **options: Any) -> pw.Runtime:
        return pw.Runtime(model, self.config(backend, compiler, **options), dynamic_dims=self.dynamic_dims)

    def step(self, num_tokens: int) -> tuple[dict[str, torch.Tensor], StepContext]:
        """The inputs and the context of a step, drawn at random on the CPU."""
        slots = torch.randperm(NUM_SLOTS)[:num_tokens]
        sources = torch.randint(0, NUM_SLOTS, (num_tokens,))
        ids, positions = torch.randint(0, VOCAB, (num_tokens,)), torch.arange(num_tokens)
        context = StepContext(slots=slots.to(DEVICE), sources=sources.to(DEVICE))
        return {"input_ids": ids.to(DEVICE), "positions": positions.to(DEVICE)}, context

    def reference(self, model: torch.nn.Module, compiler: str) -> Reference:
        return Reference(self, model, compiler)

    def pool_bytes(self) -> int:
        """Bytes of all private pools of torch's allocator but those of cuBLAS workspaces, asked of torch itself."""
        gc.collect()
        # No isinstance: it asks proxies for their class, and one of torch warns then.
        streams = [thing for thing in gc.get_objects() if type(thing) is CaptureStream]
        not_captures = {(0, 0), *(tuple(stream._workspaces.id) for stream in streams)}
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) not in not_captures)

    def give_back(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


class Reference:
    """The same program uncaptured, on a copy of the model that has its own cache."""

    def __init__(self, kit: GpuKit, model: torch.nn.Module, compiler: str) -> None:
        self.model = copy.deepcopy(model)
        self._runtime = None if compiler == "eager" else kit.runtime(self.model, "disabled", compiler)

    def run(
        self, phase: str, inputs: Mapping[str, torch.Tensor], context: StepContext, buckets: Sequence[int] = ()
    ) -> torch.Tensor:
        """The eager forward runs at the bucket's size, as a capture of it does."""
        num_tokens = len(inputs["input_ids"])
        if self._runtime is not None:
            result: torch.Tensor = self._runtime.run(phase, inputs, context=context)
            return result.clone()
        buckets = buckets or (DECODE if phase == "decode" else PREFILL)
        size = next((bucket for bucket in buckets if bucket >= num_tokens), num_tokens)
        padded = {name: _grown(tensor, size, 0) for name, tensor in inputs.items()}
        fields = {name: _grown(tensor, size, SPARE) for name, tensor in vars(context).items()}
        with torch.inference_mode(), pw.use_context(StepContext(**fields)):
            result = self.model(**padded)
        return result[:num_tokens].clone()


def _grown(tensor: torch.Tensor, size: int, value: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_full((size - len(tensor),), value)])


@pytest.fixture
def gpu() -> GpuKit:
    """Starts each test with the memory of the tests before it given back."""
    kit = GpuKit()
    if not ON_TAPE:
        kit.give_back()
    return kit


@pytest.fixture
def cuda_only() -> None:
    if ON_TAPE:
        pytest.skip("about CUDA itself")
