"""Which values of a stitched graph share memory, told from its pieces: its own nodes need carry no fake tensors.

A graph that another process traced has none on them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from torch.fx import Graph, GraphModule, Node

from ..ops import registry
from .memory import memories_of, memory_of

Memories = frozenset[Hashable]
"""What a value may lie in; nothing for a size."""


def output_memories(graph_module: GraphModule) -> tuple[Memories, ...]:
    """Where the outputs of a piece lie: the indices of the arguments in whose memory, and names of new memories."""
    places: dict[int, set[Hashable]] = {}
    for i, placeholder in enumerate(graph_module.graph.find_nodes(op="placeholder")):
        memory = memory_of(placeholder)
        if memory is not None:
            places.setdefault(memory, set()).add(i)
    (outputs,) = graph_module.graph.output_node().args
    assert isinstance(outputs, (tuple, list))
    return tuple(
        frozenset(place for memory in memories_of(node) for place in places.get(memory, {f"new {memory}"}))
        if isinstance(node, Node)
        else frozenset()
        for node in outputs
    )


def root_memories(
    root: Graph, sizes: Collection[Node], of_piece: Callable[[str], Sequence[Memories]]
) -> Mapping[Node, Memories]:
    """The memories of each value; of a piece or split op with several results, those of all.

    Args:
        sizes: the placeholders that are no tensors.
        of_piece: `output_memories` of the piece of a name.
    """
    found: dict[Node, Memories] = {}
    of_output: dict[tuple[Node, int] | None, Memories] = {}
    for node in root.nodes:
        inputs: Memories = frozenset().union(*(found[argument] for argument in node.all_input_nodes))
        if node.op == "placeholder":
            found[node] = frozenset() if node in sizes else frozenset({node})
        elif node.op == "call_module":
            for i, places in enumerate(of_piece(str(node.target))):
                of_output[node, i] = frozenset().union(*(_in_root(node, place, found) for place in places))
            found[node] = frozenset().union(*(of_output[node, i] for i in range(len(of_piece(str(node.target))))))
        elif (output := _picked(node)) in of_output:
            found[node] = of_output[output]
        elif registry.match(node.target) is not None:
            found[node] = frozenset({node})
        elif (node.op == "call_method" and node.target in _SIZE_METHODS) or node.target is getattr:
            found[node] = frozenset()
        else:  # a view, or arithmetic on sizes
            found[node] = inputs
    return found


_SIZE_METHODS = frozenset(("dim", "numel", "size", "storage_offset", "stride"))


def _picked(node: Node) -> tuple[Node, int] | None:
    """Which output of which call a getitem takes."""
    if node.target is operator.getitem and isinstance(node.args[0], Node) and isinstance(node.args[1], int):
        return node.args[0], node.args[1]
    return None


def _in_root(call: Node, place: Hashable, found: Mapping[Node, Memories]) -> Memories:
    if not isinstance(place, int):
        return frozenset({(call, place)})
    argument = call.args[place]
    return found[argument] if isinstance(argument, Node) else frozenset()
