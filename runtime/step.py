"""Whether this thread is inside a step, where modules run their plain forward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token

_INSIDE: ContextVar[bool] = ContextVar("piecework_inside_step", default=False)


@contextlib.contextmanager
def inside_step() -> Iterator[None]:
    """Marks the run of a program."""
    token = _INSIDE.set(True)
    try:
        yield
    finally:
        _INSIDE.reset(token)


enter_step: Callable[[], Token[bool]] = functools.partial(_INSIDE.set, True)
leave_step: Callable[[Token[bool]], None] = _INSIDE.reset
"""What `inside_step` does, in two halves; the second takes what the first returned."""


def is_inside_step() -> bool:
    """Whether a program runs in this thread. Dynamo cannot trace this."""
    return _INSIDE.get()
