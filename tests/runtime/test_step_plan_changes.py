"""Whatever is new about a step, or has changed since, sends it the long way."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw

from . import toy_captures as toy
from .plan_models import WIDTH, Model, Other, Wide, num_short, ones, taken, wide, wide_runtime
from .toy_captures import Slots, Toy, step

CHANGES = {
    "shape": ({"x": ones(2)}, {"rows": torch.arange(2), "start": torch.arange(3), "table": torch.ones(2, 2)}),
    "stride": ({"x": torch.ones(WIDTH, 3).t()}, {}),
    "constant": ({"x": ones(), "gain": 2}, {}),
    "constant's type": ({"x": ones(), "gain": True}, {}),
    "constant's other type": ({"x": ones(), "gain": 1.0}, {}),
    "no constant": ({"x": ones()}, {}),
    "width": ({}, {"table": torch.ones(3, 1, dtype=torch.int32)}),
    "requests": ({}, {"table": torch.ones(2, 2, dtype=torch.int32), "start": torch.arange(3, dtype=torch.int32)}),
    "stride of a field": ({}, {"rows": torch.arange(6)[::2]}),
    "plain value": ({}, {"gain": 2.0}),
    "plain value's type": ({}, {"gain": 1}),
    "plain truth value": ({}, {"gain": True}),
    "plain tuple": ({}, {"gain": "1"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_layout_is_another_step(change: str) -> None:
    runtime = wide_runtime(Model())
    inputs = {"x": ones(), "gain": 1}
    for expected in (False, False, True):
        assert taken(runtime, "decode", inputs, wide()) is expected
    other, fields = CHANGES[change]
    assert not taken(runtime, "decode", {**inputs, **other} if change != "no constant" else other, wide(**fields))


def test_dtype_class_and_phase_are_part_of_a_layout() -> None:
    runtime = wide_runtime(Model())
    for expected in (False, False, True):
        assert taken(runtime, "decode", {"x": ones()}, wide()) is expected
    assert taken(runtime, pw.Phase.DECODE, {"x": ones()}, wide())
    assert not taken(runtime, "prefill", {"x": ones()}, wide())
    assert not taken(runtime, "decode", {"x": ones()}, wide(kind=Other))
    assert not taken(runtime, "decode", {"x": ones()}, wide(rows=torch.arange(3, dtype=torch.int32)))
    runtime = pw.Runtime(nn.Identity(), toy.config_of("full"), dynamic_dims={"input": 0})
    for expected in (False, False, True):
        assert taken(runtime, "decode", {"input": ones()}) is expected
    assert not taken(runtime, "decode", {"input": ones(dtype=torch.float64)})
    assert not taken(runtime, "decode", {"input": ones()}, Slots(torch.arange(3)))


class Bigger(nn.Linear):
    """Tells what was replaced."""


def _data_moved(model: Model) -> None:
    model.linear.weight.data = model.linear.weight.data.clone() * 2


def _replaced(model: Model) -> None:
    model.linear.weight = nn.Parameter(model.linear.weight.detach() * 2)


def _buffer(model: Model) -> None:
    model.offset = model.offset + 1


def _module(model: Model) -> None:
    model.linear = Bigger(WIDTH, WIDTH)


def _same_tensors(model: Model) -> None:
    old, model.linear = model.linear, Bigger(WIDTH, WIDTH)
    model.linear.weight, model.linear.bias = old.weight, old.bias


def _appears(model: Model) -> None:
    model.extra = torch.ones(WIDTH)


def _bias_gone(model: Model) -> None:
    model.linear.bias = None


def _in_list(model: Model) -> None:
    model.lists[0] = torch.ones(WIDTH)


def _longer_list(model: Model) -> None:
    model.lists.append(torch.ones(WIDTH))


def _new_parameter(model: Model) -> None:
    model.register_parameter("later", nn.Parameter(torch.ones(1)))


def _other_view(model: Model) -> None:
    model.linear.weight = nn.Parameter(model.linear.weight.detach().t())


MODEL_CHANGES = [
    _data_moved,
    _replaced,
    _buffer,
    _module,
    _same_tensors,
    _appears,
    _bias_gone,
    _in_list,
    _longer_list,
    _new_parameter,
    _other_view,
]


@pytest.mark.parametrize("change", MODEL_CHANGES)
def test_a_model_that_changed_is_noticed_before_the_replay(change: Any) -> None:
    torch.manual_seed(0)
    model = Model()
    runtime = wide_runtime(model)
    for expected in (False, False, True):
        assert taken(runtime, "decode", {"x": ones()}, wide()) is expected
    change(model)
    before = num_short(runtime)
    with runtime.counters.expect(captures=1, replays=0, fallbacks=1):
        got = runtime.run("decode", {"x": ones()}, wide(), copy=True)
    assert num_short(runtime) == before
    assert torch.equal(got, wide_runtime(model).run("decode", {"x": ones()}, wide()))
    for again in (False, True):
        assert taken(runtime, "decode", {"x": ones()}, wide()) is again


def test_what_the_program_does_not_use_may_change_if_it_was_traced() -> None:
    model = Model()
    phase = pw.PhaseConfig(backend="full", compiler="aot_eager", buckets=(4,))
    runtime = pw.Runtime(
        model,
        pw.GraphConfig(prefill=phase, decode=phase, capture_device="tape"),
        dynamic_dims={"x": 0},
        context_sizes={"blocks": 4},
    )
    for expected in (False, False, True):
        assert taken(runtime, "decode", {"x": ones()}, wide()) is expected
    model.extra = torch.ones(WIDTH)
    assert taken(runtime, "decode", {"x": ones()}, wide())
    model.offset = model.offset + 1
    assert not taken(runtime, "decode", {"x": ones()}, wide())


def test_settings_of_torch_are_part_of_a_layout() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    runtime = pw.Runtime(model, toy.config_of("full"), dynamic_dims={"input": 0})
    for expected in (False, False, True):
        assert taken(runtime, "decode", {"input": ones()}) is expected
    with torch.autocast("cpu", torch.bfloat16):
        for expected in (False, False, True):
            assert taken(runtime, "decode", {"input": ones()}) is expected
        assert runtime.run("decode", {"input": ones()}).dtype is torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert not taken(runtime, "decode", {"input": ones()})
    torch.use_deterministic_algorithms(True)
    try:
        assert not taken(runtime, "decode", {"input": ones()})
    finally:
        torch.use_deterministic_algorithms(False)
    assert taken(runtime, "decode", {"input": ones()})
    assert runtime.run("decode", {"input": ones()}).dtype is torch.float32


def test_inputs_that_are_written_take_the_long_way() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            state.add_(1)
            return x + state

    runtime = pw.Runtime(Writes(), toy.config_of("full"), dynamic_dims={"x": 0, "state": 0})
    state = torch.zeros(3, WIDTH)
    for count in range(1, 5):
        assert not taken(runtime, "decode", {"x": ones(), "state": state})
        assert torch.equal(state, torch.full((3, WIDTH), float(count)))


def test_another_program_of_the_entry_is_noticed() -> None:
    runtime = toy.runtime_of(Toy(), "full", "aot_eager")
    for seed in range(3):
        step(runtime, 3, seed)
    before = num_short(runtime)
    (entry,) = runtime.entries
    entry.program = copy.copy(entry.program)
    entry.program._hooked = None  # of the other one
    with runtime.counters.expect(captures=1, fallbacks=1):
        step(runtime, 3)
    assert num_short(runtime) == before


def test_an_input_that_another_bucket_writes_in_place_is_captured_anew() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            if x.shape[0] > 4:
                state.add_(1)
            return x + state

    runtime = pw.Runtime(Writes(), toy.config_of("full"), dynamic_dims={"x": 0})
    state = torch.zeros(WIDTH)
    for expected in (False, False, True):
        assert taken(runtime, "decode", {"x": ones(3), "state": state}) is expected
    runtime.run("decode", {"x": ones(8), "state": state})
    assert not taken(runtime, "decode", {"x": ones(3), "state": state})
    state.fill_(7)
    assert torch.equal(runtime.run("decode", {"x": ones(3), "state": state}), ones(3) + 7)


@pytest.mark.parametrize("what", ["written", "rows", "generation"])
def test_what_is_learned_later_sends_a_step_the_long_way(what: str) -> None:
    runtime = toy.runtime_of(Toy(), "full")
    for seed in range(4):
        step(runtime, 3, seed)
    before = num_short(runtime)
    (entry,), (table,) = runtime.entries, runtime._captures._slots.tables
    if what == "written":
        entry.written_inputs.add("x")
    elif what == "rows":
        table.rows = dict(table.rows)
    else:
        table.context.generation += 1
    step(runtime, 3)
    assert num_short(runtime) == before


def test_contexts_that_grow_what_they_have_room_for() -> None:
    """Without a capacity the static table grows with the widest step: other sizes, so another capture."""
    model = Model()
    runtime = pw.Runtime(model, toy.config_of("full"), dynamic_dims={"x": 0})
    for expected in (False, False, True):
        assert taken(runtime, "decode", {"x": ones()}, wide()) is expected
    narrow = runtime.run("decode", {"x": ones()}, wide(), copy=True)
    assert not taken(runtime, "decode", {"x": ones()}, wide(num_blocks=5))
    assert not taken(runtime, "decode", {"x": ones()}, wide())
    assert torch.equal(runtime.run("decode", {"x": ones()}, wide()), narrow)
    for _ in range(2):
        runtime.run("decode", {"x": ones()}, wide(num_blocks=5))
    assert torch.equal(runtime.run("decode", {"x": ones()}, wide()), narrow)
    assert num_short(runtime) > 3


@pytest.mark.parametrize(("first", "then"), [(1, True), (True, 1), (0.0, -0.0), (1, 1.0), ("1", 1)])
def test_values_that_are_equal_may_be_others(first: Any, then: Any) -> None:
    runtime = wide_runtime(Model())
    for expected in (False, False, True):
        assert taken(runtime, "decode", {"x": ones(), "gain": 2}, wide(gain=first)) is expected
    assert not taken(runtime, "decode", {"x": ones(), "gain": 2}, wide(gain=then))
    if not isinstance(first, str):
        runtime = wide_runtime(Model())
        for expected in (False, False, True):
            assert taken(runtime, "decode", {"x": ones(), "gain": first}, wide()) is expected
        assert not taken(runtime, "decode", {"x": ones(), "gain": then}, wide())


@pytest.mark.parametrize("writes", [True, False])
def test_after_what_may_write_inputs_no_tail_is_known(writes: bool) -> None:
    class Maybe(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1) if writes else x + 1

    runtime = pw.Runtime(Maybe(), toy.config_of("full"), dynamic_dims={"x": 0})
    for is_replay in (False, True, True):
        runtime.run("decode", {"x": ones(3)})
        (table,) = runtime._captures._slots.tables
        tails = table.buffers._tails.values()
        assert any(tail.kind is not None for tail in tails) is (is_replay and not writes)


def test_what_lies_beside_the_fields_of_a_context_takes_the_long_way() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Derived(Wide):
        def __post_init__(self) -> None:
            object.__setattr__(self, "derived", float(self.gain) * 2)

    runtime = wide_runtime(Model())
    for _ in range(4):
        assert not taken(runtime, "decode", {"x": ones()}, wide(kind=Derived))
    assert runtime.counters["replays"] == 3
    with runtime.counters.expect(captures=1, replays=0):  # what was derived is frozen in the capture
        context = wide(kind=Derived)
        object.__setattr__(context, "derived", 5.0)
        runtime.run("decode", {"x": ones()}, context)


def test_steps_that_count_a_fallback_take_the_long_way() -> None:
    runtime = wide_runtime(Model())
    runtime.run("decode", {"x": ones()}, wide())
    runtime.entries[0].fallback = "a reason"
    for _ in range(3):
        assert not taken(runtime, "decode", {"x": ones()}, wide())
    assert runtime.counters["fallbacks"] == {"a reason": 3}


def test_devices_whose_settings_are_not_read_take_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = wide_runtime(Model())
    reader = runtime._layouts
    assert reader.knows(torch.device("cpu"))
    assert not reader.knows(torch.device("meta"))
    monkeypatch.setattr(type(reader), "knows", lambda self, device: False)
    for _ in range(4):
        assert not taken(runtime, "decode", {"x": ones()}, wide())
