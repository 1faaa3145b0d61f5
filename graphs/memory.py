"""Which memory a fake tensor is in: how aliases are told apart everywhere in graphs/."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node


def memory(tensor: torch.Tensor) -> int:
    """A number that equals that of every tensor it shares memory with."""
    return int(tensor.untyped_storage()._cdata)


def memory_of(node: Any) -> int | None:
    """The memory that a node's tensor is in; None for anything else."""
    if not isinstance(node, Node):
        return None
    if "memory" in node.meta:  # a specialised piece, whose fake tensors were made anew
        known: int | None = node.meta["memory"]
        return known
    value = node.meta.get("example_value")
    return memory(value) if isinstance(value, torch.Tensor) else None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a node's value: itself, or the elements of its tuple."""
    values: Iterable[Any] = value if isinstance(value, (tuple, list)) else (value,)
    return (item for item in values if isinstance(item, torch.Tensor))
