"""A piece for exactly one number of tokens: its symbol replaced by a constant everywhere."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

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
    """Fills in `values`; other symbols stay symbolic, and placeholders that shared storage still do."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    fill = _Fill([node.meta["example_value"] for node in placeholders], values, fake_mode)
    graph = Graph()
    copies: dict[Node, Any] = {}
    kept = []
    for i, node in enumerate(placeholders):
        value = fill(node.meta["example_value"])
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


class _Fill:
    """Turns the fake values of a general piece into those of a specialised one."""

    def __init__(self, general: Sequence[Any], values: Mapping[sympy.Symbol, int], fake_mode: FakeTensorMode) -> None:
        self.values = {symbol: sympy.Integer(value) for symbol, value in values.items()}
        self.fake_mode = fake_mode
        self.storages: dict[int, torch.Tensor] = {}
        tensors = [value for value in general if isinstance(value, torch.Tensor)]
        # A static buffer gets a new storage too when a symbolic slice of it is another placeholder.
        self.symbolic_storages = {memory(value) for value in tensors if self._is_symbolic(value)}
        self.num_users = Counter(map(memory, tensors))

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return self.size(value)
        if not isinstance(value, torch.Tensor) or memory(value) not in self.symbolic_storages:
            return value
        sizes, strides = [self.size(s) for s in value.shape], [self.size(s) for s in value.stride()]
        offset = self.size(value.storage_offset())
        with self.fake_mode:
            if self.num_users[memory(value)] == 1 and offset == 0:
                # Not as a view of a base: AOTAutograd goes by the record of views when a piece returns a view of it.
                return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
            storage = value.untyped_storage()
            base = self.storages.get(storage._cdata)
            if base is None:
                num_bytes = self.size(storage.nbytes())
                base = torch.empty(num_bytes // value.element_size(), dtype=value.dtype, device=value.device)
                self.storages[storage._cdata] = base
            flat = base if base.dtype == value.dtype else base.view(value.dtype)
            return flat.as_strided(sizes, strides, offset)

    def size(self, size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        expr = size.node.expr.xreplace(self.values)
        if expr.is_Integer:
            return int(expr)
        assert self.fake_mode.shape_env is not None
        return self.fake_mode.shape_env.create_symintnode(expr, hint=None)

    @staticmethod
    def _is_symbolic(tensor: torch.Tensor) -> bool:
        sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        return any(isinstance(size, torch.SymInt) for size in sizes)
