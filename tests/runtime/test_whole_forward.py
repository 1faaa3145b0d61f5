"""Whole programs: which buckets get one, under each startup policy, and that a slower one is left out."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import piecework as pw
from piecework.errors import CompileError
from piecework.graphs.program import Program
from piecework.graphs.stitched import PiecewiseGraph
from piecework.runtime.warm_up import WarmUp

from .toy_captures import Affine, Slots, Toy, plain, step, x_of

LIMIT_S = 240.0


@pw.split_op(mutates_args=("calls", "out"), name="piecework_whole::counted", capturable=True)
def counted(x: torch.Tensor, calls: torch.Tensor, out: torch.Tensor) -> None:
    """Counts its calls, and reads no context."""
    calls.add_(1)
    out.copy_(x)


class Counting(Affine):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        counted(x, self.calls, out)
        result: torch.Tensor = super().forward(out)
        return result


Make = Callable[..., Any]
Times = Callable[[Sequence[float] | None], list[Any]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Any] = []

    def runtime(
        model: Any, compiler: str = "aot_eager", *, example_context: Any = None, specialize: Any = (), **more: Any
    ) -> Any:
        decode = pw.PhaseConfig(backend="full", compiler=compiler, buckets=(2, 4, 8), specialize=specialize)
        prefill = pw.PhaseConfig(backend="tc_piecewise", compiler="aot_eager", buckets=(4, 8))
        options = {"startup": "lazy", "torch_compile_max_bs": 4, "torch_compile_mode": "default", **more}
        config = pw.GraphConfig(
            decode=decode,
            prefill=prefill,
            capture_device="tape",
            enable_torch_compile=True,
            **{"compile_workers": 0, **options},
        )
        examples = {"x": x_of(2, 0)}
        made.append(
            pw.Runtime(model, config, dynamic_dims={"x": 0}, example_inputs=examples, example_context=example_context)
        )
        return made[-1]

    yield runtime
    for each in made:
        each.close()


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    """Says what programs take: the ordinary one, then the whole one. Returns what was measured."""

    def say(seconds: Sequence[float] | None) -> list[Any]:
        asked: list[Any] = []

        def measured(warm_up: WarmUp, programs: Any, signature: Any, size: int, recorder: Any) -> Any:
            asked.append((size, [program.kind for program in programs]))
            return None if seconds is None else [*seconds]

        monkeypatch.setattr(WarmUp, "seconds", measured)
        return asked

    return say


def run(runtime: Any, num_tokens: int, seed: int = 0, phase: str = "decode") -> None:
    x = x_of(num_tokens, seed)
    with torch.inference_mode():
        expected = runtime.model(x)
    torch.testing.assert_close(runtime.run(phase, {"x": x}), expected)


def until_settled(runtime: Any) -> None:
    for seed in range(5000):
        for num_tokens in (2, 4, 8):
            run(runtime, num_tokens, seed)
        if runtime.settled:
            return
        runtime._tiering.background.wait(0.01)
    raise AssertionError("never settled")


def kinds(runtime: Any) -> dict[int | None, str]:
    return {e.bucket: e.program.kind for e in runtime.entries if e.phase == "decode" and e.num_steps}


@pytest.mark.parametrize("startup", ["eager", "lazy", "tiered"])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_the_buckets_up_to_the_bound_are_compiled_whole_once(
    make: Make, times: Times, startup: str, compiler: str
) -> None:
    asked = times([2e-3, 1e-3])
    runtime = make(Affine(), compiler, startup=startup)
    for num_tokens in (1, 3, 7, 4, 2, 8):
        run(runtime, num_tokens)
    if startup == "tiered":
        until_settled(runtime)
        assert runtime.counters["in_step_seconds"] == 0
    for num_tokens in (1, 3, 7, 4, 2, 8):
        run(runtime, num_tokens, 5)
    ordinary = "eager" if compiler == "eager" else "general"
    assert kinds(runtime) == {2: "whole", 4: "whole", 8: ordinary}
    assert runtime.counters["compiles_whole"] == 2
    assert sorted(asked) == [(2, [ordinary, "whole"]), (4, [ordinary, "whole"])]
    compiled = [event for event in runtime.events if event.kind == "compile_whole"]
    assert sorted(event.detail["bucket"] for event in compiled) == [2, 4]
    assert {event.detail["mode"] for event in compiled} == {"default"}
    assert runtime.counters["fallbacks"] == {}
    assert runtime.counters["whole_not_faster"] == 0
    run(runtime, 3, 0, "prefill")
    assert runtime.counters["compiles_whole"] == 2, "none for prefill"
    assert all(e.program.kind == "general" for e in runtime.entries if e.phase == "prefill" and startup != "tiered")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ([1e-3, 2e-3], "the whole forward takes 2.000 ms of the device, general 1.000 ms: not faster, left out"),
        ([1e-3, 0.995e-3], "the whole forward takes 0.995 ms of the device, general 1.000 ms: not faster, left out"),
    ],
)
@pytest.mark.parametrize("startup", ["eager", "lazy", "tiered"])
def test_one_that_is_not_faster_is_left_out_and_counted(
    make: Make, times: Times, startup: str, seconds: list[float], said: str
) -> None:
    times(seconds)
    runtime = make(Affine(), startup=startup)
    for num_tokens in (2, 4, 8):
        run(runtime, num_tokens)
    if startup == "tiered":
        until_settled(runtime)
    assert kinds(runtime) == {2: "general", 4: "general", 8: "general"}
    assert runtime.counters["whole_not_faster"] == 2
    assert runtime.counters["compiles_whole"] == 2
    entry = next(e for e in runtime.explain().as_dict()["entries"] if (e["phase"], e["bucket"]) == ("decode", 2))
    assert entry["why_not_whole"] == said
    for num_tokens in (2, 4):
        run(runtime, num_tokens, 3)
    assert runtime.counters["compiles_whole"] == 2


def test_measuring_leaves_the_model_and_the_random_generators_as_they_are(make: Make) -> None:
    """Without a context of no tokens nothing keeps a split op from writing: then nothing is called on padding."""
    model = Counting()
    runtime = make(model)
    for seed in range(5):
        runtime.run("decode", {"x": x_of(4, seed)})
    assert kinds(runtime) == {4: "whole"}
    assert model.calls.tolist() == [5.0]
    assert "could not be measured" in runtime.entries[0].why
    other = make(Affine())
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    run(other, 2)
    torch.testing.assert_close(torch.rand(2), expected)
    assert any(event.kind == "measure" for event in other.events)


@pytest.mark.parametrize("startup", ["lazy", "tiered"])
def test_one_that_fails_when_it_is_called_is_left_out(
    make: Make, monkeypatch: pytest.MonkeyPatch, startup: str
) -> None:
    call = Program.__call__

    def broken(program: Any, *arguments: Any) -> Any:
        if program.kind == "whole":
            raise RuntimeError("kernel is broken")
        return call(program, *arguments)

    monkeypatch.setattr(Program, "__call__", broken)
    runtime = make(Affine(), startup=startup)
    for num_tokens in (2, 4, 8):
        run(runtime, num_tokens)
    if startup == "tiered":
        until_settled(runtime)
    assert kinds(runtime) == {2: "general", 4: "general", 8: "general"}
    assert "fails when it is called on padding (RuntimeError: kernel is broken)" in str(runtime.explain())
    assert runtime.counters["fallbacks"] == {"whole-forward compile failed: the ordinary program stays": 2}


def test_one_that_holds_for_fewer_sizes_than_what_it_would_replace_is_left_out(times: Times) -> None:
    """Its bucket's other steps would run neither it nor what they ran before."""
    times([2e-3, 1e-3])

    class Branching(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y.sum(0) if y.shape[0] > 4 else x - y.sum(0)

    config = pw.GraphConfig(
        decode=pw.PhaseConfig(backend="full", compiler="eager", buckets=(4,)),
        prefill=pw.PhaseConfig(backend="disabled"),
        capture_device="tape",
        enable_torch_compile=True,
        torch_compile_mode="default",
    )
    dims = {"x": {0: "tokens"}, "y": {0: "context"}}
    with pw.Runtime(Branching(), config, dynamic_dims=dims) as runtime:
        for length in (5, 3, 3, 3, 5):
            x, y = x_of(4), torch.randn(length, x_of(4).shape[1])
            torch.testing.assert_close(runtime.run("decode", {"x": x, "y": y}), Branching()(x, y))
        assert [entry.program.kind for entry in runtime.entries] == ["eager"]
        assert runtime.entries[0].why_not_whole == "the whole forward holds for fewer sizes of context"
        assert runtime.counters["replays"] == 3


def test_padding_of_sizes_at_which_a_program_does_not_hold_measures_nothing() -> None:
    """Dims other than tokens are as long in padding as in the example inputs."""

    class Branching(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y.sum(0) if y.shape[0] > 4 else x - y.sum(0)

    config = pw.GraphConfig(decode=pw.PhaseConfig(compiler="aot_eager", buckets=(4,)))
    dims = {"x": {0: "tokens"}, "y": {0: "context"}}
    x = x_of(4)
    for length, is_measured in ((3, False), (6, True)):
        examples = {"x": x, "y": torch.ones(length, x.shape[1])}
        with pw.Runtime(Branching(), config, dynamic_dims=dims, example_inputs=examples) as runtime:
            runtime.run("decode", {"x": x, "y": torch.ones(5, x.shape[1])})
            (entry,) = runtime.entries
            assert entry.program.kind == "general"
            times = runtime._warm_up.seconds([entry.program], entry.signature, 4, runtime._recorder)
            assert (times is not None) is is_measured


def test_a_full_disk_is_tried_again(make: Make, times: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    times([2e-3, 1e-3])
    monkeypatch.setattr("piecework.runtime.background.BACKOFF_S", 0.001)
    compile_whole, calls = PiecewiseGraph.compile_whole, []

    def full_at_first(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise CompileError("compiler inductor: failed") from OSError(errno.ENOSPC, "No space left on device")
        return compile_whole(*arguments)

    monkeypatch.setattr(PiecewiseGraph, "compile_whole", full_at_first)
    runtime = make(Affine(), startup="tiered", torch_compile_max_bs=2)
    until_settled(runtime)
    assert kinds(runtime) == {2: "whole", 4: "general", 8: "general"}
    assert len(calls) == 2


def test_nothing_is_compiled_whole_before_it_is_known_to_come(make: Make, times: Times) -> None:
    times([2e-3, 1e-3])
    runtime = make(Affine(), startup="tiered", startup_budget=100.0)
    assert runtime.counters["compiles_general"] > 0
    assert runtime.counters["compiles_whole"] == 0
    until_settled(runtime)
    assert runtime.counters["compiles_whole"] == 2


def test_what_cannot_be_measured_is_taken_and_says_so(make: Make, times: Times) -> None:
    times(None)
    runtime = make(Affine())
    run(runtime, 2)
    (entry,) = runtime.entries
    assert (entry.program.kind, entry.why) == ("whole", "the whole forward; it could not be measured on padding")


@pytest.mark.parametrize("startup", ["eager", "lazy", "tiered"])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_compile_that_fails_costs_no_step_and_is_not_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, startup: str, compiler: str
) -> None:
    tried: list[int] = []

    def failing(graph: PiecewiseGraph, bucket: int, *arguments: Any) -> Any:
        tried.append(bucket)
        raise CompileError("whole: no compiler\nmore")

    monkeypatch.setattr(PiecewiseGraph, "compile_whole", failing)
    runtime = make(Affine(), compiler, startup=startup)
    for num_tokens in (2, 4, 8):
        run(runtime, num_tokens)
    if startup == "tiered":
        until_settled(runtime)
    for num_tokens in (2, 4, 2, 4):
        run(runtime, num_tokens, 7)
    assert sorted(tried) == [2, 4]
    assert runtime.counters["fallbacks"] == {"whole-forward compile failed: the ordinary program stays": 2}
    ordinary = "eager" if compiler == "eager" else "general"
    assert kinds(runtime) == {2: ordinary, 4: ordinary, 8: ordinary}
    entry = next(e for e in runtime.entries if (e.phase, e.bucket) == ("decode", 2))
    assert entry.why_not_whole == "whole-forward compile failed: whole: no compiler"


def test_under_tiered_each_kind_takes_the_place_of_the_one_before(make: Make, times: Times) -> None:
    times([2e-3, 1e-3])
    runtime = make(Affine(), startup="tiered", specialize=(2,))
    until_settled(runtime)
    promoted = [
        (event.scope.bucket, event.detail["from_"], event.detail["to"])
        for event in runtime.events
        if event.kind == "promote" and event.scope.phase == "decode" and event.scope.bucket is not None
    ]
    last = {bucket: to for bucket, _, to in promoted}
    assert last == {2: "whole", 4: "whole", 8: "general"}
    order = ("eager", "general", "specialized", "whole")
    assert all(order.index(before) < order.index(after) for _, before, after in promoted)
    assert not any(event.scope.in_step for event in runtime.events if event.kind.startswith(("compile", "trace")))
    assert runtime.wait_settled(LIMIT_S)


def test_split_ops_in_the_one_graph_read_each_steps_context(make: Make, times: Times) -> None:
    """And write what belongs to the model: the cache is the same as without."""
    times([2e-3, 1e-3])
    mine, other = Toy(), Toy()
    runtime = make(mine, "eager", example_context=Slots(slots=torch.zeros(0, dtype=torch.int64)))
    for seed in range(4):
        for num_tokens in (2, 3, 4, 8):
            got = step(runtime, num_tokens, seed)
            torch.testing.assert_close(got, plain(other, num_tokens, seed))
    for layer, expected in zip(mine.layers, other.layers, strict=True):
        torch.testing.assert_close(layer.cache[:-1], expected.cache[:-1])  # the last row is a dump
    assert kinds(runtime) == {2: "whole", 4: "whole", 8: "eager"}
    assert runtime.counters["captures"] == 3
    assert runtime.counters["replays"] == 4 * 4 - 3
