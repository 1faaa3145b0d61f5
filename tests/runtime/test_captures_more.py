"""Captures that would be wrong without a word: what has changed since, or a first run did not show, or stays behind."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw
from piecework.graphs.tape import TapeDevice

from .function_captures import ALL, EAGER, WIDTH, Model, Step, runtime_of, store, x_of


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A table of which no one knows the largest size."""

    table: torch.Tensor = pw.context_field(pad=0, slots={0: "blocks"})


@pw.split_op(mutates_args=("out",), name="piecework_more::add_blocks", capturable=True)
def add_blocks(x: torch.Tensor, out: torch.Tensor) -> None:
    """out = x plus the sum of the table."""
    out.copy_(x + pw.get_context(Blocks).table.sum())


# Inputs.


@pytest.mark.parametrize("backend", EAGER)
def test_an_input_that_only_a_larger_bucket_writes(backend: str) -> None:
    """From then on it is captured where it is: a capture that reads a copy of it is made anew."""

    def function(m: Any, x: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 4:
            log.add_(1)
        return x + log

    runtime = runtime_of(Model(function), backend)
    log, theirs = torch.zeros(WIDTH), torch.zeros(WIDTH)
    for seed, num_tokens in enumerate((4, 8, 4, 8, 4)):
        log.fill_(seed)
        theirs.fill_(seed)
        expected = function(None, x_of(num_tokens, seed), theirs)
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(num_tokens, seed), "log": log}), expected)
        torch.testing.assert_close(log, theirs)
    assert runtime.counters["captures"] == 3
    assert any("another bucket writes the input log" in reason for reason in runtime.counters["fallbacks"])


@pytest.mark.parametrize("backend", EAGER)
def test_two_inputs_that_are_one_tensor(backend: str) -> None:
    """Read, they may be; if one is written, copies of them would be apart."""
    runtime = runtime_of(Model(lambda m, x, y: x + y), backend, dynamic_dims={"x": 0, "y": 0})
    for seed in range(3):
        x = x_of(3, seed)
        torch.testing.assert_close(runtime.run("decode", {"x": x, "y": x}), x * 2)
    assert runtime.counters["replays"] == 2
    runtime = runtime_of(Model(lambda m, x, y: x.mul_(2) + y), backend, dynamic_dims={"x": 0, "y": 0})
    for _ in range(2):
        x = x_of()
        with pytest.raises(pw.InputError, match=r"writes into '[xy]', which shares memory.*backend='disabled'"):
            runtime.run("decode", {"x": x, "y": x})
        assert torch.equal(x, x_of())


@pytest.mark.parametrize("backend", ALL)
def test_inputs_with_a_gradient_leave_no_graph_behind(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x, y: x * y), backend)
    seen = []
    for seed in range(4):
        leaf, y = x_of(3, seed).requires_grad_(), torch.ones(WIDTH, requires_grad=True) * 2
        seen.append(weakref.ref(leaf))
        torch.testing.assert_close(runtime.run("decode", {"x": leaf * 1, "y": y}), leaf.detach() * 2)
        del leaf, y
    assert not any(ref() for ref in seen)


