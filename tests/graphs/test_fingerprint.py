"""Fingerprints in both directions: equal where two pieces compute the same, different after any other change."""

from __future__ import annotations

import dataclasses
import math
import operator
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piecework.graphs.audit import Interval
from piecework.graphs.fingerprint import canonical, fingerprint
from piecework.graphs.inputs import InputContract
from piecework.graphs.stitched import PiecewiseGraph

from .toys import Fn, applied, double, trace_model


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A placeholder: sizes are ints or names of symbols; `view_of` is an earlier one whose storage it shares."""

    shape: tuple[int | str, ...] = (4, 4)
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    transposed: bool = False
    offset: int = 0
    view_of: int | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """A call: arguments are earlier values (by number) or constants in a `Const`."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Const:
    value: Any


@dataclasses.dataclass(frozen=True)
class Description:
    """A piece. `outputs` are numbers of values."""

    placeholders: tuple[Tensor, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]


class Builder:
    """Makes graph modules; the names of nodes and symbols are drawn, and say nothing."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.shape_env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shape_env)
        self.symbols: dict[str, torch.SymInt] = {}

    def build(self, description: Description) -> GraphModule:
        graph = Graph()
        values: list[Node] = []
        for placeholder in description.placeholders:
            node = graph.placeholder(self.name())
            shared = None if placeholder.view_of is None else values[placeholder.view_of].meta["example_value"]
            node.meta["example_value"] = self.tensor(placeholder, shared)
            values.append(node)
        for step in description.steps:
            args = tuple(self.argument(a, values) for a in step.args)
            kwargs = {key: self.argument(a, values) for key, a in step.kwargs}
            op = "call_method" if isinstance(step.target, str) else "call_function"
            values.append(graph.create_node(op, step.target, args, kwargs, name=self.name()))
            with self.mode:
                values[-1].meta["example_value"] = torch.empty(4, 4)
        graph.output(tuple(values[i] for i in description.outputs))
        return GraphModule(nn.Module(), graph)

    def name(self) -> str:
        return f"n{self.random.randrange(10**9)}"

    def argument(self, argument: Any, values: list[Node]) -> Any:
        return argument.value if isinstance(argument, Const) else values[argument]

    def size(self, size: int | str) -> Any:
        if isinstance(size, int):
            return size
        if size not in self.symbols:
            for _ in range(self.random.randrange(3)):
                self.shape_env.create_unbacked_symint()  # other numbers for the same symbols
            self.symbols[size] = self.shape_env.create_unbacked_symint()
            torch._check(self.symbols[size] >= 0)
        return self.symbols[size]

    def tensor(self, t: Tensor, shared: torch.Tensor | None) -> torch.Tensor:
        shape = [self.size(s) for s in t.shape]
        strides = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = strides[i + 1] * shape[i + 1]
        if t.transposed:
            strides.reverse()
        with self.mode:
            if shared is not None:
                return shared.as_strided(shape, strides, t.offset)
            base = torch.empty(4096, dtype=t.dtype, device=t.device)
            return base.as_strided(shape, strides, t.offset)


def text_of(description: Description, seed: int = 0) -> str:
    return canonical(Builder(seed).build(description)).text


BINARY: list[Any] = [operator.add, operator.mul, torch.add, torch.sub, torch.ops.aten.add.Tensor, "add", "mul", "add_"]
UNARY: list[Any] = [torch.relu, torch.neg, "relu", "neg", torch.ops.aten.relu.default, torch.nn.functional.gelu]
CONSTANTS = [0, 1, 2, True, False, 0.0, -0.0, 1.0, 2.0, None, "sum", torch.float32, (1, 2), slice(0, 2), math.inf]

tensors = st.builds(
    Tensor,
    shape=st.sampled_from([(4, 4), (2, 8), ("s", 4), (4, "s"), ("s", "s"), ("s", "t"), ("t", "s")]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    transposed=st.booleans(),
    offset=st.sampled_from([0, 8]),
)


@st.composite
def descriptions(draw: Any) -> Description:
    placeholders = [draw(tensors) for _ in range(draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        placeholders.append(dataclasses.replace(draw(tensors), dtype=placeholders[0].dtype, view_of=0))
    num, steps = len(placeholders), []
    for _ in range(draw(st.integers(1, 5))):
        first = draw(st.integers(0, num - 1))
        if draw(st.booleans()):
            steps.append(Step(draw(st.sampled_from(UNARY)), (first,)))
        elif draw(st.booleans()):
            steps.append(Step(draw(st.sampled_from(BINARY)), (first, draw(st.integers(0, num - 1)))))
        else:
            steps.append(Step(draw(st.sampled_from(BINARY)), (first, Const(draw(st.sampled_from(CONSTANTS))))))
        num += 1
    outputs = draw(st.lists(st.integers(0, num - 1), min_size=1, max_size=3))
    return Description(tuple(placeholders), tuple(steps), tuple(outputs))


@given(descriptions(), st.integers(1, 99), st.integers(1, 99))
def test_names_tensors_and_symbols_say_nothing(description, one, other):
    assert text_of(description, one) == text_of(description, other)
    assert fingerprint(text_of(description, one)) == fingerprint(text_of(description, other))


def replaced(items: tuple[Any, ...], i: int, item: Any) -> tuple[Any, ...]:
    return (*items[:i], item, *items[i + 1 :])


def variants(description: Description) -> Iterator[tuple[str, Description]]:
    """Every description that differs from this one in exactly one thing that matters."""
    p, s, o = description.placeholders, description.steps, description.outputs
    for i, t in enumerate(p):
        others = [
            ("dtype", {"dtype": torch.float16 if t.dtype != torch.float16 else torch.bfloat16}),
            ("device", {"device": "meta"}),
            ("strides", {"transposed": not t.transposed}),
            ("offset", {"offset": t.offset + 16}),
            ("size", {"shape": (*t.shape, 3)}),
            ("symbol to constant", {"shape": tuple(4 if n == "s" else n for n in t.shape)}),
            ("constant to symbol", {"shape": tuple("s" if n == 4 else n for n in t.shape)}),
            ("symbol relation", {"shape": tuple("t" if n == "s" else n for n in t.shape)}),
        ]
        for what, change in others:
            if t.view_of is not None and what in ("dtype", "device"):
                continue
            if any(x.view_of == i for x in p) and what in ("dtype", "device"):
                continue
            yield what, dataclasses.replace(description, placeholders=replaced(p, i, dataclasses.replace(t, **change)))
        if t.view_of is not None:
            alone = dataclasses.replace(t, view_of=None)
            yield "aliasing", dataclasses.replace(description, placeholders=replaced(p, i, alone))
    for i, step in enumerate(s):
        for target in BINARY if len(step.args) == 2 else UNARY:
            if target is not step.target:
                yield (
                    "operator",
                    dataclasses.replace(description, steps=replaced(s, i, dataclasses.replace(step, target=target))),
                )
        for j, argument in enumerate(step.args):
            if isinstance(argument, Const):
                for constant in CONSTANTS:
                    if constant is not argument.value:
                        args = replaced(step.args, j, Const(constant))
                        changed = dataclasses.replace(step, args=args)
                        yield "constant", dataclasses.replace(description, steps=replaced(s, i, changed))
            else:
                for other in range(len(p) + i):
                    if other != argument:
                        changed = dataclasses.replace(step, args=replaced(step.args, j, other))
                        yield "argument", dataclasses.replace(description, steps=replaced(s, i, changed))
        keyword = dataclasses.replace(step, kwargs=(("alpha", Const(2)),))
        yield "keyword", dataclasses.replace(description, steps=replaced(s, i, keyword))
    yield "another output", dataclasses.replace(description, outputs=(*o, 0))
    yield "another step", dataclasses.replace(description, steps=(*s, Step(torch.relu, (0,))))


def means_the_same(left: Description, right: Description) -> bool:
    """Symbols are equal up to a renaming in order of appearance; everything else must be equal as it is."""

    def normal(description: Description) -> Any:
        names: dict[str, str] = {}
        shapes = tuple(
            tuple(names.setdefault(n, f"s{len(names)}") if isinstance(n, str) else n for n in t.shape)
            for t in description.placeholders
        )
        rest = tuple(dataclasses.replace(t, shape=()) for t in description.placeholders)
        return repr((shapes, rest, description.steps, description.outputs))

    return normal(left) == normal(right)


@settings(max_examples=20)
@given(descriptions())
def test_every_single_change_is_seen(description):
    text = text_of(description)
    for what, variant in variants(description):
        assert (text_of(variant, seed=5) == text) == means_the_same(description, variant), what


@settings(max_examples=200)
@given(descriptions(), descriptions())
def test_two_random_pieces_are_equal_only_when_they_mean_the_same(left, right):
    assert (text_of(left, 1) == text_of(right, 2)) == means_the_same(left, right)


# One by one, what a random mutation might miss.

X = Tensor(shape=("s", 4))


def one_step(target: Any, *args: Any, **kwargs: Any) -> Description:
    step = Step(target, (0, *map(Const, args)), tuple((k, Const(v)) for k, v in kwargs.items()))
    return Description((X,), (step,), (1,))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (one_step(torch.mul, 1), one_step(torch.mul, True)),
        (one_step(torch.mul, 1), one_step(torch.mul, 1.0)),
        (one_step(torch.mul, 0.0), one_step(torch.mul, -0.0)),
        (one_step(torch.mul, 1e-5), one_step(torch.mul, 1.0000000000000002e-5)),
        (one_step(torch.mul, "1"), one_step(torch.mul, 1)),
        (one_step(torch.mul, (1,)), one_step(torch.mul, 1)),
        (one_step("view", (2, -1)), one_step("view", (-1, 2))),
        (one_step(operator.getitem, slice(0, 2)), one_step(operator.getitem, slice(0, 2, 1))),
        (one_step(operator.getitem, (slice(None), 0)), one_step(operator.getitem, (Ellipsis, 0))),
        (one_step("to", torch.float16), one_step("to", torch.bfloat16)),
        (one_step("to", torch.device("cpu")), one_step("to", torch.device("cuda:0"))),
        (one_step("to", memory_format=torch.channels_last), one_step("to", memory_format=torch.preserve_format)),
        (one_step(torch.sum, dim=0), one_step(torch.sum, keepdim=0)),
        (one_step("relu"), one_step("relu_")),
        (one_step(torch.nn.functional.relu, False), one_step(torch.nn.functional.relu, True)),
        (one_step(torch.ops.aten.add.Tensor, 1), one_step(torch.ops.aten.add.Scalar, 1)),
        (one_step(torch.ops.aten.relu), one_step(torch.ops.aten.relu.default)),
        (one_step(torch.empty_like), one_step(torch.zeros_like)),
        (one_step(torch._C._nn.gelu), one_step(torch.nn.functional.silu)),
        (one_step(math.floor), one_step(math.ceil)),
    ],
)
def test_different(left, right):
    assert text_of(left) != text_of(right)
    assert text_of(left, 3) == text_of(left, 4)


def write(to: int, *, alias: bool) -> Description:
    """Two placeholders, one of which is written."""
    second = Tensor(view_of=0) if alias else Tensor()
    return Description((Tensor(), second), (Step("add_", (to, Const(1))), Step(torch.add, (0, 1))), (3,))


def test_mutation_and_aliasing_of_placeholders():
    texts = [text_of(write(to, alias=alias)) for to in (0, 1) for alias in (False, True)]
    assert len(set(texts)) == 4
    assert " written" in texts[0].splitlines()[0]
    assert " written" not in texts[0].splitlines()[1]


def test_a_split_op_argument_declared_mutated():
    step = Step(torch.ops.piecework_toys.double.default, (0, 1))
    lines = text_of(Description((Tensor(), Tensor()), (step,), (1,))).splitlines()
    assert " written" not in lines[0]
    assert " written" in lines[1]
    assert double is torch.ops.piecework_toys.double.default


def test_a_symbolic_size_among_the_arguments():
    def graph(plus: int) -> GraphModule:
        builder = Builder(plus)
        graph = Graph()
        n, x = graph.placeholder("n"), graph.placeholder("x")
        n.meta["example_value"] = builder.size("s")
        x.meta["example_value"] = builder.tensor(X, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FX would rather have it as a node
            graph.output((graph.call_function(torch.add, (x, builder.size("s") + plus)),))
        return GraphModule(nn.Module(), graph)

    assert canonical(graph(1)).text != canonical(graph(2)).text
    assert "SymInt s0" in canonical(graph(1)).text


def test_the_interval_of_a_symbol_counts():
    module = Builder(0).build(one_step(torch.relu))
    symbol = module.graph.find_nodes(op="placeholder")[0].meta["example_value"].shape[0].node.expr
    texts = {canonical(module, intervals={symbol: i}).text for i in (Interval(), Interval(2), Interval(0, 8))}
    assert len(texts) == 3


def with_constant(value: Any) -> str:
    module = nn.Module()
    module.constant = value
    graph = Graph()
    graph.output((graph.get_attr("constant"),))
    return canonical(GraphModule(module, graph)).text


def test_constant_tensors_count_by_value():
    assert with_constant(torch.tensor([1.0, 2.0])) == with_constant(torch.tensor([1.0, 2.0]))
    different = [
        torch.tensor([1.0, 2.0]),
        torch.tensor([1.0, 3.0]),
        torch.tensor([1.0, 2.0], dtype=torch.float64),
        torch.tensor([[1.0, 2.0]]),
        torch.tensor([1.0, -0.0]),
        torch.tensor([1.0, 0.0]),
        torch.tensor(1.0),
        torch.tensor([], dtype=torch.float32),
        torch.tensor([1 + 2j]),
        torch.tensor([True, False]),
    ]
    assert len({with_constant(t) for t in different}) == len(different)


def test_what_cannot_be_compared_is_equal_to_nothing():
    class Odd:
        pass

    odd = Odd()
    assert with_constant(odd) != with_constant(odd)
    assert text_of(one_step(lambda x: x)) != text_of(one_step(lambda x: x))
    assert with_constant(torch.empty(2, device="meta")) != with_constant(torch.empty(2, device="meta"))


def nested(body: Callable[[Any], Any]) -> str:
    module = nn.Module()
    module.body = torch.fx.symbolic_trace(body)
    graph = Graph()
    graph.output((graph.get_attr("body"),))
    return canonical(GraphModule(module, graph)).text


def test_nested_graphs_count():
    assert nested(lambda x: x + 1) == nested(lambda y: y + 1)
    assert nested(lambda x: x + 1) != nested(lambda x: x + 2)


# Pieces of real traces.


class Layers(nn.Module):
    """Layers that differ in their tensors, and in what a test gives them."""

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in factors])
        self.factors = factors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, factor in enumerate(self.factors):
            x = applied(x @ self.weights[i] * factor) + x
        return x.sum(-1)


def pieces_of(model: nn.Module) -> list[str]:
    graph = PiecewiseGraph.from_trace(trace_model(model, {"x": torch.randn(3, 4)}), InputContract({"x": 0}))
    return [graph.fingerprints[piece.name] for piece in graph.split.pieces]


def test_layers_that_differ_in_their_tensors_only():
    first, *middle, last = pieces_of(Layers([2.0] * 6))
    assert len(set(middle)) == 1
    assert len({first, middle[0], last}) == 3


def test_one_layer_with_another_constant():
    found = pieces_of(Layers([2.0, 2.0, 3.0, 2.0]))
    assert len(set(found[1:4])) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.t(),
        lambda w: w.double().float()[:, :4].as_strided((4, 4), (1, 4)),
        lambda w: torch.randn(4, 8)[:, :4],
        lambda w: torch.randn(20)[4:].view(4, 4),
    ],
)
def test_one_layer_with_another_layout(change):
    model = Layers([2.0] * 4)
    model.weights[2] = nn.Parameter(change(model.weights[2].detach()))
    found = pieces_of(model)
    assert len(set(found[1:4])) == 2


def test_two_models_and_two_traces_of_one_model():
    model = Layers([2.0] * 2)
    assert pieces_of(model) == pieces_of(model) == pieces_of(Layers([2.0] * 2))


def test_tied_weights_are_one_placeholder():
    def twice(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ m.a @ m.b

    weight = torch.randn(4, 4)
    assert pieces_of(Fn(twice, a=weight, b=weight)) != pieces_of(Fn(twice, a=weight, b=weight.clone()))
