"""Which operator makes a size that depends on data: a graph with one cannot be captured, and a tape cannot see it.

Pieces are captured as opaque calls, of which a device without a GPU does not know what they wait for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..errors import CaptureError
from .memory import memories_of, tensors_in

_FRAME = re.compile(r'File "(.+)", line (\d+)')


@dataclasses.dataclass(frozen=True, slots=True)
class DataSize:
    """An operator that makes such a size, and the line of the model that calls it, where that is known."""

    op: str
    line: str | None

    def error(self) -> CaptureError:
        """What a capture of its graph raises."""
        return CaptureError(
            f"{self.op}: expected sizes that follow from those of the inputs, got one that depends on data, for which "
            f"a device would have to be waited; use an operator of fixed size (torch.where, masked_fill), or call it "
            f"in the body of a split op",
            op=self.op,
            line=self.line,
        )


def find_data_size(graph_module: GraphModule, dims: Collection[sympy.Symbol]) -> DataSize | None:
    """The first node that makes a size of its own; `dims` are the symbols of the dynamic dims."""
    for node in graph_module.graph.nodes:
        if not node.op.startswith("call"):
            continue
        known: set[Any] = set(dims).union(*map(_symbols, node.all_input_nodes))
        # A slice has a symbol of its own too, where torch does not know whether it ends within its tensor.
        if not _symbols(node) <= known and not _is_view(node):
            return DataSize(_name(node), _line(node))
    return None


def _symbols(node: Node) -> set[sympy.Symbol]:
    value = node.meta.get("example_value")
    sizes: Iterable[Any] = [size for tensor in tensors_in(value) for size in tensor.shape]
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        sizes = [value]
    return {symbol for size in sizes for symbol in free_unbacked_symbols(size)}


def _is_view(node: Node) -> bool:
    made = set(memories_of(node))
    return bool(made) and made <= {memory for argument in node.all_input_nodes for memory in memories_of(argument)}


def _name(node: Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))


def _line(node: Node) -> str | None:
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else None
