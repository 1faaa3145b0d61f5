"""Models that are a function, captured on the tape, and a split op that writes a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import piecework as pw

WIDTH = 4
ALL = ("full", "breakable", "tc_piecewise")
EAGER = ("full", "breakable")
OPTIONS = ("startup", "debug_captures", "max_captures", "evaluate_guards", "cuda_graph_memory_budget")


class Model(nn.Module):
    """A module whose forward is a function of (module, x)."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor, **more: Any) -> Any:
        return self.function(self, x, **more)


def runtime_of(model: nn.Module, backend: str, *, buckets: tuple[int, ...] = (2, 4, 8), **options: Any) -> Any:
    given = {key: options.pop(key) for key in OPTIONS if key in options}
    phase = pw.PhaseConfig(backend=backend, buckets=buckets)
    config = pw.GraphConfig(prefill=phase, decode=phase, capture_device="tape", **given)
    options.setdefault("dynamic_dims", {"x": 0})
    return pw.Runtime(model, config, **options)


def x_of(num_tokens: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed * 100 + num_tokens))


@dataclasses.dataclass(frozen=True)
class Step:
    """What the toys read."""

    gain: torch.Tensor = pw.context_field(pad=0)
    power: float = 1.0


@pw.split_op(mutates_args=("cache",), name="piecework_more::store", capturable=True)
def store(x: torch.Tensor, cache: torch.Tensor) -> None:
    """Adds to the cache, unless the step says that there is nothing to store."""
    step = pw.get_context(Step)
    if step.power != 0:
        cache[: x.shape[0]] += x * step.gain[:, None]
