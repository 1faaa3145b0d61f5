"""The identity of a piece: a canonical text in which names and particular tensors do not appear.

Two pieces with equal texts compute the same function of their placeholders, so one compiled artifact serves both. The
text holds the operators and constants in order, and of each placeholder its dtype, device, sizes and strides over
renamed symbols, its storage offset, which placeholders share storage with it and whether the piece writes into it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from .audit import Interval
from .memory import memory
from .mutation import mutated_arguments

_UNIQUE = itertools.count()
_MAX_PERMUTED = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Canonical:
    """The canonical text of a piece, a line a node, and what its symbols are called there."""

    text: str
    symbols: Mapping[sympy.Symbol, str]
    """The piece's own symbol -> `s0`, `s1`, ... in order of appearance."""


def canonical(
    graph_module: GraphModule,
    *,
    intervals: Mapping[sympy.Symbol, Interval] | None = None,
    ambient: Sequence[str] = (),
) -> Canonical:
    """The canonical form of a piece.

    `intervals` are the sizes for which its symbols are valid, `ambient` the settings of torch it was traced under.
    """
    writer = _Canonical(graph_module, intervals or {})
    text = "\n".join([writer.text(), *(f"under {state}" for state in ambient)])
    return Canonical(text=text, symbols={symbol: str(name) for symbol, name in writer.symbols.items()})


def fingerprint(text: str) -> str:
    """The SHA-256 of a canonical text, as 64 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


class _Canonical:
    def __init__(self, graph_module: GraphModule, intervals: Mapping[sympy.Symbol, Interval]) -> None:
        self.graph_module = graph_module
        self.intervals = intervals
        self.names: dict[Node, str] = {}
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self.storages: dict[int, int] = {}

    def text(self) -> str:
        written = {n for node in self.graph_module.graph.nodes for n in mutated_arguments(node)}
        lines = []
        for i, node in enumerate(self.graph_module.graph.nodes):
            self.names[node] = f"%{i}"
            if node.op == "placeholder":
                mark = " written" if node in written else ""
                lines.append(f"%{i} = placeholder {self._value(node.meta.get('example_value'))}{mark}")
            elif node.op == "get_attr":
                lines.append(f"%{i} = constant {self._attribute(str(node.target))}")
            elif node.op == "output":
                lines.append(f"return {self._argument(node.args[0])}")
            else:
                lines.append(f"%{i} = {self._target(node)}({self._arguments(node)})")
        for original, renamed in self.symbols.items():
            lines.append(f"{renamed} in {self.intervals.get(original, Interval())}")
        return "\n".join(lines)

    def _value(self, value: Any) -> str:
        """A placeholder: everything that a compiler may look at, except the data."""
        if isinstance(value, torch.Tensor):
            shared = self.storages.setdefault(memory(value), len(self.storages))
            fields = [
                str(value.dtype).removeprefix("torch."),
                f"[{', '.join(map(self._size, value.shape))}]",
                f"strides ({', '.join(map(self._size, value.stride()))})" if value.layout is torch.strided else "",
                f"offset {self._size(value.storage_offset())}",
                f"storage {shared}",
                str(value.device),
                str(value.layout).removeprefix("torch."),
                "conj" if value.is_conj() else "",
                "neg" if value.is_neg() else "",
            ]
            return " ".join(filter(None, fields))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return f"{type(value).__name__} {self._size(value)}"
        return self._argument(value)

    def _size(self, size: Any) -> str:
        if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return repr(size)
        expr = size.node.expr
        fresh = sorted((symbol for symbol in expr.free_symbols if symbol not in self.symbols), key=str)
        if fresh:
            # Not in the order of the symbols' own names, which are another process's business.
            names = [sympy.Symbol(f"s{len(self.symbols) + i}", integer=True) for i in range(len(fresh))]
            orders = itertools.permutations(fresh) if len(fresh) <= _MAX_PERMUTED else [tuple(fresh)]
            candidates = [dict(zip(order, names, strict=True)) for order in orders]
            self.symbols.update(min(candidates, key=lambda new: str(expr.xreplace({**self.symbols, **new}))))
        return str(expr.xreplace(self.symbols))

    def _target(self, node: Node) -> str:
        target: Any = node.target
        if node.op == "call_method":
            return f".{target}"
        if node.op == "call_module":
            return f"module {self._attribute(target)}"
        if isinstance(target, OpOverload):
            return f"op {target._schema.name}.{target._overloadname}"
        if isinstance(target, OpOverloadPacket):
            return f"op {target._qualified_op_name}"
        if isinstance(target, HigherOrderOperator):
            return f"higher-order {target.name()}"
        return f"function {_function_name(target)}"

    def _arguments(self, node: Node) -> str:
        positional = [self._argument(a) for a in node.args]
        return ", ".join([*positional, *(f"{k}={self._argument(v)}" for k, v in sorted(node.kwargs.items()))])

    def _argument(self, value: Any) -> str:
        """A constant with its type, since `1`, `True` and `1.0` print alike in places and mean different things."""
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, (tuple, list)):
            return f"{type(value).__name__}({', '.join(map(self._argument, value))})"
        if isinstance(value, dict):
            return f"dict({', '.join(f'{k!r}: {self._argument(v)}' for k, v in value.items())})"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._argument, (value.start, value.stop, value.step)))})"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return f"{type(value).__name__} {self._size(value)}"
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return f"{type(value).__name__} {value}"
        if value is Ellipsis:
            return "..."
        if callable(value):
            return f"function {_function_name(value)}"
        # Not comparable by text: equal to nothing, so that the piece is compiled for itself.
        return f"{type(value).__name__} unique {next(_UNIQUE)}"

    def _attribute(self, path: str) -> str:
        value: Any = self.graph_module
        for part in path.split("."):
            value = getattr(value, part)
        if isinstance(value, GraphModule):
            nested = _Canonical(value, self.intervals)
            nested.symbols = self.symbols
            body = "\n".join(f"  {line}" for line in nested.text().splitlines())
            return f"graph {{\n{body}\n}}"
        if isinstance(value, torch.Tensor):
            return f"{self._value(value)} {_digest(value)}"
        return self._argument(value)


def _digest(tensor: torch.Tensor) -> str:
    if type(tensor) is not torch.Tensor or tensor.device.type == "meta":
        return f"unique {next(_UNIQUE)}"
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(bytes(data.tolist())).hexdigest()


def _function_name(function: Any) -> str:
    """A name that identifies a function across processes; a local one is equal to nothing."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    if name is None or "<" in name:
        return f"unique {next(_UNIQUE)}"
    module = getattr(function, "__module__", None) or ""
    if not module and (owner := getattr(function, "__self__", None)) is not None:
        # A builtin method such as torch.empty_like: its owner's name tells it from another one of that name.
        module = owner.__name__ if inspect.isclass(owner) or inspect.ismodule(owner) else type(owner).__name__
    return f"{module}.{name}"
