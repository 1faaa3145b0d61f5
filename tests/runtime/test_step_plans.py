"""Steps of a known layout take the shorter way, and come to the same."""

from __future__ import annotations

import dataclasses
import gc
import random
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw
from piecework.graphs.addresses import Addresses
from piecework.graphs.prepared_fill import PreparedFill
from piecework.ops.context import host_field
from piecework.runtime import step_plans

from . import toy_captures as toy
from .plan_models import WIDTH, Model, Planned, Wide, num_short, ones, wide, wide_runtime
from .toy_captures import BACKENDS, Toy, plain, step, x_of


@pytest.mark.parametrize(("backend", "compiler"), BACKENDS)
def test_the_third_step_of_a_layout_takes_the_shorter_way(backend: str, compiler: str) -> None:
    model, reference = Toy(), Toy()
    runtime = toy.runtime_of(model, backend, compiler)
    ways = []
    for seed in range(5):  # captured, replayed the long way, replayed the short way
        before = num_short(runtime)
        torch.testing.assert_close(step(runtime, 3, seed), plain(reference, 3, seed))
        ways.append(num_short(runtime) - before)
    assert ways == [0, 0, 1, 1, 1]
    counters = runtime.counters.by_phase_and_bucket()["decode", 4]
    assert (counters["steps"], counters["replays"], counters["captures"]) == (5, 4, 1)
    assert runtime.counters["steps"] == 5
    assert runtime.counters["replays"] == 4
    (entry,) = runtime.entries
    assert entry.num_steps == 5
    (slot,) = runtime._captures.state_of(entry)
    assert slot.num_replays == 4
    for left, right in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(left[:-1], right[:-1])


@pytest.mark.parametrize(("backend", "compiler"), BACKENDS)
def test_random_sizes_and_phases_are_right_whichever_way_they_take(backend: str, compiler: str) -> None:
    model, reference = Toy(), Toy()
    runtime = toy.runtime_of(model, backend, compiler)
    draw = random.Random(0)
    for seed in range(60):
        num_tokens, phase = draw.randint(1, 8), draw.choice(["prefill", "decode"])
        torch.testing.assert_close(step(runtime, num_tokens, seed, phase), plain(reference, num_tokens, seed))
    assert num_short(runtime) > 10
    for left, right in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(left[:-1], right[:-1])


