"""Cuts a traced graph at split ops into pieces and opaque regions, in the original order.

Note [What may cross a boundary]
Between two subgraphs pass tensors and symbolic sizes only. A tuple never does: a `getitem` is moved next to the node
that makes its tuple, so a multi-output split op keeps its getitems and a `chunk` keeps its halves. Order is never
changed otherwise, so mutations stay where the model wrote them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from ..errors import TraceError
from ..ops import registry
from .fakes import FakeFactory, TensorDescription, describe
from .memory import memories_of, memory_of
from .mutation import is_mutation, mutated_arguments

Kind = Literal["piece", "opaque", "glue"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A maximal run of nodes between split ops."""

    index: int
    graph_module: GraphModule | None
    """Placeholders in order of first use; returns a tuple of what later subgraphs need. None: see `PiecewiseGraph`."""

    @property
    def name(self) -> str:
        """`piece_<index>`, its name in the stitched graph."""
        return f"piece_{self.index}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subgraph:
    """One step of the stitched graph: a piece, an opaque region of split ops, or glue left to Python."""

    kind: Kind
    piece: Piece | None = None
    ops: tuple[OpOverload, ...] = ()
    """The split ops of an opaque region, in order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitGraph:
    """A graph cut at its split ops."""

    root: Graph
    """The stitched graph: the traced placeholders, a `call_module` of each piece by name, split ops and glue inline."""
    subgraphs: tuple[Subgraph, ...]
    matches: Mapping[OpOverload, int]
    """How many nodes each registered split op matched."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The compilable pieces, in order."""
        return tuple(s.piece for s in self.subgraphs if s.piece is not None)

    @property
    def num_opaque(self) -> int:
        """How many opaque regions there are."""
        return sum(s.kind == "opaque" for s in self.subgraphs)


def split(graph_module: GraphModule, *, keep_consecutive: bool = True) -> SplitGraph:
    """Cuts `graph_module` at every registered split op.

    Split ops that follow each other without compute between them form one opaque region, or one each when
    `keep_consecutive` is False. A run of nodes that computes nothing (size arithmetic, views) is left to Python.

    Raises:
        TraceError: something that is neither a tensor nor a size would cross a split op, or a split op is called
            inside a higher-order operator, where nothing can be cut.
    """
    graph = graph_module.graph
    _check_nested(graph_module)
    _use_what_was_written(graph)
    _move_getitems_to_producers(graph)
    groups = _group(graph, keep_consecutive)
    return _Stitcher(graph_module, groups).stitch()


def _use_what_was_written(graph: Graph) -> None:
    """`y = x.mul_(2)` makes `y` the same tensor as `x`: later nodes take `x`, so that no piece gets it twice."""
    for node in graph.nodes:
        if node.op != "call_method" or not is_mutation(node) or not isinstance(node.args[0], Node):
            continue
        result, written = _value(node), _value(node.args[0])
        if isinstance(result, torch.Tensor) and isinstance(written, torch.Tensor):
            same = memory_of(node) == memory_of(node.args[0]) and result.storage_offset() == written.storage_offset()
            if same and result.shape == written.shape and result.stride() == written.stride():
                node.replace_all_uses_with(node.args[0])


def _check_nested(graph_module: GraphModule) -> None:
    for name, nested in graph_module.named_modules():
        if nested is graph_module or not isinstance(nested, GraphModule):
            continue
        for node in nested.graph.nodes:
            op = registry.match(node.target) if node.op == "call_function" else None
            if op is not None:
                raise TraceError(
                    f"split: {op._schema.name} is called inside a higher-order operator (graph {name!r}), such as "
                    f"activation checkpointing or torch.cond, where the graph cannot be cut; call it outside of that"
                )


def _move_getitems_to_producers(graph: Graph) -> None:
    """See Note [What may cross a boundary]."""
    for node in list(graph.nodes):
        if isinstance(_value(node), (tuple, list)):
            anchor = node
            for user in sorted(node.users):
                if user.target is operator.getitem and user.op == "call_function" and user.args[0] is node:
                    anchor.append(user)
                    anchor = user


@dataclasses.dataclass
class _Group:
    kind: Kind
    nodes: list[Node]
    ops: list[OpOverload] = dataclasses.field(default_factory=list)


