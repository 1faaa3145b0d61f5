"""The whole forward as one piece for exactly one bucket: nothing is cut, and split ops are opaque operators in it.

It is put together again from a graph that was cut, so that nothing is traced twice and a graph that another process
traced serves as well.

Note [A write in the one graph is no copy]
A compiler makes the graph functional first: a split op that writes into a KV cache becomes one that returns a new one,
and a copy into the placeholder at the end. Inductor takes both out again where nothing else lies in the same memory. So
tensors that are apart from each other in one allocation, such as the caches of all layers, are apart for the compiler
too: else it would make all of that memory anew for a write into one of them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, _constrain_range_for_size
from torch.fx.node import map_aggregate

from ..errors import CompileError
from . import audit
from .bindings import SizeBinding
from .fakes import FakeFactory, Size, TensorDescription, fill, size_expr
from .inputs import TOKENS
from .memory import memory, tensors_in
from .mutation import mutated_arguments
from .native_bodies import Bodies, expand
from .piece import BuiltPiece
from .propagate import propagate
from .split import Piece, SplitGraph, Subgraph
from .stitched import PiecewiseGraph
from .whole_inputs import describe_placeholders

NO_BODIES: Bodies = MappingProxyType({})
_MARK = "whole-forward compile"
"""In the text of the piece: a model without a split op has an equal piece, which is compiled with other settings."""


def whole_graph(graph: PiecewiseGraph, bucket: int, bodies: Bodies = NO_BODIES) -> PiecewiseGraph:
    """A graph of one piece, `piece_0`, for exactly `bucket` tokens; the given one is left as it is.

    Its facts, rows and written inputs are those of `graph`. Sizes of other dims stay symbolic.

    Args:
        bodies: operators of kernels, and what takes their places: see `piecework.graphs.native_bodies`. A graph that is
            a whole forward already keeps what it has.

    Raises:
        CompileError: the trace is not valid at `bucket`, has a size that depends on data, or takes a tensor that has
            more to it than a layout.
    """
    if graph.whole_bucket == bucket:
        return graph
    if graph.whole_bucket is not None:
        raise CompileError(
            f"whole: expected a graph that is cut at its split ops, got the whole forward for {graph.whole_bucket} "
            f"tokens; make the one for {bucket} from the graph that it was made from"
        )
    if bucket not in graph.traced.interval:
        raise CompileError(
            f"whole: expected a number of tokens in {graph.traced.interval}, where the trace is valid, got {bucket}; "
            f"take a trace that is valid there"
        )
    if graph.data_size is not None:
        raise CompileError(f"whole: {graph.data_size.error()}")
    return _Joiner(graph, bucket, bodies).join()


class _Joiner:
    """Puts the pieces of one graph and what lies between them into one graph, under a ShapeEnv of its own."""

    def __init__(self, graph: PiecewiseGraph, bucket: int, bodies: Bodies) -> None:
        self._graph = graph
        self._bucket = bucket
        self._bodies = bodies
        self._shape_env = ShapeEnv(duck_shape=False, allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        self._fake_mode = FakeTensorMode(shape_env=self._shape_env)
        self._dims: dict[str, sympy.Symbol] = {}
        """The symbols of the dims that stay symbolic, by name."""
        self._pieces = {fingerprint: graph.built(first) for fingerprint, (first, *_) in graph.distinct_pieces().items()}
        self._joined = Graph()
        self._attributes = torch.nn.Module()
        self._names: dict[int, str] = {}
        """The id of what a piece holds -> what it is called in the one graph."""

    def join(self) -> PiecewiseGraph:
        """The graph of the whole. Raises: CompileError."""
        placeholders = self._graph.split.root.find_nodes(op="placeholder")
        joined = dict(zip(placeholders, self._take_placeholders(placeholders), strict=True))
        outputs = self._copy(dict(joined))
        results = list(dict.fromkeys(n for n in outputs if isinstance(n, Node) and n.op != "placeholder"))
        end = self._joined.output(tuple(results))
        for node in self._joined.find_nodes(op="placeholder"):
            if not node.users:
                self._joined.erase_node(node)
        graph_module = GraphModule(self._attributes, self._joined, class_name="Whole")
        self._propagate(graph_module)
        (ends,) = end.args
        assert isinstance(ends, tuple)
        now = dict(zip(results, ends, strict=True))  # a body may have come in the place of a result
        outputs = [now[each] if isinstance(each, Node) and each in now else each for each in outputs]
        results = list(dict.fromkeys(now.values()))
        numbers = {node: value for node in results if not isinstance(value := node.meta["example_value"], torch.Tensor)}
        results = [node for node in results if node not in numbers]
        end.args = (tuple(results),)
        graph_module.recompile()
        # What the model returns of sizes is computed from those that were asked for: see `assemble`.
        returned = [None if each in numbers else each for each in outputs]
        return self._result(graph_module, joined, results, returned)

    def _take_placeholders(self, placeholders: Sequence[Node]) -> list[Any]:
        """What stands for each placeholder: a placeholder with a fake value, or the number of tokens."""
        graph = self._graph
        dims = {size for _, _, _, sizes in graph.inputs.tensors for size in sizes if isinstance(size, str)}
        dims |= {b.name for b in graph.traced.bindings.placeholders if isinstance(b, SizeBinding)}
        self._dims = {name: self._symbol(name) for name in sorted(dims - {TOKENS})}
        sizes: dict[str, Size] = {TOKENS: self._bucket, **self._dims}
        described = describe_placeholders(graph.traced.bindings, graph.inputs, sizes)
        factory = FakeFactory(self._fake_mode, [each for each in described if isinstance(each, TensorDescription)])
        taken: list[Any] = []
        for placeholder, each in zip(placeholders, described, strict=True):
            if isinstance(each, int):
                taken.append(each)
                continue
            node = self._joined.placeholder(placeholder.name)
            value = factory.tensor(each) if isinstance(each, TensorDescription) else factory.size(each)
            node.meta["example_value"] = value
            taken.append(node)
        return taken

    def _symbol(self, name: str) -> sympy.Symbol:
        """The symbol of a dim, of which the ShapeEnv knows what the trace knew."""
        traced = self._graph.traced
        interval = traced.intervals.get(name, audit.ANY_SIZE)
        if traced.mode == "unbacked":
            with self._shape_env.ignore_fresh_unbacked_symbols():
                size = self._shape_env.create_unbacked_symint()
            _constrain_range_for_size(size, min=interval.low, max=interval.high)
            symbol: sympy.Symbol = size.node.expr
            return symbol
        hint = max(interval.low, 2)
        source = ConstantSource(name)
        expr = self._shape_env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        backed = self._shape_env.create_symintnode(expr, hint=hint, source=source)
        # Asking is how a ShapeEnv learns of a bound.
        assert backed >= interval.low
        assert interval.high is None or backed <= interval.high
        assert isinstance(expr, sympy.Symbol)
        return expr

    def _copy(self, joined: dict[Node, Any]) -> list[Any]:
        """Copies the root with its pieces inlined; returns what the root returns, as nodes or constants.

        Args:
            joined: what stands for each node of the root; has the placeholders, and gets the others.
        """
        returned: dict[Node, list[Any]] = {}
        for node in self._graph.split.root.nodes:
            if node.op == "call_module":
                arguments = [joined[a] if isinstance(a, Node) else a for a in node.args]
                returned[node] = self._inline(str(node.target), arguments)
            elif node.target is operator.getitem and node.args[0] in returned:
                call, i = node.args
                joined[node] = returned[call][i]
            elif node.op not in ("placeholder", "output"):
                joined[node] = self._joined.create_node(
                    node.op, node.target, *self._arguments(node, joined, {}), name=node.name
                )
        (outputs,) = self._graph.split.root.output_node().args
        assert isinstance(outputs, (tuple, list))
        return [joined[each] if isinstance(each, Node) else each for each in outputs]

    def _inline(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        """Copies the nodes of the piece of a name; returns what it returns."""
        built = self._pieces[self._graph.fingerprints[name]]
        # A piece of this fingerprint, with symbols of its own, which may be other dims than in this call.
        dims = self._graph.dim_names[name]
        symbols = {symbol: dims[canon] for symbol, canon in built.canonical.symbols.items() if canon in dims}
        values = {symbol: self._dims.get(dim, self._bucket) for symbol, dim in symbols.items()}
        graph = built.graph_module.graph
        copies: dict[Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), arguments, strict=True))
        for node in graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            target = node.target
            if node.op in ("get_attr", "call_module"):
                target = self._attribute(built.graph_module, str(target))
            copies[node] = self._joined.create_node(
                node.op, target, *self._arguments(node, copies, values), name=node.name
            )
        (outputs,) = graph.output_node().args
        assert isinstance(outputs, (tuple, list))
        return [copies[each] if isinstance(each, Node) else each for each in outputs]

    def _arguments(self, node: Node, copies: Mapping[Node, Any], values: Mapping[sympy.Symbol, Any]) -> tuple[Any, Any]:
        def copied(value: Any) -> Any:
            if isinstance(value, Node):
                return copies[value]
            if isinstance(value, torch.SymInt):
                filled = fill(size_expr(value), values)
                return filled if isinstance(filled, int) else self._shape_env.create_symintnode(filled, hint=None)
            return value

        return map_aggregate(node.args, copied), map_aggregate(node.kwargs, copied)

    def _attribute(self, owner: GraphModule, path: str) -> str:
        """Takes over a constant or a nested graph of a piece; returns its name."""
        value: Any = owner
        for part in path.split("."):
            value = getattr(value, part)
        if id(value) not in self._names:
            name = self._names[id(value)] = f"{path.replace('.', '_')}_{len(self._names)}"
            if isinstance(value, torch.Tensor):
                self._attributes.register_buffer(name, value)
            else:
                setattr(self._attributes, name, value)
        return self._names[id(value)]

    def _propagate(self, graph_module: GraphModule) -> None:
        try:
            expand(graph_module, self._bodies, self._fake_mode)
            propagate(graph_module, self._fake_mode)
        except Exception as error:  # whatever an operator raises
            raise CompileError(
                f"whole: the forward cannot be put together for {self._bucket} tokens ({type(error).__name__}: "
                f"{error}); see the cause above"
            ) from error
        _check_views(graph_module.graph)

    def _result(
        self, graph_module: GraphModule, joined: Mapping[Node, Any], results: Sequence[Node], returned: Sequence[Any]
    ) -> PiecewiseGraph:
        graph = self._graph
        built = BuiltPiece(
            graph_module=graph_module,
            fake_mode=self._fake_mode,
            shape_env=self._shape_env,
            dims=self._dims,
            intervals={name: graph.traced.intervals.get(name, audit.ANY_SIZE) for name in self._dims},
            ambient=(*next((piece.ambient for piece in self._pieces.values()), ()), _MARK),
        )
        piece = Piece(index=0, graph_module=graph_module)
        root = _root(piece.name, joined, self._joined.find_nodes(op="placeholder"), results, returned)
        return PiecewiseGraph(
            graph.traced,
            SplitGraph(root=root, subgraphs=(Subgraph(kind="piece", piece=piece),), matches=graph.split.matches),
            build=lambda _: built,
            texts={piece.name: built.canonical.text},
            fingerprints={piece.name: built.fingerprint},
            dim_names={piece.name: built.dim_names},
            rows=graph.rows,
            reduced=graph.reduced,
            written_inputs=graph.written_inputs,
            writes_frozen=graph.writes_frozen,
            inputs=graph.inputs,
            whole_bucket=self._bucket,
            pieces_write_model=graph.pieces_write_model,
        )


def _check_views(graph: Graph) -> None:
    """Refuses a write of a custom operator through a view of another dtype: AOTAutograd would hand it the base's dtype.

    Seen with torch 2.11 to 2.14. Raises: CompileError.
    """
    dtypes: dict[int, set[torch.dtype]] = {}
    for node in graph.nodes:
        for tensor in tensors_in(node.meta.get("example_value")):
            dtypes.setdefault(memory(tensor), set()).add(tensor.dtype)
    for node in graph.nodes:
        if isinstance(node.target, (OpOverload, OpOverloadPacket)):
            written = [tensor for a in mutated_arguments(node) for tensor in tensors_in(a.meta["example_value"])]
            if any(len(dtypes[memory(tensor)]) > 1 for tensor in written):
                raise CompileError(
                    f"whole: {node.target}: expected to write into memory of one dtype, got memory that is used as "
                    f"another one too (x.view(dtype)); hold the tensor in the dtype that the operator writes"
                )


def _root(
    name: str, joined: Mapping[Node, Any], taken: Sequence[Node], results: Sequence[Node], returned: Sequence[Any]
) -> Graph:
    """The stitched graph of one piece.

    Args:
        joined: the placeholders of the root that was, and what stands for them in the piece.
        taken: the piece's placeholders.
        results: what the piece returns.
        returned: what the root returns: placeholders of the piece, results, constants.
    """
    root = Graph()
    in_root: dict[Any, Node] = {}
    for placeholder, node in joined.items():
        copy = root.create_node("placeholder", placeholder.target, name=placeholder.name)
        if isinstance(node, Node):
            in_root[node] = copy
    call = root.call_module(name, tuple(in_root[node] for node in taken))
    for i, node in enumerate(results):
        in_root[node] = root.call_function(operator.getitem, (call, i))
    root.output(tuple(in_root[each] if isinstance(each, Node) else each for each in returned))
    return root
