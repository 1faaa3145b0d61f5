"""Where the graph is cut, what crosses, and that nothing moves: against hand-made and random graphs."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter

from piecework.errors import RegistrationError, TraceError
from piecework.graphs.split import SplitGraph, split
from piecework.ops.split_op import split_op

from .toys import (
    CALLS,
    Fn,
    accumulate,
    applied,
    assert_equals_model,
    assert_same,
    double,
    halves,
    run_eager,
    trace_model,
)

X = {"x": torch.randn(3, 4)}
OTHERS = [{"x": torch.randn(n, 4)} for n in (0, 1, 6)]


def kinds(function: Any, *, keep_consecutive: bool = True, **tensors: torch.Tensor) -> list[str]:
    traced = trace_model(Fn(function, **tensors), X)
    return [s.kind for s in split(traced.graph_module, keep_consecutive=keep_consecutive).subgraphs]


def check(function: Any, **tensors: torch.Tensor) -> list[str]:
    """The kinds of subgraphs; the program must equal the model under eager and aot_eager, general and specialised."""
    for compiler in ("eager", "aot_eager"):
        program = assert_equals_model(Fn(function, **tensors), X, compiler=compiler, also=OTHERS)
        assert_equals_model(Fn(function, **tensors), X, compiler=compiler, bucket=3)
    return [s.kind for s in program.graph.split.subgraphs]


def test_no_split_op_is_one_piece():
    assert check(lambda m, x: (x + 1).relu()) == ["piece"]


def test_pieces_around_a_split_op():
    assert check(lambda m, x: applied(x + 1) * 2) == ["piece", "opaque", "piece"]


def test_split_op_first_and_last():
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        accumulate(x, m.cache)
        y = x + m.cache
        accumulate(y, m.cache)
        return y

    assert check(function, cache=torch.zeros(4)) == ["opaque", "piece", "opaque"]


def test_nothing_but_a_split_op():
    assert check(lambda m, x: halves(x)) == ["opaque"]
    assert check(lambda m, x: accumulate(x, m.cache), cache=torch.zeros(4)) == ["opaque"]


def consecutive(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    accumulate(y, m.cache)
    accumulate(y, m.cache)
    first, second = halves(y)
    return first + second


def test_consecutive_split_ops():
    cache = torch.zeros(4)
    assert check(consecutive, cache=cache) == ["piece", "opaque", "piece"]
    kept = split(trace_model(Fn(consecutive, cache=cache), X).graph_module)
    assert [op.name() for op in kept.subgraphs[1].ops] == [
        "piecework_toys::accumulate",
        "piecework_toys::accumulate",
        "piecework_toys::halves",
    ]
    assert kept.num_opaque == 1
    apart = kinds(consecutive, keep_consecutive=False, cache=cache)
    assert apart == ["piece", "opaque", "opaque", "opaque", "piece"]


def with_glue(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch._check(x.shape[0] <= 8)
    accumulate(x, m.cache)
    out = m.out[: x.shape[0]]
    double(x.view(-1, 4), out.view(out.shape[0], 4))
    return out


def test_glue_is_no_piece():
    """Views and size arithmetic between two split ops: merged into one opaque region, or left to Python."""
    tensors = {"cache": torch.zeros(4), "out": torch.zeros(8, 4)}
    assert check(with_glue, **tensors) == ["opaque"]
    assert "piece" not in kinds(with_glue, keep_consecutive=False, **tensors)
    assert kinds(with_glue, keep_consecutive=False, **tensors).count("opaque") == 2


def test_a_getitem_stays_with_its_producer():
    """Also when the model takes the second half only after another split op."""

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        pair = halves(x + 1)
        first = applied(pair[0] * 3)
        return first + pair[1]

    assert check(function) == ["piece", "opaque", "piece", "opaque", "piece"]
    root = split(trace_model(Fn(function), X).graph_module).root
    nodes = list(root.nodes)
    producer = next(n for n in nodes if n.target is torch.ops.piecework_toys.halves.default)
    assert [n.target for n in nodes[nodes.index(producer) + 1 :][:2]] == [operator.getitem, operator.getitem]


def test_a_getitem_far_from_its_producer_is_moved_to_it():
    """Dynamo puts them together; another pass or tracer need not, and a tuple may not cross a split op."""

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x * 2).chunk(2, dim=-1)
        first, second = halves(gate + 1)
        return applied(first * 3) * second + up

    model = Fn(function)
    traced = trace_model(model, X)
    graph = traced.graph_module.graph
    getitems = [node for node in graph.nodes if node.target is operator.getitem]
    assert len(getitems) == 4
    for late in (getitems[3], getitems[1]):
        min(late.users).prepend(late)
    traced.graph_module.recompile()
    parts = split(traced.graph_module)
    assert [s.kind for s in parts.subgraphs] == ["piece", "opaque", "piece", "opaque", "piece"]
    arguments = [X["x"] if node.name == "x" else 3 for node in graph.find_nodes(op="placeholder")]
    with torch.inference_mode():
        (result,) = Interpreter(stitched(parts)).run(*arguments)
    assert_same(result, run_eager(model, X))


def test_a_chunk_whose_halves_straddle_a_split_op():
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x * 2).chunk(2, dim=-1)
        return applied(gate + 1) * up

    assert check(function) == ["piece", "opaque", "piece"]
    for subgraph in split(trace_model(Fn(function), X).graph_module).subgraphs:
        if subgraph.piece is not None:
            for node in subgraph.piece.graph_module.graph.find_nodes(op="placeholder"):
                assert isinstance(node.meta["example_value"], (torch.Tensor, torch.SymInt))


def test_a_symbolic_size_crosses():
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0] * 2 + 1
        y = applied(x + 1)
        return y.sum() + torch.arange(n).sum() + torch.full((n,), 2.0).sum()

    assert check(function) == ["piece", "opaque", "piece"]


def test_mutations_stay_in_order():
    def function(m: Any, x: torch.Tensor) -> Any:
        m.cache.add_(1)
        accumulate(x, m.cache)
        seen = m.cache * 1
        m.cache.mul_(3)
        accumulate(x, m.cache)
        m.cache[0] = 7
        residual = x + 1
        residual.add_(seen)
        out = applied(residual)
        residual.sub_(out)
        return seen, residual, m.cache * 2

    assert check(function, cache=torch.ones(4)) == ["piece", "opaque", "piece", "opaque", "piece", "opaque", "piece"]


def test_a_write_to_an_input():
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        double(x * 1, x)
        return x * 2

    assert check(function) == ["piece", "opaque", "piece"]


def test_a_piece_that_only_mutates():
    def function(m: Any, x: torch.Tensor) -> None:
        m.count.add_(1)
        accumulate(x, m.cache)
        m.count.mul_(2)
        accumulate(x, m.cache)

    tensors = {"count": torch.zeros(1), "cache": torch.zeros(4)}
    assert check(function, **tensors) == ["piece", "opaque", "piece", "opaque"]


def test_a_constant_for_a_split_op():
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(4)
        double(torch.tensor([1.0, 2.0, 3.0, 4.0]), out)
        return x + out

    assert check(function) == ["piece", "opaque", "piece"]


# What a split op writes through a view.


@pytest.mark.parametrize("make", [torch.empty, torch.zeros, torch.ones])
def test_a_view_of_the_output_buffer(make):
    """The way attention is called: the operator fills a view, and the next piece reads the base."""

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        out = make(x.shape[0], 4)
        double((x + 1).view(-1, 2, 2), out.view(-1, 2, 2))
        return out @ m.weight

    assert check(function, weight=torch.randn(4, 4)) == ["piece", "opaque", "piece"]


def base_and_view(m: Any, x: torch.Tensor) -> Any:
    base = x * 1
    view = base.view(-1, 2, 2)
    out = applied(view)
    base.add_(1)
    return view * 2, base, out


def two_views(m: Any, x: torch.Tensor) -> Any:
    base = x * 1
    left, right = base[:, :2], base[:, 2:]
    out = applied(left + 0)
    left.add_(1)
    right.mul_(2)
    return base, out


def chunks(m: Any, x: torch.Tensor) -> Any:
    base = x * 1
    left, right = base.chunk(2, dim=1)
    out = applied(left + 0)
    base.mul_(3)
    left.add_(right)
    return base, right, out


def slice_of_a_buffer(m: Any, x: torch.Tensor) -> Any:
    rows = m.cache[: x.shape[0]]
    rows.add_(x)
    out = applied(rows)
    rows.mul_(2)
    m.cache.add_(1)
    return out + rows


def through_the_op(m: Any, x: torch.Tensor) -> Any:
    base = x * 1
    view = base.t()
    double(base + 1, base)
    return view + 1, base - 1


@pytest.mark.parametrize("function", [base_and_view, two_views, chunks, slice_of_a_buffer, through_the_op])
def test_placeholders_that_alias(function):
    """A piece writes into one of two tensors that share memory, and reads the other."""
    assert check(function, cache=torch.zeros(8, 4)) == ["piece", "opaque", "piece"]


@pytest.mark.parametrize("context", ["autocast", "inference_mode"])
def test_a_context_may_not_stay_open_across_a_split_op(context):
    manager = {
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "inference_mode": lambda: torch.inference_mode(False),
    }[context]

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        with manager():
            return applied(x + 1) * 2

    traced = trace_model(Fn(function), X)
    with pytest.raises(TraceError, match="only tensors and sizes may cross.*torch.autocast between two split ops"):
        split(traced.graph_module)


def test_a_context_within_a_piece():
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ m.weight
        return applied(y) * 2

    assert check(function, weight=torch.randn(4, 4)) == ["piece", "opaque", "piece"]
    assert not torch.is_autocast_enabled("cpu")


def test_no_grad_across_a_split_op():
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = applied(x + 1) * 2
        return y + 1

    assert check(function) == ["piece", "opaque", "piece"]
    assert torch.is_grad_enabled()


# Matching.


def test_packets_and_overloads_match():
    """`str(target)` of one is `ns.op`, of the other `ns.op.default`: a comparison by name misses one of them."""

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.piecework_toys.double(x + 1, out)
        out2 = torch.empty_like(x)
        torch.ops.piecework_toys.double.default(out + 1, out2)
        return out2 * 2

    assert check(function) == ["piece", "opaque", "piece", "opaque", "piece"]
    matches = split(trace_model(Fn(function), X).graph_module).matches
    assert matches == {torch.ops.piecework_toys.double.default: 2}


def graph_calling(target: Any) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    with FakeTensorMode() as mode:
        x.meta["example_value"] = torch.empty(3)
        plus = graph.call_function(torch.add, (x, 1))
        plus.meta["example_value"] = torch.empty(3)
        node = graph.call_function(target, (plus,))
        node.meta["example_value"] = torch.empty(3)
    assert mode is not None
    graph.output((node,))
    return GraphModule(nn.Module(), graph)


def test_somebody_elses_operator(registry_snapshot):
    target = torch.ops.aten.cos
    assert split(graph_calling(target)).num_opaque == 0
    registry_snapshot.add(split_op.register("aten::cos"))
    with pytest.raises(RegistrationError, match="only aten.cos.default of its .* overloads"):
        split(graph_calling(target))
    assert split(graph_calling(target.default)).num_opaque == 1
    assert split(graph_calling(torch.ops.aten.sin.default)).num_opaque == 0

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.cos.default(x + 1) * 2

    assert check(function) == ["piece", "opaque", "piece"]


def test_every_split_op_runs_once_a_call():
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = applied(x + 1)
            accumulate(x, m.cache)
        return x

    from .toys import make_program, run

    model = Fn(function, cache=torch.zeros(4))
    program = make_program(model, X, compiler="aot_eager")
    CALLS.clear()
    for _ in range(2):
        run(program, X)
    assert CALLS == {"double": 6, "accumulate": 6}


def test_32_layers():
    """32 opaque regions, 33 pieces, 3 distinct: the first, the last, and everything between."""

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        for _ in range(32):
            x = applied(x @ m.weight) + x
        return x.sum(-1)

    from piecework.graphs.inputs import InputContract
    from piecework.graphs.stitched import PiecewiseGraph

    graph = PiecewiseGraph.from_trace(trace_model(Fn(function, weight=torch.randn(4, 4)), X), InputContract({"x": 0}))
    assert graph.split.num_opaque == 32
    assert len(graph.split.pieces) == 33
    assert graph.num_distinct == 3


# Random programs: split and stitched again they must do what they did before.


@st.composite
def programs(draw: Any) -> list[tuple[str, int, int, float]]:
    steps = st.tuples(
        st.sampled_from(
            "add mul add_ mul_ view slice chunk double double_into accumulate halves write matmul size copy_".split()
        ),
        st.integers(0, 30),
        st.integers(0, 30),
        st.sampled_from([0.5, 2.0, -1.0]),
    )
    return draw(st.lists(steps, min_size=1, max_size=10))


def interpret(steps: list[tuple[str, int, int, float]]) -> Any:
    """A model's forward that does `steps`, on a stack of tensors [n, 4]; every step may read or write older ones."""

    def function(m: Any, x: torch.Tensor) -> Any:
        stack, extra = [x, x + 1], []
        for kind, i, j, number in steps:
            a, b = stack[i % len(stack)], stack[j % len(stack)]
            if kind == "add":
                stack.append(a + b)
            elif kind == "mul":
                stack.append(a * number)
            elif kind == "add_":
                a.add_(number)
            elif kind == "mul_":
                stack.append(a.mul_(number))
            elif kind == "view":
                stack.append(a.view(-1, 2, 2).view(-1, 4))
            elif kind == "slice":
                extra.append(a[:, 1:3])
                a[:, 1:3].add_(number)
            elif kind == "chunk":
                left, right = a.chunk(2, dim=1)
                extra += [left, right]
            elif kind == "double":
                stack.append(applied(a))
            elif kind == "double_into":
                double(a * 1, b)
            elif kind == "accumulate":
                accumulate(a, m.cache)
            elif kind == "halves":
                stack += halves(a)
            elif kind == "write":
                m.cache.add_(number)
                stack.append(a + m.cache)
            elif kind == "matmul":
                stack.append(a @ m.weight)
            elif kind == "size":
                stack.append(a + (x.shape[0] * 2 + 1))
            elif kind == "copy_":
                a.copy_(b + number)
        return stack, extra, m.cache + 1

    return function


