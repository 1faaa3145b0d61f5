"""A lock that threads get in turn."""

from __future__ import annotations

import threading
from types import TracebackType


class Turns:
    """A lock that a thread which takes it again and again does not keep from the others.

    With a plain lock, a thread that steps in a loop usually has it back before one that waits wakes up.
    """

    def __init__(self) -> None:
        self._next = threading.Lock()
        """Who holds it is the next one to get the lock itself."""
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()
