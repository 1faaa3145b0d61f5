"""FX graphs as plain JSON data and back: operators by qualified name, constants by value, tensors by key.

Nothing is pickled. Functions are looked up by module and name; what cannot be found again under its name, or has no
value that JSON can hold, makes a `PortableError`.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Graph, GraphModule, Node

from ..errors import PortableError
from .expressions import decode_expr, encode_expr

Data = Any
"""What JSON can hold."""

_NAMED = (torch.dtype, torch.layout, torch.memory_format)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

# Where torch's builtin functions live that do not say it themselves.
_BUILTIN_HOMES = ("torch", "torch._C._VariableFunctions", "torch._C._nn", "torch._C", "operator", "builtins", "math")


@dataclasses.dataclass(kw_only=True, slots=True)
class Encoder:
    """Encodes the graphs of one program; `tensors` collects their constants."""

    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def graph(self, graph: Graph, owner: Any, symbols: Mapping[Any, str]) -> Data:
        """Nodes in order, each `[op, target, args, kwargs, name]`.

        Args:
            owner: whose attributes the graph's `get_attr` nodes read.
            symbols: the names of the symbols that may stand among arguments.

        Raises:
            PortableError: a node cannot be written down.
        """
        indices: dict[Node, int] = {}
        nodes = []
        for node in graph.nodes:
            try:
                target = self._target(node, owner, symbols)
                args = [self._value(a, indices, symbols) for a in node.args]
                kwargs = {k: self._value(v, indices, symbols) for k, v in node.kwargs.items()}
            except PortableError as error:
                raise PortableError(f"{error} (node {node.name})") from None
            nodes.append([node.op, target, args, kwargs, node.name])
            indices[node] = len(indices)
        return nodes

    def tensor(self, tensor: torch.Tensor) -> str:
        """Keeps a constant; returns its key."""
        dense = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not dense or tensor.device.type == "meta" or tensor.is_conj() or tensor.is_neg():
            raise PortableError(
                f"portable: a constant is a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}, or a "
                f"lazy conjugate; only dense tensors can travel, so make it a parameter or a buffer of the model"
            )
        for key, known in self.tensors.items():
            if known is tensor:
                return key
        key = f"constant_{len(self.tensors)}"
        self.tensors[key] = tensor
        return key

    def _target(self, node: Node, owner: Any, symbols: Mapping[Any, str]) -> Data:
        if node.op == "call_function":
            return encode_function(node.target)
        if node.op == "get_attr":
            value = owner
            for part in str(node.target).split("."):
                value = getattr(value, part)
            if isinstance(value, GraphModule):
                return {"name": node.target, "graph": self.graph(value.graph, value, symbols)}
            if isinstance(value, torch.Tensor):
                return {"name": node.target, "tensor": self.tensor(value)}
            raise PortableError(
                f"portable: the constant {node.target} is a {type(value).__name__}, which cannot travel"
            )
        return str(node.target)

    def _value(self, value: Any, indices: Mapping[Node, int], symbols: Mapping[Any, str]) -> Data:
        if isinstance(value, Node):
            return {"node": indices[value]}
        if isinstance(value, (tuple, list)):
            kind = "size" if isinstance(value, torch.Size) else "tuple" if isinstance(value, tuple) else "list"
            if kind == "tuple" and type(value) is not tuple:
                raise PortableError(f"portable: an argument is a {type(value).__name__}, which cannot travel")
            return {kind: [self._value(item, indices, symbols) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[k, self._value(v, indices, symbols)] for k, v in value.items()]}
        if isinstance(value, slice):
            return {"slice": [self._value(v, indices, symbols) for v in (value.start, value.stop, value.step)]}
        if isinstance(value, _SYMBOLIC):
            return {"symbolic": encode_expr(value.node.expr, symbols), "type": type(value).__name__}
        return encode_constant(value)


def encode_constant(value: Any) -> Data:
    """A constant as JSON data. Raises: PortableError."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [str(value.real), str(value.imag)]}
    if isinstance(value, _NAMED):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if value is Ellipsis:
        return {"ellipsis": True}
    if callable(value):
        return {"function": encode_function(value)}
    raise PortableError(f"portable: an argument is a {type(value).__name__}, which cannot travel")


def encode_function(function: Any) -> Data:
    """How a function is found again: an operator by its name, anything else by module and qualified name."""
    if isinstance(function, OpOverload):
        return {"op": f"{function._schema.name}.{function._overloadname}"}
    if isinstance(function, OpOverloadPacket):
        return {"packet": function._qualified_op_name}
    if isinstance(function, HigherOrderOperator):
        if function.name().startswith("triton_kernel_wrapper"):
            raise PortableError(
                "portable: the graph launches a Triton kernel, which is an entry of a table of this process; wrap the "
                "launch in a split op or another custom operator"
            )
        return {"higher_order": function.name()}
    name = getattr(function, "__qualname__", getattr(function, "__name__", ""))
    short = getattr(function, "__name__", "")
    for module, path in ((getattr(function, "__module__", None), name), *((home, short) for home in _BUILTIN_HOMES)):
        if module and _look_up(module, path) is function:
            return {"module": module, "name": path}
    raise PortableError(
        f"portable: the graph calls {function!r}, which is not found under a name of its own; define it at the top of "
        f"a module"
    )


