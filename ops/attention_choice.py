"""Which implementation of paged attention an operator asked for: a scope that operator bodies look at.

A runtime sets it around whatever runs its model; nothing on a traced path reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar, Token
from typing import Any

AUTO = "auto"
"""The first of the table that can serve a call."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionBackend:
    """What serves paged attention for one runtime, and what its implementations keep for as long as it lives."""

    name: str = AUTO
    """`auto`, or the `backend` of rows of `piecework.ops.attention.IMPLEMENTATIONS`."""
    memory: dict[Hashable, Any] = dataclasses.field(default_factory=dict, repr=False)
    """Workspaces and the like, by keys of the implementations. Captures may hold their addresses."""


_DEFAULT = AttentionBackend()
_BACKEND: ContextVar[AttentionBackend] = ContextVar("piecework_attention_backend", default=_DEFAULT)

attention_backend: Callable[[], AttentionBackend] = _BACKEND.get
"""What was set in this thread. Inside operator bodies only: Dynamo cannot trace it."""

set_attention_backend: Callable[[AttentionBackend], Token[AttentionBackend]] = _BACKEND.set
reset_attention_backend: Callable[[Token[AttentionBackend]], None] = _BACKEND.reset
"""What `use_attention_backend` does, in two halves: for who calls them each step, and sees to it that both happen."""


@contextlib.contextmanager
def use_attention_backend(backend: AttentionBackend | str) -> Iterator[AttentionBackend]:
    """Makes attention of this thread use `backend`; by its name, with memory that goes away with the scope.

    A name that no row has is an error of the first call inside.
    """
    if isinstance(backend, str):
        backend = AttentionBackend(name=backend)
    token = _BACKEND.set(backend)
    try:
        yield backend
    finally:
        _BACKEND.reset(token)
