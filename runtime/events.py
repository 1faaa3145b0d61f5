"""What happened: the timeline of events and the counters over it, by phase and bucket."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..phases import Phase
from .progress import Progress

logger = logging.getLogger("piecework")

COUNTERS = (
    "traces",
    "programs_bound",
    "regions_reused",
    "pieces",
    "distinct_pieces",
    "opaque_regions",
    "compiles_general",
    "compiles_specialized",
    "compiles_whole",
    "captures",
    "replays",
    "whole_not_faster",
    "promotions",
    "evictions",
    "cache_hits",
    "cache_misses",
    "entries",
    "steps",
    "boundary_overruns",
    "startup_budget_hits",
    "worker_jobs",
    "workers_lost",
    "jit_after_ready",
)
"""Names of the integer counters; `as_dict` adds `fallbacks`, `warnings` and `in_step_seconds`."""

_COUNTED = {
    "trace": "traces",
    "bind": "programs_bound",
    "compile_general": "compiles_general",
    "compile_specialized": "compiles_specialized",
    "compile_whole": "compiles_whole",
    "entry": "entries",
    "capture": "captures",
    "evict": "evictions",
    "promote": "promotions",
    "worker_job": "worker_jobs",
    "worker_lost": "workers_lost",
    "jit": "jit_after_ready",
}
"""Event kind -> the counter it increments."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """On whose behalf something happens."""

    phase: Phase | None = None
    bucket: int | None = None
    """Padded number of tokens; None for a step without padding."""
    in_step: bool = False
    """Whether a step waits for it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One trace, compile, capture, eviction, entry or fallback."""

    at_s: float
    """When it ended, in seconds since the runtime was made."""
    kind: str
    seconds: float
    scope: Scope
    detail: Mapping[str, Any]


class Counters:
    """Monotonic counts of everything a runtime does; safe to read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: collections.Counter[str] = collections.Counter()
        self._by_scope: dict[tuple[str, int | None], Any] = {}
        self._fallbacks: collections.Counter[str] = collections.Counter()
        self._warnings: collections.Counter[str] = collections.Counter()
        self._in_step_seconds = 0.0

    def add(self, name: str, amount: int = 1, scope: Scope | None = None) -> None:
        """Adds to a counter, and to its share of the scope's phase and bucket."""
        assert name in COUNTERS, name
        with self._lock:
            self._totals[name] += amount
            self._share(scope)[name] += amount

    def add_fallback(self, reason: str, scope: Scope | None = None) -> int:
        """Counts one fallback under its reason, and in the scope's `fallbacks`; returns how many there are now."""
        with self._lock:
            self._fallbacks[reason] += 1
            self._share(scope)["fallbacks"] += 1
            return self._fallbacks[reason]

    def add_warning(self, text: str) -> int:
        """Counts one warning under its text; returns how many there are now."""
        with self._lock:
            self._warnings[text] += 1
            return self._warnings[text]

    def add_in_step(self, seconds: float, scope: Scope | None = None) -> None:
        """Adds compile or trace time that a step waited for."""
        with self._lock:
            self._in_step_seconds += seconds
            self._share(scope)["in_step_seconds"] += seconds

    def share(self, scope: Scope) -> Any:
        """The part of a scope's phase and bucket, for `add_replay`."""
        with self._lock:
            return self._share(scope)

    def add_replay(self, share: Any) -> None:
        """Counts a step that was a replay, in the totals and in a share."""
        with self._lock:
            for counter in (self._totals, share):
                counter["replays"] += 1
                counter["steps"] += 1

    def _share(self, scope: Scope | None) -> Any:
        """The part of a scope; one that is thrown away for what no phase caused."""
        if scope is None or scope.phase is None:
            return collections.Counter()
        return self._by_scope.setdefault((str(scope.phase), scope.bucket), collections.Counter())

    def __repr__(self) -> str:
        counted = {name: value for name, value in self.as_dict().items() if value}
        if "in_step_seconds" in counted:
            counted["in_step_seconds"] = round(counted["in_step_seconds"], 3)
        return f"Counters({', '.join(f'{name}={value}' for name, value in counted.items())})"

    def __getitem__(self, name: str) -> Any:
        return self.as_dict()[name]

    def as_dict(self) -> dict[str, Any]:
        """All counters by name; `fallbacks` and `warnings` map a text to a count, `in_step_seconds` is in seconds."""
        with self._lock:
            return {
                **{name: self._totals[name] for name in COUNTERS},
                "fallbacks": dict(self._fallbacks),
                "warnings": dict(self._warnings),
                "in_step_seconds": self._in_step_seconds,
            }

    def by_phase_and_bucket(self) -> dict[tuple[str, int | None], dict[str, float]]:
        """The counters' shares by (phase, bucket), those that are not 0; bucket None holds what no bucket caused.

        `fallbacks` is a number here.
        """
        with self._lock:
            return {key: dict(counter) for key, counter in self._by_scope.items()}

    @contextlib.contextmanager
    def expect(self, **deltas: int) -> Iterator[None]:
        """For tests: the body must change the named counters by exactly these amounts.

        Raises:
            AssertionError: it did not; the message lists every difference.
            KeyError: there is no such counter.
        """
        before = self.as_dict()
        unknown = sorted(set(deltas) - set(before))
        if unknown:
            raise KeyError(f"counters.expect: {', '.join(unknown)} unknown; the counters are {', '.join(before)}")
        yield
        after = self.as_dict()
        changed = {name: _number(after[name]) - _number(before[name]) for name in deltas}
        wrong = [
            f"{name}: expected +{deltas[name]}, got +{got}" for name, got in changed.items() if got != deltas[name]
        ]
        if wrong:
            raise AssertionError("counters: " + "; ".join(wrong))


