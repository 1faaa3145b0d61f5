"""A context's plan before captures that no step precedes: one that was left for later, and one in another pool."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

import piecework as pw

PLANNED: list[tuple[int, list[int]]] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    rows: torch.Tensor = pw.context_field(pad=-1)

    def plan(self) -> None:
        PLANNED.append((len(self.rows), self.rows.tolist()))


def make(startup: str) -> pw.Runtime:
    phase = pw.PhaseConfig(backend="full", buckets=(2, 4), max_padding_waste=1.0)
    config = pw.GraphConfig(decode=phase, capture_device="tape", startup=startup, promotion_budget_ms=0)
    return pw.Runtime(nn.Linear(4, 4), config, dynamic_dims={"input": 0})


def step(runtime: pw.Runtime, num_tokens: int) -> None:
    runtime.run("decode", {"input": torch.ones(num_tokens, 4)}, Planned(rows=torch.arange(num_tokens)))


def test_a_capture_that_was_left_for_later_is_planned_for_padding() -> None:
    PLANNED.clear()
    runtime = make("tiered")
    step(runtime, 2), step(runtime, 4)  # the second writes over what the first was filled with
    assert PLANNED == [(2, [0, 1]), (4, [0, 1, 2, 3])]
    assert runtime.promote() >= 2
    assert sorted(PLANNED[2:]) == [(2, [-1, -1]), (4, [-1, -1, -1, -1])]
    PLANNED.clear()
    step(runtime, 2)
    assert PLANNED == [(2, [0, 1])]
    assert runtime.counters["replays"] == 1
    runtime.close()


def test_captures_in_another_pool_are_planned_for_padding() -> None:
    PLANNED.clear()
    runtime = make("lazy")
    step(runtime, 2), step(runtime, 4)
    PLANNED.clear()
    runtime.compact()
    assert sorted(PLANNED) == [(2, [-1, -1]), (4, [-1, -1, -1, -1])]
    step(runtime, 3)
    assert PLANNED[2:] == [(4, [0, 1, 2, -1])]
    runtime.close()
