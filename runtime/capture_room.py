"""The pool that a runtime's captures share, and how it is kept within its budget; the policy is memory.py's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ..graphs.device import GraphDevice, Pool
from ..phases import GraphConfig
from .capture_slot import Slot
from .events import Recorder, Scope
from .memory import CaptureBudget

LOOK_AGAIN_STEPS = 256
"""Steps after which a pool from which something was released is looked at again: a compaction may pay by now."""

NO_ROOM = "no room for a capture: other buckets are more useful"


class CaptureRoom:
    """Evicts and compacts. The caller holds the captures' lock, and no replay runs meanwhile."""

    def __init__(self, config: GraphConfig, device: GraphDevice) -> None:
        self._device = device
        self._budget: CaptureBudget[Slot] = CaptureBudget(config.cuda_graph_memory_budget, config.max_captures)
        self._was_released = False
        self._num_steps = 0
        self._known_bytes: int | None = None
        self.pool: Pool = device.open_pool()

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool, as of the last capture or release: asking a device takes as long as a short step."""
        if self._known_bytes is None:
            self._known_bytes = self.pool.num_bytes
        return self._known_bytes

    def used(self, slot: Slot) -> None:
        """Counts a step of the slot, captured or not."""
        self._num_steps += 1
        self._budget.used(slot)

    def may_capture(self, slot: Slot) -> bool:
        """Whether there is or can be made room for it now."""
        return self._budget.may_try(slot)

    def make_room(self, slot: Slot, recorder: Recorder) -> None:
        """Before a capture: evicts what it is worth more than."""
        for victim in self._budget.victims(slot, self.pool_bytes) or ():
            self._evict(victim, recorder)

    def admit(self, slot: Slot) -> None:
        """A capture was made: notes what it added to the pool."""
        before, self._known_bytes = self.pool_bytes, None
        slot.num_bytes = max(0, self.pool_bytes - before)
        self._budget.admit(slot, slot.num_bytes)

    def failed(self) -> None:
        """A capture was given up, which may have grown the pool."""
        self._known_bytes = None

    def settle(self, slot: Slot, recorder: Recorder) -> None:
        """After a capture: keeps to the budget, now that it is known what the capture needs."""
        budget = self._budget.budget_bytes
        if budget is not None and slot.num_bytes > budget:
            num_bytes, entry = slot.num_bytes, slot.entry
            self.release(slot)
            slot.refuse(
                f"cuda_graph_memory_budget: expected at least {num_bytes} bytes for the bucket {entry.bucket} of "
                f"{entry.phase}, got {budget}; raise it, or leave the bucket out"
            )
            recorder.fallback(str(slot.refused))
        elif self._budget.over(self.pool_bytes):
            victims = self._budget.victims(slot, self.pool_bytes)
            if victims is None:
                num_bytes = slot.num_bytes
                self.release(slot)
                self._budget.refused(slot, num_bytes)
                recorder.fallback(NO_ROOM)
            for victim in victims or ():
                self._evict(victim, recorder)

    def release(self, slot: Slot) -> None:
        """Drops a slot's capture, if it has one."""
        if slot.capture is not None:
            slot.capture.release()
            self._was_released = True
            self._known_bytes = None
        slot.capture = None
        slot.num_bytes = 0
        self._budget.released(slot)

    def forget(self, slot: Slot) -> None:
        """Drops a slot that will not run any more."""
        self.release(slot)
        self._budget.forget(slot)

    def wants_compaction(self, *, now: bool = False) -> bool:
        """Whether all captures should be made again in a new pool; looked at now and then.

        Args:
            now: looks in any case.
        """
        due = now or (self._was_released and self._num_steps % LOOK_AGAIN_STEPS == 0)
        return due and self._budget.wants_compaction(self.pool_bytes)

    def compact(self, slots: Iterable[Slot], recapture: Callable[[Slot, Recorder], None], recorder: Recorder) -> None:
        """Makes every capture again in a new pool, the largest bucket first, and gives the old one back.

        Args:
            recapture: makes one, or counts why it could not.
        """
        started = time.perf_counter()
        before = self.pool_bytes
        live = [slot for slot in slots if slot.capture is not None]
        for slot in live:
            self.release(slot)
        self._device.give_back()
        self.pool, self._known_bytes = self._device.open_pool(), None
        for slot in sorted(live, key=lambda slot: -(slot.entry.bucket or 0)):
            # What a step waits for is the whole, which is counted below.
            recapture(slot, recorder.within(Scope(phase=slot.entry.phase, bucket=slot.entry.bucket)))
        self._budget.compacted()
        self._was_released = False
        recorder.record(
            "compact", seconds=time.perf_counter() - started, bytes_before=before, bytes_after=self.pool_bytes
        )

    def _evict(self, slot: Slot, recorder: Recorder) -> None:
        num_bytes, entry = slot.num_bytes, slot.entry
        self.release(slot)
        recorder.within(Scope(phase=entry.phase, bucket=entry.bucket)).record("evict", bytes=num_bytes)
