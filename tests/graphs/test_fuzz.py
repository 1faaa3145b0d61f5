"""Random models through everything: trace, split, fingerprint, portable round trip, bind, compile, stitch, run."""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter
from torch.fx.experimental.symbolic_shapes import ShapeEnv, _constrain_range_for_size
from torch.utils._pytree import tree_flatten

from piecework.errors import CompileError
from piecework.graphs.audit import ANY_SIZE
from piecework.graphs.bindings import Bindings, InputBinding, SizeBinding
from piecework.graphs.inputs import InputContract
from piecework.graphs.portable import PortableProgram
from piecework.graphs.program import Program
from piecework.graphs.propagate import propagate
from piecework.graphs.recorder import NullRecorder
from piecework.graphs.stitched import PiecewiseGraph
from piecework.graphs.trace import OutputRef, Traced
from piecework.phases import Compiler

from .random_programs import WIDTH, RandomModel, models
from .toys import assert_same, run, run_eager, trace_model

DIMS = {"x": {0: "tokens"}, "y": {0: "rows"}}
SIZES = (5, 1, 0, 8)
BUCKET = SIZES[0]


def inputs_of(num_tokens: int, with_y: bool) -> dict[str, Any]:
    x = torch.linspace(-2, 2, num_tokens * WIDTH).reshape(num_tokens, WIDTH)
    y = torch.linspace(-1, 1, (num_tokens + 2) * WIDTH).reshape(num_tokens + 2, WIDTH)
    return {"x": x, "y": y} if with_y else {"x": x}


def assert_exactly(got: Any, expected: Any) -> None:
    """Same structure, same bits, but that any NaN equals any other."""
    got_leaves, got_spec = tree_flatten(got)
    expected_leaves, expected_spec = tree_flatten(expected)
    assert got_spec == expected_spec
    for left, right in zip(got_leaves, expected_leaves, strict=True):
        if isinstance(right, torch.Tensor):
            torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
        else:
            assert type(left) is type(right)
            assert left == right


def made(arguments: tuple[Any, ...]) -> RandomModel:
    torch.manual_seed(0)
    return RandomModel(*arguments)


def assert_does_what(program: Program, model: nn.Module, compiler: Compiler, sizes: Any, with_y: bool) -> None:
    """The program over `model` leaves the same results, inputs and buffers as the plain forward of a copy."""
    compare = assert_exactly if compiler is Compiler.EAGER else assert_same
    before, reference = copy.deepcopy(model), copy.deepcopy(model)
    for size in sizes:
        ours, theirs = inputs_of(size, with_y), inputs_of(size, with_y)
        compare(run(program, ours, DIMS), run_eager(reference, theirs))
        compare(ours, theirs)
        compare(state_of(model), state_of(reference))
    for tensor, value in zip(state_of(model), state_of(before), strict=True):
        tensor.copy_(value)


def state_of(model: nn.Module) -> list[torch.Tensor]:
    lists = [tensor for module in model.modules() for tensor in getattr(module, "tables", ())]
    return [*model.buffers(), *model.parameters(), *lists]


def graph_of(arguments: tuple[Any, ...], with_y: bool, compiler: Compiler) -> tuple[RandomModel, PiecewiseGraph]:
    """A model and its graph; traced backed when the compiler decides on a size, which is what a runtime does."""
    model = made(arguments)
    for backed in (False, True):
        traced = trace_model(model, inputs_of(BUCKET, with_y), DIMS, backed=backed)
        graph = PiecewiseGraph.from_trace(traced, InputContract(DIMS))
        try:
            graph.compile_general(compiler, {}, NullRecorder())
        except CompileError as error:
            if backed or "GuardOnDataDependentSymNode" not in str(error):
                raise
        else:
            break
    return model, graph


# An example costs a trace or two, so that shrinking one would take minutes.
quick = settings(phases=(Phase.explicit, Phase.reuse, Phase.generate))


