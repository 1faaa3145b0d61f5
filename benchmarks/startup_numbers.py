"""The numbers of bench_startup.py: from what a child saw to the row of its policy."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from startup_spec import WHOLE, WHOLE_MAX_BS, Spec

from piecework.runtime.bench.measures import CHANGES, percentile

LATE_S = 0.05
CAUSES = {
    "trace": "trace",
    "compile_general": "compile",
    "compile_specialized": "compile",
    "capture": "capture",
    "load": "load",
    "first_call": "first call",
    "kernel": "attention kernels",
    "worker_start": "imports of workers",
    "worker_job": "jobs of workers",
}
"""Kind of event -> what its seconds are called."""
STATES_BESIDE = {"tiered": "eager, replayed", WHOLE: "general, replayed"}
"""The state of a step that replays what does not change while workers are at it."""

Json = dict[str, Any]


def row_of(seen: Json, spec: Spec) -> Json:
    """The row of one policy; what was stopped early has fewer numbers."""
    steps, events = seen["steps"], seen.get("events", [])
    row: Json = {"ready_s": seen.get("ready_s")}
    if not steps:
        return row
    is_ours = "events" in seen
    row["first_token_s"] = steps[0]["at_s"]
    settled_at_s = seen.get("settled_at_s")
    if settled_at_s is not None and is_ours:
        changes = [event["at_s"] for event in events if event["kind"] in CHANGES and event["at_s"] <= settled_at_s]
        settled_at_s = max([row["ready_s"], *changes])
    row["settled_s"] = settled_at_s
    row["buckets_met"] = f"{seen.get('buckets_met', 0)} of {len(spec.buckets)}"
    row["num_steps"] = len(steps)
    row["worst_step_ms"] = max(step["seconds"] for step in steps) * 1e3
    row["steady_ms"] = {bucket: statistics.median(times) for bucket, times in seen.get("steady_ms", {}).items()}
    row["delayed"] = delayed(steps, events)
    row["num_delayed"] = len(row["delayed"])
    row["causes"] = causes(events, row["ready_s"])
    row["causes"]["first steps"] = {"a step": first_steps_s(steps, row["steady_ms"])}
    if is_ours:
        row["captured_by_second"] = captured_by_second(steps, spec)
        row["promotions"] = seen["counters"]["promotions"]
        row["counters"] = seen["counters"]
    if "alone_ms" in seen:
        row["alone_ms"] = {bucket: statistics.median(times) for bucket, times in seen["alone_ms"].items()}
        row |= beside_workers(steps, events, seen["alone_ms"], seen["policy"])
    return row


def against(policies: Mapping[str, Json]) -> None:
    """Writes each policy's steady steps as multiples of those of `eager`, where both are known."""
    base = policies.get("eager", {}).get("steady_ms", {})
    for row in policies.values():
        ratios = {bucket: ms / base[bucket] for bucket, ms in row.get("steady_ms", {}).items() if bucket in base}
        if ratios:
            row["steady_to_eager"], row["steady_to_eager_worst"] = ratios, max(ratios.values())


def captured_by_second(steps: Sequence[Json], spec: Spec) -> str:
    """How many decode buckets replayed in their second step, or in their first."""
    captured = 0
    for size in spec.decode:
        first_two = [s["state"] for s in steps if (s["phase"], s["bucket"]) == ("decode", size)][:2]
        captured += any("replayed" in state for state in first_two)
    return f"{captured} of {len(spec.decode)}"


