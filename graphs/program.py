"""The stitched whole: pieces and split ops in order, bound to the model.

A `PiecewiseGraph` is a trace cut into fingerprinted pieces. Linking it with compiled pieces makes a `Program`, a
callable for the whole forward: `general` with the pieces compiled for any size, `specialized` with those of one bucket.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Literal

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from ..errors import CompileError, TraceError
from ..phases import Compiler
from . import audit
from .bindings import InputBinding, ModelTensor, SizeBinding
from .compilers import CompiledCallable, compile_piece
from .fingerprint import canonical_text, fingerprint
from .inputs import TOKENS, InputContract
from .memory import memory, memory_of
from .mutation import mutated_arguments
from .outputs import Rows, map_leaves
from .propagate import fake_mode_of
from .recorder import Recorder
from .specialize import specialize
from .split import Piece, SplitGraph, split
from .trace import BindingRef, OutputRef, SizeRef, Traced

ProgramKind = Literal["eager", "general", "specialized"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompiledPiece:
    """What a compiler made of one fingerprint."""

    call: CompiledCallable
    intervals: audit.Intervals
    """The sizes for which it is valid, of the dims that it depends on: compilers add guards of their own."""
    seconds: float


CompiledKey = tuple[str, Compiler]
"""Fingerprint and compiler."""

CompiledPieces = MutableMapping[CompiledKey, CompiledPiece]


class PiecewiseGraph:
    """A traced model cut at its split ops."""

    def __init__(self, traced: Traced, contract: InputContract, *, ambient: Sequence[str] = ()) -> None:
        self.traced = traced
        self._ambient = tuple(ambient)
        self.split: SplitGraph = split(traced.graph_module)
        self.fake_mode = fake_mode_of(traced.graph_module, traced.shape_env)
        self._contract = contract
        self._symbol = traced.symbols.get(TOKENS)
        self.texts = {piece.name: self._text(piece.graph_module) for piece in self.split.pieces}
        self.fingerprints = {name: fingerprint(text) for name, text in self.texts.items()}
        self.rows = self._output_rows()
        self.written_inputs = _written_inputs(traced)

    @property
    def num_distinct(self) -> int:
        """How many different fingerprints the pieces have."""
        return len(set(self.fingerprints.values()))

    def compile_general(self, compiler: Compiler, compiled: CompiledPieces, recorder: Recorder) -> Program:
        """Compiles each distinct piece that `compiled` lacks for any size, and links the general program.

        Raises:
            CompileError: a compiler failed on a piece.
        """
        calls: dict[str, CompiledCallable] = {}
        intervals = self.traced.intervals
        with recorder.progress("compiling the general program", total=self.num_distinct) as advance:
            for piece in self.split.pieces:
                key = (self.fingerprints[piece.name], compiler)
                if key not in compiled:
                    compiled[key] = self._compile(piece.graph_module, compiler)
                    recorder.record(
                        "compile_general", seconds=compiled[key].seconds, fingerprint=key[0], compiler=str(compiler)
                    )
                    advance()
                intervals = audit.intersect(intervals, compiled[key].intervals)
                calls[piece.name] = compiled[key].call
        return Program(self, calls, kind="general", intervals=intervals)

    def compile_specialized(
        self, bucket: int, compiler: Compiler, compiled: CompiledPieces, recorder: Recorder
    ) -> Program:
        """Compiles each distinct piece for exactly `bucket` tokens, and links the specialised program.

        Raises:
            CompileError: a compiler failed on a piece.
        """
        calls: dict[str, CompiledCallable] = {}
        values = {self._symbol: bucket} if self._symbol is not None else {}
        intervals = self.traced.intervals
        with recorder.progress(f"compiling bucket {bucket}", total=self.num_distinct) as advance:
            for piece in self.split.pieces:
                special = specialize(piece.graph_module, values, self.fake_mode)
                key = (fingerprint(self._text(special.graph_module)), compiler)
                if key not in compiled:
                    compiled[key] = self._compile(special.graph_module, compiler)
                    recorder.record(
                        "compile_specialized",
                        seconds=compiled[key].seconds,
                        fingerprint=key[0],
                        compiler=str(compiler),
                        bucket=bucket,
                    )
                    advance()
                intervals = audit.intersect(intervals, compiled[key].intervals)
                calls[piece.name] = _pick(compiled[key].call, special.kept)
        exact = {TOKENS: audit.Interval(bucket, bucket)}
        return Program(self, calls, kind="specialized", intervals={**intervals, **exact})

    def _compile(self, graph_module: GraphModule, compiler: Compiler) -> CompiledPiece:
        started = time.perf_counter()
        call = compile_piece(compiler, graph_module, self.fake_mode)
        try:
            intervals = self._audit()
        except TraceError as error:
            raise CompileError(f"compiler {compiler}: it added a condition that cannot be kept. {error}") from error
        # The ShapeEnv is the whole trace's; a piece is shared by other traces, which may hold for other sizes.
        own = self._dims_of(graph_module)
        own_intervals = {name: interval for name, interval in intervals.items() if name in own}
        return CompiledPiece(call=call, intervals=own_intervals, seconds=time.perf_counter() - started)

    def _dims_of(self, graph_module: GraphModule) -> set[str]:
        """Names of the dynamic dims that a piece's placeholders depend on."""
        examples = (node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder"))
        sizes = (s for e in examples for s in ((*e.shape, *e.stride()) if isinstance(e, torch.Tensor) else (e,)))
        free = {symbol for s in sizes if isinstance(s, torch.SymInt) for symbol in s.node.expr.free_symbols}
        return {name for name, symbol in self.traced.symbols.items() if symbol in free}

    def _audit(self) -> audit.Intervals:
        symbols = {name: {symbol} for name, symbol in self.traced.symbols.items()}
        traced_at = {name: max(interval.low, 2) for name, interval in self.traced.intervals.items()}
        return audit.intervals_after_compile(self.traced.shape_env, symbols, traced_at)

    def _text(self, graph_module: GraphModule) -> str:
        intervals = {symbol: self.traced.intervals[name] for name, symbol in self.traced.symbols.items()}
        return canonical_text(graph_module, intervals=intervals, ambient=self._ambient)

    def _output_rows(self) -> Mapping[str, Rows]:
        """Of each output, which dims are a multiple of `tokens`, and of how many rows a token."""
        (graph_outputs,) = self.traced.graph_module.graph.output_node().args
        assert isinstance(graph_outputs, (tuple, list))
        rows: dict[str, Rows] = {}

        def leaf(path: str, value: Any) -> Any:
            if isinstance(value, OutputRef):
                node = graph_outputs[value.index]
                example = node.meta.get("example_value") if isinstance(node, Node) else node
                if isinstance(example, torch.Tensor):
                    rows[path] = {d: n for d, size in enumerate(example.shape) if (n := self._per_token(path, size))}
            elif isinstance(value, BindingRef) and isinstance(value.binding, InputBinding):
                dims = self._contract.dynamic_dims.get(value.binding.name, {})
                rows[path] = {dim: 1 for dim, name in dims.items() if name == TOKENS}
            elif isinstance(value, BindingRef):
                rows[path] = {}
            return value

        map_leaves(self.traced.output, leaf)
        return rows

    def _per_token(self, path: str, size: Any) -> int:
        if not isinstance(size, torch.SymInt) or self._symbol not in size.node.expr.free_symbols:
            return 0
        ratio = size.node.expr / self._symbol
        if not ratio.is_Integer and self.traced.interval.high is not None:
            # Such as Min(s, 16) for a slice of a buffer of 16 rows, where s is 16 at most.
            sizes = range(max(self.traced.interval.low, 1), self.traced.interval.high + 1)
            ratios = {ratio.xreplace({self._symbol: sympy.Integer(n)}) for n in sizes[: 1 << 12]}
            ratio = ratios.pop() if len(ratios) == 1 and len(sizes) <= 1 << 12 else ratio
        if not ratio.is_Integer:
            raise TraceError(
                f"trace: output {path!r} has a dim of size {size.node.expr}, from which padded rows cannot be cut; "
                f"return a whole number of rows a token"
            )
        return int(ratio)


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
        self._bindings = graph.traced.bindings
        self._output = graph.traced.output
        self._calls = calls
        self._forward = _link(graph.split.root, calls)

    @property
    def interval(self) -> audit.Interval:
        """The numbers of tokens for which it is valid."""
        return self.intervals.get(TOKENS, audit.ANY_SIZE)

    def holds_at(self, sizes: Mapping[str, int]) -> bool:
        """Whether the program is valid at these sizes, by name."""
        return all(sizes[name] in interval for name, interval in self.intervals.items())

    def __call__(
        self,
        tensors: Mapping[str, torch.Tensor],
        sizes: Mapping[str, int],
        asked: Mapping[str, int] | None = None,
    ) -> Any:
        """Runs the forward at sizes where it `holds_at`, under the caller's grad mode and step context.

        Args:
            tensors: the inputs, padded to `sizes`.
            asked: the sizes without padding, which is what the model returns where it returns a size.
        """
        outputs = self._forward(*self._bindings.arguments(tensors, sizes))

        def leaf(path: str, value: Any) -> Any:
            if isinstance(value, OutputRef):
                return outputs[value.index]
            if isinstance(value, SizeRef):
                return value.at(asked if asked is not None else sizes)
            if isinstance(value, BindingRef):
                return _resolve(value.binding, tensors, sizes)
            return value

        return map_leaves(self._output, leaf)

    def watched(self, watch: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Relinks the program with `watch(op)` in place of every split op (the debug mode)."""
        self._forward = _link(self.graph.split.root, self._calls, watch)


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
    watch: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Callable[..., Sequence[Any]]:
    """The stitched graph as one generated Python function that calls the compiled pieces directly."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in root.nodes:
        if node.op == "call_module":
            target: Callable[..., Any] = _named(calls[str(node.target)], str(node.target))
            copies[node] = graph.call_function(target, torch.fx.map_arg(node.args, copies.__getitem__))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if watch is not None and isinstance(node.target, torch._ops.OpOverload):
                copies[node].target = _named(watch(node.target), node.target._schema.name.replace("::", "_"))
    forward: Callable[..., Sequence[Any]] = GraphModule(torch.nn.Module(), graph, class_name="Stitched").forward
    return forward


def _named(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A plain function: what FX code generation can refer to by name."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    return function


def _pick(call: CompiledCallable, kept: Sequence[int]) -> CompiledCallable:
    @functools.wraps(call, assigned=(), updated=())
    def picked(*arguments: Any) -> Sequence[Any]:
        return call(*[arguments[i] for i in kept])

    return picked


def _written_inputs(traced: Traced) -> tuple[str, ...]:
    """Names of the inputs that the model writes into, itself or through a split op."""
    written = {
        memory(tensor)
        for node in traced.graph_module.graph.nodes
        for argument in mutated_arguments(node)
        if isinstance(tensor := argument.meta.get("example_value"), torch.Tensor)
    }
    placeholders = traced.graph_module.graph.find_nodes(op="placeholder")
    return tuple(
        binding.name
        for node, binding in zip(placeholders, traced.bindings.placeholders, strict=True)
        if isinstance(binding, InputBinding) and memory_of(node) in written
    )


def distinct_pieces(graph: PiecewiseGraph) -> dict[str, list[Piece]]:
    """The pieces of each fingerprint, in order of first appearance."""
    groups: dict[str, list[Piece]] = {}
    for piece in graph.split.pieces:
        groups.setdefault(graph.fingerprints[piece.name], []).append(piece)
    return groups
