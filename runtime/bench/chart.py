"""One policy's timeline as an SVG element: steps by their latency, lanes of work below, and ready and settled.

Plain text, no script: every dot and bar has a `<title>`, which is its tooltip and its text for a screen reader.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .timeline import Lane, Span, lanes

WIDTH = 960
LEFT, RIGHT, TOP = 118, 16, 36
STEPS_HEIGHT, LANE_HEIGHT, AXIS_HEIGHT = 150, 20, 34


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Where seconds lie; one for all charts of a page, so that they can be compared."""

    end_s: float
    """The right end of the time axis; it begins at 0."""
    least_s: float
    most_s: float
    """The ends of the latency axis, powers of ten."""

    @classmethod
    def of(cls, steps: Sequence[Mapping[str, Any]], end_s: float) -> Scale:
        """One that holds these steps."""
        seconds = [max(step["seconds"], 1e-6) for step in steps] or [1e-3]
        least, most = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds)))
        return cls(end_s=max(end_s, 1e-3), least_s=10.0**least, most_s=10.0 ** max(most, least + 1))

    def x(self, at_s: float) -> float:
        """The place of a second."""
        return LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, max(0.0, at_s / self.end_s))

    def y(self, seconds: float) -> float:
        """The place of a latency."""
        part = math.log10(max(seconds, self.least_s) / self.least_s) / math.log10(self.most_s / self.least_s)
        return TOP + STEPS_HEIGHT * (1 - min(1.0, part))


def chart(result: Mapping[str, Any], scale: Scale, *, number: int, name: str) -> str:
    """The SVG of one result. `number` makes its ids unique in the page."""
    drawn = lanes(result)
    height = TOP + STEPS_HEIGHT + 10 + LANE_HEIGHT * len(drawn) + AXIS_HEIGHT
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title-{number} about-{number}">',
        f'<title id="title-{number}">Timeline of {escape(name)}</title>',
        f'<desc id="about-{number}">{escape(in_words(result))}</desc>',
        _after_trace(result, scale),
        *_latency_axis(scale),
        *_time_axis(scale, height),
        *_dots(result["steps"], scale),
    ]
    for i, lane in enumerate(drawn):
        parts += _lane(lane, TOP + STEPS_HEIGHT + 10 + LANE_HEIGHT * i, scale)
    parts += _moments(result, scale, height - AXIS_HEIGHT)
    return "\n".join([*parts, "</svg>"])


def in_words(result: Mapping[str, Any]) -> str:
    """What the chart shows, in a sentence or two."""
    kinds = [event["kind"] for event in result["events"]]
    compiles = sum(kind.startswith("compile") for kind in kinds)
    return (
        f"Ready at {result['ready_s']:.2f} s, every bucket at its best at {result['settled_s']:.2f} s. "
        f"{len(result['steps'])} steps, the longest {result['worst_step_s']:.3f} s. {kinds.count('trace')} traces, "
        f"{compiles} compiles, {result['in_step_compiles']} of them while a step waited, {kinds.count('capture')} "
        f"captures, {kinds.count('promote')} promotions."
    )


def _latency_axis(scale: Scale) -> list[str]:
    parts = []
    decades = range(round(math.log10(scale.least_s)), round(math.log10(scale.most_s)) + 1)
    for decade in decades:
        y = scale.y(10.0**decade)
        text = f"{10**decade} s" if decade >= 0 else f"{10.0 ** (decade + 3):g} ms"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    middle = TOP + STEPS_HEIGHT / 2
    turned = f'transform="rotate(-90 14 {middle})"'
    parts.append(f'<text class="label" x="14" y="{middle}" text-anchor="middle" {turned}>one step (log)</text>')
    return parts


def _time_axis(scale: Scale, height: float) -> list[str]:
    bottom = height - AXIS_HEIGHT
    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>']
    step = _round_step(scale.end_s / 8)
    for i in range(int(scale.end_s / step) + 1):
        x = scale.x(i * step)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{i * step:g} s</text>')
    parts.append(
        f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{bottom + 31}" text-anchor="middle">'
        "seconds since the start of the engine's construction</text>"
    )
    return parts


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, ... and their tenths that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _dots(steps: Sequence[Mapping[str, Any]], scale: Scale) -> list[str]:
    """One for each step; of those that would lie on each other, the first."""
    dots: dict[tuple[str, float, float], str] = {}
    for step in steps:
        x, y = round(scale.x(step["at_s"]), 1), round(scale.y(step["seconds"]), 1)
        bucket = "unpadded" if step["bucket"] is None else f"bucket {step['bucket']}"
        text = f"{step['phase']}, {bucket}: {1e3 * step['seconds']:.2f} ms, ended at {step['at_s']:.3f} s"
        dots.setdefault(
            (step["phase"], x, y),
            f'<circle class="{step["phase"]}" cx="{x}" cy="{y}" r="2.6"><title>{escape(text)}</title></circle>',
        )
    return list(dots.values())


def _lane(lane: Lane, top: float, scale: Scale) -> list[str]:
    middle = top + LANE_HEIGHT / 2
    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{middle}" y2="{middle}"/>',
        f'<text class="lane" x="{LEFT - 8}" y="{middle + 4}" text-anchor="end">{escape(lane.name)}</text>',
    ]
    return [*parts, *(_mark(s, middle, scale) if s.is_mark else _bar(s, top, scale) for s in lane.spans)]


def _bar(span: Span, top: float, scale: Scale) -> str:
    x = scale.x(span.start_s)
    width = max(1.5, scale.x(span.end_s) - x)
    kind = "waited" if span.in_step else "behind"
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{top + 4}" width="{width:.1f}" height="{LANE_HEIGHT - 8}">'
        f"<title>{escape(span.text)}</title></rect>"
    )


def _mark(span: Span, middle: float, scale: Scale) -> str:
    x = scale.x(span.start_s)
    return f'<path class="mark" d="M{x:.1f} {middle - 6} l5 6 l-5 6 l-5 -6 z"><title>{escape(span.text)}</title></path>'


def _moments(result: Mapping[str, Any], scale: Scale, bottom: float) -> list[str]:
    """The lines of ready and settled, their labels in two rows, since they may be close."""
    parts = []
    for name, row in (("ready", 11), ("settled", 25)):
        x = scale.x(result[f"{name}_s"])
        anchor, moved = ("start", x + 4) if WIDTH - x > 110 else ("end", x - 4)
        text = f"{name} {result[f'{name}_s']:.1f} s"
        parts.append(f'<line class="{name}" x1="{x:.1f}" x2="{x:.1f}" y1="{row - 9}" y2="{bottom}"/>')
        parts.append(f'<text class="moment" x="{moved:.1f}" y="{row}" text-anchor="{anchor}">{text}</text>')
    return parts


def _after_trace(result: Mapping[str, Any], scale: Scale) -> str:
    """A band where the rounds that follow the trace are."""
    x = scale.x(result["served_s"])
    width = scale.x(max(step["at_s"] for step in result["steps"])) - x
    return (
        f'<rect class="after" x="{x:.1f}" y="{TOP}" width="{max(width, 0):.1f}" height="{STEPS_HEIGHT}">'
        "<title>after the trace: two rounds of every size</title></rect>"
    )