def _group(graph: Graph, keep_consecutive: bool) -> list[_Group]:
    groups: list[_Group] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        op = registry.match(node.target) if node.op == "call_function" else None
        last = groups[-1] if groups else None
        if op is not None:
            if last is None or last.kind != "opaque" or not keep_consecutive:
                groups.append(last := _Group("opaque", []))
            last.ops.append(op)
        elif last is None or (last.kind == "opaque" and not _belongs_to(node, last)):
            groups.append(last := _Group("piece", []))
        last.nodes.append(node)
    for group in groups:
        if group.kind == "piece" and all(map(_is_free, group.nodes)):
            group.kind = "glue"
    return _merge_glue(groups) if keep_consecutive else groups


def _belongs_to(node: Node, group: _Group) -> bool:
    return node.target is operator.getitem and node.args[0] in group.nodes


def _merge_glue(groups: list[_Group]) -> list[_Group]:
    """Split ops with nothing but glue between them are consecutive: they form one opaque region."""
    merged: list[_Group] = []
    for group in groups:
        if len(merged) >= 2 and group.kind == "opaque" and merged[-1].kind == "glue" and merged[-2].kind == "opaque":
            glue = merged.pop()
            merged[-1].nodes += glue.nodes + group.nodes
            merged[-1].ops += group.ops
        else:
            merged.append(group)
    return merged


_VIEW_METHODS = frozenset(
    "chunk detach diagonal expand expand_as flatten movedim narrow permute reshape reshape_as select size split "
    "split_with_sizes squeeze stride t transpose unbind unflatten unfold unsqueeze view view_as".split()
)
_VIEW_FUNCTIONS: frozenset[Any] = frozenset(
    (
        operator.getitem, getattr, torch.chunk, torch.flatten, torch.narrow, torch.permute, torch.reshape, torch.select,
        torch.split, torch.squeeze, torch.t, torch.transpose, torch.unbind, torch.unflatten, torch.unsqueeze,
        torch.sym_int, torch.sym_max, torch.sym_min, torch.sym_float, torch.sym_not,
    )
)  # fmt: skip


def _is_free(node: Node) -> bool:
    """Whether a node computes nothing on the device: arithmetic on sizes, or a view of one of its arguments."""
    value = _value(node)
    if isinstance(value, (int, bool, float, torch.SymInt, torch.SymBool, torch.SymFloat)) or value is None:
        return node.op == "call_function" and not is_mutation(node) and (value is not None or not node.users)
    return _is_view(node)


def _is_view(node: Node) -> bool:
    """Whether a node only looks at one of its arguments in another way."""
    if node.target not in (_VIEW_METHODS if node.op == "call_method" else _VIEW_FUNCTIONS) or node.op == "get_attr":
        return False
    if node.target is operator.getitem and isinstance(_value(node.all_input_nodes[0]), (tuple, list)):
        return _is_view(node.all_input_nodes[0])
    sources = {memory for argument in node.all_input_nodes for memory in memories_of(argument)}
    viewed = set(memories_of(node))
    return bool(viewed) and viewed <= sources


def _views_to_repeat(nodes: Sequence[Node], inputs: Sequence[Node]) -> list[Node]:
    """The views among a piece's inputs that the piece makes again for itself, each after what it is made from.

    Of a tensor that the piece writes into, only the base comes in then: compilers can rarely tell what a write into
    one of two inputs that share memory does to the other.
    """
    written = {memory for node in nodes for argument in mutated_arguments(node) for memory in memories_of(argument)}
    aliases = [node for node in inputs if not written.isdisjoint(memories_of(node))]
    num_users = Counter(memory for node in aliases for memory in memories_of(node))
    chains: dict[Node, None] = {}
    for node in aliases:
        if all(num_users[memory] > 1 for memory in memories_of(node)):
            chain = []
            while _is_view(node):
                chain.append(node)
                node = next(a for a in node.all_input_nodes if not written.isdisjoint(memories_of(a)))
            chains.update(dict.fromkeys(reversed(chain)))
    return list(chains)


def _value(node: Node) -> Any:
    return node.meta.get("example_value")


