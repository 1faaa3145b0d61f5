"""A piece for exactly one number of tokens: its symbol replaced by a constant everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from .fakes import FakeFactory, TensorDescription, describe, fill, size_expr
from .memory import memory, memory_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SpecializedPiece:
    """A piece's graph with a size filled in."""

    graph_module: GraphModule
    kept: tuple[int, ...]
    """Which of the general piece's placeholders it still takes: sizes that became constants are gone."""


def specialize(
    graph_module: GraphModule, values: Mapping[sympy.Symbol, int], fake_mode: FakeTensorMode
) -> SpecializedPiece:
    """Fills in `values`; other symbols stay symbolic, and placeholders that shared memory still do."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    filled = _filled([node.meta["example_value"] for node in placeholders], values, fake_mode)
    graph = Graph()
    copies: dict[Node, Any] = {}
    kept = []
    for i, (node, value) in enumerate(zip(placeholders, filled, strict=True)):
        if isinstance(value, int):
            copies[node] = value
            continue
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {**node.meta, "example_value": value, "memory": memory_of(node)}
        kept.append(i)
    for node in graph_module.graph.nodes:
        if node.op != "placeholder":
            copies[node] = graph.create_node(
                node.op,
                node.target,
                torch.fx.map_arg(node.args, copies.__getitem__),
                torch.fx.map_arg(node.kwargs, copies.__getitem__),
                node.name,
            )
            copies[node].meta["memory"] = memory_of(node)
    return SpecializedPiece(graph_module=GraphModule(graph_module, graph), kept=tuple(kept))


def _filled(general: list[Any], values: Mapping[sympy.Symbol, int], fake_mode: FakeTensorMode) -> list[Any]:
    """The fake values of a general piece's placeholders turned into those of the specialised one."""
    tensors = [value for value in general if isinstance(value, torch.Tensor)]
    # A static buffer gets new memory too when a symbolic slice of it is another placeholder.
    symbolic = {memory(tensor) for tensor in tensors if _is_symbolic(tensor)}
    described = {id(t): describe(t).at(values) for t in tensors if memory(t) in symbolic}
    factory = FakeFactory(fake_mode, (described[id(t)] for t in tensors if id(t) in described))

    def of(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return factory.size(fill(size_expr(value), values))
        description: TensorDescription | None = described.get(id(value))
        return value if description is None else factory.tensor(description)

    return [of(value) for value in general]


def _is_symbolic(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))
