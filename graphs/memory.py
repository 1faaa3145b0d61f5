"""Which memory a node's tensors are in: how aliases are told apart everywhere in graphs/.

Note [Nodes of a region share fake tensors]
Calls of a repeated layer are stamped out of one subgraph, with the fake tensors of one. Each call's nodes carry in
`meta["memories"]` what the memory of those stands for in this call, so `memory_of` tells two layers apart. Where
values enter a piece they get fake tensors of their own, since a compiler goes by those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node


def memory(tensor: torch.Tensor) -> int:
    """A number that equals that of every fake tensor it shares memory with."""
    return int(tensor.untyped_storage()._cdata)


def memory_of(node: Any) -> int | None:
    """The memory that a node's tensor is in; None for anything else."""
    return next(memories_of(node), None) if isinstance(node, Node) and not _is_tuple(node) else None


def memories_of(node: Node) -> Iterator[int]:
    """The memory of a node's tensor, or of each tensor in its tuple."""
    if "memory" in node.meta:  # a piece's placeholder or a specialised piece, whose fake tensors were made anew
        known: int | None = node.meta["memory"]
        if known is not None:
            yield known
        return
    stands_for = node.meta.get("memories", {})
    for tensor in tensors_in(node.meta.get("example_value")):
        yield stands_for.get(memory(tensor), memory(tensor))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a node's value: itself, or the elements of its tuple."""
    values: Iterable[Any] = value if isinstance(value, (tuple, list)) else (value,)
    return (item for item in values if isinstance(item, torch.Tensor))


def _is_tuple(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), (tuple, list))