def delayed(steps: Sequence[Json], events: Sequence[Json]) -> list[Json]:
    """Steps that took over 50 ms longer than their own run, and what happened meanwhile.

    Until the attention kernels are compiled eager steps run others, which take another time: they are of two kinds.
    """
    kernels_at_s = max((event["at_s"] for event in events if event["kind"] == "kernel"), default=0.0)

    def kind(step: Json) -> tuple[Any, ...]:
        is_without = step["state"] == "eager" and step["at_s"] - step["seconds"] < kernels_at_s
        return step["phase"], step["bucket"], step["state"], is_without

    kinds: dict[tuple[Any, ...], list[float]] = {}
    for step in steps:
        kinds.setdefault(kind(step), []).append(step["seconds"])
    found = []
    for step in steps:
        like = kinds[kind(step)]
        if len(like) < 3:  # too few: as the other one
            like = [*like, *kinds.get((*kind(step)[:-1], not kind(step)[-1]), [])]
        during = [event for event in events if _waited(event, step)]
        waited_s = sum(event["seconds"] for event in during)
        late_s = step["seconds"] - statistics.median(like) if len(like) >= 3 else waited_s
        if late_s > LATE_S:
            about = {name: step[name] for name in ("at_s", "phase", "bucket", "state")}
            found.append(about | {"late_ms": late_s * 1e3, "events": sorted({event["kind"] for event in during})})
    return found


def _waited(event: Json, step: Json) -> bool:
    """Whether an event was a part of the step: it ended in it, and is one that steps wait for."""
    within = step["at_s"] - step["seconds"] < event["at_s"] <= step["at_s"]
    return within and (event["kind"] == "boundary" or (event["in_step"] and event["kind"] != "entry"))


def causes(events: Iterable[Json], ready_s: float) -> dict[str, dict[str, float]]:
    """Seconds by cause and by who waited for them."""
    made: dict[str, dict[str, float]] = {}
    for event in events:
        cause = CAUSES.get(event["kind"])
        if cause is None or event["detail"].get("where") == "worker":
            continue  # a worker's trace or compile is in its job
        who = "a step" if event["in_step"] else "before ready" if event["at_s"] <= ready_s else "nobody"
        by = made.setdefault(cause, {})
        by[who] = by.get(who, 0.0) + event["seconds"]
    return made


def first_steps_s(steps: Sequence[Json], steady_ms: Mapping[str, float]) -> float:
    """What the first step of each bucket took beyond a steady one, where that is known, together."""
    seen: dict[str, float] = {}
    for step in steps:
        seen.setdefault(f"{step['phase']} {step['bucket']}", step["seconds"])
    return sum(seconds - steady_ms.get(bucket, 0.0) / 1e3 for bucket, seconds in seen.items())


def beside_workers(
    steps: Sequence[Json], events: Sequence[Json], alone_ms: Mapping[str, Sequence[float]], policy: str
) -> Json:
    """Decode replays while a worker compiled, as multiples of their bucket's median alone.

    They are of the eager forward, or of the general program while a worker tried out the kernels of a whole forward.
    """
    jobs = [(event["at_s"] - event["seconds"], event["at_s"]) for event in events if event["kind"] == "worker_job"]
    if policy == WHOLE:  # the last one, which is at it to the end if it has not ended
        last_s = max((event["at_s"] for event in events if event["kind"] == "compile_general"), default=0.0)
        jobs = [(last_s, max((event["at_s"] for event in events if event["kind"] == "compile_whole"), default=1e9))]
    medians = {bucket: statistics.median(times) / 1e3 for bucket, times in alone_ms.items()}
    beside = [
        step["seconds"] / medians[f"{step['phase']} {step['bucket']}"]
        for step in steps
        if step["state"] == STATES_BESIDE[policy]
        and step["phase"] == "decode"
        and (policy != WHOLE or step["bucket"] > WHOLE_MAX_BS)
        and any(begun <= step["at_s"] - step["seconds"] and step["at_s"] <= ended for begun, ended in jobs)
    ]
    alone = [time / 1e3 / medians[bucket] for bucket, times in alone_ms.items() for time in times]
    return {
        "num_beside": len(beside),
        "beside_p50": percentile(beside, 50),
        "beside_p99": percentile(beside, 99),
        "alone_p99": percentile(alone, 99),
    }
