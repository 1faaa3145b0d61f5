"""`tiered`: steps run at once by what there is, better programs come behind, and boundaries put them in place.

Held together by events and counters, never by how long something took. Here a thread of this process compiles
(`compile_workers=0`); test_tiered_workers.py has the processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import piecework as pw
from piecework.errors import CompileError, WorkerLostError
from piecework.runtime.building import WorkerBuilder

from .toy_captures import BACKENDS, BODIES, LAYERS, SEGMENTS, Affine, Slots, Toy, config_of, plain, step, x_of

WAYS = (*BACKENDS, ("disabled", "aot_eager"))
COMPILED = [way for way in WAYS if way[1] != "eager" or way[0] == "tc_piecewise"]
LIMIT_S = 120.0

Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Any] = []

    def runtime(backend: str = "full", compiler: str = "aot_eager", *, model: Any = None, **options: Any) -> Any:
        more = {name: options.pop(name) for name in ("example_inputs", "example_context") if name in options}
        options = {"startup": "tiered", "compile_workers": 0, **options}
        config = config_of(backend, compiler, **options)
        made.append(pw.Runtime(model or Toy(), config, dynamic_dims={"x": 0}, **more))
        return made[-1]

    yield runtime
    for each in made:
        each.close()


def no_tokens() -> Slots:
    return Slots(torch.empty(0, dtype=torch.int64))


class Gate:
    """Holds the background where a piece would be compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived, self.open = threading.Event(), threading.Event()
        precompile = WorkerBuilder.precompile

        def held(builder: WorkerBuilder, *arguments: Any) -> None:
            self.arrived.set()
            assert self.open.wait(LIMIT_S)
            precompile(builder, *arguments)

        monkeypatch.setattr(WorkerBuilder, "precompile", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


def programs(runtime: Any) -> dict[tuple[str, int | None], str]:
    return {(str(e.phase), e.bucket): e.program.kind for e in runtime.entries if e.num_steps}


def kinds(runtime: Any, kind: str) -> list[Any]:
    return [event for event in runtime.events if event.kind == kind]


def both(runtime: Any, reference: Toy, num_tokens: int, seed: int = 0, phase: str = "decode") -> None:
    """The step, and what is left of it in the caches, as the model alone would do it."""
    torch.testing.assert_close(step(runtime, num_tokens, seed, phase), plain(reference, num_tokens, seed))


def settle(runtime: Any, reference: Toy, sizes: tuple[int, ...], phase: str = "decode") -> None:
    """Steps of these sizes, all of them right, until nothing gets better any more."""
    for seed in range(10_000):
        for num_tokens in sizes:
            both(runtime, reference, num_tokens, seed, phase)
        if runtime.settled:
            return
        runtime.wait_settled(0.01)
    raise AssertionError("never settled")


@pytest.mark.parametrize(("backend", "compiler"), WAYS)
def test_steps_are_right_all_the_way_up_and_nothing_compiles_in_one(make: Make, backend: str, compiler: str) -> None:
    runtime, reference = make(backend, compiler, model=Toy()), Toy()
    assert runtime.ready
    settle(runtime, reference, (3, 4, 1, 8, 9))
    in_steps = [e.kind for e in runtime.events if e.scope.in_step and e.kind not in ("entry", "fallback", "warning")]
    assert in_steps == []
    assert runtime.counters["in_step_seconds"] == 0
    is_traced = (backend, compiler) in COMPILED
    assert set(programs(runtime).values()) == {"general" if is_traced else "eager"}
    assert runtime.counters["promotions"] == len(kinds(runtime, "promote"))
    assert (runtime.counters["promotions"] > 0) == is_traced
    captured = [e for e in runtime.explain().as_dict()["entries"] if e["captured"]]
    buckets = [] if backend == "disabled" else [2, 4, 8]
    assert [(e["bucket"], e["segments"]) for e in captured] == [(bucket, SEGMENTS[backend]) for bucket in buckets]
    assert runtime.explain().as_dict()["settled"]
    assert kinds(runtime, "settled")
    before = runtime.counters.as_dict()
    for num_tokens in (3, 4, 1, 8):
        step(runtime, num_tokens)
    after = runtime.counters.as_dict()
    assert after["replays"] - before["replays"] == (0 if backend == "disabled" else 4)
    assert [after[name] for name in ("captures", "promotions")] == [before[n] for n in ("captures", "promotions")]


@pytest.mark.parametrize(("backend", "compiler"), [way for way in WAYS if way[0] != "disabled"])
def test_a_bucket_is_a_replay_at_its_second_appearance(make: Make, gate: Gate, backend: str, compiler: str) -> None:
    runtime, reference = make(backend, compiler), Toy()
    for num_tokens in (4, 2, 8):
        with runtime.counters.expect(replays=0, steps=1):
            both(runtime, reference, num_tokens)
        before = BODIES[0]
        with runtime.counters.expect(captures=1, replays=1, steps=1):  # captured at the boundary before it
            both(runtime, reference, num_tokens, 1)
        assert BODIES[0] - before == 2 * LAYERS  # ours and the reference's: a capture runs nothing
    assert set(programs(runtime).values()) == {"eager"}
    assert all(not event.scope.in_step for event in kinds(runtime, "capture"))


@pytest.mark.parametrize(("backend", "compiler"), COMPILED)
def test_steps_go_on_while_the_compiler_is_held_and_replay_what_it_made(
    make: Make, gate: Gate, backend: str, compiler: str
) -> None:
    runtime, reference = make(backend, compiler), Toy()
    both(runtime, reference, 4)
    assert gate.arrived.wait(LIMIT_S)
    for seed in range(20):
        both(runtime, reference, 4, seed)
    assert programs(runtime) == {("decode", 4): "eager"}
    assert not runtime.settled
    assert not runtime.wait_settled(0.05)
    assert kinds(runtime, "promote") == []
    gate.open.set()
    settle(runtime, reference, (4,))
    assert programs(runtime) == {("decode", 4): "general"}
    with runtime.counters.expect(replays=0 if backend == "disabled" else 1):
        both(runtime, reference, 4, 5)
    [promoted] = kinds(runtime, "promote")
    assert (promoted.detail["from_"], promoted.detail["to"], promoted.scope.bucket) == ("eager", "general", 4)


def test_a_bucket_that_comes_later_begins_with_the_program_that_is_there(make: Make) -> None:
    runtime, reference = make(), Toy()
    settle(runtime, reference, (4,))
    promotions = runtime.counters["promotions"]
    for seed in range(2):
        both(runtime, reference, 7, seed)
    assert programs(runtime)["decode", 8] == "general"
    assert runtime.counters["promotions"] == promotions
    assert runtime.settled


def test_specialised_buckets_come_last(make: Make) -> None:
    phase = pw.PhaseConfig(backend="full", compiler="aot_eager", buckets=(2, 4, 8), specialize=(4,))
    config = pw.GraphConfig(decode=phase, prefill=phase, startup="tiered", compile_workers=0, capture_device="tape")
    reference = Toy()
    with pw.Runtime(Toy(), config, dynamic_dims={"x": 0}) as runtime:
        settle(runtime, reference, (4, 2))
        assert programs(runtime) == {("decode", 4): "specialized", ("decode", 2): "general"}
        ways = [event.detail["to"] for event in kinds(runtime, "promote") if event.scope.bucket == 4]
        assert ways in (["general", "specialized"], ["specialized"])
        assert runtime.counters["compiles_specialized"] > 0
        assert all(not event.scope.in_step for event in kinds(runtime, "compile_specialized"))


def test_each_phase_has_its_own_policy(make: Make) -> None:
    phase = pw.PhaseConfig(backend="full", compiler="aot_eager", buckets=(2, 4))
    lazy = pw.PhaseConfig(backend="full", compiler="aot_eager", buckets=(2, 4), startup="lazy")
    config = pw.GraphConfig(decode=phase, prefill=lazy, startup="tiered", compile_workers=0, capture_device="tape")
    reference = Toy()
    with pw.Runtime(Toy(), config, dynamic_dims={"x": 0}) as runtime:
        with runtime.counters.expect(captures=1, traces=1):
            step(runtime, 2, 0, "prefill")
        assert any(event.scope.in_step for event in kinds(runtime, "trace"))
        settle(runtime, reference, (2,))
        assert runtime.counters["traces"] == 1  # one program for both
        assert "startup: lazy in prefill and tiered in decode" in str(runtime.explain())


def test_without_a_budget_only_the_caller_promotes(make: Make) -> None:
    runtime, reference = make("full", "eager", promotion_budget_ms=0), Toy()
    for seed in range(4):
        with runtime.counters.expect(captures=0, replays=0):
            both(runtime, reference, 4, seed)
    assert runtime.promote() == 1
    with runtime.counters.expect(captures=0, replays=1):
        both(runtime, reference, 4, 9)


def test_the_budget_of_a_boundary(make: Make, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each capture is expected to take more than the budget: each is made alone, and counted."""
    monkeypatch.setattr("piecework.runtime.promotion.CAPTURE_ESTIMATE_S", 10.0)
    runtime = make("full", "eager", promotion_budget_ms=1e-6)
    phases = ("decode", "prefill")
    for phase in phases:  # the second step begins with the boundary of the first one's capture
        step(runtime, 4, 0, phase)
    with runtime.counters.expect(captures=1, boundary_overruns=1):
        step(runtime, 2)
    assert [event.detail["done"] for event in kinds(runtime, "boundary")] == [1] * runtime.counters["captures"]
    runtime.promote()
    assert all(event["captured"] for event in runtime.explain().as_dict()["entries"])


def test_the_most_used_bucket_goes_first(make: Make) -> None:
    runtime = make("full", "eager", promotion_budget_ms=0)
    for num_tokens, times in ((2, 1), (8, 5), (4, 3)):
        for seed in range(times):
            step(runtime, num_tokens, seed)
    runtime.promote()
    assert [event.scope.bucket for event in kinds(runtime, "capture")] == [8, 4, 2]


def test_a_compile_that_fails_costs_a_promotion_and_no_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        raise CompileError("compiler aot_eager: no such luck")

    monkeypatch.setattr("piecework.graphs.piece.compile_piece", failing)
    runtime, reference = make(), Toy()
    settle(runtime, reference, (4, 2))
    assert len(calls) == 2  # once at each size: it may depend on that
    assert set(programs(runtime).values()) == {"eager"}
    entries = runtime.explain().as_dict()["entries"]
    assert all("no such luck" in entry["given_up"] for entry in entries if entry["steps"])
    assert all(entry["captured"] for entry in entries if entry["steps"])
    assert runtime.counters["fallbacks"]["not promoted: a better program could not be made"] >= 1
    assert "no such luck" in str(runtime.explain())
    for seed in range(20):
        both(runtime, reference, 4, seed)
    assert runtime.wait_settled(LIMIT_S)
    assert len(calls) == 2


@pytest.mark.parametrize("num_lost", [1, 3])
def test_a_lost_worker_is_tried_again_and_not_for_ever(
    make: Make, monkeypatch: pytest.MonkeyPatch, num_lost: int
) -> None:
    monkeypatch.setattr("piecework.runtime.background.BACKOFF_S", 0.001)
    lost: list[Any] = []
    precompile = WorkerBuilder.precompile

    def losing(builder: WorkerBuilder, *arguments: Any) -> None:
        if len(lost) < num_lost:
            lost.append(arguments)
            raise WorkerLostError("compile worker 7: was killed")
        precompile(builder, *arguments)

    monkeypatch.setattr(WorkerBuilder, "precompile", losing)
    runtime, reference = make(), Toy()
    settle(runtime, reference, (4,))
    assert len(lost) == num_lost
    assert programs(runtime) == {("decode", 4): "general" if num_lost < 3 else "eager"}
    assert runtime.counters["fallbacks"]["a compile worker was lost: tried again later"] == min(num_lost, 2)


def test_a_model_that_cannot_be_traced_stays_captured_eager(make: Make) -> None:
    class Untraceable(Toy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    runtime, reference = make(model=Untraceable()), Toy()
    settle(runtime, reference, (4,))
    [entry] = [entry for entry in runtime.explain().as_dict()["entries"] if entry["steps"]]
    assert (entry["program"], entry["captured"]) == ("eager", True)
    assert "could not be made" in entry["given_up"]


def test_a_program_is_made_under_the_autocast_of_its_steps(make: Make) -> None:
    runtime, reference = make(model=Affine()), Affine()
    for seed in range(1000):
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            got = runtime.run("decode", {"x": x_of(4, seed)})
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got, reference(x_of(4, seed)))
            if runtime.settled:
                break
            runtime.wait_settled(0.01)
    [entry] = [entry for entry in runtime.explain().as_dict()["entries"] if entry["steps"]]
    assert (entry["program"], entry["captured"]) == ("general", True)


def test_what_needs_settings_that_are_gone_is_not_promoted(make: Make) -> None:
    runtime, x = make(model=Affine()), x_of(4)
    with runtime._table.lock:  # the background waits for it
        torch.set_default_dtype(torch.float64)
        try:
            runtime.run("decode", {"x": x})
        finally:
            torch.set_default_dtype(torch.float32)
    for _ in range(1000):
        if all(entry.given_up for entry in runtime.entries):
            break
        threading.Event().wait(0.01)
    [entry] = [entry for entry in runtime.explain().as_dict()["entries"] if entry["steps"]]
    assert entry["program"] == "eager"
    assert "settings of torch" in entry["given_up"]


def test_warm_up_makes_the_best_at_once(make: Make) -> None:
    runtime, reference = make(example_inputs={"x": x_of(2)}, example_context=no_tokens()), Toy()
    both(runtime, reference, 4)  # eager so far
    runtime.warm_up("decode")
    assert {e.bucket: e.program.kind for e in runtime.entries if str(e.phase) == "decode"} == {
        2: "general",
        4: "general",
        8: "general",
        None: "general",
    }
    with runtime.counters.expect(captures=0, replays=3):
        for num_tokens in (2, 4, 8):
            both(runtime, reference, num_tokens, 1)


def test_one_bucket_can_be_warmed_up_alone(make: Make) -> None:
    runtime = make(example_inputs={"x": x_of(2)}, example_context=no_tokens())
    runtime.warm_up("decode", buckets=[4])
    captured = [e["bucket"] for e in runtime.explain().as_dict()["entries"] if e["captured"]]
    assert captured == [4]
    with pytest.raises(pw.ConfigError, match="warm_up: expected buckets of decode, 2, 4, 8, got 3"):
        runtime.warm_up("decode", buckets=[3])


def test_wait_settled_captures_on_padding_what_no_step_has_run_since(make: Make) -> None:
    runtime, reference = make(example_inputs={"x": x_of(2)}, example_context=no_tokens()), Toy()
    both(runtime, reference, 4)
    before = [buffer.clone() for buffer in runtime.model.buffers()]
    assert runtime.wait_settled(LIMIT_S)
    for buffer, kept in zip(runtime.model.buffers(), before, strict=True):
        assert torch.equal(buffer[:-1], kept[:-1])
    assert programs(runtime) == {("decode", 4): "general"}
    with runtime.counters.expect(captures=0, replays=1):
        both(runtime, reference, 4, 1)


def test_what_a_step_returned_is_untouched_by_the_boundary_before_another_phase(make: Make) -> None:
    runtime, reference = make(), Toy()
    for seed in range(5000):
        kept = step(runtime, 4, seed, "prefill")
        own = kept.clone()
        torch.testing.assert_close(own, plain(reference, 4, seed))
        both(runtime, reference, 2, seed)
        assert torch.equal(kept, own)
        if runtime.settled:
            break
        threading.Event().wait(0.01)
    assert runtime.settled
    assert runtime.counters["promotions"] >= 1


def test_lazy_and_eager_have_nothing_to_wait_for() -> None:
    for startup in ("lazy", "eager"):
        config = config_of("full", "aot_eager", startup=startup)
        more = {"example_inputs": {"x": x_of(2)}, "example_context": no_tokens()}
        with pw.Runtime(Toy(), config, dynamic_dims={"x": 0}, **more) as runtime:  # type: ignore[arg-type]
            assert runtime.ready
            assert runtime.settled
            assert runtime.wait_settled()
            assert runtime.promote() == 0
            step(runtime, 4)
            assert runtime.settled


def test_two_threads_on_two_phases_while_everything_is_promoted(make: Make) -> None:
    """The toy's cache is shared by both, so that only what does not read it is compared: rows at slot -1."""
    runtime = make("full", "aot_eager")
    wrong: list[str] = []
    settled = threading.Event()

    def serve(phase: str) -> None:
        seed = 0
        while not settled.is_set() and seed < 5000:
            seed += 1
            num_tokens = 1 + seed % 8
            x = x_of(num_tokens, seed)
            got = runtime.run(phase, {"x": x}, Slots(torch.full((num_tokens,), -1)), copy=True)
            with torch.inference_mode(), pw.use_context(Slots(torch.full((num_tokens,), -1))):
                expected = reference(x)
            if not torch.allclose(got, expected, atol=1e-5):
                wrong.append(f"{phase} {seed}")
            if seed > 50 and runtime.settled:
                settled.set()

    reference = Toy()
    threads = [threading.Thread(target=serve, args=(phase,)) for phase in ("decode", "prefill")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert wrong == []
    assert settled.is_set()


def test_close_while_something_is_made(make: Make, gate: Gate) -> None:
    runtime = make()
    step(runtime, 4)
    assert gate.arrived.wait(LIMIT_S)
    threading.Timer(0.05, gate.open.set).start()
    runtime.close()
    with pytest.raises(pw.RuntimeClosedError):
        step(runtime, 4)
    assert not [t for t in threading.enumerate() if t.name == "piecework-background" and t.is_alive()]


def test_evaluate_guards_and_tiered_do_not_go_together() -> None:
    with pytest.raises(pw.ConfigError, match="startup: expected eager or lazy under evaluate_guards"):
        pw.GraphConfig(startup="tiered", evaluate_guards=True)
    with pytest.raises(pw.ConfigError, match="startup: expected eager or lazy under evaluate_guards"):
        pw.GraphConfig(decode={"startup": "tiered"}, evaluate_guards=True)


def test_a_capture_that_cannot_be_made_at_a_boundary_is_counted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, reference = make("full", "eager"), Toy()

    def failing(*arguments: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("piecework.graphs.full.capture", failing)
    settle(runtime, reference, (4,))
    [entry] = [entry for entry in runtime.explain().as_dict()["entries"] if entry["steps"]]
    assert "no memory" in entry["not_captured"]
    assert runtime.settled


def test_captures_that_fail_keep_to_the_budget_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = make("full", "eager", promotion_budget_ms=20)
    monkeypatch.setattr(runtime._tiering.promotions, "before_step", lambda: None)
    for num_tokens in (2, 4, 8):
        step(runtime, num_tokens)

    def failing(slot: Any, recorder: Any) -> bool:
        slot.waits = False
        threading.Event().wait(0.05)
        return False

    monkeypatch.setattr(runtime._captures, "capture_waiting", failing)
    assert runtime._tiering.promotions._at_boundary(0.02) == 0
    assert len(runtime._captures.waiting) == 2  # one has used the budget up
    assert runtime.counters["boundary_overruns"] == 1


def test_nothing_is_captured_that_would_be_dropped_at_once(make: Make) -> None:
    runtime, reference = make(promotion_budget_ms=0), Toy()
    both(runtime, reference, 4)
    while not runtime._tiering.background.is_idle:
        runtime._tiering.background.wait(0.05)
    assert runtime.promote() == 1
    assert [event.kind for event in runtime.events if event.kind in ("capture", "promote")] == ["promote"]