@pytest.mark.parametrize("kind", [Wide, Planned])
def test_static_tensors_hold_what_the_long_way_leaves(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays read nothing but static tensors, so equal results of many steps mean equal static tensors."""
    torch.manual_seed(0)
    model = Model()
    short, long = wide_runtime(model), wide_runtime(model)
    long._layouts = None
    draw = random.Random(1)
    for seed in range(80):
        num_tokens, num_blocks = draw.randint(1, 8), draw.randint(1, 4)
        context = wide(
            num_tokens,
            num_blocks,
            kind,
            table=torch.randint(1, 9, (num_tokens, num_blocks), dtype=torch.int32),
            start=torch.randint(1, 9, (num_tokens + 1,), dtype=torch.int32),
        )
        inputs = {"x": x_of(num_tokens, seed)[:, :WIDTH]}
        assert torch.equal(short.run("decode", inputs, context), long.run("decode", inputs, context))
        for left, right in zip(short._captures._slots, long._captures._slots, strict=True):
            if left.entry.num_steps and left.last_step == left.entry.num_steps - 1:
                for name, tensor in left.work.tensors.items():
                    assert torch.equal(tensor, right.work.tensors[name])
    assert num_short(short) > 5
    assert long._captures.plans.num_steps == 0


def test_a_capture_that_was_evicted_takes_its_plans_along() -> None:
    model, reference = Toy(), Toy()
    runtime = toy.runtime_of(model, "full", options={"max_captures": 1})
    for seed in range(4):
        step(runtime, 2, seed)
        plain(reference, 2, seed)
    before = num_short(runtime)
    (slot,) = [slot for slot in runtime._captures._slots if slot.capture is not None]
    capture = weakref.ref(slot.capture)
    runtime._captures._room.release(slot)
    torch.testing.assert_close(step(runtime, 2, 9), plain(reference, 2, 9))
    assert num_short(runtime) == before
    step(runtime, 2, 5)
    gc.collect()
    assert capture() is None  # the plan that held it went when the next one came


def test_a_closed_runtime_refuses_and_holds_no_plans() -> None:
    runtime = toy.runtime_of(Toy(), "full")
    for seed in range(3):
        step(runtime, 2, seed)
    assert len(runtime._captures.plans) == 1
    runtime.close()
    assert len(runtime._captures.plans) == 0
    with pytest.raises(pw.RuntimeClosedError):
        step(runtime, 2)


def test_a_compaction_makes_plans_anew() -> None:
    model, reference = Toy(), Toy()
    runtime = toy.runtime_of(model, "full")
    for seed in range(3):
        step(runtime, 2, seed), plain(reference, 2, seed)
    runtime.compact()
    before = num_short(runtime)
    torch.testing.assert_close(step(runtime, 2, 4), plain(reference, 2, 4))
    assert num_short(runtime) == before
    torch.testing.assert_close(step(runtime, 2, 5), plain(reference, 2, 5))
    assert num_short(runtime) == before + 1


def test_threads_share_plans_and_see_their_own_results() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    runtime = pw.Runtime(model, toy.config_of("full"), dynamic_dims={"input": 0})
    wrong: list[object] = []

    def serve(seed: int) -> None:
        for i in range(40):
            x = torch.full((3 + (i + seed) % 2, WIDTH), float(seed + i))
            got = runtime.run("decode" if seed % 2 else "prefill", {"input": x}, copy=True)
            if not torch.allclose(got, model(x)):
                wrong.append((seed, i))

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert num_short(runtime) > 100
    assert runtime.counters["steps"] == 160


@pytest.mark.parametrize("option", ["debug_captures", "evaluate_guards"])
def test_the_debug_modes_go_through_all_checks(option: str) -> None:
    runtime = toy.runtime_of(Toy(), "full", options={option: True})
    for seed in range(4):
        step(runtime, 2, seed)
    assert runtime._captures.plans is None


def test_wrong_steps_are_refused_as_ever() -> None:
    runtime = wide_runtime(Model())
    for _ in range(3):
        runtime.run("decode", {"x": ones()}, wide())
    with pytest.raises(pw.ConfigError, match="phase"):
        runtime.run("decoding", {"x": ones()}, wide())
    with pytest.raises(pw.ConfigError, match="phase"):
        runtime.run(["decode"], {"x": ones()}, wide())
    with pytest.raises(pw.InputError, match="expected a mapping"):
        runtime.run("decode", [ones()], wide())
    with pytest.raises(pw.InputError, match="expected 3 rows"):
        runtime.run("decode", {"x": ones()}, wide(rows=torch.arange(2)))
    with pytest.raises(pw.InputError, match="got list"):
        runtime.run("decode", {"x": ones(), "gain": [1]}, wide())
    with pytest.raises(pw.ContextError):
        wide_runtime(Model()).run("decode", {"x": ones()}, None)


def test_outputs_of_any_structure() -> None:
    class Many(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"a": x + 1, "b": (x * 2, "text"), "x": x}

    class Sizes(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x + 1, x.shape[0]

    runtime = pw.Runtime(Many(), toy.config_of("full"), dynamic_dims={"x": 0})
    for seed in range(4):
        x = x_of(3, seed)
        got = runtime.run("decode", {"x": x}, copy=bool(seed % 2))
        assert torch.equal(got["a"], x + 1)
        assert torch.equal(got["b"][0], x * 2)
        assert torch.equal(got["x"], x)
        assert got["b"][1] == "text"
    assert num_short(runtime) == 2
    runtime = pw.Runtime(Sizes(), toy.config_of("tc_piecewise", "aot_eager"), dynamic_dims={"x": 0})
    for num_tokens in (3, 4, 3, 4, 3, 4):
        assert runtime.run("decode", {"x": x_of(num_tokens)})[1] == num_tokens
    assert num_short(runtime) == 2


@pytest.mark.parametrize("num_tokens", [3, 4])
def test_what_is_returned_is_the_callers_to_turn(num_tokens: int) -> None:
    """A view of its own each time: in-place changes of its shape do not stay."""
    runtime = pw.Runtime(nn.Linear(WIDTH, WIDTH), toy.config_of("full"), dynamic_dims={"input": 0})
    for seed in range(4):
        got = runtime.run("decode", {"input": x_of(num_tokens, seed)[:, :WIDTH]})
        assert got.shape == (num_tokens, WIDTH)
        if seed:  # of a replay
            got.unsqueeze_(0)
    assert num_short(runtime) == 2
    mine = runtime.run("decode", {"input": ones()}, copy=True)
    kept = mine.clone()
    runtime.run("decode", {"input": ones() * 2})
    assert torch.equal(mine, kept)


def test_host_fields_without_a_default_follow_each_step() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Planning:
        rows: torch.Tensor = pw.context_field(pad=0)
        number: int = host_field()

        def plan(self) -> None:
            numbers.append(self.number)

    numbers: list[int] = []
    runtime = pw.Runtime(nn.Identity(), toy.config_of("full"), dynamic_dims={"input": 0})
    for number in range(5):
        runtime.run("decode", {"input": ones()}, Planning(rows=torch.arange(3), number=number))
    assert numbers == [0, 1, 2, 3, 4]
    assert num_short(runtime) == 3


def test_a_step_that_fails_leaves_nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = Toy(), Toy()
    runtime = toy.runtime_of(model, "full")
    for seed in range(3):
        step(runtime, 3, seed), plain(reference, 3, seed)
    fill = PreparedFill.run

    def failing(self: PreparedFill, sources: Any) -> None:
        fill(self, sources)
        for target in runtime._captures._slots.tables[0].buffers._tensors.values():
            target.fill_(99)
        raise ValueError("no")

    with monkeypatch.context() as patch:
        patch.setattr(PreparedFill, "run", failing)
        with pytest.raises(ValueError, match="no"):
            step(runtime, 3)
    assert pw.runtime.step.is_inside_step() is False
    torch.testing.assert_close(step(runtime, 3, 4), plain(reference, 3, 4))
    (slot,) = runtime._captures._slots
    assert not slot.work.tensors["x"][3:].any()


def test_an_operator_that_writes_the_context_has_its_tails_filled_each_time() -> None:
    @dataclasses.dataclass(frozen=True)
    class Room:
        room: torch.Tensor = pw.context_field(pad=0, slots={0: "places"})

    @pw.split_op(mutates_args=("out",), name="piecework_plans::scribble", capturable=True)
    def scribble(x: torch.Tensor, out: torch.Tensor) -> None:
        room = pw.get_context(Room).room
        out.copy_(x + room.sum())
        room.add_(1)

    class Scribbles(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            scribble(x, out)
            return out

    runtime = pw.Runtime(Scribbles(), toy.config_of("full"), dynamic_dims={"x": 0}, context_sizes={"places": 4})
    for _ in range(5):
        assert torch.equal(runtime.run("decode", {"x": ones()}, Room(torch.ones(1))), ones() + 1)
    assert num_short(runtime) == 3


def test_a_layout_that_came_once_makes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_plans, "MAX_LAYOUTS", 3)
    runtime = toy.runtime_of(Toy(), "full")
    for num_tokens in (8, 7, 6, 5):
        step(runtime, num_tokens)
    assert len(runtime._captures.plans) == 0
    assert len(runtime._captures.plans._layouts) == 1  # those that were noted are bounded too
    step(runtime, 5)
    assert len(runtime._captures.plans) == 1


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_plans, "MAX_PLANS", 3)
    runtime = toy.runtime_of(Toy(), "full")
    for num_tokens in (1, 2, 3, 4, 5, 6, 7, 8):
        for seed in range(2):
            step(runtime, num_tokens, seed)
    assert len(runtime._captures.plans) == 3
    for num_tokens in (8, 6):
        before = num_short(runtime)
        step(runtime, num_tokens)
        assert num_short(runtime) == before + 1
    before = num_short(runtime)
    step(runtime, 1)
    assert num_short(runtime) == before


def test_staleness_is_asked_once_and_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = toy.runtime_of(Toy(), "full")
    for seed in range(3):
        step(runtime, 2, seed)
    asked = []
    hold = Addresses.hold
    monkeypatch.setattr(Addresses, "hold", lambda self: asked.append(self) or hold(self))
    monkeypatch.setattr(Addresses, "moved", lambda *_: pytest.fail("the long way"))
    step(runtime, 2)
    assert len(asked) == 1


@pytest.mark.parametrize("backend", ["disabled", "full", "tc_piecewise"])
def test_the_debug_mode_asks_the_context_before_anything_runs(backend: str) -> None:
    class Bad(Exception):
        pass

    @dataclasses.dataclass(frozen=True)
    class Checked:
        slots: torch.Tensor = pw.context_field(pad=-1)

        def check(self) -> None:
            if (self.slots > 40).any():
                raise Bad("slots")

    ran = []

    class Noted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ran.append(1)
            return x + 1

    for is_debug in (True, False):
        runtime = toy.runtime_of(Noted(), backend, options={"debug_captures": is_debug})
        for num_tokens in (3, 3, 3, 20):
            runtime.run("decode", {"x": x_of(num_tokens)}, Checked(torch.arange(num_tokens)))
            ran.clear()
            wrong = Checked(torch.arange(num_tokens) + 50)
            if is_debug:
                with pytest.raises(Bad, match="slots"):
                    runtime.run("decode", {"x": x_of(num_tokens)}, wrong)
                assert not ran
            else:
                runtime.run("decode", {"x": x_of(num_tokens)}, wrong)
