"""The table of a startup comparison, for a terminal and as rows for a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ...phases import Phase
from ..console import columns
from .measures import SERVED_BY_S

LESS, MORE, NEITHER = "less is better", "more is better", ""

# Key of the result, how the table calls it, which way is better, how it is written.
ROWS: tuple[tuple[str, str, str, str], ...] = (
    ("ready_s", "ready", LESS, "s"),
    ("first_token_s", "first token", LESS, "s"),
    ("worst_first_token_s", "worst time to first token", LESS, "s"),
    ("settled_s", "every bucket at its best", LESS, "s"),
    ("worst_step_s", "longest step", LESS, "s"),
    ("ramp_p50_s", "step until settled, p50", LESS, "s"),
    ("ramp_p99_s", "step until settled, p99", LESS, "s"),
    ("steady_step_s", "steady step (median)", LESS, "s"),
    *((f"tokens_by_s.{second}", f"tokens served by {second} s", MORE, "n") for second in SERVED_BY_S),
    ("in_step_compiles", "compiles inside steps", LESS, "n"),
    ("compiles_before_ready", "compiles before ready", LESS, "n"),
    ("promotions", "promotions", NEITHER, "n"),
    ("captures", "captures", NEITHER, "n"),
    ("in_step_captures", "captures inside steps", LESS, "n"),
    ("in_boundary_captures", "captures between steps", NEITHER, "n"),
    ("pool_bytes", "pool of the captures", NEITHER, "bytes"),
    ("peak_bytes", "peak memory", LESS, "bytes"),
)

OF_CAPTURES = ("in_step_captures", "in_boundary_captures", "pool_bytes")
"""Rows that are left out where nothing was captured."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of the table."""

    title: str
    cells: tuple[str, ...]
    """One for each result."""
    is_best: tuple[bool, ...]
    better: str
    """Which way is better, in words; empty for neither."""


def name_of(result: dict[str, Any]) -> str:
    """What a result is called: its policy, and that its caches were warm if they were."""
    return f"{result['policy']}{'' if result['cold'] else ', warm'}"


def rows(results: Sequence[dict[str, Any]]) -> list[Row]:
    """The rows that say something about these results."""
    anything_captured = any(result["captures"] for result in results)
    made = []
    for key, title, better, unit in ROWS:
        if key in OF_CAPTURES and not anything_captured:
            continue
        values = [_value(result, key) for result in results]
        cells = tuple(_in_unit(value, unit) for value in values)
        if key == "settled_s":
            cells = tuple(
                cell if result["settled"] else f"not by {cell}" for cell, result in zip(cells, results, strict=True)
            )
        known = [value for value in values if value is not None]
        best = (max if better is MORE else min)(known) if better and known and len(set(cells)) > 1 else None
        is_best = tuple(value is not None and value == best for value in values)
        made.append(Row(title=title, cells=cells, is_best=is_best, better=better))
    return made


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results side by side, a star at the best of a row, and the conditions above."""
    lines = [("", *map(name_of, results), "")]
    for row in rows(results):
        marked = [cell + (" *" if best else "") for cell, best in zip(row.cells, row.is_best, strict=True)]
        lines.append((row.title, *marked, row.better))
    return "\n".join([conditions(results), "", columns(lines), "", "* the best of the row", *fallbacks(results)])


def fallbacks(results: Sequence[dict[str, Any]]) -> list[str]:
    """What did not run as it should, a line each."""
    return [
        f"{name_of(result)}: fallback x{count}: {reason}"
        for result in results
        for reason, count in result["counters"]["fallbacks"].items()
    ]


def conditions(results: Sequence[dict[str, Any]]) -> str:
    """What was run and on what, in three lines."""
    about = results[0]["conditions"]
    model, config = about["model"], about["config"]
    compilers = " and ".join(dict.fromkeys(config[str(phase)]["compiler"] for phase in Phase))
    buckets = ", ".join(f"{phase} {' '.join(map(str, sizes))}" for phase, sizes in about["buckets"].items())
    backends = [f"{phase} {backend}" for phase in Phase if (backend := config[str(phase)]["backend"]) != "disabled"]
    captured = f"; captured: {', '.join(backends)}" if backends else ""
    caches = " and ".join(dict.fromkeys("cold" if result["cold"] else "warm" for result in results))
    return (
        f"Startup policies: each in a fresh process, {caches} caches, the same {about['num_requests']} requests, "
        f"arriving over {about['last_arrival_s']:.0f} s\n"
        f"{model['architecture']}, {model['num_layers']} layers, hidden size {model['hidden_size']}, {model['dtype']}; "
        f"{compilers}; buckets: {buckets}{captured}\n"
        f"{about['device']}; torch {about['torch']}, Python {about['python']}"
    )


def _value(result: dict[str, Any], key: str) -> Any:
    name, _, inner = key.partition(".")
    return result[name][inner] if inner else result[name]


def _in_unit(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return f"{value / 1e6:.0f} MB"
    if unit != "s":
        return str(value)
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.{0 if value >= 0.01 else 1}f} ms"
