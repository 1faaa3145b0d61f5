"""Imports between steps: a thread that imports what takes seconds leaves Python's interpreter lock to steps.

Between the modules, since one that is being executed cannot be stopped. It waits in the import statement and not in a
finder: there the interpreter holds a lock that every other import needs.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PATIENCE_S = 0.025
"""How long a module waits for the step that runs: in a server without a pause the imports go on nevertheless."""
_LOOK_S = 0.001


class StepGate:
    """Whether a step is in its Python at the moment. The thread of the steps writes, others look."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.num_ended = 0

    @property
    def is_busy(self) -> bool:
        """Whether a step has begun and not ended."""
        return self.num_begun != self.num_ended


class _Waiter:
    """Lets one thread wait for a gate."""

    def __init__(self, gate: StepGate) -> None:
        self._gate = gate
        self._waited_for = -1
        """The step that went on for as long as a module waits."""

    def wait(self) -> None:
        """Returns when no step is in its Python, or after a while."""
        gate, until = self._gate, time.monotonic() + PATIENCE_S
        while gate.is_busy and gate.num_begun != self._waited_for:
            if time.monotonic() >= until:
                self._waited_for = gate.num_begun  # it may be waiting for the very import
                return
            time.sleep(_LOOK_S)


_lock = threading.Lock()
_waiters: dict[int, _Waiter] = {}
"""By thread."""
_theirs: Any = None
"""What `import` called before the first of the threads began."""


@contextlib.contextmanager
def imports_between_steps(gate: StepGate) -> Iterator[None]:
    """Inside, what this thread imports is imported a module at a time, each when no step is in its Python.

    A module waits for `PATIENCE_S` at most, and once for a step that goes on. Other threads import as always. There is
    no other hook that is called without a lock: `builtins.__import__` is another one meanwhile.
    """
    global _theirs
    me = threading.get_ident()
    with _lock:
        if not _waiters:
            _theirs = builtins.__import__
            builtins.__import__ = _import
        _waiters[me] = _Waiter(gate)
    try:
        yield
    finally:
        with _lock:
            del _waiters[me]
            # Where somebody has put another one in front of ours, that one goes on calling it.
            if not _waiters and builtins.__import__ is _import:
                builtins.__import__ = _theirs


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    waiter = _waiters.get(threading.get_ident())
    if waiter is not None and _full_name(name, globals, level) not in sys.modules:
        waiter.wait()
    return _theirs(name, globals, locals, fromlist, level)


def _full_name(name: str, globals: Mapping[str, object] | None, level: int) -> str:
    """That of a module which an import statement names."""
    if not level:
        return name
    package = str((globals or {}).get("__package__") or "")
    parent = package.rsplit(".", level - 1)[0]
    return f"{parent}.{name}" if name else parent
