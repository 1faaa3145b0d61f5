"""A lock that threads get in turn."""

from __future__ import annotations

import threading
from _thread import RLock


class Turns(RLock):
    """A lock that a thread which takes it again and again does not keep from the others.

    With a plain lock, a thread that steps in a loop usually has it back before one that waits wakes up.

    An interrupt (KeyboardInterrupt) leaves it free: releasing it is the base class's own and runs no Python, where an
    interrupt could come first; and what is raised while it is taken gives it back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next = threading.Lock()
        """Who holds it is the next one to get the lock itself."""

    def __enter__(self) -> bool:
        try:
            with self._next:
                return self.acquire()
        except BaseException:
            if self._is_owned():
                self.release()
            raise