def _number(value: Any) -> Any:
    return sum(value.values()) if isinstance(value, dict) else value


_MAX_EVENTS = 10_000


class Recorder:
    """Writes events and counters for one scope; `within` gives one for another scope over the same log."""

    def __init__(
        self, counters: Counters, *, scope: Scope | None = None, origin: Recorder | None = None, progress: bool = True
    ) -> None:
        self.counters = counters
        self.scope = scope or Scope()
        self._events: collections.deque[Event] = origin._events if origin else collections.deque(maxlen=_MAX_EVENTS)
        self._started: float = origin._started if origin else time.perf_counter()
        self._show_progress: bool = origin._show_progress if origin else progress

    def within(self, scope: Scope) -> Recorder:
        """The same log, written to on behalf of `scope`."""
        return Recorder(self.counters, scope=scope, origin=self)

    @property
    def started_s(self) -> float:
        """Where `Event.at_s` counts from, on the clock of `time.perf_counter`."""
        return self._started

    @property
    def events(self) -> tuple[Event, ...]:
        """The newest events, oldest first."""
        return tuple(self._events)

    def record(self, kind: str, *, seconds: float = 0.0, **detail: Any) -> None:
        """Adds an event, counts it, and attributes its time to the step that waited for it."""
        at_s = time.perf_counter() - self._started
        self._events.append(Event(at_s=at_s, kind=kind, seconds=seconds, scope=self.scope, detail=detail))
        if kind in _COUNTED:
            self.counters.add(_COUNTED[kind], scope=self.scope)
        if self.scope.in_step and kind != "entry":
            self.counters.add_in_step(seconds, self.scope)
        logger.debug("%s %.3f s %s %s", kind, seconds, self.scope, detail)

    def warn(self, text: str) -> None:
        """Counts a warning that is no fallback; the first with this text is an event too, and logged."""
        if self.counters.add_warning(text) == 1:
            logger.warning("%s", text)
            self.record("warning", text=text)

    def fallback(self, reason: str, **detail: Any) -> None:
        """Counts a fallback; the first of each reason is an event too, and logged as a warning."""
        if self.counters.add_fallback(reason, self.scope) == 1:
            extra = f" ({', '.join(f'{k}: {v}' for k, v in detail.items())})" if detail else ""
            logger.warning("%s%s", reason, extra)
            self.record("fallback", reason=reason, **detail)

    @contextlib.contextmanager
    def progress(self, title: str, *, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Shows work that takes over a second; see `Progress`."""
        if not self._show_progress:
            yield lambda: None
            return
        with Progress(title, total=total) as advance:
            yield advance
