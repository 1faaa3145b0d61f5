"""The numbers of one run: from its steps, its events and its requests to what a result says."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from ..events import Event
from .feeder import Feeder, StepRecord

SERVED_BY_S = (5, 10, 30, 60)
"""The seconds at which served tokens are counted."""
CHANGES = frozenset({"trace", "compile_general", "compile_specialized", "compile_whole", "capture", "promote"})
"""Kinds of events after which a bucket may run something better."""
COMPILES = frozenset({"compile_general", "compile_specialized", "compile_whole"})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What was seen of one policy. Seconds count from the start of the engine's construction."""

    ready_s: float
    served_s: float
    """When the last request of the trace was answered."""
    settled: bool
    """Whether every bucket came to its best in time."""
    feeder: Feeder
    num_steps_before_steady: int
    """Steps of the trace and of the first, uncounted round after it."""
    events: Sequence[dict[str, Any]]
    """As `events_as_data` makes them."""


def events_as_data(events: Iterable[Event], offset_s: float) -> list[dict[str, Any]]:
    """Events as plain data for JSON, `offset_s` later: what they count from began so long after what we count from."""
    return [
        {
            "at_s": event.at_s + offset_s,
            "kind": event.kind,
            "seconds": event.seconds,
            "phase": str(event.scope.phase) if event.scope.phase is not None else None,
            "bucket": event.scope.bucket,
            "in_step": event.scope.in_step,
            "detail": {name: _plain(value) for name, value in event.detail.items()},
        }
        for event in events
    ]


def measures(run: Run) -> dict[str, Any]:
    """The columns that come of steps and events, and both as plain data."""
    steps, events = run.feeder.steps, run.events
    traffic = [step for step in steps if step.at_s <= run.served_s]
    steady = steps[run.num_steps_before_steady :]
    settled_s = max([run.ready_s, *(event["at_s"] for event in events if event["kind"] in CHANGES)])
    ramp = [step.seconds for step in traffic if step.at_s <= settled_s]
    captures = [event for event in events if event["kind"] == "capture"]
    assert run.feeder.first_answer_s is not None
    return {
        "ready_s": run.ready_s,
        "first_token_s": run.feeder.first_answer_s,
        "worst_first_token_s": max(run.feeder.first_token_s.values()),
        "settled_s": settled_s,
        "settled": run.settled,
        "served_s": run.served_s,
        "worst_step_s": max(step.seconds for step in traffic),
        "ramp_p50_s": percentile(ramp, 50),
        "ramp_p99_s": percentile(ramp, 99),
        "steady_step_s": statistics.median(step.seconds for step in steady),
        "tokens_by_s": {str(second): _tokens_by(traffic, second) for second in SERVED_BY_S},
        "compiles_before_ready": sum(e["kind"] in COMPILES and e["at_s"] <= run.ready_s for e in events),
        "in_step_compiles": sum(e["kind"] in COMPILES and e["in_step"] for e in events),
        "in_step_captures": sum(e["in_step"] for e in captures),
        "in_boundary_captures": sum(not e["in_step"] and e["at_s"] > run.ready_s for e in captures),
        "steps": [dataclasses.asdict(step) for step in steps],
        "events": list(events),
    }


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that at least `percent` of them do not exceed; None of nothing."""
    if not values:
        return None
    rank = max(0, -(-int(len(values) * percent) // 100) - 1)
    return sorted(values)[rank]


def _tokens_by(steps: Sequence[StepRecord], second: float) -> int:
    return sum(step.num_tokens for step in steps if step.at_s <= second)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
