"""Random models captured on the tape: each step of each bucket is, bit for bit, what the uncaptured model does."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import piecework as pw
from piecework.runtime.events import Counters

from .random_programs import STEPS, WIDTH, RandomModel, models
from .test_fuzz import assert_exactly, state_of

DIMS = {"x": {0: "tokens"}, "y": {0: "rows"}}
BUCKETS = (4, 8)
SCALE = int(os.environ.get("PIECEWORK_FUZZ_SCALE", "1"))
"""How many times the usual number of examples are drawn."""

KINDS = tuple(kind for kind in STEPS if kind != "branch")
"""Nothing that decides on a size: such a program is not padded to every bucket."""
UNCAPTURABLE = frozenset(("masked",))
"""What no device can capture: a size that depends on data."""

BACKENDS = {
    "full": ("full", "eager"),
    "full-aot": ("full", "aot_eager"),
    "breakable": ("breakable", "eager"),
    "piecewise": ("tc_piecewise", "eager"),
    "piecewise-aot": ("tc_piecewise", "aot_eager"),
}


class Tensors(RandomModel):
    """A random model that returns tensors only: a number of an eager forward cannot be told from one of the padding."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, Any]:
        outputs = super().forward(x, y)
        outputs["extra"] = tuple(extra for extra in outputs["extra"] if isinstance(extra, (torch.Tensor, tuple)))
        return outputs


def runtime_of(model: torch.nn.Module, backend: str, compiler: str) -> pw.Runtime:
    phase = {"backend": backend, "compiler": compiler, "buckets": BUCKETS}
    config = pw.GraphConfig(prefill=phase, decode=phase, capture_device="tape")
    # Nothing is cut: padded rows are compared too.
    return pw.Runtime(model, config, dynamic_dims=DIMS, output_dims=None)


def inputs_of(num_tokens: int, num_rows: int | None, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = {"x": torch.randn(num_tokens, WIDTH, generator=generator)}
    if num_rows is not None:
        inputs["y"] = torch.randn(num_rows, WIDTH, generator=generator)
    return inputs


def padded(inputs: dict[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    x = inputs["x"]
    return {**inputs, "x": torch.cat((x, x.new_zeros(size - x.shape[0], WIDTH)))}


class Uncaptured:
    """The same model without captures, at the size that the captured one ran at."""

    def __init__(self, model: torch.nn.Module, compiler: str) -> None:
        self.model = model
        self.runtime = runtime_of(model, "disabled", compiler) if compiler != "eager" else None

    def run(self, inputs: dict[str, torch.Tensor], size: int) -> Any:
        if self.runtime is not None:
            return self.runtime.run("decode", inputs)
        at_size = padded(inputs, size)
        with torch.inference_mode():
            outputs = self.model(**at_size)
        for name, tensor in inputs.items():
            tensor.copy_(at_size[name][: tensor.shape[0]])
        return outputs


Step = tuple[int, int]
"""Numbers of tokens and of rows."""


def steps() -> st.SearchStrategy[list[Step]]:
    step = st.tuples(st.sampled_from((0, 1, 3, 4, 5, 8)), st.sampled_from((2, 3, 8)))
    return st.lists(step, min_size=2, max_size=5)


def check(arguments: tuple[Any, ...], with_y: bool, plan: list[Step], name: str) -> Counters:
    """Runs the plan three times over; returns the counters."""
    backend, compiler = BACKENDS[name]
    torch.manual_seed(0)
    model = Tensors(*arguments)
    reference = Uncaptured(copy.deepcopy(model), compiler)
    runtime = runtime_of(model, backend, compiler)
    for seed, (num_tokens, num_rows) in enumerate(plan * 3):
        ours = inputs_of(num_tokens, num_rows if with_y else None, seed)
        theirs = copy.deepcopy(ours)
        got = runtime.run("decode", ours)
        expected = reference.run(theirs, got["stack"][0].shape[0])
        assert_exactly(got, expected)
        assert_exactly(ours, theirs)
        assert_exactly(state_of(model), state_of(reference.model))
    return runtime.counters


def kinds_of(arguments: tuple[Any, ...]) -> set[str]:
    before, (num_layers, in_layers), after = arguments
    return {kind for kind, *_ in (*before, *(in_layers if num_layers else ()), *after)}


def check_captured(arguments: tuple[Any, ...], with_y: bool, plan: list[Step], name: str) -> None:
    counters = check(arguments, with_y, plan, name)
    fallbacks = [reason for reason in counters["fallbacks"] if " traced " not in reason]
    if kinds_of(arguments).isdisjoint(UNCAPTURABLE):
        assert not fallbacks
        buckets = {(num_tokens > BUCKETS[0], num_rows if with_y else 0) for num_tokens, num_rows in plan}
        assert counters["captures"] == len(buckets)
        assert counters["replays"] == 3 * len(plan) - len(buckets)
    else:
        assert any(reason.startswith("the capture failed: ") for reason in fallbacks)


# An example may cost a trace, so that shrinking one would take minutes.
quick = settings(phases=(Phase.explicit, Phase.reuse, Phase.generate))


@pytest.mark.parametrize("name", ["full", "breakable"])
def test_eager_forwards(name):
    @settings(quick, max_examples=25 * SCALE)
    @given(models(KINDS), st.booleans(), steps())
    def run(arguments, with_y, plan):
        check_captured(arguments, with_y, plan, name)

    run()


@pytest.mark.parametrize("name", ["full-aot", "piecewise", "piecewise-aot"])
def test_programs(name):
    # AOTAutograd fails where placeholders overlap, one is written and a view of one is returned, captured or not.
    kinds = tuple(kind for kind in KINDS if kind != "whole") if name.endswith("aot") else KINDS

    @settings(quick, max_examples=5 * SCALE)
    @given(models(kinds), st.booleans(), steps())
    def run(arguments, with_y, plan):
        check_captured(arguments, with_y, plan, name)

    run()
