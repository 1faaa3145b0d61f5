"""What runs, why, and at what cost: as a table for a person and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..graphs.debug import MutationWitness
from ..graphs.program import Program
from ..ops.fused_choice import Choice as FusedChoice
from ..phases import Phase, Resolved
from .captures import Captures
from .entries import Entry
from .events import Counters
from .programs import ProgramFamily


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """An explanation of a runtime at one moment."""

    data: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return self.data

    def __str__(self) -> str:
        return "\n".join(_lines(self.data))


def explain(
    *,
    resolved: Resolved,
    entries: Sequence[Entry],
    families: Sequence[ProgramFamily],
    counters: Counters,
    witness: MutationWitness | None,
    fused: Mapping[Phase, FusedChoice],
    captures: Captures | None,
    settled: bool,
) -> Explanation:
    """Collects what a runtime decided so far."""
    return Explanation(
        data={
            "phases": {str(phase): _phase(resolved, phase) for phase in Phase},
            "fused_ops": {str(phase): {op.name: dataclasses.asdict(op) for op in fused[phase].ops} for phase in Phase},
            "startup": str(resolved.config.startup),
            "settled": settled,
            "reasons": list(resolved.reasons),
            "traces": [_trace(program, family) for family in families for program in family.general],
            "entries": [entry_data(entry, captures) for entry in entries],
            "memory": _memory(captures),
            "unmatched_split_ops": sorted({name for family in families for name in family.unmatched}),
            "never_written": {k: list(v) for k, v in witness.never_written().items()} if witness is not None else {},
            "counters": counters.as_dict(),
        }
    )


def _phase(resolved: Resolved, phase: Phase) -> dict[str, Any]:
    config = resolved.config.phase(phase)
    return {
        "backend": str(config.backend),
        "compiler": str(config.compiler),
        "buckets": list(resolved.ladders[phase].buckets),
        "specialize": config.specialize if isinstance(config.specialize, str) else list(config.specialize),
        "startup": str(resolved.config.startup_of(phase)),
    }


def _trace(program: Program, family: ProgramFamily) -> dict[str, Any]:
    graph = program.graph
    return {
        "inputs": str(family.signature),
        "compiler": str(family.compiler),
        "kernels": dict(family.fused.kernels),
        "mode": graph.traced.mode,
        "valid_for": str(program.interval),
        "intervals": {name: str(interval) for name, interval in program.intervals.items()},
        "pieces": len(graph.split.pieces),
        "distinct_pieces": graph.num_distinct,
        "opaque_regions": graph.split.num_opaque,
        "split_ops": {op._schema.name: count for op, count in graph.split.matches.items()},
        "regions_reused": graph.traced.regions_reused,
        "frozen": list(graph.traced.frozen),
        "trace_s": graph.trace_s,
        "compiles": graph.num_compiles,
        "compile_s": graph.compile_s,
    }


def _memory(captures: Captures | None) -> dict[str, int]:
    """Bytes that captures hold of the device: of the pool that they share, and of the buffers around them."""
    if captures is None:
        return {"pool_bytes": 0, "buffer_bytes": 0}
    return {"pool_bytes": captures.pool_bytes, "buffer_bytes": captures.buffer_bytes}


def entry_data(entry: Entry, captures: Captures | None = None) -> dict[str, Any]:
    """An entry as plain data; `build_s` and `capture_s` are in seconds, `bytes` what its captures added to the pool."""
    slots = captures.state_of(entry) if captures is not None else []
    made = [slot for slot in slots if slot.capture is not None]
    return {
        "phase": str(entry.phase),
        "bucket": entry.bucket,
        "program": entry.program.kind,
        "runs_at": entry.size,
        "why": entry.why,
        "target": entry.target,
        "why_not_whole": entry.why_not_whole,
        "given_up": entry.given_up,
        "steps": entry.num_steps,
        "build_s": entry.build_s,
        "captured": bool(made),
        "segments": max((slot.capture.num_segments for slot in made if slot.capture is not None), default=0),
        "bytes": sum(slot.num_bytes for slot in made),
        "capture_s": sum(slot.seconds for slot in made),
        "replays": sum(slot.num_replays for slot in slots),
        "not_captured": next((slot.refused for slot in slots if slot.refused is not None), None),
    }


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _sizes(intervals: dict[str, str]) -> str:
    return " and ".join(f"{interval} {name}" for name, interval in intervals.items()) or "any size"


def _startups(phases: dict[str, Any]) -> list[str]:
    """The policy, with the phases where they have different ones."""
    policies = {name: phase["startup"] for name, phase in phases.items()}
    if len(set(policies.values())) == 1:
        return [next(iter(policies.values()))]
    return [f"{policy} in {name}" for name, policy in policies.items()]


def _why(entry: dict[str, Any]) -> str:
    """Why an entry runs what it runs, and what will or will not come."""
    parts = [entry["why"], entry["not_captured"], entry["why_not_whole"], entry["given_up"]]
    said = [part for part in parts if part is not None]
    return "; ".join(part for i, part in enumerate(said) if not any(part in other for other in said[:i]))


def _fused_lines(phases: dict[str, Any]) -> Iterator[str]:
    """A line for each fused op whose choice is not simply the default, of both phases if they agree."""
    lines: dict[str, list[str]] = {}
    for phase, ops in phases.items():
        for op in ops.values():
            if not op["by_default"]:
                lines.setdefault(f"{op['name']} runs {op['runs']} ({op['reason']})", []).append(phase)
    yield from (f"fused op {line} in {' and '.join(names)}" for line, names in lines.items())


_MAX_FROZEN = 2
"""Values shown; `as_dict` has all of them."""


def _lines(data: dict[str, Any]) -> Iterator[str]:
    for name, phase in data["phases"].items():
        yield f"{name}: backend {phase['backend']}, compiler {phase['compiler']}, " + (
            f"{_count(len(phase['buckets']), 'bucket')} {phase['buckets'][0]} to {phase['buckets'][-1]}"
        )
    yield "startup: " + " and ".join(_startups(data["phases"]))
    yield from (f"  {reason}" for reason in data["reasons"])
    yield from _fused_lines(data["fused_ops"])
    for trace in data["traces"]:
        yield (
            f"trace ({trace['inputs']}): {trace['mode']}, valid for {_sizes(trace['intervals'])}, "
            f"{_count(trace['pieces'], 'piece')} ({trace['distinct_pieces']} distinct), "
            f"{_count(trace['opaque_regions'], 'opaque region')}"
        )
        yield (
            f"  traced in {trace['trace_s']:.2f} s, "
            f"{_count(trace['compiles'], 'compile')} in {trace['compile_s']:.2f} s"
        )
        if trace["frozen"]:
            shown = ", ".join(trace["frozen"][:_MAX_FROZEN])
            yield f"  frozen Python state: {_count(len(trace['frozen']), 'value')}, such as {shown}"
    if data["unmatched_split_ops"]:
        yield f"split ops that no graph has called: {', '.join(data['unmatched_split_ops'])}"
    for name, arguments in data["never_written"].items():
        yield f"{name} declares {', '.join(arguments)} mutated and has never changed it; drop it from mutates_args"
    if any(phase["backend"] != "disabled" for phase in data["phases"].values()):
        memory = data["memory"]
        yield (
            f"captures: {memory['pool_bytes'] / 2**20:.1f} MiB in the pool, "
            f"{memory['buffer_bytes'] / 2**20:.1f} MiB of buffers"
        )
    rows = [("phase", "bucket", "program", "runs at", "steps", "build s", "capture s", "segments", "MiB", "why")]
    for e in data["entries"]:
        bucket = "-" if e["bucket"] is None else str(e["bucket"])
        size = "as asked" if e["runs_at"] is None else str(e["runs_at"])
        captured = ["-"] * 3
        if e["captured"]:
            captured = [f"{e['capture_s']:.3f}", str(e["segments"]), f"{e['bytes'] / 2**20:.1f}"]
        cells = (e["phase"], bucket, e["program"], size, str(e["steps"]), f"{e['build_s']:.2f}", *captured, _why(e))
        rows.append(cells)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    fallbacks = data["counters"]["fallbacks"]
    yield from (f"fallback x{count}: {reason}" for reason, count in fallbacks.items())
    yield from (f"warning x{count}: {text}" for text, count in data["counters"]["warnings"].items())
