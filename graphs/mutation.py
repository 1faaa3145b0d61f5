"""Which nodes write into their arguments, and which arguments those are."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        "iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor setitem delitem"
    ).split()
)


def is_mutation(node: Node) -> bool:
    """Whether the node writes into at least one of its arguments."""
    return next(mutated_arguments(node), None) is not None


def mutated_arguments(node: Node) -> Iterator[Node]:
    """The argument nodes that a node writes into, as far as its target declares it."""
    if node.op == "call_method":
        # torch's convention: `add_`, and not `__getitem__`.
        if str(node.target).endswith("_") and not str(node.target).endswith("__"):
            yield from _nodes(node.args[:1])
        elif node.target == "__setitem__":
            yield from _nodes(node.args[:1])
    elif node.op == "call_function":
        yield from _nodes([node.kwargs.get("out")])
        if node.target in _IN_PLACE_OPERATORS or _is_in_place(node):
            yield from _nodes(node.args[:1])
        elif isinstance(node.target, (OpOverload, OpOverloadPacket)):
            yield from _by_schema(node)


def _is_in_place(node: Node) -> bool:
    """`relu(x, inplace=True)`, and builtins such as `torch.relu_`."""
    name = getattr(node.target, "__name__", "")
    if isinstance(node.target, (OpOverload, OpOverloadPacket)):
        return False
    if name.endswith("_") and not name.endswith("__"):
        return True
    if node.kwargs.get("inplace") is True:
        return True
    if True not in node.args:
        return False
    try:
        parameters = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return "inplace" in parameters[: len(node.args)] and node.args[parameters.index("inplace")] is True


def _by_schema(node: Node) -> Iterator[Node]:
    target: Any = node.target
    overloads = [target] if isinstance(target, OpOverload) else [getattr(target, name) for name in target.overloads()]
    for i, argument in enumerate(overloads[0]._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.kwargs.get(argument.name, node.args[i] if i < len(node.args) else None)
            yield from _nodes(value if isinstance(value, (list, tuple)) else [value])


def _nodes(values: Any) -> Iterator[Node]:
    for value in values:
        if isinstance(value, Node) and isinstance(value.meta.get("example_value"), (torch.Tensor, type(None))):
            yield value