def _check_crossing(node: Node) -> None:
    """See Note [What may cross a boundary]."""
    value = _value(node)
    if not isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float)):
        raise TraceError(
            f"split: {node.target} makes a {type(value).__name__ if value is not None else 'context'} that is still "
            f"in use after a split op, and only tensors and sizes may cross one; enter and leave a context such as "
            f"torch.autocast between two split ops, or inside the operator's body"
        )


def _own_fakes(inputs: Sequence[Node], placeholders: Mapping[Node, Node]) -> None:
    """See Note [Nodes of a region share fake tensors]."""
    shared = {memory_of(node) for node in inputs if "memories" in node.meta}
    described: dict[Node, TensorDescription] = {}
    for node in inputs:
        memory = memory_of(node)
        if memory is not None and memory in shared:
            described[node] = dataclasses.replace(describe(_value(node)), memory=memory)
    if not described:
        return
    factory = FakeFactory(_value(next(iter(described))).fake_mode, described.values())
    for node, description in described.items():
        placeholders[node].meta.update(example_value=factory.tensor(description), memory=description.memory)


def _inputs_of(nodes: Sequence[Node]) -> list[Node]:
    """What the nodes need from elsewhere, in order of first use."""
    inside = set(nodes)
    return list(dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in inside))


def _needed_by(group: _Group) -> tuple[list[Node], list[Node]]:
    """The views that a piece makes again, and what comes in."""
    repeated = _views_to_repeat(group.nodes, _inputs_of(group.nodes))
    return repeated, _inputs_of([*repeated, *group.nodes])


class _Stitcher:
    """Builds the stitched root graph and the pieces' graph modules."""

    def __init__(self, graph_module: GraphModule, groups: Sequence[_Group]) -> None:
        self.graph_module = graph_module
        self.groups = groups
        self.root = Graph()
        self.in_root: dict[Node, Node] = {}
        self.needed = {node for group in groups if group.kind == "piece" for node in _needed_by(group)[1]}

    def stitch(self) -> SplitGraph:
        for node in self.graph_module.graph.find_nodes(op="placeholder"):
            self.in_root[node] = self.root.node_copy(node)
        subgraphs: list[Subgraph] = []
        matches: dict[OpOverload, int] = {}
        for group in self.groups:
            if group.kind == "piece":
                piece = self._cut_out(sum(s.piece is not None for s in subgraphs), group)
                subgraphs.append(Subgraph(kind="piece", piece=piece))
                continue
            for node in group.nodes:
                self.in_root[node] = self.root.node_copy(node, self.in_root.__getitem__)
            for op in group.ops:
                matches[op] = matches.get(op, 0) + 1
            subgraphs.append(Subgraph(kind=group.kind, ops=tuple(group.ops)))
        output = self.graph_module.graph.output_node()
        self.root.node_copy(output, self.in_root.__getitem__)
        return SplitGraph(root=self.root, subgraphs=tuple(subgraphs), matches=matches)

    def _cut_out(self, index: int, group: _Group) -> Piece:
        repeated, inputs = _needed_by(group)
        inside = set(group.nodes)
        # Also what nobody but a repeated view takes.
        outputs = [n for n in group.nodes if n in self.needed or any(user not in inside for user in n.users)]
        for node in inputs:
            _check_crossing(node)
        graph = Graph()
        copies: dict[Node, Node] = {}
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        _own_fakes(inputs, copies)
        for node in [*repeated, *group.nodes]:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in outputs))
        piece = Piece(index=index, graph_module=GraphModule(self.graph_module, graph, class_name=f"Piece{index}"))
        self._call(piece, inputs, outputs)
        return piece

    def _call(self, piece: Piece, inputs: Sequence[Node], outputs: Sequence[Node]) -> None:
        call = self.root.call_module(piece.name, tuple(self.in_root[node] for node in inputs))
        call.meta["example_value"] = tuple(_value(node) for node in outputs)
        for i, node in enumerate(outputs):
            self.in_root[node] = self.root.call_function(operator.getitem, (call, i))
            self.in_root[node].meta = dict(node.meta)
            self.in_root[node].name = self.root._graph_namespace.create_name(node.name, None)