def decode_function(data: Data) -> Callable[..., Any]:
    """The function that `encode_function` wrote down. Raises: PortableError if it does not exist here."""
    if "op" in data:
        qualified, _, overload = data["op"].rpartition(".")
        found: Any = _operator(qualified, overload)
    elif "packet" in data:
        found = _operator(data["packet"], None)
    elif "higher_order" in data:
        found = getattr(torch.ops.higher_order, data["higher_order"], None)
    else:
        found = _look_up(data.get("module", ""), data.get("name", ""))
    if not callable(found):
        raise PortableError(
            f"portable: the program calls {_display(data)}, which does not exist in this process; import the module "
            f"that defines it first, in the version that the program was made with"
        )
    return found  # type: ignore[no-any-return]


def _display(data: Data) -> str:
    return str(data.get("op") or data.get("packet") or data.get("higher_order") or f"{data['module']}.{data['name']}")


def _operator(qualified: str, overload: str | None) -> Any:
    namespace, _, name = qualified.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return packet if overload is None or packet is None else getattr(packet, overload or "default", None)


def _look_up(module: str, path: str) -> Any:
    # Parts of torch's C extension are attributes, not modules.
    value: Any = None
    for home in (module, "torch" if module.startswith("torch.") else ""):
        if home:
            try:
                value = importlib.import_module(home)
            except ImportError:
                continue
            rest = module.removeprefix(home).lstrip(".")
            for part in [p for p in (*rest.split("."), *path.split(".")) if p]:
                value = getattr(value, part, None)
            return value
    return value


@dataclasses.dataclass(kw_only=True, slots=True)
class Decoder:
    """Rebuilds graphs out of what an `Encoder` wrote."""

    tensors: Mapping[str, torch.Tensor]

    def graph_module(self, nodes: Data, symbols: Mapping[str, Any], class_name: str) -> GraphModule:
        """A graph module; its nodes carry no values yet.

        Args:
            symbols: what stands for each symbol among arguments: a SymInt, by name.

        Raises:
            PortableError: it is damaged, or calls something that does not exist here.
        """
        root = torch.nn.Module()
        return GraphModule(root, self.graph(nodes, symbols, root), class_name=class_name)

    def graph(self, nodes: Data, symbols: Mapping[str, Any], root: torch.nn.Module) -> Graph:
        """A graph; what its `get_attr` nodes read becomes attributes of `root`. Raises: PortableError."""
        graph = Graph()
        made: list[Node] = []
        for op, target, args, kwargs, name in nodes:
            resolved = target
            if op == "call_function":
                resolved = decode_function(target)
            elif op == "get_attr":
                resolved = self._attribute(root, target, symbols)
            decoded = tuple(self._value(a, made, symbols) for a in args)
            named = {k: self._value(v, made, symbols) for k, v in kwargs.items()}
            made.append(graph.create_node(op, resolved, decoded, named, name))
        return graph

    def _attribute(self, root: torch.nn.Module, target: Data, symbols: Mapping[str, Any]) -> str:
        name = str(target["name"]).replace(".", "_")
        if "graph" in target:
            root.add_module(name, self.graph_module(target["graph"], symbols, "Nested"))
        else:
            root.register_buffer(name, self.tensors[target["tensor"]])
        return name

    def _value(self, data: Data, made: list[Node], symbols: Mapping[str, Any]) -> Any:
        if not isinstance(data, dict):
            return data
        ((kind, content),) = [(k, v) for k, v in data.items() if k != "type"]
        if kind == "node":
            return made[content]
        if kind in ("tuple", "list", "size"):
            items = [self._value(item, made, symbols) for item in content]
            return items if kind == "list" else tuple(items) if kind == "tuple" else torch.Size(items)
        if kind == "dict":
            return {k: self._value(v, made, symbols) for k, v in content}
        if kind == "slice":
            return slice(*(self._value(v, made, symbols) for v in content))
        if kind == "symbolic":
            return _symbolic(content, data["type"], symbols)
        return decode_constant(data)


def decode_constant(data: Data) -> Any:
    """The constant that `encode_constant` wrote down. Raises: PortableError."""
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(float(content[0]), float(content[1]))
    if kind == "torch":
        return operator.attrgetter(content)(torch)
    if kind == "device":
        return torch.device(content)
    if kind == "ellipsis":
        return Ellipsis
    if kind == "function":
        return decode_function(content)
    raise PortableError(f"portable: expected a constant, got {data!r}; the program is damaged, make it again")


def _symbolic(encoded: Data, kind: str, symbols: Mapping[str, Any]) -> Any:
    """A symbolic number over SymInts: the ShapeEnv they belong to makes the node."""
    known = {name: value.node.expr for name, value in symbols.items()}
    shape_env = next(iter(symbols.values())).node.shape_env
    expr = decode_expr(encoded, known)
    if kind == "SymInt":
        return shape_env.create_symintnode(expr, hint=None)
    raise PortableError(f"portable: an argument is a {kind}, which cannot travel")
