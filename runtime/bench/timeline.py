"""From a result's events to lanes of spans and marks: what the page draws and the trace file lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LANE_OF: dict[str, str] = {
    "trace": "trace",
    "bind": "trace",
    "compile_general": "compile",
    "compile_specialized": "compile",
    "compile_whole": "compile",
    "worker_start": "worker",
    "worker_job": "worker",
    "load": "load",
    "first_call": "load",
    "capture": "capture",
    "boundary": "promotion",
    "promote": "promotion",
    "worker_lost": "notes",
    "promotion_failed": "notes",
    "capture_failed": "notes",
    "jit": "notes",
    "fallback": "notes",
    "warning": "notes",
    "evict": "notes",
    "compact": "notes",
}
"""Kind of event -> its lane; other kinds are in none."""
ORDER = ("trace", "compile", "worker", "arrived", "load", "capture", "promotion", "notes")
FROM_WORKERS = "arrived"
"""The lane of what workers made, at the moments when it came: how long they took is in theirs."""
MARKS = frozenset({"promote", "worker_lost", "promotion_failed", "jit", "fallback", "warning", "evict"})
"""Kinds that are moments: what they say of seconds is not when they were."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that took time, or a moment."""

    start_s: float
    end_s: float
    """As `start_s` for a moment."""
    name: str
    in_step: bool
    """Whether a step waited for it."""
    detail: Mapping[str, Any]

    @property
    def is_mark(self) -> bool:
        """Whether it is a moment."""
        return self.start_s == self.end_s

    @property
    def text(self) -> str:
        """In one line."""
        took = "" if self.is_mark else f", {self.end_s - self.start_s:.3f} s"
        waited = ", a step waited" if self.in_step else ""
        more = "".join(f", {name} {value}" for name, value in self.detail.items())
        return f"{self.name} at {self.start_s:.3f} s{took}{waited}{more}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """Spans of one kind that do not overlap, by their start, and marks."""

    name: str
    spans: tuple[Span, ...]


def lanes(result: Mapping[str, Any]) -> list[Lane]:
    """The lanes of one result, those of workers apart; a lane in which spans overlap becomes several."""
    grouped: dict[str, list[Span]] = {}
    for event in result["events"]:
        if (name := _lane_name(event)) is not None:
            grouped.setdefault(name, []).append(span_of(event))
    made = []
    for name in sorted(grouped, key=lambda name: (ORDER.index(name.partition(" ")[0]), name)):
        for i, spans in enumerate(apart(grouped[name])):
            made.append(Lane(name=name if i == 0 else f"{name} ({i + 1})", spans=tuple(spans)))
    return made


def _lane_name(event: Mapping[str, Any]) -> str | None:
    group = LANE_OF.get(event["kind"])
    if group == "worker":
        return f"worker {event['detail'].get('worker')}"
    return FROM_WORKERS if _is_of_worker(event) else group


def _is_of_worker(event: Mapping[str, Any]) -> bool:
    return LANE_OF.get(event["kind"]) in ("trace", "compile") and event["detail"].get("where") == "worker"


def span_of(event: Mapping[str, Any]) -> Span:
    """The span of an event; one that began before the clock did begins at 0."""
    kind, detail = event["kind"], dict(event["detail"])
    seconds = 0.0 if kind in MARKS or _is_of_worker(event) else event["seconds"]
    place = [] if event["phase"] is None else [event["phase"]]
    place += [] if event["bucket"] is None else [str(event["bucket"])]
    return Span(
        start_s=max(0.0, event["at_s"] - seconds),
        end_s=max(0.0, event["at_s"]),
        name=" ".join([kind.replace("_", " "), *place]),
        in_step=event["in_step"],
        detail=detail,
    )


def apart(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans in as few rows as hold them without an overlap; marks are in the first."""
    rows: list[list[Span]] = [[]]
    ends = [0.0]
    marks = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        if span.is_mark:
            marks.append(span)
            continue
        # Clocks of events are read one after the other: what ends a microsecond too late does not overlap.
        row = next((i for i, end in enumerate(ends) if end <= span.start_s + 1e-6), len(rows))
        if row == len(rows):
            rows.append([])
            ends.append(0.0)
        rows[row].append(span)
        ends[row] = span.end_s
    rows[0] = sorted([*rows[0], *marks], key=lambda span: span.start_s)
    return rows


def end_s(results: Sequence[Mapping[str, Any]]) -> float:
    """The last second of any result."""
    ends = [float(step["at_s"]) for result in results for step in result["steps"]]
    return max([float(result["settled_s"]) for result in results] + ends)
