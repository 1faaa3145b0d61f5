"""Progress of slow work: a bar on a terminal, plain lines elsewhere, and nothing at all below a second."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

SHOW_AFTER_S = 1.0


@contextlib.contextmanager
def Progress(title: str, *, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Yields a function to call when one of `total` parts is done; shows on stderr what takes over a second."""
    shown = _Bar(title, total) if sys.stderr.isatty() else _Lines(title, total)
    timer = threading.Timer(SHOW_AFTER_S, shown.start)
    timer.daemon = True
    timer.start()
    try:
        yield shown.advance
    finally:
        timer.cancel()
        shown.stop()


class _Lines:
    """One line when the work turns out slow, one when it is done."""

    def __init__(self, title: str, total: int | None) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._started = time.perf_counter()
        self._lock = threading.Lock()
        self._running = False

    def start(self) -> None:
        with self._lock:
            self._running = True
            self._say(f"piecework: {self._title}" + (f" ({self._total} parts)" if self._total else "") + " ...")

    def advance(self) -> None:
        with self._lock:
            self._done += 1

    def stop(self) -> None:
        with self._lock:
            if self._running:
                self._say(f"piecework: {self._title}: done in {time.perf_counter() - self._started:.1f} s")

    @staticmethod
    def _say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class _Bar:
    """A rich progress bar; gone again when the work is done."""

    def __init__(self, title: str, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._lock = threading.Lock()
        self._stopped = False
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            *([BarColumn(), MofNCompleteColumn()] if total is not None else []),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(title, total=total)

    def start(self) -> None:
        with self._lock:
            if not self._stopped:
                self._bar.start()

    def advance(self) -> None:
        self._bar.advance(self._task)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._bar.stop()
