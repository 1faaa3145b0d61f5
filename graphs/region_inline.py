"""Puts the nodes of regions where they are called, after a check that every call is that of another layer.

Note [A reused region is checked]
A stamp takes another layer's tensors by rewriting Dynamo's sources, and a source that is not rewritten makes a layer
read the first layer's weights (seen with torch 2.13, where the layer came in as a bound method). So after the trace
each call must read, where the first call read a tensor of its layer, that very tensor of one other layer, and no two
calls may be of one layer. A trace that fails this is thrown away, and the model traced flat.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .memory import memory, memory_of, tensors_in
from .mutation import is_mutation
from .region import RegionError, Regions


def drop_unread(graph: Graph) -> None:
    """Takes out sizes and elements that nobody reads, as Dynamo does in a flat graph but not in a subgraph."""
    for node in reversed(list(graph.nodes)):
        is_size = node.op.startswith("call") and isinstance(node.meta.get("example_value"), _SIZES)
        if not node.users and (_is_getitem(node) or (is_size and not is_mutation(node))):
            graph.erase_node(node)


_SIZES = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size)


def _calls(graph_module: GraphModule) -> list[Node]:
    return graph_module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)


def inline_regions(
    graph_module: GraphModule, regions: Regions | None, owners: Mapping[Node, Sequence[str]]
) -> int | None:
    """Replaces every call of a region by the nodes of its subgraph; returns how many calls had been reused.

    The nodes share fake tensors afterwards: see Note [Nodes of a region share fake tensors]. None: there was no region.

    Args:
        owners: the dotted names that each placeholder's tensor has in the model.

    Raises:
        RegionError: a call does not read the tensors of a layer of its own, or does not have the form of a region.
    """
    calls = _calls(graph_module)
    if not calls:
        return None
    first = {str(node.args[1]): node for node in reversed(calls)}
    if regions is not None:
        _check_layers(calls, first, regions, owners)
    _check_values(graph_module, calls)
    outer: dict[int, int] = {}
    for node in graph_module.graph.nodes:
        if node.op.startswith("call"):
            node.meta["memories"] = outer
    pending = calls
    while pending:
        for call in pending:
            _inline(graph_module, call)
        pending = _calls(graph_module)  # those that were in the subgraphs
    for node in graph_module.graph.find_nodes(op="get_attr"):
        if not node.users:
            graph_module.graph.erase_node(node)
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    if regions is not None and len(calls) == len(first):
        raise RegionError("no layer could take the trace of another")
    return len(calls) - len(first)


def _check_layers(
    calls: Sequence[Node], first: Mapping[str, Node], regions: Regions, owners: Mapping[Node, Sequence[str]]
) -> None:
    """See Note [A reused region is checked]."""
    places = {node: [regions.locate(name) for name in names] for node, names in owners.items()}
    taken: set[str] = set()
    for call in calls:
        own, operands = first[str(call.args[1])].args[2:], call.args[2:]
        if len(own) != len(operands):
            raise RegionError("a call of a region has another number of arguments")
        pairs = [(a, b) for a, b in zip(own, operands, strict=True) if isinstance(a, Node) and isinstance(b, Node)]
        candidates = _called_layers(pairs, places)
        if not candidates:
            raise RegionError("a call of a region does not read the tensors of one layer")
        free = [layer for layer in candidates if layer not in taken]
        if not free:
            raise RegionError(f"layer {candidates[0]} is called more than once")
        taken.add(free[0])


_Place = tuple[str, str]
"""A layer, and the name of a tensor in it; the layer is empty for a tensor that is in none."""


def _called_layers(pairs: Sequence[tuple[Node, Node]], places: Mapping[Node, Sequence[_Place]]) -> list[str]:
    """The layers for which a call is right, given its arguments beside those of the first call."""
    origins = {layer for own, _ in pairs for layer, _ in places.get(own, ()) if layer}
    layers = {layer for _, other in pairs for layer, _ in places.get(other, ()) if layer}
    return sorted(
        layer
        for layer in layers
        if any(all(_fits(own, other, origin, layer, places) for own, other in pairs) for origin in origins)
    )


def _fits(own: Node, other: Node, origin: str, layer: str, places: Mapping[Node, Sequence[_Place]]) -> bool:
    """Whether what the first call took from `origin` is taken from `layer`, and what is of no layer is the same."""
    inside = {name for place, name in places.get(own, ()) if place == origin}
    if inside:
        return any(place == layer and name in inside for place, name in places.get(other, ()))
    return own is other or not (places.get(own) or places.get(other))


def _check_values(graph_module: GraphModule, calls: Sequence[Node]) -> None:
    """Sizes that come from data differ from call to call, and the stamps have one symbol for all; and fake tensors of
    a stamp are made anew, which can only be done for plain ones."""
    for body in {str(call.args[1]): _body(graph_module, call) for call in calls}.values():
        known: set[sympy.Symbol] = set()
        for node in body.graph.nodes:
            symbols = free_unbacked_symbols(_example(node))
            if any(t.layout is not torch.strided or t.is_conj() or t.is_neg() for t in tensors_in(_example(node))):
                raise RegionError("a layer handles a sparse tensor or a lazy conjugate")
            if node.op == "placeholder":
                known |= symbols
            elif not symbols <= known:
                raise RegionError("a layer makes tensors whose size comes from data")


def _example(node: Node) -> Any:
    return node.meta.get("example_value")


def _body(graph_module: GraphModule, call: Node) -> GraphModule:
    node = call.args[0]
    body = getattr(graph_module, str(node.target)) if isinstance(node, Node) else None
    if not isinstance(body, GraphModule):
        raise RegionError("a region has no subgraph")
    return body


def _inline(graph_module: GraphModule, call: Node) -> None:
    body, graph = _body(graph_module, call), graph_module.graph
    placeholders = body.graph.find_nodes(op="placeholder")
    values: dict[Node, Any] = dict(zip(placeholders, call.args[2:], strict=True))
    memories = _memories(values)
    with graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "get_attr":
                values[node] = graph.get_attr(_hoist(graph_module, body, str(node.target)))
                values[node].meta = dict(node.meta)
            elif node.op not in ("placeholder", "output"):
                for tensor in tensors_in(node.meta.get("example_value")):
                    memories.setdefault(memory(tensor), next(_FRESH))
                values[node] = graph.node_copy(node, values.__getitem__)
                values[node].meta["memories"] = memories
    (results,) = body.graph.output_node().args
    for user in list(call.users):
        if not _is_getitem(user):
            raise RegionError(f"the result of a region is used by {user.target}")
        result: Any = results[user.args[1]]  # type: ignore[index]
        result = values[result] if isinstance(result, Node) else result
        if isinstance(value := user.meta.get("example_value"), torch.Tensor):
            # What comes after the region and is a view of its result.
            user.meta["memories"][memory(value)] = memory_of(result)
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(call)


_FRESH = itertools.count(-1, -1)
"""Memories that no fake tensor has: those of a stamp."""


def _memories(arguments: Mapping[Node, Any]) -> dict[int, int]:
    """What the memory of a subgraph's placeholders stands for in a call."""
    memories: dict[int, int] = {}
    for placeholder, argument in arguments.items():
        own, other = memory_of(placeholder), memory_of(argument)
        if own is not None and other is not None and memories.setdefault(own, other) != other:
            raise RegionError("arguments of a region that share memory do not in another call of it")
    return memories


def _is_getitem(node: Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def _hoist(graph_module: GraphModule, body: GraphModule, target: str) -> str:
    """Makes what a body's `get_attr` reads an attribute of the outer graph module, under a name of its own."""
    value: Any = body
    for part in target.split("."):
        value = getattr(value, part)
    for name, known in (*graph_module.named_children(), *graph_module.named_buffers(recurse=False)):
        if known is value:
            return name
    index = 0
    while hasattr(graph_module, name := f"region_{target.replace('.', '_')}_{index}"):
        index += 1
    setattr(graph_module, name, value)
    return name
