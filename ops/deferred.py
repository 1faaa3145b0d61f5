"""Whether this step waits for compiles: a scope in which operators hand them to somebody else.

An operator that would have to compile something first may be called where nothing may wait, such as in a server's
step. There it asks `deferring`: inside a scope it hands the compile over and does this one call in a way that needs
none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar

Compile = Callable[[], None]
"""Compiles; from any thread, launches nothing on streams of others, and twice is fine. Raises whatever the compiler
raised, once it has noted that: the operator then compiles in its step, and fails there."""
Submit = Callable[[Hashable, Compile], None]
"""`submit(key, compile)` returns at once and has `compile` run some time, in another thread. One that it was given
before, by its key, may come again, since a scope sees one step only: then it does nothing."""


class Deferred:
    """What takes compiles in one scope; called as `Submit` is, which gets each key once."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._given: set[Hashable] = set()
        self.awaited: set[Hashable] = set()
        """Keys of what operators did without here: what a capture of the same calls waits for."""

    def __call__(self, key: Hashable, compile: Compile, *, ahead: bool = False) -> None:
        """`ahead`: nothing here does without it; it is for calls that are to be expected."""
        if not ahead:
            self.awaited.add(key)
        if key not in self._given:
            self._submit(key, compile)
            self._given.add(key)


_DEFERRED: ContextVar[Deferred | None] = ContextVar("piecework_defer_compiles", default=None)

deferring: Callable[[], Deferred | None] = _DEFERRED.get
"""What takes compiles here, or None where they are waited for. Inside operator bodies only: Dynamo cannot trace it."""


def awaited() -> frozenset[Hashable]:
    """Keys of the compiles that this scope has done without so far; none where there is no scope."""
    deferred = _DEFERRED.get()
    return frozenset(deferred.awaited) if deferred is not None else frozenset()


@contextlib.contextmanager
def defer_compiles(submit: Submit) -> Iterator[None]:
    """In this thread operators do not wait for compiles of theirs, but give them to `submit`, once a key.

    An operator that is captured meanwhile, with what it is to launch not compiled yet, raises KernelNotReadyError:
    the capture is worth another attempt later. What an operator does in place of what it will do may round differently.
    The scope changes nothing of what other code compiles: only operators that ask `deferring`.
    """
    token = _DEFERRED.set(Deferred(submit))
    try:
        yield
    finally:
        _DEFERRED.reset(token)
