"""What the graphs report to; the runtime implements it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol


class Recorder(Protocol):
    """Receives every trace and compile."""

    def record(self, kind: str, *, seconds: float = 0.0, **detail: Any) -> None:
        """Something happened that took `seconds`."""

    def progress(
        self, title: str, *, total: int | None = None
    ) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Shows work that may take long; calling what it yields says that one of `total` parts is done."""


class NullRecorder:
    """A recorder for callers that do not care."""

    def record(self, kind: str, *, seconds: float = 0.0, **detail: Any) -> None:
        """Forgets it."""

    def progress(
        self, title: str, *, total: int | None = None
    ) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Shows nothing."""
        return contextlib.nullcontext(lambda: None)