@pytest.mark.parametrize("backend", ALL)
def test_a_cache_that_the_first_run_did_not_write(backend: str) -> None:
    """A split op says what it may write: what it did in one step does not tell."""

    def function(m: Any, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        store(x, cache)
        return x + 1

    for options in ({}, {"max_captures": 1}):
        runtime = runtime_of(Model(function), backend, **options)
        cache, theirs = torch.zeros(8, WIDTH), torch.zeros(8, WIDTH)
        # With room for one capture, the four steps of a bucket keep the other one out.
        for num_tokens, power in (*[(4, 0.0)] * 4, (8, 0.0), (8, 1.0), (8, 0.0), (4, 1.0), (4, 1.0)):
            step = Step(torch.ones(num_tokens), power)
            runtime.run("decode", {"x": x_of(num_tokens), "cache": cache}, step)
            with torch.inference_mode(), pw.use_context(step):
                function(None, x_of(num_tokens), theirs)
            torch.testing.assert_close(cache, theirs)


@pytest.mark.parametrize("backend", ALL)
def test_inputs_without_dynamic_dims_take_their_own_size(backend: str) -> None:
    """A buffer is sized for the largest bucket, but what does not grow with the tokens needs no more than it has."""
    runtime = runtime_of(Model(lambda m, x, big: x + big.sum(0)), backend, buckets=(1, 2, 256))
    runtime.run("decode", {"x": x_of(1), "big": torch.ones(1024, WIDTH)})
    assert runtime.explain().as_dict()["memory"]["buffer_bytes"] < 3 * 1024 * WIDTH * 4


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("largest_first", [False, True])
def test_constants_that_differ_in_each_step_do_not_pile_up(
    backend: str, largest_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TapeDevice, "wants_largest_first", largest_first)
    empty = Step(torch.ones(0)) if largest_first else None
    runtime = runtime_of(Model(lambda m, x, gain: x * gain), backend, example_context=empty)
    for gain in range(20):
        for _ in range(2):
            torch.testing.assert_close(runtime.run("decode", {"x": x_of(), "gain": float(gain)}), x_of() * gain)
    num_captures = 8 * (1 + largest_first)
    assert (runtime.counters["captures"], runtime.counters["replays"]) == (num_captures, 8)
    fallbacks = runtime.counters["fallbacks"]
    assert sum(count for reason, count in fallbacks.items() if "different sets of inputs: not" in reason) <= 24


# Outputs of an eager forward.


class Box:
    """A class that nobody can look into."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@pytest.mark.parametrize("backend", EAGER)
def test_outputs_that_a_replay_could_not_make_are_refused(backend: str) -> None:
    for function, match in (
        (lambda m, x: (x * 2, x.shape), r"output '1': expected a tensor.*the size torch.Size"),
        (lambda m, x: (x * 2, Box(x)), r"output '1': expected a tensor.*got a Box"),
    ):
        runtime = runtime_of(Model(function), backend)
        for num_tokens in (3, 3, 8):
            with pytest.raises(pw.InputError, match=match):
                runtime.run("decode", {"x": x_of(num_tokens)})
        assert runtime.counters["captures"] == 0


# The context.


@pytest.mark.parametrize("backend", EAGER)
def test_a_plain_value_of_the_context_that_the_forward_reads_itself(backend: str) -> None:
    """Frozen by a segment as by a whole capture; what only split ops read is not, between segments."""
    runtime = runtime_of(Model(lambda m, x: x * pw.get_context(Step).power), backend)
    for power in (1.0, 2.0, 2.0, 3.0):
        step = Step(torch.ones(3), power)
        torch.testing.assert_close(runtime.run("decode", {"x": x_of()}, step), x_of() * power)
    assert runtime.counters["replays"] == 1


@dataclasses.dataclass
class Slow:
    """A context with a method that a subclass overrides."""

    def factor(self) -> int:
        return 2


class Fast(Slow):
    """Equal to the former in all of its values."""

    def factor(self) -> int:
        return 3


@pytest.mark.parametrize("backend", EAGER)
def test_a_context_of_another_class(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x: x * pw.get_context(Slow).factor()), backend)
    for kind in (Slow, Fast, Slow):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of()}, kind()), x_of() * kind().factor())
    with pytest.raises(pw.ContextError):
        runtime.run("decode", {"x": x_of()})


def test_slots_that_grow_do_not_use_up_the_tries() -> None:
    """Static tensors without a capacity grow by powers of two, each time under a capture that was hardly used."""

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        add_blocks(x, out := torch.empty_like(x))
        return out

    runtime = runtime_of(Model(function), "full")
    for power in range(8):
        for _ in range(2):
            table = torch.ones(1 << power)
            torch.testing.assert_close(runtime.run("decode", {"x": x_of()}, Blocks(table)), x_of() + (1 << power))
    assert runtime.counters["captures"] == runtime.counters["replays"] == 8
    assert any("a size in the slots of its context grew" in reason for reason in runtime.counters["fallbacks"])


# What a capture leaves behind.


@pytest.mark.parametrize("backend", EAGER)
@pytest.mark.parametrize("what", ["attribute", "list"])
def test_a_capture_that_fails_puts_back_what_it_has_set(backend: str, what: str) -> None:
    """Else the next step would find scratch of the capture there, and one entry too many."""

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        if what == "list":
            m.kept.append(x)
        else:
            m.kept = [*m.kept, x]
        return x * len(m.kept) if x.sum().item() < 1e9 else x

    model = Model(function, kept=[])
    runtime = runtime_of(model, backend)
    for seed in range(3):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(4, seed)}), x_of(4, seed) * (seed + 1))
    assert not any(tensor.isnan().any() for tensor in model.kept)


def test_a_runtime_that_is_closed_between_the_checks_of_a_step() -> None:
    runtime = runtime_of(Model(lambda m, x: x * 2), "full")
    pick = runtime._table.pick

    def closing(*arguments: Any) -> Any:
        picked = pick(*arguments)
        runtime.close()
        return picked

    runtime._table.pick = closing
    with pytest.raises(pw.RuntimeClosedError, match="another thread"):
        runtime.run("decode", {"x": x_of()})
    runtime.compact()
    gc.collect()
    assert runtime.explain().as_dict()["memory"] == {"pool_bytes": 0, "buffer_bytes": 0}


def test_a_runtime_that_is_closed_during_a_step() -> None:
    """The step ends first, captured and all."""
    entered, closing = threading.Event(), threading.Event()

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        entered.set()
        closing.wait(10)
        return x * 2

    runtime = runtime_of(Model(function), "full")
    results: list[torch.Tensor] = []
    step = threading.Thread(target=lambda: results.append(runtime.run("decode", {"x": x_of()}, copy=True)))
    close = threading.Thread(target=lambda: (closing.set(), runtime.close()))
    step.start()
    entered.wait(10)
    close.start()
    for thread in (step, close):
        thread.join(20)
        assert not thread.is_alive()
    torch.testing.assert_close(results[0], x_of() * 2)
    gc.collect()
    assert runtime.explain().as_dict()["memory"] == {"pool_bytes": 0, "buffer_bytes": 0}


@pytest.mark.parametrize("backend", ALL)
def test_a_runtime_that_is_let_go_of_without_close(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x: x * 2), backend)
    for _ in range(3):
        runtime.run("decode", {"x": x_of()})
    model, captures, pool = weakref.ref(runtime.model), weakref.ref(runtime._captures), runtime._captures._room.pool
    del runtime
    gc.collect()
    assert model() is None
    assert captures() is None
    assert (pool.num_captures, pool.num_bytes) == (0, 0)


@pytest.mark.parametrize("backend", ALL)
def test_explaining_and_compacting_while_other_threads_step(backend: str) -> None:
    model = Model(lambda m, x: x @ m.table, table=torch.eye(WIDTH))
    runtime = runtime_of(model, backend, max_captures=2)
    failures: list[BaseException] = []

    def steps(seed: int) -> None:
        for i in range(20):
            x = x_of(1 + (seed + i) % 9, i)
            result = runtime.run(("decode", "prefill")[seed % 2], {"x": x}, copy=True)
            torch.testing.assert_close(result, x)

    def look() -> None:
        for i in range(20):
            str(runtime.explain())
            if i % 5 == 0:
                runtime.compact()

    def guarded(function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(steps, seed)) for seed in range(3)]
    threads.append(threading.Thread(target=guarded, args=(look,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures, failures


# Modules that are called as such.


@pytest.mark.parametrize("backend", ALL)
def test_a_compilable_module_that_is_called_twice_in_a_forward(backend: str) -> None:
    """What calls a module knows nothing of results that the next call overwrites."""
    phase = pw.PhaseConfig(backend=backend, buckets=(2, 4, 8))
    config = pw.GraphConfig(prefill=phase, decode=phase, capture_device="tape")

    @pw.compilable(dynamic_dims={"x": 0}, config=config)
    class Scale(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3

    module = Scale().eval()
    with torch.no_grad():
        for seed in range(3):
            first, second = module(x_of(3, seed)), module(x_of(3, seed + 1))
            torch.testing.assert_close(first, x_of(3, seed) * 3)
            torch.testing.assert_close(second, x_of(3, seed + 1) * 3)
    assert module.runtime.counters["replays"] == 5


@pytest.mark.parametrize("backend", ALL)
def test_tensors_without_data(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x: x * 2), backend)
    for _ in range(3):
        result = runtime.run("decode", {"x": torch.ones(3, WIDTH, device="meta")})
        assert (result.device.type, result.shape) == ("meta", (3, WIDTH))


# Warm-up, and the debug mode.


@pytest.mark.parametrize("backend", ALL)
def test_warm_up_knows_the_inputs_of_earlier_steps(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x: x * 2), backend)
    with pytest.raises(pw.InputError, match="or call run"):
        runtime.warm_up()
    runtime.run("decode", {"x": x_of()})
    for _ in range(2):
        runtime.warm_up()
        assert runtime.counters["captures"] == 6
    torch.testing.assert_close(runtime.run("prefill", {"x": x_of(7)}), x_of(7) * 2)
    assert runtime.counters["replays"] == 1


@pytest.mark.parametrize("backend", EAGER)
@pytest.mark.parametrize("how", ["transposed", "appended", "set", "module"])
def test_changes_that_only_the_debug_mode_looks_for(backend: str, how: str) -> None:
    table = torch.arange(16.0).reshape(WIDTH, WIDTH)
    model = Model(
        lambda m, x: m.act(x @ m.table) * sum(m.gains) * (1 if m.extra is None else m.extra),
        table=table,
        gains=[torch.ones(1)],
        extra=None,
        act=nn.Identity(),
    )
    runtime = runtime_of(model, backend, debug_captures=True)
    for _ in range(2):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of()}), model(x_of()))
    if how == "transposed":
        model.table.data = model.table.data.t()
    elif how == "appended":
        model.gains.append(torch.ones(1))
    elif how == "set":
        model.extra = torch.ones(1) * 2
    else:
        model.act = nn.Tanh()
    with runtime.counters.expect(captures=1, replays=0):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of()}), model(x_of()))


# What appears, and what gives way.


@pytest.mark.parametrize("backend", EAGER)
@pytest.mark.parametrize("how", ["bias", "attribute", "list", "module", "child"])
def test_a_tensor_that_appears_drops_the_capture(backend: str, how: str) -> None:
    """An eager forward may look for it; a replay would go on without."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
            self.adapter: torch.Tensor | None = None
            self.adapters: list[torch.Tensor] = []
            self.child: nn.Module = nn.Identity()
            self.late = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.child(self.linear(x))
            if self.adapter is not None:
                x = x + self.adapter
            if self.late is not None:
                x = self.late(x)
            return x + sum(self.adapters)

    model = Adapted()
    runtime = runtime_of(model, backend)
    for _ in range(2):
        runtime.run("decode", {"x": x_of()})
    if how == "bias":
        model.linear.bias = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
    elif how == "attribute":
        model.adapter = torch.ones(WIDTH)
    elif how == "list":
        model.adapters.append(torch.ones(WIDTH))
    elif how == "module":
        model.late = nn.Tanh()
    else:
        model.child = nn.Tanh()
    with torch.inference_mode():
        expected = model(x_of())
    with runtime.counters.expect(captures=1, replays=0):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of()}), expected)
    with runtime.counters.expect(captures=0, replays=1):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of()}), expected)


@pytest.mark.parametrize("backend", ALL)
def test_sizes_that_nobody_uses_any_more_give_way_to_others(backend: str) -> None:
    runtime = runtime_of(
        Model(lambda m, x, y: x + y.sum(0)), backend, dynamic_dims={"x": {0: "tokens"}, "y": {0: "rows"}}
    )
    for num_rows in (1, 2, 3, 4, *[5] * 80):
        y = x_of(num_rows, 1)
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(), "y": y}), x_of() + y.sum(0))
    assert runtime.counters["captures"] == 5
    assert runtime.counters["replays"] > 10
