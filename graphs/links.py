"""Whether containers hold the very objects that they held: asked before each replay, so it has to be quick."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .layouts import PLAIN_TENSORS

Link = tuple[Any, Any, Any]
"""A container, a key in it, and the object that is there."""


def links_unchanged(links: Sequence[Link]) -> bool:
    """Whether each link leads where it did; the plainest loop is the fastest, about 30 ns a link."""
    try:
        for container, key, value in links:
            if container[key] is not value:
                return False
    except (KeyError, IndexError):
        return False
    return True


class Tables:
    """Dicts, such as the tables of a model's modules: whether all hold what they held, asked at once, 10 ns a value.

    Note [Asking tables all at once]
    Two dicts are equal without a question to their values where those are the same objects. Where they are not, `==` is
    asked of what is there now and what was: tensors of several elements raise, and a module is unlike any other; what
    may answer otherwise (a tensor of one element, a class with an `==` of its own) gets a link. So a tensor that was
    replaced costs one comparison of it on its device, whose result nobody waits for. `gc.get_referents`
    lists what dicts hold in their order, without a step of Python for each.
    """

    def __init__(self, tables: Iterable[dict[str, Any]], *, in_order: bool) -> None:
        """As they are now. in_order: whether the order of their keys counts."""
        self._tables = tuple({id(table): table for table in tables if table}.values())
        self._before = tuple([dict(table) for table in self._tables])
        self._in_order = gc.get_referents(*self._tables) if in_order else None
        self._links = [
            (table, key, value)
            for table in self._tables
            for key, value in table.items()
            if not _is_unlike_others(value)
        ]

    def unchanged(self) -> bool:
        """Whether they hold the same objects under the same keys; False too if that is not sure."""
        try:
            return (
                self._tables == self._before
                and (self._in_order is None or gc.get_referents(*self._tables) == self._in_order)
                and links_unchanged(self._links)
            )
        except Exception:  # whatever an `==` raises: see the note
            return False


def _is_unlike_others(value: object) -> bool:
    """Whether `==` with another object never says yes."""
    if value is None:
        return True
    if isinstance(value, torch.nn.Module):
        return type(value).__eq__ is object.__eq__
    return isinstance(value, torch.Tensor) and type(value) in PLAIN_TENSORS and value.numel() != 1
