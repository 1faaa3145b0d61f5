"""The thread that makes better programs while steps run: traces, compiles, loads and calls them for the first time.

What takes long is done by worker processes where that is possible; this thread waits for them. Where it is not (there
is no factory of the model, a program cannot leave the process), the thread does it itself and says so: then it competes
with the steps for Python's interpreter lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError

from ..errors import PieceworkError, WorkerLostError
from ..graphs.ambient import autocast_of
from ..graphs.inputs import TOKENS
from .entries import Entry, EntryKey
from .entry_table import EntryTable
from .events import Recorder, Scope
from .padding_step import under_ambient_state
from .programs import Builder
from .promotion import GAIN

MAX_ATTEMPTS = 3
"""Times that something is tried whose worker was lost; what fails for its own reasons is not tried again."""
BACKOFF_S = 1.0
"""Wait before the second attempt; twice as long before each further one."""


@dataclasses.dataclass(slots=True)
class _Wish:
    """That something better is made for the entry of a bucket."""

    key: EntryKey
    attempts: int = 0
    not_before: float = 0.0
    """On the monotonic clock."""


class Background:
    """Makes programs for the entries that want better ones, the most valuable first. Thread-safe."""

    def __init__(
        self,
        table: EntryTable,
        builder: Builder,
        recorder: Recorder,
        *,
        on_change: Callable[[], None],
        foreseen: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Starts no thread yet.

        Args:
            on_change: called when a boundary may find something new.
            foreseen: entered around what is compiled in the thread.
        """
        self._foreseen = foreseen
        self._table = table
        self._builder = builder
        self._recorder = recorder
        self._on_change = on_change
        self._wishes: dict[EntryKey, _Wish] = {}
        self._changed = threading.Condition()
        self._is_working = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def want(self, entry: Entry) -> None:
        """Asks for something better than the entry has; returns at once."""
        if not entry.is_at_best:
            with self._changed:
                if self._closed:
                    return
                key = (entry.phase, entry.signature, entry.bucket)
                self._wishes.setdefault(key, _Wish(key))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="piecework-background", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        self._on_change()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being made or asked for."""
        with self._changed:
            return not self._wishes and not self._is_working

    def wait(self, timeout_s: float) -> None:
        """Waits until something changes here, or for so long."""
        with self._changed:
            self._changed.wait(timeout_s)

    def close(self, timeout_s: float = 60.0) -> None:
        """Ends the thread; waits for what it does itself at the moment."""
        with self._changed:
            self._closed = True
            self._wishes.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _run(self) -> None:
        while (wish := self._next()) is not None:
            try:
                with self._foreseen():
                    self._fulfil(wish)
            except BaseException as error:  # whatever a compiler raises; a step must not be hurt
                self._give_up(wish, error)
            finally:
                with self._changed:
                    self._is_working = False
                    self._changed.notify_all()
                self._on_change()

    def _next(self) -> _Wish | None:
        """Waits for the most valuable wish; None: this is the end."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                self._drop_fulfilled()
                ready = [wish for wish in self._wishes.values() if wish.not_before <= now]
                if ready:
                    self._is_working = True
                    return max(ready, key=self._value)
                waits = [wish.not_before - now for wish in self._wishes.values()]
                self._changed.notify_all()
                self._changed.wait(min(waits, default=None))
            return None

    def _drop_fulfilled(self) -> None:
        for key in list(self._wishes):
            entry = self._table.entries.get(key)
            if entry is None or entry.is_at_best or _next_kind(entry) is None:
                del self._wishes[key]

    def _value(self, wish: _Wish) -> float:
        entry = self._table.entries.get(wish.key)
        kind = _next_kind(entry) if entry is not None else None
        return 0.0 if entry is None or kind is None else (entry.num_steps + 1) * GAIN[kind]

    def _fulfil(self, wish: _Wish) -> None:
        """Makes the next better program of the wish's entry, if it has not been made for another one."""
        entry = self._table.entries.get(wish.key)
        if entry is None or entry.source is None:
            return
        family = entry.source
        recorder = self._recorder.within(Scope(phase=entry.phase, bucket=entry.bucket))
        size = _size(entry)
        with self._table.lock, autocast_of(family.signature.ambient):
            if self._closed:
                return
            if under_ambient_state(family.signature) != family.signature:
                entry.given_up = f"it needs settings of torch that do not hold any more: {family.signature}"
                recorder.fallback(
                    "not promoted: torch has other settings than in the step", inputs=str(family.signature)
                )
                return
            choice = family.choose(size, entry.sizes, recorder, self._builder)
            if choice.program is None:
                entry.given_up = choice.fallback
            elif entry.target == "specialized" and _next_kind(entry) == "specialized":
                family.specialized(choice.size, choice.program, recorder, self._builder)

    def _give_up(self, wish: _Wish, error: BaseException) -> None:
        if self._closed or isinstance(error, CancelledError):
            return
        phase, _, bucket = wish.key
        recorder = self._recorder.within(Scope(phase=phase, bucket=bucket))
        wish.attempts += 1
        if isinstance(error, WorkerLostError) and wish.attempts < MAX_ATTEMPTS:
            delay = BACKOFF_S * 2 ** (wish.attempts - 1)
            wish.not_before = time.monotonic() + delay
            recorder.fallback("a compile worker was lost: tried again later", because=str(error), seconds=delay)
            return
        text = str(error) if isinstance(error, PieceworkError) else f"{type(error).__name__}: {error}"
        if (entry := self._table.entries.get(wish.key)) is not None:
            entry.given_up = f"a better program could not be made: {text.strip().partition(chr(10))[0]}"
        recorder.fallback("not promoted: a better program could not be made", because=text)
        recorder.record("promotion_failed", error=text, attempts=wish.attempts)


def _next_kind(entry: Entry) -> str | None:
    """The kind of program that is to be made next for an entry; None: there is nothing to make."""
    family = entry.source
    if family is None:
        return None
    choice = family.known(_size(entry), entry.sizes)
    if choice is None:
        return "general"
    if choice.program is None or entry.target != "specialized":
        return None
    return "specialized" if family.known_specialized(choice.size, choice.program) is None else None


def _size(entry: Entry) -> int:
    """The number of tokens that a program of the entry is chosen for."""
    return entry.bucket if entry.bucket is not None else entry.sizes[TOKENS]
