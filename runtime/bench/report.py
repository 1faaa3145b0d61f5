"""The table of a startup comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...phases import Phase
from ..console import columns

# Key of the result, how the table calls it, whether less is better (False: neither is), how it is written.
ROWS: tuple[tuple[str, str, bool, str], ...] = (
    ("ready_s", "ready", True, "s"),
    ("first_token_s", "first token", True, "s"),
    ("settled_s", "every bucket at its best", True, "s"),
    ("worst_step_s", "longest step", True, "s"),
    ("steady_step_s", "steady step (median)", True, "s"),
    ("in_step_compiles", "compiles inside steps", True, "n"),
    ("compiles_before_ready", "compiles before ready", True, "n"),
    ("captures", "captures", False, "n"),
    ("in_step_captures", "captures inside steps", True, "n"),
    ("pool_bytes", "pool of the captures", False, "bytes"),
    ("peak_bytes", "peak memory", True, "bytes"),
)

OF_CAPTURES = ("in_step_captures", "pool_bytes")
"""Rows that are left out where nothing was captured."""


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results side by side, a star at the better one, and the conditions above."""
    rows = [("", *(result["policy"] for result in results), "")]
    anything_captured = any(result["captures"] for result in results)
    for key, title, less_is_better, unit in ROWS:
        if key in OF_CAPTURES and not anything_captured:
            continue
        values = [result[key] for result in results]
        shown = [_in_unit(value, unit) for value in values]
        best = min(values) if less_is_better and len(set(shown)) > 1 else None
        marked = [text + (" *" if value == best else "") for text, value in zip(shown, values, strict=True)]
        rows.append((title, *marked, "less is better" if less_is_better else ""))
    fallbacks = [
        f"\n{result['policy']}: fallback x{count}: {reason}"
        for result in results
        for reason, count in result["counters"]["fallbacks"].items()
    ]
    return f"{_conditions(results[0])}\n\n{columns(rows)}\n\n* the best of the row{''.join(fallbacks)}"


def _conditions(result: dict[str, Any]) -> str:
    conditions = result["conditions"]
    model, config = conditions["model"], conditions["config"]
    compilers = " and ".join(dict.fromkeys(config[str(phase)]["compiler"] for phase in Phase))
    buckets = ", ".join(f"{phase} {' '.join(map(str, sizes))}" for phase, sizes in conditions["buckets"].items())
    backends = [f"{phase} {backend}" for phase in Phase if (backend := config[str(phase)]["backend"]) != "disabled"]
    captured = f"; captured: {', '.join(backends)}" if backends else ""
    cold = "cold" if result["cold"] else "warm"
    return (
        f"Startup policies: each in a fresh process, {cold} caches, the same {conditions['num_requests']} requests\n"
        f"{model['architecture']}, {model['num_layers']} layers, hidden size {model['hidden_size']}, {model['dtype']}; "
        f"{compilers}; buckets: {buckets}{captured}\n"
        f"{conditions['device']}; torch {conditions['torch']}, Python {conditions['python']}"
    )


def _in_unit(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 1e6:.0f} MB"
    if unit != "s":
        return str(value)
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.{0 if value >= 0.01 else 1}f} ms"
