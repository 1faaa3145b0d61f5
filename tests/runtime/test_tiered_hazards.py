"""What may go on while programs are made beside the steps: each was wrong once."""

from __future__ import annotations

import gc
import shutil
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.output_graph import OutputGraph

import piecework as pw
from piecework.runtime.building import WorkerBuilder

from .toy_captures import Affine, Slots, Toy, config_of, plain, step, x_of

LIMIT_S = 120.0
Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Any] = []

    def runtime(model: Any, backend: str = "full", compiler: str = "aot_eager", **options: Any) -> Any:
        names = ("example_inputs", "example_context", "output_dims")
        more = {name: options.pop(name) for name in names if name in options}
        config = config_of(backend, compiler, **{"startup": "tiered", "compile_workers": 0, **options})
        made.append(pw.Runtime(model, config, dynamic_dims={"x": 0}, **more))
        return made[-1]

    yield runtime
    for each in made:
        each.close()


class Hold:
    """Holds whoever calls a method, before it does anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.arrived, self.open = threading.Event(), threading.Event()
        function = getattr(owner, name)

        def held(*arguments: Any, **options: Any) -> Any:
            self.arrived.set()
            assert self.open.wait(LIMIT_S)
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, held)


def run(runtime: Any, seed: int, num_tokens: int = 4) -> torch.Tensor:
    result: torch.Tensor = runtime.run("decode", {"x": x_of(num_tokens, seed)}, copy=True)
    return result


def until_settled(runtime: Any, each: Callable[[int], None]) -> None:
    for seed in range(5000):
        each(seed)
        if runtime.settled:
            return
        runtime._tiering.background.wait(0.01)
    raise AssertionError("never settled")


class TraceHeld:
    """Holds the background in the middle of Dynamo's trace."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived, self.open = threading.Event(), threading.Event()
        create = OutputGraph.create_proxy

        def held(graph: Any, *arguments: Any, **options: Any) -> Any:
            if threading.current_thread().name == "piecework-background":
                self.arrived.set()
                assert self.open.wait(LIMIT_S)
            return create(graph, *arguments, **options)

        monkeypatch.setattr(OutputGraph, "create_proxy", held)


