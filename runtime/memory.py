"""Which captures may stay: a byte budget and a cap, by use. Pure policy: it holds numbers, no captures and no torch.

Words: a key stands for whatever holds one capture (an entry). A step is a call of `used`, of whatever key. Pool bytes
are what the device's pool reports; live bytes are the sum of what the captures that still live added to it.

Rules:

- Usefulness is the number of uses, each worth half after 256 steps. It counts the steps of a bucket whether or not it
  had a capture, so that a bucket without one can earn it.
- There is room when the live bytes are within the budget and the captures within the cap. While there is, nothing is
  evicted, and every bucket is captured at its first use.
- Otherwise the least useful captures go, of equally useful ones the larger; none that could stay.
- The newcomer has to be worth it: at least twice as useful as all its victims together. Each time that it was a victim
  itself doubles that, up to 64 times. So two buckets that alternate do not take turns in the one place that there is,
  and one that all traffic has moved to gets in: within about 400 steps, and within 1,600 if it was evicted often.
- A bucket that did not get room is looked at again after one more use, then after 2, 4, ... 64 more, and captured only
  if the look says that it would get room, by the bytes that it needed the last time. One that needs more than the whole
  budget is not captured again.
- A pool gives nothing back while a capture lives, so evictions make room in the pool, not on the device. It is worth
  compacting (all captures recorded anew, into a new pool) when it is over the budget though the live bytes are not, or
  when something was released and it holds more than 64 MiB and more than twice the live bytes; but not again within
  1024 steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Generic, TypeVar

HALF_LIFE_STEPS = 256
MIN_ADVANTAGE = 2
MAX_ADVANTAGE = 64
MAX_WAIT_USES = 64
COMPACTION_PAUSE_STEPS = 1024
MIN_COMPACTION_BYTES = 64 << 20

K = TypeVar("K", bound=Hashable)


@dataclasses.dataclass(slots=True)
class _Record:
    """What is known of a key."""

    usefulness: float = 0.0
    """At the step of its last use."""
    last_step: int = 0
    num_uses: int = 0
    needs_bytes: int = 0
    """What its capture added to the pool the last time; 0 if it never had one."""
    num_evictions: int = 0
    wait_uses: int = 1
    next_try: int = 0
    """The number of uses from which on it may be tried again."""


class CaptureBudget(Generic[K]):
    """Decides which captures go when there are too many; the rules are in this file's docstring.

    Not thread-safe: a runtime calls it with its lock held.
    """

    def __init__(self, budget_bytes: int | None, max_captures: int | None) -> None:
        """None is no limit; both are 1 or more."""
        self.budget_bytes = budget_bytes
        self.max_captures = max_captures
        self._records: dict[K, _Record] = {}
        self._live: dict[K, int] = {}
        self._chosen: set[K] = set()
        self._step = 0
        self._released_since_compaction = False
        self._no_compaction_before = 0

    @property
    def live_bytes(self) -> int:
        """What the captures that live added to the pool."""
        return sum(self._live.values())

    @property
    def num_captures(self) -> int:
        """Captures that live."""
        return len(self._live)

    def used(self, key: K) -> None:
        """Counts a step of `key`'s bucket, with a capture or without. Once a step."""
        self._step += 1
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = _Record()
        record.usefulness = self._now(record) + 1.0
        record.last_step = self._step
        record.num_uses += 1

    def usefulness(self, key: K) -> float:
        """Decayed uses, as of now."""
        record = self._records.get(key)
        return 0.0 if record is None else self._now(record)

    def admit(self, key: K, num_bytes: int) -> None:
        """Records a capture that was made, and what it added to the pool; a second one replaces the first."""
        assert num_bytes >= 0, "a capture cannot shrink the pool"
        record = self._record(key)
        record.needs_bytes, record.wait_uses = num_bytes, 1
        self._live[key] = num_bytes

    def over(self, pool_bytes: int) -> bool:
        """Whether the pool is over the budget, or the captures over the cap."""
        too_many = self.max_captures is not None and len(self._live) > self.max_captures
        return too_many or (self.budget_bytes is not None and pool_bytes > self.budget_bytes)

    def victims(self, new_key: K, pool_bytes: int, *, needs_bytes: int | None = None) -> list[K] | None:
        """What to release so that `new_key` has room: the least useful first; [] if it has room already.

        Before its capture is made, or after it was admitted. Made before, the capture finds the room inside the pool
        that its victims leave; made after, the pool has grown already, and only a compaction shrinks it.

        Args:
            pool_bytes: of the pool, now.
            needs_bytes: what the capture will add, if it was not made yet; by default what it added the last time,
                and nothing if that is not known.

        Returns:
            None if it is not to have a capture now: the others are too useful, or it does not fit alone. If it was
            made, release it and call `refused`.
        """
        if new_key in self._live and not self.over(pool_bytes):
            return []
        chosen = self._choose(new_key, needs_bytes)
        self._chosen = set(chosen or ())
        return chosen

    def may_try(self, key: K, *, needs_bytes: int | None = None) -> bool:
        """Whether a capture of `key`, used in this step, is worth its time now; each no makes the next look later.

        When it says yes, call `victims` before the capture and release what it names. `needs_bytes`: as there.
        """
        record = self._record(key)
        if record.num_uses < record.next_try:
            return False
        if self._choose(key, needs_bytes) is None:
            self._wait(record)
            return False
        return True

    def refused(self, key: K, needs_bytes: int) -> None:
        """`key` has got no capture, or lost the one just made, since there was no room for so many bytes."""
        record = self._record(key)
        record.needs_bytes = needs_bytes
        self._wait(record)
        self._drop(key)

    def released(self, key: K) -> None:
        """The capture of `key` is gone: evicted, stale or closed. Unknown keys are fine."""
        if key in self._chosen and key in self._live:
            self._record(key).num_evictions += 1
            self._chosen.discard(key)
        self._drop(key)

    def forget(self, key: K) -> None:
        """`key` is gone for good, and its capture with it."""
        self._drop(key)
        self._records.pop(key, None)
        self._chosen.discard(key)

    def wants_compaction(self, pool_bytes: int) -> bool:
        """Whether to record what lives anew, into a new pool; call `compacted` after it."""
        if not self._live or self._step < self._no_compaction_before:
            return False
        live_bytes = self.live_bytes
        if self.budget_bytes is not None and live_bytes <= self.budget_bytes < pool_bytes:
            return True
        wasteful = pool_bytes > MIN_COMPACTION_BYTES and pool_bytes > 2 * live_bytes
        return wasteful and self._released_since_compaction

    def compacted(self) -> None:
        """All captures were recorded anew, and admitted with what they now add, or a compaction failed."""
        self._released_since_compaction = False
        self._no_compaction_before = self._step + COMPACTION_PAUSE_STEPS

    def _choose(self, new_key: K, needs_bytes: int | None) -> list[K] | None:
        """`victims` without a trace of the question."""
        new = self._record(new_key)
        needs = self._live.get(new_key)
        if needs is None:
            needs = new.needs_bytes if needs_bytes is None else needs_bytes
        if self.budget_bytes is not None and needs > self.budget_bytes:
            return None
        others = {key: num_bytes for key, num_bytes in self._live.items() if key != new_key}
        excess_bytes = sum(others.values()) + needs - self.budget_bytes if self.budget_bytes is not None else 0
        excess_captures = len(others) + 1 - self.max_captures if self.max_captures is not None else 0
        if excess_bytes <= 0 and excess_captures <= 0:
            return []
        victims: list[K] = []
        freed = 0
        for key in sorted(others, key=lambda key: (self.usefulness(key), -others[key])):
            if freed >= excess_bytes and len(victims) >= excess_captures:
                break
            victims.append(key)
            freed += others[key]
        for key in reversed(victims.copy()):  # the most useful first: who went in vain, since a later one was larger
            if freed - others[key] >= excess_bytes and len(victims) - 1 >= excess_captures:
                victims.remove(key)
                freed -= others[key]
        advantage = min(MIN_ADVANTAGE << min(new.num_evictions, 16), MAX_ADVANTAGE)
        if self._now(new) < advantage * sum(map(self.usefulness, victims)):
            return None
        return victims

    def _record(self, key: K) -> _Record:
        return self._records.setdefault(key, _Record())

    def _now(self, record: _Record) -> float:
        return float(record.usefulness * 0.5 ** ((self._step - record.last_step) / HALF_LIFE_STEPS))

    def _wait(self, record: _Record) -> None:
        record.next_try = record.num_uses + record.wait_uses
        record.wait_uses = min(2 * record.wait_uses, MAX_WAIT_USES)

    def _drop(self, key: K) -> None:
        if self._live.pop(key, None) is not None:
            self._released_since_compaction = True
