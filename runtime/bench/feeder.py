"""Sends a trace to an engine while it steps, in one thread, and keeps what every step and every request took.

Time is a clock's: a real one, or in tests one that moves only when it is told to.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from ..engine.params import SamplingParams
from .traffic import TimedRequest

if TYPE_CHECKING:
    from ..engine.engine import LLMEngine

IDLE_S = 0.01
"""How long an engine without requests waits before it looks for promotions again."""


class Clock(Protocol):
    """Seconds since the start of the engine's construction."""

    def now(self) -> float: ...

    def wait(self, seconds: float) -> None: ...


class WallClock:
    """The real one; it starts when it is made."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        """On `time.perf_counter`."""

    def now(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self.started

    def wait(self, seconds: float) -> None:
        """Sleeps."""
        time.sleep(seconds)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step of the engine: the forward, sampling, and what the runtime did before it."""

    at_s: float
    """When it ended."""
    seconds: float
    phase: str
    bucket: int | None
    """None: without padding."""
    num_tokens: int
    """That came out of it."""


class Feeder:
    """Feeds one engine, and records."""

    def __init__(self, engine: LLMEngine, clock: Clock) -> None:
        self.steps: list[StepRecord] = []
        self.first_token_s: dict[str, float] = {}
        """Request -> seconds from its arrival to its first token."""
        self.first_answer_s: float | None = None
        """When the very first token came."""
        self._engine, self._clock = engine, clock
        self._arrivals: dict[str, float] = {}
        self._num_steps = self._look()

    def feed(self, trace: Sequence[TimedRequest]) -> None:
        """Sends each request when its time has come, and steps until all are answered."""
        coming = deque(sorted(trace, key=lambda request: request.arrival_s))
        while coming or self._engine.has_unfinished:
            while coming and coming[0].arrival_s <= self._clock.now():
                self._send(coming.popleft())
            if self._engine.has_unfinished:
                self._step()
            else:
                self._idle(coming[0].arrival_s - self._clock.now())

    def send_at_once(self, prompts: Iterable[list[int]], max_new_tokens: int) -> None:
        """Sends prompts together, and steps until they are answered."""
        now = self._clock.now()
        self.feed([TimedRequest(arrival_s=now, prompt=each, max_new_tokens=max_new_tokens) for each in prompts])

    def _send(self, request: TimedRequest) -> None:
        # Without an end, so that every policy and every checkpoint gets answers of the same length.
        params = SamplingParams(max_new_tokens=request.max_new_tokens, ignore_eos=True)
        self._arrivals[self._engine.add_request(request.prompt, params)] = request.arrival_s

    def _step(self) -> None:
        started = self._clock.now()
        outputs = self._engine.step()
        at_s = self._clock.now()
        for output in outputs:
            arrival = self._arrivals.pop(output.request_id, None)
            if arrival is not None:
                self.first_token_s[output.request_id] = at_s - arrival
        if outputs and self.first_answer_s is None:
            self.first_answer_s = at_s
        num_steps = self._look()
        for (phase, bucket), count in num_steps.items():
            if count != self._num_steps.get((phase, bucket), 0):
                num_tokens = sum(len(output.new_token_ids) for output in outputs)
                self.steps.append(
                    StepRecord(at_s=at_s, seconds=at_s - started, phase=phase, bucket=bucket, num_tokens=num_tokens)
                )
        self._num_steps = num_steps

    def _idle(self, seconds: float) -> None:
        """Between requests: promotions find a boundary here too, as an engine's idle loop would give them one."""
        runtime = self._engine.runtime
        runtime.promote(runtime.config.promotion_budget_ms)
        self._clock.wait(max(0.0, min(seconds, IDLE_S)))

    def _look(self) -> dict[tuple[str, int | None], float]:
        counted = self._engine.runtime.counters.by_phase_and_bucket()
        return {key: counts["steps"] for key, counts in counted.items() if counts.get("steps")}
