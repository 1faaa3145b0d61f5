"""Symbolic sizes as plain data, over symbols by name: `["Add", "s0", 4]` is `s0 + 4`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
from torch.utils._sympy import functions as torch_functions

from ..errors import PortableError

Encoded = Any
"""An int, the name of a symbol, or a list of a function's name and its encoded arguments."""

_SYMPY = frozenset(
    "Add Mul Pow Rational Equality Unequality StrictLessThan LessThan StrictGreaterThan GreaterThan And Or Not".split()
)


def encode_expr(expr: Any, names: Mapping[sympy.Symbol, str]) -> Encoded:
    """An expression as JSON data.

    Raises:
        PortableError: it has a symbol without a name, or a function that is not known here.
    """
    if isinstance(expr, int):
        return expr
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Symbol):
        if expr not in names:
            raise PortableError(f"portable: the size {expr} belongs to no dim of this piece; the piece cannot travel")
        return names[expr]
    if isinstance(expr, sympy.Rational):
        return ["Rational", int(expr.p), int(expr.q)]
    function = type(expr).__name__
    if _function(function) is not type(expr):
        raise PortableError(f"portable: a size is computed by {function}, which has no portable form ({expr})")
    arguments = [encode_expr(argument, names) for argument in expr.args]
    # sympy orders these by the symbols' own names, which are another process's business.
    return [function, *(sorted(arguments, key=repr) if function in ("Add", "Mul", "Max", "Min") else arguments)]


def decode_expr(encoded: Encoded, symbols: Mapping[str, Any]) -> Any:
    """The expression over `symbols`, by name.

    Raises:
        PortableError: it was not made by `encode_expr`.
    """
    if isinstance(encoded, int):
        return sympy.Integer(encoded)
    if isinstance(encoded, str) and encoded in symbols:
        return symbols[encoded]
    if isinstance(encoded, list) and encoded and (function := _function(encoded[0])) is not None:
        return function(*(decode_expr(argument, symbols) for argument in encoded[1:]))
    raise PortableError(f"portable: expected a size, got {encoded!r}; the program is damaged, make it again")


def _function(name: Any) -> Callable[..., Any] | None:
    if not isinstance(name, str):
        return None
    known = getattr(sympy if name in _SYMPY else torch_functions, name, None)
    return known if isinstance(known, type) and issubclass(known, sympy.Basic) else None
