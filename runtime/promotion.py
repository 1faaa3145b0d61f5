"""Promotions: what is better than what runs is put in its place between two steps, the most valuable first.

Note [Step boundaries]
A boundary is the beginning of a step, before anything of it runs, or a call of `Runtime.promote`. There, an entry is
replaced by one with a better program, and what a step has left to be captured is captured. Neither runs anything of the
model: a program is compiled, loaded and called once elsewhere, and a capture executes nothing. The next step of a
replaced entry runs the new program uncaptured, once, and leaves it to the boundary after it to be captured.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Set
from typing import TYPE_CHECKING

from ..phases import GraphConfig
from .entries import Entry, EntryKey
from .entry_table import KINDS, EntryTable
from .events import Recorder, Scope

if TYPE_CHECKING:
    from .agreement import Agreement
    from .capture_slot import Slot
    from .captures import Captures

GAIN = {"capture": 8.0, "general": 1.2, "specialized": 0.1, "whole": 0.1}
"""What each is worth, in milliseconds a step: about what a Llama-3-8B on an H200 gains (see the README's tables)."""
CAPTURE_ESTIMATE_S = 0.03
"""What a capture takes until one was made."""
SWAP_ESTIMATE_S = 0.001


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """One thing that a boundary can do."""

    value: float
    estimate_s: float
    do: Callable[[], bool]
    """Returns whether it was done."""


class Promotions:
    """Does the work of boundaries. Its methods may be called from any thread; one boundary is worked on at a time."""

    def __init__(
        self,
        table: EntryTable,
        captures: Captures | None,
        config: GraphConfig,
        recorder: Recorder,
        agreement: Agreement | None = None,
    ) -> None:
        self.may_capture: Callable[[Set[Hashable]], bool] = lambda awaited: True
        """Whether the compiles of these keys, which a capture waits for, are done; asked at each boundary."""
        self.is_due = False
        """Whether the next boundary may have something to do; asked before each step."""
        self._table = table
        self._captures = captures
        self._budget_s = config.promotion_budget_ms / 1000
        self._recorder = recorder
        self._agreement = agreement
        self._lock = threading.Lock()
        self._capture_s: dict[str, float] = {}
        """Seconds that the last capture took, by backend."""
        self._num_boundaries = 0
        self._agreed: set[EntryKey] = set()
        """Buckets for which no rank will have anything better."""

    def look(self) -> None:
        """Lets the next boundary look for something to do."""
        self.is_due = self._budget_s > 0 or self._agreement is not None

    def before_step(self) -> None:
        """The boundary before a step; another thread's step does not wait for it."""
        if self._agreement is not None:  # every rank's, or the others would wait for it
            with self._lock:
                self._at_boundary(self._budget_s)
        elif self._lock.acquire(blocking=False):
            try:
                self._at_boundary(self._budget_s)
            finally:
                self._lock.release()

    def between_steps(self, budget_s: float | None) -> int:
        """A boundary that the caller makes; None: everything that there is. Returns how much was done."""
        with self._lock:
            return self._at_boundary(budget_s, is_step=False)

    def all_agree(self, *answers: bool) -> list[bool]:
        """Whether all ranks say yes, for each; every rank must ask."""
        if self._agreement is None:
            return [*answers]
        return [bool(answer) for answer in self._agreement.agree([*map(int, answers)])]

    @property
    def has_work(self) -> bool:
        """Whether a boundary would find something to do."""
        return bool(self._work())

    def _at_boundary(self, budget_s: float | None, *, is_step: bool = True) -> int:
        started = time.perf_counter()
        self.is_due = False  # what comes from now on is looked at next time
        if self._agreement is not None:
            self._agree(is_step)
        num_done = 0
        if is_step and budget_s == 0:
            return 0
        tried: set[Callable[[], bool]] = set()
        while (left := [work for work in self._work() if work.do not in tried]) != []:
            work = max(left, key=lambda each: each.value)
            passed = time.perf_counter() - started
            # One that takes longer than there is at all is made alone.
            if budget_s is not None and tried and passed + work.estimate_s > budget_s:
                self.is_due = True
                break
            tried.add(work.do)
            num_done += work.do()
        if self._captures is not None and self._captures.waiting:
            self.look()
        seconds = time.perf_counter() - started
        overran = budget_s is not None and seconds > budget_s and bool(tried)
        if overran:
            self._recorder.counters.add("boundary_overruns")
        if tried:
            self._recorder.record("boundary", seconds=seconds, done=num_done, overran=overran)
        return num_done

    def _work(self) -> list[_Work]:
        return [*self._swaps(), *self._deferred_captures()]

    def _swaps(self) -> list[_Work]:
        if self._agreement is not None:
            return []  # they are made when all ranks agree
        found = []
        for entry in list(self._table.entries.values()):
            if not entry.is_at_best and (better := self._table.better(entry)) is not None:
                found.append(self._swap_work(entry, better))
        return found

    def _swap_work(self, entry: Entry, better: Entry) -> _Work:
        skips = entry.program.kind == "eager" and better.program.kind != "general"
        value = (entry.num_steps + 1) * (GAIN[better.program.kind] + (GAIN["general"] if skips else 0.0))
        return _Work(value, SWAP_ESTIMATE_S, _Swap(self, entry, better))

    def swap(self, entry: Entry, better: Entry) -> bool:
        """Puts `better` in the place of `entry`, if that is still there."""
        started = time.perf_counter()
        if not self._table.replace(entry, better):
            return False
        scope = Scope(phase=entry.phase, bucket=entry.bucket)
        self._recorder.within(scope).record(
            "promote",
            seconds=time.perf_counter() - started,
            from_=entry.program.kind,
            to=better.program.kind,
            reason=better.why,
        )
        return True

    def _deferred_captures(self) -> list[_Work]:
        if self._captures is None:
            return []
        found = []
        for slot in self._captures.waiting:
            if not self.may_capture(slot.awaited):
                continue
            entry = slot.entry
            if self._table.entries.get((entry.phase, entry.signature, entry.bucket)) is not entry:
                self._captures.drop(entry)  # another thread's step has come too late with it
                continue
            if self._agreement is None and self._table.better(entry) is not None:
                continue  # it would be dropped at once
            estimate = self._capture_s.get(str(slot.backend), CAPTURE_ESTIMATE_S)
            found.append(_Work((entry.num_steps + 1) * GAIN["capture"], estimate, _Capture(self, slot)))
        return found

    def capture(self, slot: Slot) -> bool:
        """Captures what a step has left; whether that went well."""
        assert self._captures is not None
        started = time.perf_counter()
        scope = Scope(phase=slot.entry.phase, bucket=slot.entry.bucket)
        is_made = self._captures.capture_waiting(slot, self._recorder.within(scope))
        self._capture_s[str(slot.backend)] = time.perf_counter() - started
        return is_made

    def _agree(self, is_step: bool) -> None:
        """Promotes what all ranks can, while something is pending.

        What is pending follows from the steps and from earlier agreements alone, so it is the same on all ranks.

        Args:
            is_step: whether a step follows, which all ranks make: then they ask now and then, else each time.
        """
        assert self._agreement is not None
        pending = [entry for entry in list(self._table.entries.values()) if self._is_pending(entry)]
        if not pending:
            return
        self.is_due = True
        self._num_boundaries += is_step
        if is_step and self._num_boundaries % self._agreement.interval:
            return
        levels = []
        for entry in pending:
            better = self._table.better(entry)
            level = KINDS.index((better or entry).program.kind)
            levels += [level, level if entry.given_up is not None else KINDS.index(entry.target)]
        agreed = self._agreement.agree(levels)
        for entry, level, most in zip(pending, agreed[::2], agreed[1::2], strict=True):
            better = self._table.better(entry, most=KINDS[level])
            if better is not None:
                self.swap(entry, better)
            entry = better or entry
            if most <= KINDS.index(entry.program.kind):
                self._agreed.add((entry.phase, entry.signature, entry.bucket))
                if not entry.is_at_best:
                    entry.given_up = "another rank has no better program"

    def _is_pending(self, entry: Entry) -> bool:
        """Whether ranks have to agree on an entry, whatever this rank alone knows of it."""
        return entry.program.kind != entry.target and (entry.phase, entry.signature, entry.bucket) not in self._agreed


@dataclasses.dataclass(frozen=True, slots=True)
class _Swap:
    promotions: Promotions
    old: Entry
    new: Entry

    def __call__(self) -> bool:
        return self.promotions.swap(self.old, self.new)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Swap) and other.old is self.old

    def __hash__(self) -> int:
        return id(self.old)


@dataclasses.dataclass(frozen=True, slots=True)
class _Capture:
    promotions: Promotions
    slot: Slot

    def __call__(self) -> bool:
        return self.promotions.capture(self.slot)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Capture) and other.slot is self.slot

    def __hash__(self) -> int:
        return id(self.slot)
