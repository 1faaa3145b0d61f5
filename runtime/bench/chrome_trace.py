"""The timelines as Chrome trace events, which https://ui.perfetto.dev opens.

Format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. A policy is a
process, a lane a thread; spans are complete events (`X`), moments are instants (`i`); times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .report import name_of
from .timeline import Span, lanes

STEPS = "steps"


def chrome_trace(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The trace of all results, as data for JSON."""
    events: list[dict[str, Any]] = []
    for pid, result in enumerate(results, start=1):
        events += _names(pid, None, name_of(dict(result)), pid)
        events += _names(pid, 1, STEPS, 1)
        for step in result["steps"]:
            detail = {name: step[name] for name in ("phase", "bucket", "num_tokens")}
            name = f"{step['phase']} {step['bucket'] if step['bucket'] is not None else 'unpadded'}"
            start_s = step["at_s"] - step["seconds"]
            span = Span(start_s=start_s, end_s=step["at_s"], name=name, in_step=False, detail=detail)
            events.append(_event(span, pid, 1, "step"))
        for name in ("ready", "settled"):
            events.append(_instant(name, result[f"{name}_s"], pid, 1, {}) | {"s": "p"})
        for tid, lane in enumerate(lanes(result), start=2):
            events += _names(pid, tid, lane.name, tid)
            events += [_event(span, pid, tid, lane.name) for span in lane.spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(span: Span, pid: int, tid: int, category: str) -> dict[str, Any]:
    if span.is_mark:
        return _instant(span.name, span.start_s, pid, tid, dict(span.detail)) | {"cat": category}
    return {
        "ph": "X",
        "name": span.name,
        "cat": category,
        "ts": span.start_s * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "pid": pid,
        "tid": tid,
        "args": {**span.detail, "a step waited": span.in_step},
    }


def _instant(name: str, at_s: float, pid: int, tid: int, detail: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "i", "s": "t", "name": name, "ts": at_s * 1e6, "pid": pid, "tid": tid, "args": detail}


def _names(pid: int, tid: int | None, name: str, order: int) -> list[dict[str, Any]]:
    """What a process, or one of its threads, is called, and where it is shown."""
    what = "process" if tid is None else "thread"
    place: dict[str, Any] = {"ph": "M", "pid": pid} | ({"tid": tid} if tid is not None else {})
    return [
        place | {"name": f"{what}_name", "args": {"name": name}},
        place | {"name": f"{what}_sort_index", "args": {"sort_index": order}},
    ]
