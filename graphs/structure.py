"""A model's output structure as plain JSON data: containers, dataclasses by qualified name, leaves of the trace."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import sympy

from ..errors import PortableError
from .bindings import PlaceholderBinding
from .encode import Data, decode_constant, decode_function, encode_constant, encode_function
from .expressions import decode_expr, encode_expr
from .trace import BindingRef, OutputRef, SizeRef


def encode_structure(value: Any, binding: Callable[[PlaceholderBinding], Data]) -> Data:
    """The structure that `Traced.output` is, as data; `binding` encodes what the model hands back as it is.

    Raises:
        PortableError: a container or constant cannot be written down.
    """
    if isinstance(value, OutputRef):
        return {"output": value.index}
    if isinstance(value, BindingRef):
        return {"binding": binding(value.binding)}
    if isinstance(value, SizeRef):
        return {"size": encode_expr(value.expr, {symbol: name for name, symbol in value.symbols.items()})}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: encode_structure(getattr(value, f.name), binding) for f in dataclasses.fields(value)}
        return {"dataclass": encode_function(type(value)), "fields": fields, "keys": _keys(value)}
    if isinstance(value, dict):
        if type(value) not in (dict, OrderedDict):
            raise PortableError(f"portable: the model returns a {type(value).__name__}, which cannot travel")
        items = [[encode_constant(key), encode_structure(item, binding)] for key, item in value.items()]
        return {"dict": items, "ordered": type(value) is OrderedDict}
    if isinstance(value, (tuple, list)):
        items = [encode_structure(item, binding) for item in value]
        if hasattr(value, "_fields"):
            return {"namedtuple": encode_function(type(value)), "items": items, "fields": list(value._fields)}
        if type(value) not in (tuple, list):
            return {"sequence": encode_function(type(value)), "items": items}
        return {"tuple" if isinstance(value, tuple) else "list": items}
    return {"constant": encode_constant(value)}


def _keys(value: Any) -> list[str]:
    """Which fields of a dataclass are keys too: a transformers ModelOutput is a dict of the fields that are set."""
    return [str(key) for key in value] if isinstance(value, dict) else []


def decode_structure(data: Data, binding: Callable[[Data], PlaceholderBinding]) -> Any:
    """The structure that `encode_structure` wrote down. Raises: PortableError."""

    def decoded(item: Data) -> Any:
        return decode_structure(item, binding)

    if "output" in data:
        return OutputRef(data["output"])
    if "binding" in data:
        return BindingRef(binding(data["binding"]))
    if "size" in data:
        symbols = {name: sympy.Symbol(name, integer=True) for name in _names_in(data["size"])}
        return SizeRef(decode_expr(data["size"], symbols), symbols)
    if "dataclass" in data:
        return _dataclass(data, decoded)
    if "dict" in data:
        items = {decode_constant(key): decoded(item) for key, item in data["dict"]}
        return OrderedDict(items) if data["ordered"] else items
    if "namedtuple" in data:
        kind: Any = decode_function(data["namedtuple"])
        _check_fields(kind, list(kind._fields), data["fields"])
        return kind(*map(decoded, data["items"]))
    if "sequence" in data:  # such as torch.return_types.max
        return decode_function(data["sequence"])([*map(decoded, data["items"])])
    if "tuple" in data:
        return tuple(map(decoded, data["tuple"]))
    if "list" in data:
        return list(map(decoded, data["list"]))
    if "constant" in data:
        return decode_constant(data["constant"])
    raise PortableError(f"portable: expected an output, got {data!r}; the program is damaged, make it again")


def _dataclass(data: Data, decoded: Callable[[Data], Any]) -> Any:
    """Not through `__init__`, as in `map_leaves`: it need not understand what the leaves are."""
    kind: Any = decode_function(data["dataclass"])
    _check_fields(kind, [f.name for f in dataclasses.fields(kind)], list(data["fields"]))
    value = kind.__new__(kind)
    for name, item in data["fields"].items():
        object.__setattr__(value, name, decoded(item))
    for name in data["keys"]:
        (OrderedDict if isinstance(value, OrderedDict) else dict).__setitem__(value, name, getattr(value, name))
    return value


def _check_fields(kind: Any, here: list[str], there: list[str]) -> None:
    if here != there:
        raise PortableError(
            f"portable: the model returns a {kind.__qualname__} with the fields {', '.join(there)}, and here it has "
            f"{', '.join(here) or 'none'}; make the program again"
        )


def _names_in(encoded: Data) -> set[str]:
    if isinstance(encoded, str):
        return {encoded}
    return {name for argument in encoded[1:] for name in _names_in(argument)} if isinstance(encoded, list) else set()
