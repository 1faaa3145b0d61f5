"""Puts native bodies where a graph calls the operators of kernels, for a compiler that may do better than those.

A body is traced with the fake values of the call and written down in torch's own operators: a call by its name would
be equal in every version of it, and AOTAutograd's cache takes none.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from ..ops.fused import expanding
from ..ops.kernel import overload_of
from .dynamo import COMPILE_LOCK
from .memory import memory, tensors_in
from .propagate import propagate

Bodies = Mapping[OpOverload, Callable[..., Any]]
"""Operator -> the function in its place, which takes the operator's arguments by position."""


def expand(graph_module: GraphModule, bodies: Bodies, fake_mode: FakeTensorMode) -> None:
    """Replaces each call of an operator, also in nested graphs, by what its body does.

    Placeholders need fake values; those of other nodes are not right afterwards where something was replaced. Nested
    graphs that change are copied first, since others may hold them too.

    Raises:
        Whatever a body or an operator raises for these sizes.
    """
    nested = _own_nested(graph_module, bodies)
    if not nested and not _calls(graph_module, bodies):
        return
    expander = _Expander(bodies, fake_mode)
    with COMPILE_LOCK, torch.inference_mode(), expanding():
        with contextlib.ExitStack() as stack:
            for each in nested:
                stack.enter_context(_arguments_noted(each))
            propagate(graph_module, fake_mode)
            for each in nested:
                propagate(each, fake_mode)
                expander.expand(each)
        expander.expand(graph_module)


class _Expander:
    """Replaces calls in graphs with fake values; calls of equal arguments share one trace of their body."""

    def __init__(self, bodies: Bodies, fake_mode: FakeTensorMode) -> None:
        self._bodies = bodies
        self._fake_mode = fake_mode
        self._traced: dict[str, GraphModule] = {}

    def expand(self, graph_module: GraphModule) -> None:
        """Replaces every call in one graph."""
        for call in _calls(graph_module, self._bodies):
            _inline(graph_module, call, self._body(call))
        graph_module.recompile()

    def _body(self, call: Node) -> GraphModule:
        """What the body does with these arguments; its placeholders are the call's input nodes, each once."""
        target = overload_of(call.target)
        assert target is not None
        nodes, arguments = call.all_input_nodes, _positional(call, target)
        key = f"{target} {map_arg(arguments, lambda node: _described(node, nodes.index(node)))}"
        if key not in self._traced:

            def run(*values: Any) -> Any:
                known = dict(zip(nodes, values, strict=True))
                results = self._bodies[target](*map_arg(arguments, known.__getitem__))
                taken = {memory(value) for value in tensors_in(values)}
                owned = [_owned(result, taken) for result in tensors_in(results)]
                return tuple(owned) if isinstance(results, (tuple, list)) else owned[0]

            values = [node.meta["example_value"] for node in nodes]
            with self._fake_mode, enable_python_dispatcher():
                self._traced[key] = make_fx(run, _allow_fake_constant=True)(*values)
        return self._traced[key]


def _positional(call: Node, target: OpOverload) -> tuple[Any, ...]:
    """The arguments in the order of the schema, since a body may have other names for them."""
    rest = target._schema.arguments[len(call.args) :]
    return (*call.args, *(call.kwargs.get(each.name, each.default_value) for each in rest))


def _described(node: Node, index: int) -> Any:
    """All of a node's fake value that a body can go by, and which of the inputs it is."""
    value = node.meta["example_value"]
    if not isinstance(value, torch.Tensor):
        return index, str(value)
    return index, str(value.dtype), str(value.device), str((tuple(value.shape), value.stride()))


def _owned(result: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The result as an operator returns it: contiguous, in memory of its own, which is taken from then on."""
    fits = result.is_contiguous() and memory(result) not in taken
    owned = result if fits else result.clone(memory_format=torch.contiguous_format)
    taken.add(memory(owned))
    return owned


def _calls(graph_module: GraphModule, bodies: Bodies) -> list[Node]:
    return [n for n in graph_module.graph.nodes if n.op == "call_function" and overload_of(n.target) in bodies]


def _inline(owner: GraphModule, call: Node, body: GraphModule) -> None:
    """Puts the nodes of `body` in the place of a call."""
    graph = owner.graph
    copies: dict[Node, Node] = dict(zip(body.graph.find_nodes(op="placeholder"), call.all_input_nodes, strict=True))
    with graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "get_attr":
                copies[node] = graph.get_attr(_hoisted(owner, getattr(body, str(node.target))))
            elif node.op not in ("placeholder", "output"):
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta = {}
    (results,) = body.graph.output_node().args
    if isinstance(results, Node):
        _replace(call, copies[results])
        return
    assert isinstance(results, tuple)
    for element in list(call.users):
        assert element.target is operator.getitem
        _, i = element.args
        assert isinstance(i, int)
        result = results[i]
        assert isinstance(result, Node)
        _replace(element, copies[result])
    graph.erase_node(call)


def _replace(node: Node, result: Node) -> None:
    """Puts `result` in the place of a node, whose value later calls go by."""
    result.meta = {"example_value": node.meta["example_value"]}
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def _hoisted(owner: GraphModule, value: Any) -> str:
    """Keeps a constant of a body in the graph that takes its nodes; returns its name."""
    buffers = dict(owner.named_buffers(recurse=False))
    known = next((name for name, buffer in buffers.items() if buffer is value), None)
    if known is not None:
        return known
    name = next(name for i in range(len(buffers) + 1) if not hasattr(owner, name := f"native_constant_{i}"))
    owner.register_buffer(name, value)
    return name


def _own_nested(graph_module: GraphModule, bodies: Bodies) -> list[GraphModule]:
    """Puts copies in the place of nested graphs that call operators; returns those with calls of their own."""
    found: list[GraphModule] = []
    copies: dict[str, bool] = {}
    for node in graph_module.graph.find_nodes(op="get_attr"):
        path = str(node.target)
        nested = operator.attrgetter(path)(graph_module)
        if path in copies or not isinstance(nested, GraphModule):
            continue
        copy = GraphModule(nested, _copied(nested.graph), class_name=type(nested).__name__)
        below = _own_nested(copy, bodies)
        copies[path] = bool(below or _calls(copy, bodies))
        if copies[path]:
            graph_module.set_submodule(path, copy)
            found += [*below, copy]
    return found


def _copied(graph: Graph) -> Graph:
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


@contextlib.contextmanager
def _arguments_noted(nested: GraphModule) -> Iterator[None]:
    """Inside, a nested graph's placeholders have the values that it is called with."""
    placeholders = nested.graph.find_nodes(op="placeholder")
    before = [node.meta for node in placeholders]

    def note(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        for node, value in zip(placeholders, arguments, strict=True):
            node.meta = {**node.meta, "example_value": value}

    handle = nested.register_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
        for node, meta in zip(placeholders, before, strict=True):
            node.meta = meta