def test_weights_that_are_replaced_during_a_trace_stay(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, hold = Affine(), TraceHeld(monkeypatch)
    runtime = make(model)
    run(runtime, 0)
    assert hold.arrived.wait(LIMIT_S)
    new = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(new, assign=True)
    model.register_buffer("adapter", torch.ones(3))
    hold.open.set()
    until_settled(runtime, lambda seed: torch.testing.assert_close(run(runtime, seed), model(x_of(4, seed)).detach()))
    assert torch.equal(model.linear.weight, new["linear.weight"])
    assert torch.equal(model.adapter, torch.ones(3))
    assert {entry.program.kind for entry in runtime.entries} == {"general"}


def test_what_others_draw_during_a_trace_is_not_drawn_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    hold, runtime = TraceHeld(monkeypatch), make(Affine())
    torch.manual_seed(11)
    drawn = [torch.rand(1).item()]
    runtime.run("decode", {"x": torch.ones(4, 8)})
    assert hold.arrived.wait(LIMIT_S)
    drawn.append(torch.rand(1).item())
    hold.open.set()

    def each(seed: int) -> None:
        drawn.append(torch.rand(1).item())
        runtime.run("decode", {"x": torch.ones(4, 8)})

    until_settled(runtime, each)
    assert len(drawn) > 2
    torch.manual_seed(11)
    assert drawn == [torch.rand(1).item() for _ in drawn]


def test_a_forward_that_sets_attributes_is_refused_and_undone(make: Make) -> None:
    class Counting(Affine):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x
            return super().forward(x)

    model = Counting()
    with pytest.raises(pw.TraceError, match="the model's forward sets last"):
        pw.Runtime(
            model,
            config_of("disabled", "aot_eager", startup="eager"),
            dynamic_dims={"x": 0},
            example_inputs={"x": x_of(2)},
        )
    assert "last" not in model.__dict__


class Counter(torch.nn.Module):
    """Each call of it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n.add_(1)
        return x + self.n


@pytest.mark.parametrize("backend", ["full", "tc_piecewise", "disabled"])
def test_a_first_call_does_not_change_the_model(make: Make, backend: str) -> None:
    model, num_steps = Counter(), [0]
    runtime = make(model, backend, example_inputs={"x": x_of(2)})

    def each(seed: int) -> None:
        num_steps[0] += 1
        torch.testing.assert_close(run(runtime, seed), x_of(4, seed) + num_steps[0])

    until_settled(runtime, each)
    assert {entry.program.kind for entry in runtime.entries if entry.num_steps} == {"general"}
    assert not [event for event in runtime.events if event.kind == "first_call"]


@pytest.mark.parametrize(("backend", "compiler"), [("full", "aot_eager"), ("tc_piecewise", "eager")])
def test_a_capture_on_padding_is_made_under_the_autocast_of_its_steps(make: Make, backend: str, compiler: str) -> None:
    no_tokens = Slots(torch.empty(0, dtype=torch.int64))
    runtime = make(Affine(), backend, compiler, example_inputs={"x": x_of(2)}, example_context=no_tokens)
    for seed in range(40):
        with torch.autocast("cpu", torch.bfloat16):
            got = runtime.run("decode", {"x": x_of(4, seed)}, Slots(torch.arange(4)))
        assert got.dtype == torch.bfloat16
        runtime.wait_settled(0.05)  # under no autocast
    assert runtime.wait_settled(LIMIT_S)
    [entry] = [entry for entry in runtime.explain().as_dict()["entries"] if entry["steps"]]
    assert (entry["program"], entry["captured"]) == ("general", True)
    with torch.autocast("cpu", torch.bfloat16), runtime.counters.expect(replays=1, captures=0):
        runtime.run("decode", {"x": x_of(4, 1)}, Slots(torch.arange(4)))


def test_wait_settled_ends_where_only_a_step_helps(make: Make) -> None:
    runtime = make(Toy())
    step(runtime, 4)
    assert not runtime.wait_settled()  # without a limit: its new program is there, and no step has run it yet
    assert [entry.program.kind for entry in runtime.entries] == ["general"]
    step(runtime, 4, 1)
    assert runtime.wait_settled()


def test_the_thread_ends_when_nothing_is_asked_for(make: Make) -> None:
    """Its threads of OpenMP would make every operator on a CPU slower for as long as it lives."""
    runtime = make(Toy())
    threads = []
    for num_tokens in (4, 8):
        step(runtime, num_tokens)
        thread = runtime._tiering.background._thread
        if thread is not None:
            threads.append(thread)
        while not runtime.settled:
            step(runtime, num_tokens)
            runtime._tiering.background.wait(0.01)
        for each in threads:
            each.join(LIMIT_S)
            assert not each.is_alive()
        assert runtime._tiering.background._thread is None
    assert threads
    assert [entry.program.kind for entry in runtime.entries] == ["general", "general"]


def test_a_runtime_that_nobody_holds_goes_with_its_model_and_its_thread(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("full", "aot_eager", startup="tiered", compile_workers=0)
    model = Toy()
    hold = Hold(monkeypatch, WorkerBuilder, "precompile")
    runtime = pw.Runtime(model, config, dynamic_dims={"x": 0})
    step(runtime, 4)
    assert hold.arrived.wait(LIMIT_S)
    thread = runtime._tiering.background._thread  # type: ignore[union-attr]
    assert thread is not None
    held = weakref.ref(model)
    hold.open.set()
    del runtime, model
    for _ in range(200):
        gc.collect()
        if held() is None and not thread.is_alive():
            break
        threading.Event().wait(0.05)
    assert held() is None
    assert not thread.is_alive()


def test_a_constructor_that_fails_leaves_no_thread(make: Make) -> None:
    class Untraceable(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return x + 1

    before = {thread.name for thread in threading.enumerate()}
    phases = {
        "prefill": pw.PhaseConfig(compiler="aot_eager", buckets=(2,), startup="tiered"),
        "decode": pw.PhaseConfig(compiler="aot_eager", buckets=(2,), startup="eager"),
    }
    with pytest.raises(pw.TraceError):
        pw.Runtime(
            Untraceable(),
            pw.GraphConfig(**phases, compile_workers=1),
            dynamic_dims={"x": 0},
            example_inputs={"x": x_of(2)},
        )
    gc.collect()
    left = [thread for thread in threading.enumerate() if thread.name not in before and "prepare" not in thread.name]
    for thread in left:
        thread.join(20)
    assert not [thread.name for thread in left if thread.is_alive()]


class Branching(torch.nn.Module):
    """A program of it holds for one side of the branch only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] > 8 else x * 2


