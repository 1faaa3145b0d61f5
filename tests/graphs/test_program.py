"""General and specialised programs: what is compiled once, for which sizes it holds, and that it equals the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from piecework.errors import CompileError
from piecework.graphs import compilers
from piecework.graphs.audit import Interval
from piecework.graphs.inputs import InputContract
from piecework.graphs.piece import CompiledPieces
from piecework.graphs.stitched import PiecewiseGraph
from piecework.phases import Compiler

from .toys import CALLS, Fn, accumulate, applied, assert_equals_model, assert_same, run, run_eager, trace_model

X = {"x": torch.randn(3, 4)}
TWO = {"x": {0: "tokens"}, "y": {0: "rows"}}


class Log:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def record(self, kind: str, *, seconds: float = 0.0, **detail: Any) -> None:
        assert seconds >= 0
        self.events.append((kind, detail))

    @contextlib.contextmanager
    def progress(self, title: str, *, total: int | None = None) -> Iterator[Callable[[], None]]:
        yield lambda: None


def layers(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    for _ in range(4):
        x = applied(x @ m.weight) + x
    return x.sum(-1)


def graph_of(function: Any, inputs: Any = X, dims: Any = None, **tensors: torch.Tensor) -> PiecewiseGraph:
    dims = dims or {"x": {0: "tokens"}}
    return PiecewiseGraph.from_trace(trace_model(Fn(function, **tensors), inputs, dims), InputContract(dims))


def test_equal_pieces_are_compiled_once():
    """4 layers: 5 pieces, the 3 in the middle equal; so 3 compiles, and none the second time."""
    graph, log = graph_of(layers, weight=torch.randn(4, 4)), Log()
    compiled: CompiledPieces = {}
    graph.compile_general(Compiler.AOT_EAGER, compiled, log)
    assert [kind for kind, _ in log.events] == ["compile_general"] * 3
    assert {detail["fingerprint"] for _, detail in log.events} == set(graph.fingerprints.values())
    graph.compile_general(Compiler.AOT_EAGER, compiled, log)
    graph_of(layers, weight=torch.randn(4, 4)).compile_general(Compiler.AOT_EAGER, compiled, log)
    assert len(log.events) == 3
    graph.compile_general(Compiler.EAGER, compiled, log)
    assert len(log.events) == 6, "another compiler makes pieces of its own"


def test_specialised_pieces_are_compiled_once_a_bucket():
    graph, log = graph_of(layers, weight=torch.randn(4, 4)), Log()
    compiled: CompiledPieces = {}
    for bucket in (4, 8, 4):
        program = graph.compile_specialized(bucket, Compiler.AOT_EAGER, compiled, log)
        assert program.interval == Interval(bucket, bucket)
        assert program.kind == "specialized"
    assert [detail["bucket"] for _, detail in log.events] == [4, 4, 4, 8, 8, 8]


def test_a_piece_without_tokens_is_the_same_for_every_bucket():
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.cache.mul_(2)
        accumulate(x, m.cache)
        return m.cache + 1

    graph, log = graph_of(function, cache=torch.ones(4)), Log()
    compiled: CompiledPieces = {}
    graph.compile_general(Compiler.AOT_EAGER, compiled, log)
    graph.compile_specialized(4, Compiler.AOT_EAGER, compiled, log)
    assert [kind for kind, _ in log.events] == ["compile_general"] * 2


@pytest.mark.parametrize("bucket", [0, 1, 2, 5])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_specialised_programs_equal_the_model(bucket, compiler):
    def function(m: Any, x: torch.Tensor) -> Any:
        n = x.shape[0]
        y = applied(x @ m.weight) + torch.arange(n)[:, None]
        return y * n, torch.full((n * 2,), 1.0), n + 1

    model = Fn(function, weight=torch.randn(4, 4))
    # Traced at another size than the bucket.
    dims = {"x": {0: "tokens"}}
    graph = PiecewiseGraph.from_trace(trace_model(model, X, dims), InputContract(dims))
    program = graph.compile_specialized(bucket, Compiler(compiler), {}, Log())
    inputs = {"x": torch.randn(bucket, 4)}
    assert_same(run(program, inputs), run_eager(model, inputs))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_another_dim_stays_symbolic_when_tokens_is_filled_in(compiler):
    def function(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return applied(x @ y.t()) * y.shape[0] + y.sum()

    inputs = {"x": torch.randn(4, 4), "y": torch.randn(3, 4)}
    also = [{"x": torch.randn(4, 4), "y": torch.randn(n, 4)} for n in (0, 1, 2, 9)]

    def summed(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return function(m, x, y).sum(-1)

    assert_equals_model(Fn(summed), inputs, TWO, compiler=compiler, bucket=4, also=also)
    graph = graph_of(summed, inputs, TWO)
    special = graph.compile_specialized(4, Compiler(compiler), {}, Log())
    assert special.interval == Interval(4, 4)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_specialised_piece_writes_into_a_slice_of_a_static_buffer(compiler):
    """The slice is symbolic and the buffer is not: filled in, they must still share memory."""

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        rows = torch.as_strided(m.cache, (x.shape[0], 4), (4, 1))
        out = applied(x + 0)
        rows.add_(out)
        return m.cache[:1] * 2 + x

    model = Fn(function, cache=torch.zeros(8, 4))
    graph = PiecewiseGraph.from_trace(trace_model(model, X), InputContract({"x": 0}))
    program = graph.compile_specialized(3, Compiler(compiler), {}, Log())
    reference = Fn(function, cache=torch.zeros(8, 4))
    for _ in range(2):
        assert_same(run(program, X), run_eager(reference, X))
    assert_same(model.cache, reference.cache)


# Guards that a compiler adds.


@pytest.fixture
def restricting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], bool]], list[int]]:
    """Makes aot_eager a compiler that asks something of the first symbolic size it sees, as Inductor does."""

    def install(ask: Callable[[Any], bool]) -> list[int]:
        asked: list[int] = []

        def compile_and_ask(graph_module: Any, example_inputs: Any) -> Any:
            for value in example_inputs:
                sizes = value.shape if isinstance(value, torch.Tensor) else [value]
                for size in sizes:
                    if isinstance(size, torch.SymInt):
                        asked.append(1)
                        ask(size)
            return graph_module.forward

        monkeypatch.setitem(compilers._COMPILERS, Compiler.AOT_EAGER, compile_and_ask)
        return asked

    return install


def at_most_4096(size: Any) -> bool:
    torch._check(size <= 4096)
    return True


def multiple_of_8(size: Any) -> bool:
    torch._check(size % 8 == 0)
    return True


def test_a_guard_of_the_compiler_narrows_the_interval(restricting):
    """Seen with Inductor: `s <= 4096` on a program whose trace had no guard."""
    graph = graph_of(lambda m, x: applied(x + 1) * 2)
    assert graph.traced.interval == Interval(0, None)
    assert restricting(at_most_4096) == []
    program = graph.compile_general(Compiler.AOT_EAGER, {}, Log())
    assert program.interval == Interval(0, 4096)
    assert not program.holds_at({"tokens": 4097})


def test_every_piece_keeps_the_guards_under_which_it_was_compiled(restricting):
    """The second piece adds nothing new to the ShapeEnv, but it was compiled knowing the first one's guard. A later
    program that shares only the second must not believe it valid everywhere."""
    graph = graph_of(lambda m, x: applied(x + 1) * 2)
    asked = restricting(at_most_4096)
    compiled: CompiledPieces = {}
    graph.compile_general(Compiler.AOT_EAGER, compiled, Log())
    assert len(asked) >= 2
    assert {piece.intervals["s0"] for piece in compiled.values()} == {Interval(0, 4096)}
    other = graph_of(lambda m, x: applied(x - 1) * 2)
    shared = [key for key in compiled if key[0] in other.fingerprints.values()]
    assert len(shared) == 1
    restricting(lambda size: True)
    assert other.compile_general(Compiler.AOT_EAGER, compiled, Log()).interval == Interval(0, 4096)


def test_pieces_without_tokens_take_no_interval(restricting):
    """They are shared by traces of any interval."""

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        accumulate(x, m.cache)
        return m.cache + 1

    restricting(at_most_4096)
    graph = graph_of(function, cache=torch.zeros(4))
    compiled: CompiledPieces = {}
    program = graph.compile_general(Compiler.AOT_EAGER, compiled, Log())
    assert program.interval == Interval(0, 4096)
    assert [piece.intervals for piece in compiled.values()] == [{"s0": Interval(0, 4096)}, {}]


def test_a_guard_of_the_compiler_on_another_dim_narrows_that_dim(restricting):
    inputs = {"x": torch.randn(4, 4), "y": torch.randn(3, 4)}
    graph = graph_of(lambda m, x, y: x * 2 + y.sum(), inputs, TWO)
    restricting(lambda size: size.node.expr == graph.traced.symbols["rows"] and at_most_4096(size))
    program = graph.compile_general(Compiler.AOT_EAGER, {}, Log())
    assert program.intervals == {"tokens": Interval(), "rows": Interval(0, 4096)}
    assert program.holds_at({"tokens": 9999, "rows": 4096})
    assert not program.holds_at({"tokens": 4, "rows": 4097})


def test_a_guard_of_the_compiler_that_is_no_interval_is_a_compile_error(restricting):
    graph = graph_of(lambda m, x: x * 2)
    restricting(multiple_of_8)
    with pytest.raises(CompileError, match="added a condition that cannot be kept.*no interval"):
        graph.compile_general(Compiler.AOT_EAGER, {}, Log())


def test_a_failing_compiler_is_a_compile_error_with_its_cause(monkeypatch):
    def fails(graph_module: Any, example_inputs: Any) -> Any:
        raise ZeroDivisionError("no luck")

    monkeypatch.setitem(compilers._COMPILERS, Compiler.AOT_EAGER, fails)
    with pytest.raises(CompileError, match="aot_eager: failed on a piece of . nodes .ZeroDivisionError: no luck") as e:
        graph_of(lambda m, x: x + 1).compile_general(Compiler.AOT_EAGER, {}, Log())
    assert isinstance(e.value.__cause__, ZeroDivisionError)


def test_bodies_run_once_a_call_and_not_while_compiling():
    graph = graph_of(layers, weight=torch.randn(4, 4))
    CALLS.clear()
    program = graph.compile_general(Compiler.AOT_EAGER, {}, Log())
    special = graph.compile_specialized(3, Compiler.AOT_EAGER, {}, Log())
    assert not CALLS
    run(program, X)
    run(special, X)
    assert CALLS["double"] == 8
