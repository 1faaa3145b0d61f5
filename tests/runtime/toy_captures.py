"""The toy decoder of the capture tests, and a runtime of it on the tape."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

import piecework as pw

WIDTH = 8
LAYERS = 3
BODIES = [0]
BACKENDS = (
    ("full", "eager"),
    ("full", "aot_eager"),
    ("breakable", "eager"),
    ("tc_piecewise", "eager"),
    ("tc_piecewise", "aot_eager"),
)
SEGMENTS = {"full": 1, "breakable": LAYERS + 1, "tc_piecewise": LAYERS + 1}


@dataclasses.dataclass(frozen=True)
class Slots:
    """Which row of the cache each token is written to."""

    slots: torch.Tensor = pw.context_field(pad=-1)


@pw.split_op(mutates_args=("cache", "out"), name="piecework_captures::mix", capturable=True)
def mix(x: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
    """Stores each token's row at its slot, -1 for none; the last row of the cache is a dump for those."""
    BODIES[0] += 1
    slots = pw.get_context(Slots).slots
    cache[torch.where(slots < 0, len(cache) - 1, slots)] = x
    out.copy_(x + cache[:-1].sum(0))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cache", torch.zeros(33, WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        out = torch.empty_like(y)
        mix(y, self.cache, out)
        return x + self.down(out.tanh())


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Affine(nn.Module):
    """No split op, no cache: what it computes depends on its inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x).tanh()
        return y


def config_of(backend: str, compiler: str = "eager", *, buckets: tuple[int, ...] = (2, 4, 8), **options: Any) -> Any:
    phase = pw.PhaseConfig(backend=backend, compiler=compiler, buckets=buckets)
    return pw.GraphConfig(prefill=phase, decode=phase, capture_device="tape", **options)


def runtime_of(model: nn.Module, backend: str, compiler: str = "eager", *, options: Any = None, **more: Any) -> Any:
    more.setdefault("dynamic_dims", {"x": 0})
    return pw.Runtime(model, config_of(backend, compiler, **(options or {})), **more)


def x_of(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed * 100 + num_tokens))


def step(runtime: Any, num_tokens: int, seed: int = 0, phase: str = "decode") -> torch.Tensor:
    slots = torch.arange(num_tokens) + seed % 8
    result: torch.Tensor = runtime.run(phase, {"x": x_of(num_tokens, seed)}, Slots(slots))
    return result


def plain(model: nn.Module, num_tokens: int, seed: int = 0) -> torch.Tensor:
    with torch.inference_mode(), pw.use_context(Slots(torch.arange(num_tokens) + seed % 8)):
        result: torch.Tensor = model(x_of(num_tokens, seed))
    return result
