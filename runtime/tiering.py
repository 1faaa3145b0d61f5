"""What goes on beside the steps under `tiered`, and when it has come to its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..ops.deferred import defer_compiles
from ..phases import Phase
from .background import Background
from .entries import Entry, EntryKey
from .entry_table import EntryTable
from .events import Recorder
from .import_turns import StepGate
from .kernels import KernelQueue
from .promotion import Promotions

if TYPE_CHECKING:
    from .captures import Captures
    from .warm_up import WarmUp

_LOOK_S = 0.25
"""Seconds after which a wait looks again whatever happens."""


class Tiering:
    """The background and the boundaries of one runtime."""

    def __init__(
        self,
        table: EntryTable,
        captures: Captures | None,
        background: Background,
        promotions: Promotions,
        recorder: Recorder,
        kernels: KernelQueue,
        *,
        warm_up: WarmUp,
        gate: StepGate,
    ) -> None:
        self.gate = gate
        self.kernels = kernels
        self.background = background
        self.promotions = promotions
        self._table = table
        self._captures = captures
        self._recorder = recorder
        self._warm_up = warm_up
        self._was_settled = False
        self._wanted: set[EntryKey] = set()
        """Buckets that will come, as far as it was known at the start."""

    @property
    def is_settled(self) -> bool:
        """Whether every bucket that was seen is at its best, and nothing is going on."""
        entries = list(self._table.entries.values())
        return self._is_idle and all(map(self._is_done, entries)) and not self.promotions.has_work

    @property
    def _is_idle(self) -> bool:
        return self.background.is_idle and self.kernels.is_idle

    def _is_done(self, entry: Entry) -> bool:
        slots = self._captures.state_of(entry) if self._captures is not None else []
        if not entry.num_steps and not slots:
            return True  # it was made ready, and not seen yet
        if not entry.is_at_best or any(slot.waits for slot in slots):
            return False
        return not entry.captures or bool(slots) or (self._captures is not None and not self._captures.can_hold(entry))

    def before_step(self) -> None:
        """The boundary before a step."""
        self.promotions.before_step()
        self.note_settled()

    def between_steps(self, budget_s: float | None) -> int:
        """A boundary that the caller makes; what earlier steps returned is not valid any more. Returns what it did."""
        started = time.perf_counter()
        with defer_compiles(self.kernels.submit):
            num_done = self.promotions.between_steps(budget_s)
            for entry in list(self._table.entries.values()):
                if budget_s is not None and time.perf_counter() - started > budget_s:
                    break
                if entry.num_steps:
                    num_done += self._capture_on_padding(entry)
        self.kernels.begin_held()
        if self._captures is not None and budget_s is None:
            self._captures.compact_if_it_pays(self._recorder)
        self.note_settled()
        return num_done

    def _capture_on_padding(self, entry: Entry) -> bool:
        """Captures an entry that no step has run since its program came; whether it did."""
        if not entry.captures or self._captures is None or self._captures.state_of(entry):
            return False
        return self._warm_up.capture_entry(entry)

    def prewarm(self, phase: Phase, order: Sequence[int], deadline: float) -> None:
        """Begins to make what a phase will need, as far as its inputs are known.

        Args:
            order: buckets that will come, the most frequent first.
            deadline: on the monotonic clock: until then their eager forwards are captured.
        """
        if time.monotonic() < deadline and (missing := self._warm_up.missing):
            self._recorder.warn(f"startup_budget: {missing}")
        for bound in self._warm_up.example_inputs():
            entries = [self._table.open(phase, bound, bucket) for bucket in order]
            if not entries and self._table.is_traced(phase):
                # Also without a bucket that is known to come, its program is: one for all sizes.
                entries = [self._table.open(phase, bound, None)]
            for entry in entries:
                self.background.want(entry)
            for entry in entries if order else ():
                self._wanted.add((phase, entry.signature, entry.bucket))
                if time.monotonic() < deadline:
                    self._capture_on_padding(entry)

    def settle_before_ready(self, deadline: float) -> None:
        """Promotes and captures until all that `prewarm` began is at its best, or the deadline has passed.

        Several ranks end together: when all are at their best, or the first one's time is over.
        """
        while True:
            self.promotions.between_steps(None)
            entries = list(self._table.entries.values())
            for entry in entries:
                is_wanted = (entry.phase, entry.signature, entry.bucket) in self._wanted
                if is_wanted and entry.is_at_best and time.monotonic() < deadline:
                    self._capture_on_padding(entry)
            is_done, has_time = self.promotions.all_agree(
                all(entry.is_at_best for entry in entries), time.monotonic() < deadline
            )
            if is_done:
                return
            if not has_time:
                self._recorder.counters.add("startup_budget_hits")
                return
            self.background.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic())))

    def wait_settled(self, timeout_s: float | None) -> bool:
        """Makes boundaries until everything is settled, or for so long; whether it is.

        False too where only a step can bring it further. Several ranks end together, as in `settle_before_ready`.
        """
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        while True:
            was_idle = self._is_idle  # before the look: what came since is seen in the next round
            num_done = self.between_steps(None)
            can_go_on = bool(num_done) or not was_idle
            has_time = deadline is None or time.monotonic() < deadline
            # The least of "goes on" would end a rank that waits for another one: so it is asked the other way round.
            is_settled, has_time, all_stuck = self.promotions.all_agree(self.is_settled, has_time, not can_go_on)
            if is_settled:
                return True
            if not has_time or all_stuck:
                return False
            left = deadline - time.monotonic() if deadline is not None else _LOOK_S
            if not num_done:
                self.background.wait(max(0.0, min(left, _LOOK_S)))

    def note_settled(self) -> None:
        """Records when everything has settled, and each time that it does again."""
        is_settled = self.is_settled
        if is_settled and not self._was_settled and any(entry.num_steps for entry in self._table.entries.values()):
            self._recorder.record("settled")
        self._was_settled = is_settled

    def end(self) -> None:
        """Lets the background come to its end; `close` waits for it."""
        self.background.end()

    def close(self) -> None:
        """Ends the background."""
        self.kernels.close()
        self.background.close()
