"""What a model's forward may change outside of the model: globals and classes of the modules that define it."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from .region import RegionError

_MAX_ITEMS = 1000
"""Longer lists and dicts are tables, not state."""


@contextlib.contextmanager
def outside_unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Refuses a trace that changed what lies around the model: layers that were stamped out saw the first value only.

    Looks at the globals of the modules that define the model's classes, at the classes, and at the attributes and the
    items of plain objects among those globals.

    Raises:
        RegionError: something changed. It is not put back: another thread may have done it.
    """
    before = dict(_outside(model))
    yield
    for name, values in _outside(model):
        if name in before and _differ(before[name], values):
            raise RegionError(f"the forward changes {name}, which further layers would not see")


def _outside(model: torch.nn.Module) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Names of places outside, and what is in them now."""
    classes = {c for module in model.modules() for c in type(module).__mro__ if not _is_foreign(c.__module__)}
    for each in classes:
        yield from _entries(f"{each.__module__}.{each.__qualname__}", each)
    for name in {c.__module__ for c in classes}:
        if (module := sys.modules.get(name)) is not None:
            yield from _entries(name, module)


def _entries(name: str, owner: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for key, value in list(vars(owner).items()):
        if key.startswith("__") or key == "forward":
            continue
        yield f"{name}.{key}", (value,)
        if isinstance(value, (list, dict, set)):
            if len(value) <= _MAX_ITEMS:
                items = value.items() if isinstance(value, dict) else enumerate(value)
                yield f"{name}.{key}[...]", tuple(part for item in list(items) for part in item)
        elif not isinstance(value, (type, types.ModuleType, types.FunctionType, torch.nn.Module)) and not _is_foreign(
            type(value).__module__
        ):
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict) and len(attributes) <= _MAX_ITEMS:
                yield f"{name}.{key}.*", tuple(part for item in list(attributes.items()) for part in item)


def _differ(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """By identity; numbers and texts, which are often made anew, by value."""
    if len(left) != len(right):
        return True
    for a, b in zip(left, right, strict=True):
        if a is not b and not (type(a) is type(b) and isinstance(a, (int, float, str)) and a == b):
            return True
    return False


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in _FOREIGN


_FOREIGN = ("torch", "piecework", "builtins", "abc", "typing", "collections", "logging", "functools")
"""Roots of modules whose objects change by themselves when they are first used."""