@settings(quick, max_examples=30)
@given(models(), st.booleans(), st.sampled_from(["eager", "eager", "aot_eager"]))
def test_random_models(arguments, with_y, compiler):
    compiler = Compiler(compiler)
    model, graph = graph_of(arguments, with_y, compiler)
    signature = InputContract(DIMS).bind(inputs_of(BUCKET, with_y)).signature
    content = PortableProgram.from_graph(graph, signature).to_bytes()
    bound = PortableProgram.from_bytes(content).bind(model)
    assert PortableProgram.from_graph(graph, signature).to_bytes() == content
    assert PortableProgram.from_graph(bound, signature).to_bytes() == content
    assert {piece.name: bound.built(piece).fingerprint for piece in bound.split.pieces} == graph.fingerprints
    for each in (graph, bound):
        general = each.compile_general(compiler, {}, NullRecorder())
        sizes = [n for n in SIZES if general.holds_at({"tokens": n, "rows": n + 2})]
        assert_does_what(general, model, compiler, sizes, with_y)
        special = each.compile_specialized(BUCKET, compiler, {}, NullRecorder())
        assert_does_what(special, model, compiler, [BUCKET], with_y)


@settings(quick, max_examples=6)
@given(models(), st.booleans())
def test_another_trace_has_the_same_bytes(arguments, with_y):
    inputs, contract = inputs_of(BUCKET, with_y), InputContract(DIMS)
    contents = set()
    for size in (BUCKET, 1):
        traced = trace_model(made(arguments), inputs_of(size, with_y), DIMS)
        if traced.mode == "backed":  # by a decision on the size: another one may be another program
            traced = trace_model(made(arguments), inputs, DIMS)
        graph = PiecewiseGraph.from_trace(traced, contract)
        contents.add(PortableProgram.from_graph(graph, contract.bind(inputs).signature).to_bytes())
    assert len(contents) == 1


# Graphs that Dynamo never saw: placeholders that are views of one another with offsets, sizes as arguments, any order.

NODES = ("add", "mul_", "copy_", "slice", "chunk", "double", "halves", "accumulate", "size", "full", "setitem", "relu_")


@st.composite
def graphs(draw: Any) -> list[tuple[str, int, int]]:
    node = st.tuples(st.sampled_from(NODES), st.integers(0, 12), st.integers(0, 12))
    return draw(st.lists(node, min_size=1, max_size=14))


def arguments_of(num_tokens: int) -> dict[str, Any]:
    """The graph's inputs: `same` is all of `base`, `left` and `right` are columns of it."""
    base = torch.linspace(-2, 2, num_tokens * WIDTH).reshape(num_tokens, WIDTH)
    cache = torch.ones(WIDTH)
    return {
        "base": base,
        "same": base.view(num_tokens, WIDTH),
        "left": base[:, :2],
        "right": base[:, 2:],
        "x": base * 0.5,
        "cache": cache,
        "num": num_tokens,
    }


