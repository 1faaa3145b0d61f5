"""Imports between steps: a thread that imports what takes seconds leaves Python's interpreter lock to steps.

Between the modules, since one that is being executed cannot be stopped. It waits in the import statement and not in a
finder: there the interpreter holds a lock that every other import needs.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PATIENCE_S = 0.025
"""How long a module waits for the step that runs: in a server without a pause the imports go on nevertheless."""
LONG_PATIENCE_S = 1.5
"""How long for a step that is long: beside imports, which want the interpreter all the time, it takes three times that.
"""
TOTAL_PATIENCE_S = 5.0
"""How long all modules of a round wait together: other threads may need what is being imported."""
_LOOK_S = 0.001


class StepGate:
    """Whether a step is in its Python at the moment. The thread of the steps writes, others look."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.num_ended = 0
        self.is_at_boundary = False
        """Whether the step does what is due before it, such as a capture."""

    @property
    def is_busy(self) -> bool:
        """Whether a step has begun and not ended."""
        return self.num_begun != self.num_ended

    @property
    def is_in_first(self) -> bool:
        """Whether the first step has begun and not ended."""
        return self.num_begun > 0 and not self.num_ended

    @property
    def is_long(self) -> bool:
        """Whether the step runs all operators of a model in a way that takes long: the first time, or for a capture."""
        return self.is_at_boundary or self.is_in_first


class _Waiter:
    """Lets one thread wait for a gate."""

    def __init__(self, gate: StepGate) -> None:
        self._gate = gate
        self._left_s = TOTAL_PATIENCE_S
        self._waited_for = -1
        """The step that went on for as long as a module waits."""

    def wait(self) -> None:
        """Returns when no step is in its Python, or after a while."""
        gate, began = self._gate, time.monotonic()
        while gate.is_busy and gate.num_begun != self._waited_for:
            patience_s = LONG_PATIENCE_S if gate.is_long else PATIENCE_S
            if time.monotonic() >= began + min(patience_s, self._left_s):
                self._waited_for = gate.num_begun  # it may be waiting for the very import
                break
            time.sleep(_LOOK_S)
        self._left_s = max(0.0, self._left_s - (time.monotonic() - began))


_lock = threading.Lock()
_waiters: dict[int, _Waiter] = {}
"""By thread."""
_theirs: Any = None
"""What `import` called before the first of the threads began."""
_ours: Any = None
"""What it calls since. Another one each time: one that somebody has kept goes on calling what was there before it."""


@contextlib.contextmanager
def imports_between_steps(gate: StepGate) -> Iterator[None]:
    """Inside, what this thread imports is imported a module at a time, each when no step is in its Python.

    A module waits for `PATIENCE_S` at most, for a long step longer, and once for a step that goes on. Other threads
    import as always. There is no other hook that is called without a lock: `builtins.__import__` is another one
    meanwhile.
    """
    global _theirs, _ours
    me = threading.get_ident()
    with _lock:
        if not _waiters:
            _theirs = builtins.__import__
            _ours = builtins.__import__ = _importing(_theirs)
        before = _waiters.get(me)
        _waiters[me] = _Waiter(gate)
    try:
        yield
    finally:
        with _lock:
            if before is None:
                del _waiters[me]
            else:
                _waiters[me] = before
            # Where somebody has put another one in front of ours, that one goes on calling it.
            if not _waiters and builtins.__import__ is _ours:
                builtins.__import__ = _theirs


def _importing(theirs: Any) -> Any:
    """`import` in front of another one."""

    def import_(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        waiter = _waiters.get(threading.get_ident())
        if waiter is not None and _full_name(name, globals, level) not in sys.modules:
            waiter.wait()
        return theirs(name, globals, locals, fromlist, level)

    return import_


def _full_name(name: str, globals: Mapping[str, object] | None, level: int) -> str:
    """That of a module which an import statement names."""
    if not level:
        return name
    package = str((globals or {}).get("__package__") or "")
    parent = package.rsplit(".", level - 1)[0]
    return f"{parent}.{name}" if name else parent


def _forget() -> None:
    """In the child of a fork, which has none of these threads."""
    global _lock
    _lock = threading.Lock()
    _waiters.clear()
    if _ours is not None and builtins.__import__ is _ours:
        builtins.__import__ = _theirs


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
