"""A toy decoder with one split op a layer, and what is known about it.

Worked out by hand, for `num_layers` layers:
- opaque regions: one a layer;
- pieces: one before the first split op, one after the last, one between each two: `num_layers + 1`;
- distinct pieces: the first (embedding), the last (head) and the middle ones, which differ in nothing but tensors: 3;
- calls of the split op's body: `num_layers` a step.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import piecework as pw

HIDDEN = 16
VOCAB = 50


@dataclasses.dataclass
class Calls:
    """What the split op's body saw."""

    count: int = 0
    rows: list[int] = dataclasses.field(default_factory=list)
    contexts: list[object] = dataclasses.field(default_factory=list)


CALLS = Calls()


@dataclasses.dataclass(frozen=True)
class ToyContext:
    """Which cache row each token is written to."""

    slots: torch.Tensor = pw.context_field(pad=-1)


@pw.split_op(mutates_args=("cache", "out"), name="piecework_test::mix")
def mix(x: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """Stores each token's row at its slot and returns a mean that only reads the cache."""
    slots = pw.get_context(ToyContext).slots
    CALLS.count += 1
    CALLS.rows.append(x.shape[0])
    CALLS.contexts.append(slots.clone())
    kept = slots >= 0
    cache[slots[kept]] = x[kept].to(cache.dtype)
    out.copy_(x * scale + cache.sum(0) * kept[:, None])


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(HIDDEN, HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("cache", torch.zeros(64, HIDDEN), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        out = torch.empty_like(y)
        mix(y, self.cache, out, 0.5)
        return x + self.down(torch.tanh(out))


class Toy(torch.nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, HIDDEN)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = torch.nn.Linear(HIDDEN, VOCAB)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, bias: torch.Tensor | None = None, gain: float = 1.0
    ) -> torch.Tensor:
        x = self.embed(input_ids) + positions[:, None] * 0.01
        if bias is not None:
            x = x + bias
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * gain

    def clear(self) -> None:
        for layer in self.layers:
            layer.cache.zero_()


DYNAMIC_DIMS = {"input_ids": {0: "tokens"}, "positions": 0}


def make_inputs(num_tokens: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, VOCAB, (num_tokens,)), "positions": torch.arange(num_tokens)}


def make_context(num_tokens: int) -> ToyContext:
    return ToyContext(slots=torch.arange(num_tokens) % 64)


def reference(model: Toy, inputs: dict[str, torch.Tensor], context: ToyContext) -> torch.Tensor:
    """The plain forward from an empty cache, leaving it empty and the calls uncounted."""
    saved = dataclasses.replace(CALLS, rows=list(CALLS.rows), contexts=list(CALLS.contexts))
    model.clear()
    with torch.inference_mode(), pw.use_context(context):
        result: torch.Tensor = model(**inputs)
    model.clear()
    CALLS.count, CALLS.rows, CALLS.contexts = saved.count, saved.rows, saved.contexts
    return result


def config(compiler: str = "aot_eager", startup: str = "lazy", **kwargs: object) -> pw.GraphConfig:
    phase = {"compiler": compiler, "backend": "disabled"}
    return pw.GraphConfig(
        prefill=pw.PhaseConfig(**phase, buckets=(16, 32), **kwargs.pop("prefill", {})),
        decode=pw.PhaseConfig(**phase, buckets=(2, 4, 8), **kwargs.pop("decode", {})),
        startup=startup,
        **kwargs,
    )


class ToyKit:
    """Everything above, for the tests: modules of tests cannot import each other."""

    calls = CALLS
    Toy = Toy
    Context = ToyContext
    dynamic_dims = DYNAMIC_DIMS
    inputs = staticmethod(make_inputs)
    context = staticmethod(make_context)
    reference = staticmethod(reference)
    config = staticmethod(config)

    def runtime(
        self, model: torch.nn.Module, graph_config: pw.GraphConfig | None = None, **kwargs: object
    ) -> pw.Runtime:
        return pw.Runtime(model, graph_config or config(), dynamic_dims=DYNAMIC_DIMS, **kwargs)

    def step(self, runtime: pw.Runtime, phase: str, num_tokens: int) -> float:
        """Runs a step from an empty cache; returns the largest difference from the plain forward."""
        inputs, context = make_inputs(num_tokens), make_context(num_tokens)
        expected = reference(runtime.model, inputs, context)
        got = runtime.run(phase, inputs, context=context)
        runtime.model.clear()
        assert got.shape == expected.shape
        return float((got - expected).abs().max()) if num_tokens else 0.0


@pytest.fixture
def kit() -> ToyKit:
    CALLS.count = 0
    CALLS.rows.clear()
    CALLS.contexts.clear()
    return ToyKit()
