"""A model and a context in which every value shows, and how to ask which way a step took."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

import piecework as pw
from piecework.ops.context import host_field

WIDTH = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wide:
    """A context with everything that contexts have."""

    rows: torch.Tensor = pw.context_field(pad=-1)
    start: torch.Tensor = pw.context_field(pad="last", slots={0: "requests"}, plus={0: 1})
    table: torch.Tensor = pw.context_field(pad=0, slots={0: "requests", 1: "blocks"})
    gain: Any = 1.0
    seen: list[int] = host_field(default_factory=list)
    number: int = host_field(default=0)


class Other(Wide):
    """Another class with the same fields."""


class Planned(Wide):
    """A context with a plan, which writes into a static tensor."""

    def plan(self) -> None:
        self.rows.masked_fill_(self.rows < 0, -7)


@pw.split_op(mutates_args=("out",), name="piecework_plans::read", capturable=True)
def read(x: torch.Tensor, out: torch.Tensor) -> None:
    """Every value of the context shows in the result."""
    wide = pw.get_context(Wide)
    sums = wide.rows.sum() + 10 * wide.start.sum() + 100 * wide.table.sum() + 1000 * len(wide.table)
    out.copy_(x * float(wide.gain) + sums)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.zeros(WIDTH))
        self.extra = None
        self.lists = [torch.zeros(WIDTH)]

    def forward(self, x: torch.Tensor, gain: Any = 1) -> torch.Tensor:
        y = self.linear(x) + self.offset + self.lists[0]
        if self.extra is not None:
            y = y + self.extra
        out = torch.empty_like(y)
        read(y, out)
        return out * gain if type(gain) is not bool else out + 3


def wide(num_tokens: int = 3, num_blocks: int = 2, kind: type = Wide, **fields: Any) -> Wide:
    given = {
        "rows": torch.arange(num_tokens),
        "start": torch.arange(num_tokens + 1, dtype=torch.int32),
        "table": torch.ones(num_tokens, num_blocks, dtype=torch.int32),
    }
    return kind(**{**given, **fields})


def wide_runtime(model: nn.Module, backend: str = "full", **options: Any) -> Any:
    phase = pw.PhaseConfig(backend=backend, buckets=(2, 4, 8))
    options.setdefault("dynamic_dims", {"x": 0})
    config = pw.GraphConfig(prefill=phase, decode=phase, capture_device="tape", **options.pop("config", {}))
    return pw.Runtime(model, config, context_sizes={"blocks": 4}, **options)


def num_short(runtime: Any) -> int:
    return runtime._captures.plans.num_steps


def taken(runtime: Any, *args: Any, **kwargs: Any) -> bool:
    """Runs a step; whether it took the shorter way."""
    before = num_short(runtime)
    runtime.run(*args, **kwargs)
    return num_short(runtime) > before


def ones(num_tokens: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(num_tokens, WIDTH, dtype=dtype)