def test_sizes_at_which_a_program_does_not_hold_get_one_of_their_own(make: Make) -> None:
    runtime = make(Branching(), "disabled")
    for num_tokens in (9, 30, 12):  # above the ladder: unpadded

        def each(seed: int, num_tokens: int = num_tokens) -> None:
            x = x_of(num_tokens, seed)
            torch.testing.assert_close(run(runtime, seed, num_tokens), Branching()(x))

        until_settled(runtime, each)
    run(runtime, 0, 8)
    until_settled(runtime, lambda seed: torch.testing.assert_close(run(runtime, seed, 8), x_of(8, seed) * 2))
    assert runtime.counters["traces"] == 2


def test_a_phase_that_traces_nothing_waits_for_no_compile(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = Hold(monkeypatch, WorkerBuilder, "precompile")
    decode = pw.PhaseConfig(backend="full", compiler="aot_eager", buckets=(4,), startup="tiered")
    prefill = pw.PhaseConfig(backend="full", compiler="eager", buckets=(4, 8), startup="lazy")
    config = pw.GraphConfig(decode=decode, prefill=prefill, capture_device="tape", compile_workers=0)
    try:
        with pw.Runtime(Toy(), config, dynamic_dims={"x": 0}) as runtime:
            reference = Toy()
            torch.testing.assert_close(step(runtime, 4), plain(reference, 4))
            assert hold.arrived.wait(LIMIT_S)
            for num_tokens in (4, 8):
                torch.testing.assert_close(step(runtime, num_tokens, 1, "prefill"), plain(reference, num_tokens, 1))
            hold.open.set()
    finally:
        hold.open.set()


def test_an_entry_that_a_step_opens_during_a_warm_up_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from piecework.runtime.entry_table import EntryTable

    runtime = make(Toy(), example_inputs={"x": x_of(2)}, example_context=Slots(torch.empty(0, dtype=torch.int64)))
    hold = Hold(monkeypatch, EntryTable, "_make_entry")
    thread = threading.Thread(target=lambda: runtime.warm_up("decode", buckets=[4]))
    thread.start()
    try:
        assert hold.arrived.wait(LIMIT_S)
        for seed in range(3):
            step(runtime, 4, seed)
    finally:
        hold.open.set()
    thread.join(LIMIT_S)
    step(runtime, 4, 4)
    [entry] = [entry for entry in runtime.entries if entry.bucket == 4]
    assert (entry.program.kind, entry.num_steps) == ("general", 4)
    slots = [slot for slot in runtime._captures._slots if slot.entry.bucket == 4]
    assert [slot.entry for slot in slots] == [entry]


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system that nothing can be written to, whoever asks."""
    command = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a read-only file system")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_read_only_cache_costs_the_promotion_and_no_step(
    make: Make, read_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(read_only))
    runtime = make(Affine(), compiler="inductor")
    with torch.inference_mode():
        expected = runtime.model(x_of(4, 0))

    def each(seed: int) -> None:
        torch.testing.assert_close(run(runtime, 0), expected)

    until_settled(runtime, each)
    (entry,) = runtime.entries
    assert entry.program.kind == "eager"
    assert "Read-only file system" in entry.given_up
    assert runtime.counters["captures"] == 1
    assert runtime.counters["promotions"] == 0
    assert "not promoted: a better program could not be made" in runtime.counters["fallbacks"]
    assert runtime.counters["replays"] > 0
