"""A lock that threads get in turn."""

from __future__ import annotations

import contextlib
import threading
from _thread import RLock


class Turns(RLock):  # type: ignore[misc]  # it is final in the type stubs alone
    """A lock that a thread which takes it again and again does not keep from the others.

    With a plain lock, a thread that steps in a loop usually has it back before one that waits wakes up.

    An interrupt (KeyboardInterrupt) does not leave it held: leaving it is the base class's own and runs no Python,
    where an interrupt could come first, and what is raised while it is taken gives it back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next = threading.Lock()
        """Who holds it is the next one to get the lock itself."""

    def __enter__(self) -> bool:  # type: ignore[override]  # of the base class's arguments `with` passes none
        try:
            with self._next:
                return self.acquire()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # not taken yet
                self.release()
            raise
