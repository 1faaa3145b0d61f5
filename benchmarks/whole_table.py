"""The table that bench_whole.py prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from report import in_short

MIB = 1 << 20


def table(result: dict[str, Any]) -> str:
    """A short table: a line a way, its numbers of each row."""
    rows = result["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["ways"]))
    head = "".join(f"{row['batch']}x{row['context']}".rjust(10) for row in rows)
    lines = []
    for title, key, form, scale in (
        ("step, ms", "step_ms", ".3f", 1.0),
        ("first step, s", "compile_s", ".1f", 1.0),
        ("peak, MiB", "peak_bytes", ".1f", 1 / MIB),
    ):
        lines.append(f"{title:<40}{head}")
        for name in names:
            cells = [_cell(row["ways"].get(name, {}), key, form, scale) for row in rows]
            lines.append(f"  {name:<38}" + "".join(cell.rjust(10) for cell in cells))
    for row in rows:
        for name, way in [("", row), *row["ways"].items()]:
            if "error" in way:
                lines.append(f"{row['batch']}x{row['context']} {name}: {way['error']}")
            if "whole" in way:
                lines.append(f"{row['batch']}x{row['context']} {name}: {said_of(way['whole'])}")
    lines.append(f"{result['layers']} layers, {result['dtype']}, mode {result['mode']}; {in_short(result)}")
    return "\n".join(lines)


def said_of(whole: Mapping[str, Any]) -> str:
    """What the runtime found of a whole forward, in words."""
    if "whole_ms" not in whole:
        return "taken unmeasured" if whole.get("taken") else f"not measured: {whole.get('error', 'no reason')}"
    taken = "taken" if whole["taken"] else "left out"
    return f"whole {whole['whole_ms']:.3f} ms, {whole['replaces']} {whole['ordinary_ms']:.3f} ms on padding: {taken}"


def _cell(way: Mapping[str, Any], key: str, form: str, scale: float) -> str:
    if "error" in way:
        return "error"
    return f"{way[key] * scale:{form}}" if key in way else "-"
