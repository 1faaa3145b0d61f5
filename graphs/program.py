"""A callable for the whole forward: compiled pieces with the split ops between them, bound to the model.

`general` has the pieces compiled for any size, `specialized` those of one bucket; `whole` has everything, split ops
included, in one piece for one bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Graph, GraphModule, Node

from . import audit
from .bindings import InputBinding, ModelTensor, SizeBinding
from .compilers import CompiledCallable
from .inputs import TOKENS
from .outputs import Rows, map_leaves
from .trace import BindingRef, OutputRef, SizeRef

if TYPE_CHECKING:
    from .stitched import PiecewiseGraph

ProgramKind = Literal["eager", "general", "specialized", "whole"]

TensorsByName = Mapping[str, torch.Tensor]
SizesByName = Mapping[str, int]
Watch = Callable[[Callable[..., Any]], Callable[..., Any]]
Hook = Callable[[str, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]

OPERATORS = (OpOverload, OpOverloadPacket)


class Program:
    """A callable for the whole forward, made of compiled pieces with the split ops between them."""

    def __init__(
        self,
        graph: PiecewiseGraph,
        calls: Mapping[str, CompiledCallable],
        *,
        kind: ProgramKind,
        intervals: audit.Intervals,
    ) -> None:
        self.graph = graph
        self.kind = kind
        self.intervals = intervals
        self.rows: Mapping[str, Rows] | None = graph.rows
        self.written_inputs = graph.written_inputs
        self.bindings = graph.traced.bindings
        self.calls = calls
        """Name of a piece -> what is called for it."""
        self.watch: Watch | None = None
        """What the debug mode has around every split op."""
        self._forward = _link(graph.split.root, calls)
        self._hooked: Callable[..., Sequence[Any]] | None = None
        self._hook: Hook | None = None

    @property
    def interval(self) -> audit.Interval:
        """The numbers of tokens for which it is valid."""
        return self.intervals.get(TOKENS, audit.ANY_SIZE)

    def holds_at(self, sizes: Mapping[str, int]) -> bool:
        """Whether the program is valid at these sizes, by name."""
        return all(sizes[name] in interval for name, interval in self.intervals.items())

    def holds_padded_from(self, num_tokens: int) -> bool:
        """Whether a step of `num_tokens` may be padded: the model decides on its size as on the padded one.

        A backed trace never shows what was decided on 0 and 1; those are padded up to 2 all the same.
        """
        interval = self.graph.traced.interval
        return num_tokens in interval or (self.graph.traced.mode == "backed" and num_tokens < interval.low == 2)

    def __call__(self, tensors: TensorsByName, sizes: SizesByName, asked: SizesByName | None = None) -> Any:
        """Runs the forward at sizes where it `holds_at`, under the caller's grad mode and step context.

        Args:
            tensors: the inputs, padded to `sizes`.
            asked: the sizes without padding, which is what the model returns where it returns a size.
        """
        outputs = self._forward(*self.bindings.arguments(tensors, sizes))
        return assemble(self.graph.traced.output, outputs, tensors, sizes, asked)

    def flat(self, tensors: TensorsByName, sizes: SizesByName, hook: Hook | None = None) -> tuple[Sequence[Any], Any]:
        """Runs the forward; returns the graph's outputs, and the structure that `assemble` makes of them.

        Args:
            hook: called as `hook(name, call, arguments, kwargs)` in place of each piece and split op; `name` is that
                of its node in the root graph, `call` the operator itself, without `watch`. Of one thread at a time.
        """
        arguments = self.bindings.arguments(tensors, sizes)
        if hook is None:
            return self._forward(*arguments), self.graph.traced.output
        if self._hooked is None:
            self._hooked = _link(self.graph.split.root, self.calls, self._call_hook)
        self._hook = hook
        try:
            return self._hooked(*arguments), self.graph.traced.output
        finally:
            self._hook = None

    def _call_hook(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(*arguments: Any, **kwargs: Any) -> Any:
            assert self._hook is not None
            return self._hook(name, call, arguments, kwargs)

        return hooked

    def watched(self, watch: Watch) -> None:
        """Relinks the program with `watch(op)` in place of every split op (the debug mode)."""
        self.watch = watch
        self._forward = _link(
            self.graph.split.root, self.calls, lambda _, call: watch(call) if isinstance(call, OpOverload) else call
        )


def assemble(
    structure: Any,
    outputs: Sequence[Any],
    tensors: TensorsByName,
    sizes: SizesByName,
    asked: SizesByName | None = None,
) -> Any:
    """What the model returns, from the flat outputs; `asked` are the sizes without padding."""

    def leaf(path: str, value: Any) -> Any:
        if isinstance(value, OutputRef):
            return outputs[value.index]
        if isinstance(value, SizeRef):
            return value.at(asked if asked is not None else sizes)
        if isinstance(value, BindingRef):
            return _resolve(value.binding, tensors, sizes)
        return value

    return map_leaves(structure, leaf)


def _resolve(binding: object, tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> Any:
    if isinstance(binding, InputBinding):
        return tensors[binding.name]
    if isinstance(binding, ModelTensor):
        return binding.current()
    assert isinstance(binding, SizeBinding)
    return sizes[binding.name]


def _link(
    root: Graph,
    calls: Mapping[str, CompiledCallable],
    wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Callable[..., Sequence[Any]]:
    """The stitched graph as one generated Python function that calls the compiled pieces directly.

    Args:
        wrap: makes what is called in place of each piece and operator, from its node's name and the callable.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in root.nodes:
        if node.op == "call_module":
            target: Callable[..., Any] = calls[str(node.target)]
            target = _named(target if wrap is None else wrap(node.name, target), str(node.target))
            copies[node] = graph.call_function(target, torch.fx.map_arg(node.args, copies.__getitem__))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if wrap is not None and isinstance(node.target, OPERATORS):
                copies[node].target = _named(wrap(node.name, node.target), node.name)
    forward: Callable[..., Sequence[Any]] = GraphModule(torch.nn.Module(), graph, class_name="Stitched").forward
    return forward


def _named(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A plain function: what FX code generation can refer to by name."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    return function
