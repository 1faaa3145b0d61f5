"""The thread that makes better programs while steps run: traces, compiles, loads and calls them for the first time.

What takes long is done by worker processes where that is possible; this thread waits for them. Where it is not (there
is no factory of the model, a program cannot leave the process), the thread does it itself and says so: then it competes
with the steps for Python's interpreter lock.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import CancelledError

from ..errors import PieceworkError
from ..graphs.ambient import autocast_of
from ..graphs.inputs import TOKENS
from ..graphs.random_state import restores_ignored
from .entries import Entry, EntryKey
from .entry_table import EntryTable
from .events import Recorder, Scope
from .lock_turns import short_turns
from .padding_step import under_ambient_state
from .passing import passing
from .programs import Builder
from .promotion import GAIN

MAX_ATTEMPTS = 3
"""Times that something is tried whose worker was lost; what fails for its own reasons is not tried again."""
_LOOK_S = 1.0
"""Seconds after which the thread looks whether there is a runtime still."""
BACKOFF_S = 1.0
"""Wait before the second attempt; twice as long before each further one."""


@dataclasses.dataclass(slots=True)
class _Wish:
    """That something better is made for the entry of a bucket."""

    key: EntryKey
    size: int
    """The number of tokens that a program is wanted for."""
    sizes: Mapping[str, int]
    attempts: int = 0
    not_before: float = 0.0
    """On the monotonic clock."""


class Background:
    """Makes programs for the entries that want better ones, the most valuable first. Thread-safe.

    Its thread ends when nothing is asked for, and another one begins with the next wish: what it ran on the CPU leaves
    it threads of OpenMP, and as long as there are more of those than cores, all of the process's hand over work slowly.
    """

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
        # Inductor's and Dynamo's settings are a context's from torch 2.12 on: the constructor's, and not a step's.
        self._context = contextvars.copy_context()
        self._table = table
        self._builder = builder
        self._recorder = recorder
        self._on_change = on_change
        self._wishes: dict[Hashable, _Wish] = {}
        self._refused: set[Hashable] = set()
        """Sizes for which there will be no program."""
        self._changed = threading.Condition()
        self._is_working = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def want(self, entry: Entry) -> None:
        """Asks for something better than the entry has; returns at once."""
        if not entry.is_at_best:
            key = (entry.phase, entry.signature, entry.bucket)
            self._add(key, _Wish(key, _size(entry), entry.sizes))
        self._on_change()

    def want_sizes(self, entry: Entry, size: int, sizes: Mapping[str, int]) -> None:
        """Asks for a program of the entry's family at sizes at which its own does not hold; returns at once."""
        key = (entry.phase, entry.signature, entry.bucket)
        self._add((key, size, frozenset(sizes.items())), _Wish(key, size, dict(sizes)))

    def _add(self, name: Hashable, wish: _Wish) -> None:
        with self._changed:
            if self._closed or name in self._refused:
                return
            self._wishes.setdefault(name, wish)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._context.copy().run,  # the last one may still be in it
                    args=(_run, weakref.ref(self), self._changed),
                    name="piecework-background",
                    daemon=True,
                )
                self._thread.start()
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being made or asked for."""
        with self._changed:
            return not self._wishes and not self._is_working

    def wait(self, timeout_s: float) -> None:
        """Waits until something changes here, or for so long."""
        with self._changed:
            self._changed.wait(timeout_s)

    def end(self) -> None:
        """Lets the thread come to its end; `close` waits for it."""
        with self._changed:
            self._closed = True
            self._wishes.clear()
            self._changed.notify_all()

    def close(self, timeout_s: float = 60.0) -> None:
        """Ends the thread; waits for what it does itself at the moment, at most so long."""
        self.end()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def work(self) -> float | None:
        """Fulfils one wish. Returns how long to wait before the next look, in seconds; None: the thread is to end."""
        with self._changed:
            if self._closed:
                return None
            now = time.monotonic()
            self._drop_fulfilled()
            if not self._wishes:
                self._thread = None
                self._changed.notify_all()
                return None
            ready = {name: wish for name, wish in self._wishes.items() if wish.not_before <= now}
            if not ready:
                self._changed.notify_all()
                return min([_LOOK_S, *(wish.not_before - now for wish in self._wishes.values())])
            name = max(ready, key=lambda each: self._value(ready[each]))
            self._is_working = True
        try:
            with self._foreseen(), restores_ignored(), short_turns():
                self._fulfil(ready[name])
        except BaseException as error:  # whatever a compiler raises; a step must not be hurt
            self._give_up(name, ready[name], error)
        finally:
            with self._changed:
                self._is_working = False
                self._changed.notify_all()
            self._on_change()
        return 0.0

    def _drop_fulfilled(self) -> None:
        for name, wish in list(self._wishes.items()):
            entry = self._table.entries.get(wish.key)
            # An entry's own wish goes with it; one for other sizes does not depend on what the entry has.
            is_over = entry is None or (name == wish.key and entry.is_at_best)
            if is_over or name in self._refused or entry is None or _next_kind(self._table, entry, wish) is None:
                del self._wishes[name]

    def _value(self, wish: _Wish) -> float:
        entry = self._table.entries.get(wish.key)
        kind = _next_kind(self._table, entry, wish) if entry is not None else None
        return 0.0 if entry is None or kind is None else (entry.num_steps + 1) * GAIN[kind]

    def _fulfil(self, wish: _Wish) -> None:
        """Makes the next better program of the wish's entry, if it has not been made for another one."""
        entry = self._table.entries.get(wish.key)
        if entry is None or (family := entry.source or entry.whole_source) is None:
            return
        recorder = self._recorder.within(Scope(phase=entry.phase, bucket=entry.bucket))
        with self._table.lock, autocast_of(family.signature.ambient):
            if self._closed:
                return
            if under_ambient_state(family.signature) != family.signature:
                entry.given_up = f"it needs settings of torch that do not hold any more: {family.signature}"
                recorder.fallback(
                    "not promoted: torch has other settings than in the step", inputs=str(family.signature)
                )
                return
            if _next_kind(self._table, entry, wish) == "whole":
                self._table.make_whole(entry, recorder, self._builder)
                return
            choice = family.choose(wish.size, wish.sizes, recorder, self._builder)
            if choice.program is None:
                if wish.size == _size(entry):
                    entry.given_up = choice.fallback
            elif _next_kind(self._table, entry, wish) == "specialized":
                family.specialized(choice.size, choice.program, recorder, self._builder)

    def _give_up(self, name: Hashable, wish: _Wish, error: BaseException) -> None:
        if self._closed or isinstance(error, CancelledError):
            return
        phase, _, bucket = wish.key
        recorder = self._recorder.within(Scope(phase=phase, bucket=bucket))
        wish.attempts += 1
        if (reason := passing(error)) is not None and wish.attempts < MAX_ATTEMPTS:
            delay = BACKOFF_S * 2 ** (wish.attempts - 1)
            wish.not_before = time.monotonic() + delay
            recorder.fallback(f"{reason}: tried again later", because=str(error), seconds=delay)
            if (entry := self._table.entries.get(wish.key)) is not None:
                for family in filter(None, (entry.source, entry.whole_source)):
                    family.forget_failures()
            return
        text = str(error) if isinstance(error, PieceworkError) else f"{type(error).__name__}: {error}"
        self._refused.add(name)
        if name == wish.key and (entry := self._table.entries.get(wish.key)) is not None:
            entry.given_up = f"a better program could not be made: {text.strip().partition(chr(10))[0]}"
        recorder.fallback("not promoted: a better program could not be made", because=text)
        recorder.record("promotion_failed", error=text, attempts=wish.attempts)


def _run(background: weakref.ReferenceType[Background], changed: threading.Condition) -> None:
    """The thread. It keeps no runtime alive that nobody else holds."""
    while (mine := background()) is not None:
        delay = mine.work()
        del mine
        if delay is None:
            return
        if delay:
            with changed:
                changed.wait(delay)


def _next_kind(table: EntryTable, entry: Entry, wish: _Wish) -> str | None:
    """The kind of program that is to be made next for a wish; None: there is nothing to make."""
    family, is_own = entry.source, wish.size == _size(entry)
    if family is not None:
        choice = family.known(wish.size, wish.sizes)
        if choice is None:
            return "general"
        if choice.program is None:
            return None
        if is_own and "specialized" in entry.kinds and family.known_specialized(choice.size, choice.program) is None:
            return "specialized"
    if is_own and entry.whole_source is not None and table.whole.known(entry) is None:
        return "whole"
    return None


def _size(entry: Entry) -> int:
    """The number of tokens that a program of the entry is chosen for."""
    return entry.bucket if entry.bucket is not None else entry.sizes[TOKENS]
