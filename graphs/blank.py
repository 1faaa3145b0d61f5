"""Which outputs of a piece are memory that nothing was written to, such as the `out` that a split op fills."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .memory import memory_of
from .mutation import mutated_arguments

_EMPTY_FUNCTIONS = frozenset((torch.empty, torch.empty_like, torch.empty_strided))
_EMPTY_METHODS = frozenset(("new_empty", "new_empty_strided"))


def blank_outputs(graph_module: GraphModule) -> frozenset[int]:
    """Indices of such outputs: made by `empty` and its kin, and not written by the piece."""
    (outputs,) = graph_module.graph.output_node().args
    assert isinstance(outputs, (tuple, list))
    written = {memory_of(argument) for node in graph_module.graph.nodes for argument in mutated_arguments(node)}
    return frozenset(
        i
        for i, node in enumerate(outputs)
        if isinstance(node, Node) and _is_empty(node) and memory_of(node) not in written
    )


def _is_empty(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in _EMPTY_METHODS
    return node.op == "call_function" and node.target in _EMPTY_FUNCTIONS