def graph_module_of(steps: list[tuple[str, int, int]]) -> tuple[GraphModule, ShapeEnv, Any]:
    """The graph with a fake value on each node, as a trace leaves it, and the symbol of its size."""
    shape_env = ShapeEnv(duck_shape=False, allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    fake_mode = FakeTensorMode(shape_env=shape_env)
    with shape_env.ignore_fresh_unbacked_symbols():
        num_tokens = shape_env.create_unbacked_symint()
    _constrain_range_for_size(num_tokens)
    with fake_mode:
        base = torch.empty(num_tokens, WIDTH)
        values = {"base": base, "same": base.view(num_tokens, WIDTH), "left": base[:, :2], "right": base[:, 2:]}
        values |= {"x": torch.empty(num_tokens, WIDTH), "cache": torch.empty(WIDTH), "num": num_tokens}
    graph = Graph()
    for name, value in values.items():
        graph.placeholder(name).meta["example_value"] = value
    known = {node.name: node for node in graph.nodes}
    left, right, cache, num = (known[name] for name in ("left", "right", "cache", "num"))
    wide, narrow = [known["base"], known["same"], known["x"]], [left, right]
    call, method = graph.call_function, graph.call_method
    for kind, i, j in steps:
        a, b = wide[i % len(wide)], wide[j % len(wide)]
        c, d = narrow[i % len(narrow)], narrow[j % len(narrow)]
        if kind == "add":
            wide.append(call(operator.add, (a, b)))
        elif kind == "mul_":
            wide.append(method("mul_", (a, 0.5)))
            method("add_", (c, 1))
        elif kind == "copy_":
            method("copy_", (c, call(operator.mul, (d, 2))))
        elif kind == "slice":
            narrow.append(call(operator.getitem, (a, (Ellipsis, slice(1, 3, None)))))
        elif kind == "chunk":
            halved = method("chunk", (a, 2), {"dim": -1})
            narrow += [call(operator.getitem, (halved, index)) for index in (1, 0)]
        elif kind == "double":
            out = call(torch.empty_like, (a,))
            call(torch.ops.piecework_toys.double.default, (a, out))
            wide.append(out)
            call(torch.ops.piecework_toys.double, (), {"x": c, "out": d})
        elif kind == "halves":
            pair = call(torch.ops.piecework_toys.halves.default, (a,))
            wide += [call(operator.getitem, (pair, index)) for index in (0, 1)]
        elif kind == "accumulate":
            call(torch.ops.piecework_toys.accumulate.default, (b, cache))
            wide.append(call(torch.add, (a, cache), {"alpha": 2}))
        elif kind == "size":
            wide.append(call(operator.mul, (a, call(operator.add, (num, j)))))
        elif kind == "full":
            filled = call(torch.full, ((num, WIDTH), float("-inf")), {"dtype": torch.float64})
            wide.append(call(torch.where, (call(operator.gt, (b, 0)), filled, a)))
            wide.append(method("to", (wide[-1], torch.float32)))
        elif kind == "setitem":
            call(operator.setitem, (a, (slice(None, None, None), 1), float("nan")))
        elif kind == "relu_":
            call(torch.nn.functional.relu, (c,), {"inplace": True})
    graph.output((*wide, *narrow))
    graph_module = GraphModule(nn.Module(), graph)
    propagate(graph_module, fake_mode)
    return graph_module, shape_env, num_tokens.node.expr


def traced_of(steps: list[tuple[str, int, int]]) -> Traced:
    graph_module, shape_env, symbol = graph_module_of(steps)
    names = [node.name for node in graph_module.graph.find_nodes(op="placeholder")]
    (outputs,) = graph_module.graph.output_node().args
    return Traced(
        graph_module=graph_module,
        bindings=Bindings(tuple(SizeBinding("tokens") if n == "num" else InputBinding(n) for n in names)),
        output=[OutputRef(i) for i in range(len(outputs))],
        intervals={"tokens": ANY_SIZE},
        frozen=(),
        symbols={"tokens": symbol},
        shape_env=shape_env,
    )


GRAPH_DIMS = {name: {0: "tokens"} for name in ("base", "same", "left", "right", "x")}


@settings(max_examples=40)
@given(graphs())
def test_random_graphs(steps):
    """Under eager alone: AOTAutograd fails where placeholders overlap, one is written and a view of one is returned."""
    compiler = Compiler.EAGER
    contract = InputContract(GRAPH_DIMS)
    graph = PiecewiseGraph.from_trace(traced_of(steps), contract)
    tensors = {name: value for name, value in arguments_of(BUCKET).items() if name != "num"}
    signature = contract.bind(tensors).signature
    content = PortableProgram.from_graph(graph, signature).to_bytes()
    assert PortableProgram.from_graph(PiecewiseGraph.from_trace(traced_of(steps), contract), signature).to_bytes() == (
        content
    )
    bound = PortableProgram.from_bytes(content).bind(nn.Module())
    assert PortableProgram.from_graph(bound, signature).to_bytes() == content
    plain = Interpreter(traced_of(steps).graph_module)
    for each in (graph, bound):
        for bucket in (None, BUCKET):
            if bucket is None:
                program = each.compile_general(compiler, {}, NullRecorder())
            else:
                program = each.compile_specialized(bucket, compiler, {}, NullRecorder())
            for size in SIZES if bucket is None else (BUCKET,):
                ours, theirs = arguments_of(size), arguments_of(size)
                with torch.inference_mode():
                    got = program({k: v for k, v in ours.items() if k != "num"}, {"tokens": size})
                    expected = list(plain.run(*theirs.values()))
                assert_exactly([got, ours], [expected, theirs])
