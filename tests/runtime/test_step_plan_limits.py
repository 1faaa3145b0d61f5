"""Many plans cost no more than few; what a plan or a capture relies on is all looked at."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import piecework as pw
from piecework.graphs import buffers
from piecework.runtime import capture_slots, step_plans
from piecework.runtime.step_plans import StepPlan

from . import toy_captures as toy
from .plan_models import Model, ones, taken, wide, wide_runtime
from .toy_captures import Toy, step


def origins(runtime: pw.Runtime) -> int:
    """How many are looked at when a plan is added: no fewer than plans have."""
    plans = runtime._captures.plans
    assert {plan.origin for plan in plans._plans.values()} <= plans._samples.keys()
    assert all(plan.origin == origin for origin, plan in plans._samples.items())
    return len(plans._samples)


def test_a_plan_is_added_without_a_look_at_each_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = wide_runtime(Model())
    for num_tokens in (3, 4, 5, 6, 7, 8):
        for num_blocks in (1, 2, 3, 4):
            for _ in range(3):
                runtime.run("decode", {"x": ones(num_tokens), "gain": 1}, wide(num_tokens, num_blocks))
    assert len(runtime._captures.plans) == 24
    assert origins(runtime) == 2  # of the buckets 4 and 8
    asked = []
    is_current = StepPlan.is_current
    monkeypatch.setattr(StepPlan, "is_current", lambda self: asked.append(self) or is_current(self))
    for _ in range(2):
        runtime.run("decode", {"x": ones(3), "gain": 1}, wide(rows=torch.arange(6)[::2]))
    assert len(runtime._captures.plans) == 25
    assert len(asked) == 2


def test_plans_that_went_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_plans, "MAX_PLANS", 3)
    runtime = toy.runtime_of(Toy(), "full")
    for num_tokens in (1, 2, 3, 4, 5, 6, 7, 8, 3, 8):
        for seed in range(3):
            step(runtime, num_tokens, seed)
        origins(runtime)
    assert len(runtime._captures.plans) == 3
    assert origins(runtime) == 2  # of the buckets 4 and 8; that of 2 is from before them
    runtime.compact()
    for _ in range(2):
        step(runtime, 8)
    assert len(runtime._captures.plans) == origins(runtime) == 1
    runtime.close()
    assert len(runtime._captures.plans) == origins(runtime) == 0


def test_a_value_of_a_context_whose_hash_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a key's part, and the key is let go of all the same."""

    class Value:
        number = 0

        def __hash__(self) -> int:
            return self.number

        def __eq__(self, other: object) -> bool:
            return self is other

        def __float__(self) -> float:
            return 1.0

    monkeypatch.setattr(step_plans, "MAX_PLANS", 2)
    runtime, value = wide_runtime(Model()), Value()
    for Value.number in range(6):
        for _ in range(3):
            runtime.run("decode", {"x": ones()}, wide(gain=value))
    assert runtime.counters["captures"] == 1
    runtime.compact()
    for _ in range(3):
        runtime.run("decode", {"x": ones()}, wide(gain=value))
    assert len(runtime._captures.plans) == 1


def test_an_attribute_in_the_place_of_a_field_that_was_not_set() -> None:
    """The number of attributes says nothing: a field with a default need not be one."""

    @dataclasses.dataclass(frozen=True)
    class Context:
        rows: torch.Tensor = pw.context_field(pad=0)
        mode: int = dataclasses.field(default=0, init=False)

    @pw.split_op(mutates_args=("out",), name="piecework_plans::beside", capturable=True)
    def beside(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x + getattr(pw.get_context(Context), "gain", 0))

    class Reads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            beside(x, out)
            return out

    def context(**attributes: int) -> Context:
        made = Context(torch.arange(3))
        for name, value in attributes.items():
            object.__setattr__(made, name, value)
        return made

    runtime = pw.Runtime(Reads(), toy.config_of("full"), dynamic_dims={"x": 0})
    runtime.run("decode", {"x": ones()}, context(mode=0))
    for gain in (1, 1, 1, 2):
        assert not taken(runtime, "decode", {"x": ones()}, context(gain=gain))
        assert torch.equal(runtime.run("decode", {"x": ones()}, context(gain=gain)), ones() + gain)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_static_input_that_is_no_longer_where_it_was_is_noticed(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of very many sizes beside `tokens`, the oldest static tensors are forgotten; their buffer was replaced since."""

    class Sums(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y.sum(1, keepdim=True)

    monkeypatch.setattr(buffers, "_MAX_TENSORS", 12)
    monkeypatch.setattr(capture_slots, "MAX_SLOTS", 40)
    dims = {"x": 0, "y": {0: "tokens", 1: "width"}}
    runtime = pw.Runtime(Sums(), toy.config_of("full", buckets=(4,)), dynamic_dims=dims)
    if not is_known:
        runtime._layouts = None
    for k in range(60):
        width = 2 if k % 3 == 0 else k // 3 + 3
        for seed in range(2):
            x, y = toy.x_of(3, seed)[:, :1], torch.full((3, width), float(seed + k))
            assert torch.equal(runtime.run("decode", {"x": x, "y": y}), x + y.sum(1, keepdim=True))