@settings(max_examples=40)
@example(
    [("add", 0, 0, 0.5), ("mul_", 0, 0, 0.5), ("double", 0, 0, 0.5), ("add", 0, 0, 0.5), ("slice", 3, 0, 0.5)],
    "aot_eager",
    True,
)  # a specialised piece returns a view of an input that it wrote
@given(programs(), st.sampled_from(["eager", "aot_eager"]), st.booleans())
def test_random_models(steps, compiler, specialise):
    model = Fn(interpret(steps), cache=torch.ones(4), weight=torch.eye(4) * 0.5)
    assert_equals_model(
        model, X, compiler=compiler, bucket=3 if specialise else None, also=[] if specialise else OTHERS
    )


def stitched(parts: SplitGraph) -> GraphModule:
    module = nn.Module()
    for piece in parts.pieces:
        module.add_module(piece.name, piece.graph_module)
    return GraphModule(module, parts.root)


@settings(max_examples=60)
@given(programs(), st.booleans())
def test_random_graphs_stitched_again(steps, keep_consecutive):
    """Without Dynamo: the pieces' nodes, one after the other, are the graph's nodes."""
    model = Fn(interpret(steps), cache=torch.ones(4), weight=torch.eye(4) * 0.5)
    traced = trace_model(model, X)
    before = [n.target for n in traced.graph_module.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    parts = split(traced.graph_module, keep_consecutive=keep_consecutive)

    def arguments() -> list[Any]:
        torch.manual_seed(1)
        found: dict[str, torch.Tensor] = {"x": torch.randn(3, 4), "cache": torch.ones(4), "weight": torch.eye(4) * 0.5}
        nodes = traced.graph_module.graph.find_nodes(op="placeholder")
        return [found.get(n.name, 3) for n in nodes]

    ours, theirs = arguments(), arguments()
    with torch.inference_mode():
        assert_same(list(Interpreter(stitched(parts)).run(*ours)), list(Interpreter(traced.graph_module).run(*theirs)))
    assert_same(ours, theirs)
    calls = [n for n in parts.root.nodes if n.op == "call_module"]
    assert [n.target for n in calls] == [piece.name for piece in parts.pieces]
    inside = [n.target for piece in parts.pieces for n in piece.graph_module.graph.nodes]
    for op, count in parts.matches.items():
        assert before.count(op) + before.count(op.overloadpacket) == count
        assert op not in inside


def test_a_split_op_where_nothing_can_be_cut_is_refused():
    """Inside a higher-order operator it would be compiled into the piece without a word."""

    def hidden(m: Any, x: torch.Tensor) -> torch.Tensor:
        def body(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            out = torch.empty_like(y)
            double(y, out)
            return out

        return torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)

    traced = trace_model(Fn(hidden), {"x": torch.randn(3, 4)})
    with pytest.raises(TraceError, match="double is called inside a higher-order operator"):
        split(traced.graph_module)
