"""Whether this thread is inside a step, where modules run their plain forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_INSIDE: ContextVar[bool] = ContextVar("piecework_inside_step", default=False)


@contextlib.contextmanager
def inside_step() -> Iterator[None]:
    """Marks the run of a program."""
    token = _INSIDE.set(True)
    try:
        yield
    finally:
        _INSIDE.reset(token)


def is_inside_step() -> bool:
    """Whether a program runs in this thread. Dynamo cannot trace this."""
    return _INSIDE.get()
