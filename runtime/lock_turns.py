"""Python's interpreter lock, between steps and the threads that work beside them.

Each operator of PyTorch gives the lock up for a moment, and a thread that runs Python takes it then. The step gets it
back when the other thread has had it for the interpreter's switch interval: 5 ms unless somebody said otherwise. An
eager forward of 1,800 operators would wait for seconds. `short_turns` makes that shorter. What consists of many small
parts is better done between steps: see `piecework.runtime.import_turns`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

SWITCH_INTERVAL_S = 0.0002
"""The interval beside steps. A turn still is many times what passing the lock on costs."""

_lock = threading.Lock()
_num_threads = 0
_theirs = _ours = 0.0
"""The interval before the first of the threads began, and what it was set to."""


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Inside, this thread works beside steps: whoever waits for the lock gets it soon. Nests, and counts threads.

    The interval is the process's, and put back with the last thread, unless somebody has set another one meanwhile.
    """
    global _num_threads, _theirs, _ours
    with _lock:
        _num_threads += 1
        if _num_threads == 1:
            _theirs = sys.getswitchinterval()
            if _theirs > SWITCH_INTERVAL_S:
                sys.setswitchinterval(SWITCH_INTERVAL_S)
            _ours = sys.getswitchinterval()
    try:
        yield
    finally:
        with _lock:
            _num_threads -= 1
            if not _num_threads and sys.getswitchinterval() == _ours != _theirs:
                sys.setswitchinterval(_theirs + 5e-7)  # it is cut to whole microseconds


def _forget() -> None:
    """In the child of a fork, which has none of these threads."""
    global _lock, _num_threads
    _lock = threading.Lock()
    if _num_threads and sys.getswitchinterval() == _ours != _theirs:
        sys.setswitchinterval(_theirs + 5e-7)
    _num_threads = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
