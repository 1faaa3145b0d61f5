"""The name and the schema of an operator that `@split_op` defines, as the function and its annotations give them."""

from __future__ import annotations

import ast
import inspect
import keyword
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..errors import RegistrationError


def qualified_name(body: Callable[..., Any], name: str | None, location: str) -> str:
    """The operator's name as `namespace::op`. Raises: RegistrationError if that is no name."""
    namespace = body.__module__.partition(".")[0].strip("_") or "main"
    qualified = name if name is not None and "::" in name else f"{namespace}::{name or body.__name__}"
    left, _, right = qualified.partition("::")
    if not all(part.isidentifier() and part.isascii() and not keyword.iskeyword(part) for part in (left, right)):
        raise RegistrationError(
            f"{location}: name: expected `op` or `namespace::op` made of identifiers, got {qualified!r}; "
            f"pass such a name=..."
        )
    return qualified


def schema_of(body: Callable[..., Any], mutates_args: Sequence[str], qualified: str, location: str) -> str:
    """The inferred schema `(args) -> returns`, after the checks that a schema alone cannot make.

    Raises:
        RegistrationError: what is said to be mutated is no tensor argument, or is returned; or nothing can be inferred.
    """
    if isinstance(mutates_args, str):
        advice = (
            "list the arguments that it writes to; an operator that may write anything cannot be cut at safely"
            if mutates_args == "unknown"
            else f'write mutates_args=("{mutates_args}",)'
        )
        raise RegistrationError(
            f"{location}: mutates_args: expected a sequence of argument names, got {mutates_args!r}; {advice}"
        )
    parameters = inspect.signature(body).parameters
    missing = [arg for arg in mutates_args if arg not in parameters]
    if missing:
        raise RegistrationError(
            f"{location}: mutates_args names {', '.join(missing)}, which {qualified} does not take; "
            f"its arguments are {', '.join(parameters)}"
        )
    returned = [arg for arg in mutates_args if arg in _returned_names(body)]
    if returned:
        raise RegistrationError(
            f"{location}: {qualified} returns {', '.join(returned)}, which it mutates; return nothing "
            f"(the caller has the tensor), or return a new tensor and do not mutate"
        )
    try:
        # A mutated argument that is no tensor fails here too.
        return torch.library.infer_schema(body, mutates_args=tuple(mutates_args))
    except (ValueError, RuntimeError) as error:
        raise RegistrationError(
            f"{location}: no schema can be inferred for {qualified}: {str(error).strip()}; annotate every argument and "
            f"the result with types that torch.library.infer_schema accepts, and mutate tensors only"
        ) from error


def _returned_names(body: Callable[..., Any]) -> set[str]:
    """Names that a `return` of the function plainly hands back. Empty when there is no source to read.

    What takes another way (`y = out; return y`) is not seen here; `torch.library.opcheck` finds it.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(body)))
    except (OSError, TypeError, SyntaxError):
        return set()
    names: set[str] = set()
    for function in ast.iter_child_nodes(tree):
        for node in _own_nodes(function):
            if isinstance(node, ast.Return) and node.value is not None:
                names.update(_handed_back(node.value))
    return names


def _handed_back(value: ast.expr) -> set[str]:
    if isinstance(value, ast.Name):
        return {value.id}
    if isinstance(value, (ast.Tuple, ast.List)):
        return {name for element in value.elts for name in _handed_back(element)}
    if isinstance(value, ast.IfExp):
        return _handed_back(value.body) | _handed_back(value.orelse)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        # An in-place method returns what it wrote into.
        if value.func.attr.endswith("_") and not value.func.attr.endswith("__"):
            return _handed_back(value.func.value)
    return set()


def _own_nodes(node: ast.AST) -> Iterable[ast.AST]:
    """The nodes below `node`, without those of nested functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield child
            yield from _own_nodes(child)
