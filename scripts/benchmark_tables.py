"""Writes the README's benchmark tables from benchmarks/results, between `<!-- benchmarks:begin NAME -->` and `:end`.

    python scripts/benchmark_tables.py [--check]

`--check` writes nothing and exits with 1 if the README is not what it would be. Needs no torch.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
NOT_RUN = "not run"
_MARKER = re.compile(r"<!-- benchmarks:(begin|end) (\S+) -->")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something would change")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parsed = parser.parse_args(arguments)
    before = parsed.readme.read_text(encoding="utf-8")
    try:
        after = with_tables(before, parsed.results, str(parsed.readme.name))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if after == before:
        return 0
    if parsed.check:
        print(
            f"{parsed.readme.name}: expected the tables that {parsed.results} gives, got other ones; run "
            f"python scripts/benchmark_tables.py",
            file=sys.stderr,
        )
        return 1
    parsed.readme.write_text(after, encoding="utf-8")
    return 0


def with_tables(text: str, results: Path, where: str) -> str:
    """The text with the table of each marker made anew.

    Raises:
        ValueError: a marker that has no partner, or no table; or a result that is no JSON of that benchmark.
    """
    parts: list[str] = []
    position = 0
    opened: str | None = None
    for marker in _MARKER.finditer(text):
        kind, name = marker.groups()
        expected = ("begin", name) if opened is None else ("end", opened)
        if (kind, name) != expected or name not in TABLES:
            wanted = "begin and one of " + ", ".join(TABLES) if opened is None else f"end {opened}"
            raise ValueError(
                f"{where}: expected a marker benchmarks: with {wanted}, got {kind} {name}; put a begin and an end "
                f"around each table"
            )
        if kind == "begin":
            parts += [text[position : marker.end()], "\n", rendered(name, results), "\n"]
            opened = name
        else:
            opened = None
        position = marker.start() if kind == "end" else marker.end()
    if opened is not None:
        raise ValueError(f"{where}: expected a marker benchmarks:end {opened}, got the end of the file; add it")
    return "".join([*parts, text[position:]])


def rendered(name: str, results: Path) -> str:
    """One table as markdown, with its conditions; or that it was not measured yet.

    Raises:
        ValueError: the file is no result of that benchmark.
    """
    file = results / f"gpu_{name}.json"
    command = f"`python benchmarks/gpu_run.py --only {name}`"
    if not file.exists():
        return f"Not measured yet; {command} does."
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        lines = TABLES[name](result)
        where = (
            f"{result['device']}, driver {result['driver']}, torch {result['torch']}, triton {result['triton']}, "
            f"commit {result['commit']}"
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file}: expected a result of {name}, got one without {error}; measure it again, or remove the file"
        ) from error
    return "\n".join([*lines, "", f"{where}; {command}; medians."])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table, the first column to the left and the others to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def capture(result: dict[str, Any]) -> list[str]:
    """Each way of capturing: its cost, and a step by replay."""
    sizes = list(result["uncaptured_step_ms"])
    rows = [["uncaptured, eager", "", "", "", "", *(f"{ms:.1f} ms" for ms in result["uncaptured_step_ms"].values())]]
    not_begun: list[str] = []
    for way in result["ways"]:
        name = f"`{way['backend']}`, `{way['compiler']}`"
        if way.get("error", "").startswith("not begun"):
            not_begun.append(f"{way['backend']} {way['compiler']}")
            continue
        if "error" in way:
            rows.append([name, way["error"], *[""] * (3 + len(sizes))])
            continue
        arrival = f"{way['pool_bytes_arrival'] / MIB:.0f} MiB" if "pool_bytes_arrival" in way else NOT_RUN
        steps = [f"{way['step_ms'][size]:.1f} ms" for size in sizes]
        pool = f"{way['pool_bytes_random'] / MIB:.0f} MiB"
        rows.append([name, f"{way['capture_ms_median']:.0f} ms", str(way["segments"]), pool, arrival, *steps])
    head = ["backend, compiler", "capture of a bucket", "segments", "pool", "pool, largest not first"]
    lines = markdown([*head, *(f"step at {size}" for size in sizes)], rows)
    about = f"{result['layers']} layers, {result['dtype']}, {result['seq_len']} tokens a request."
    left_out = f" Not begun in this run, for want of time: {', '.join(not_begun)}." if not_begun else ""
    return [*lines, "", about + left_out]


def decode(result: dict[str, Any]) -> list[str]:
    """Each row of requests x tokens: the floor, and a step of each way as milliseconds and as a multiple of it."""
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["ways"]))
    rows = []
    for row in sorted(result["rows"], key=lambda row: (row["context"], row["batch"])):
        cells = [_cell(row, name, "floor_ms", ".2f") for name in names]
        rows.append([f"{row['batch']} x {row['context']:,}", f"{row['floor_ms']:.2f}", *cells])
    lines = markdown(["requests x tokens", "floor", *names], rows)
    shared = [row for row in result["rows"] if "distinct_caches" in row]
    long = (
        f" In rows of {shared[0]['context']:,} tokens layers share {shared[0]['distinct_caches']} caches."
        if shared
        else ""
    )
    ungraphed = [f"{row['batch']} x {row['context']:,}" for row in result["rows"] if _skips(row)]
    without = f" torch.compile made no CUDA graph at {', '.join(ungraphed)}." if ungraphed else ""
    weights, bandwidth = f"{result['weight_bytes'] / 1e9:.1f} GB", f"{result['copy_bytes_per_s'] / 1e12:.2f} TB/s"
    return [
        *lines,
        "",
        f"Milliseconds a step, logits included, and as a multiple of the floor: {weights} of weights and the KV cache, "
        f"at the {bandwidth} of a copy in the same run. {result['layers']} layers, {result['dtype']}.{long}{without}"
        f"{_beside_compiled(result['rows'])}",
    ]


def _beside_compiled(rows: Sequence[dict[str, Any]]) -> str:
    """The captured compiled forward as a multiple of plain torch.compile's step, for each row that has both."""
    ours = next((name for row in rows for name in row["ways"] if name.startswith("full, ")), "")
    shown = []
    for row in sorted(rows, key=lambda row: (row["context"], row["batch"])):
        times = [row["ways"].get(name, {}) for name in (ours, "plain torch.compile")]
        if all("step_ms" in way and "error" not in way for way in times):
            ratio = times[0]["step_ms"] / times[1]["step_ms"]
            shown.append(f"{ratio:.2f} x at {row['batch']} x {row['context']:,}")
    return f" A step of {ours} takes, of the time of plain torch.compile, {', '.join(shown)}." if shown else ""


def _skips(row: dict[str, Any]) -> bool:
    return any(way.get("cudagraph_skips") for way in row["ways"].values())


def _cell(row: dict[str, Any], name: str, base: str, form: str) -> str:
    way = row["ways"].get(name, {})
    if "error" in way or "error" in row:
        return "failed" if "error" in way and not way["error"].startswith("not begun") else NOT_RUN
    return f"{way['step_ms']:{form}} ({way['step_ms'] / row[base]:.2f} x)" if "step_ms" in way else NOT_RUN


def prefill(result: dict[str, Any]) -> list[str]:
    """Each size of a prompt: a step of each way as milliseconds and its speed against plain eager."""
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["ways"]))
    rows = []
    for row in sorted(result["rows"], key=lambda row: row["tokens"]):
        cells = []
        for name in names:
            way = row["ways"].get(name, {})
            speed = f" ({way['speed_of_plain_eager']:.2f} x)" if "speed_of_plain_eager" in way else ""
            cells.append(
                "failed" if "error" in way else f"{way['step_ms']:.2f}{speed}" if "step_ms" in way else NOT_RUN
            )
        best = max((way["tokens_per_s"] for way in row["ways"].values() if "tokens_per_s" in way), default=None)
        rows.append([f"{row['tokens']:,}", *cells, f"{best:,.0f}" if best is not None else NOT_RUN])
    return [
        *markdown(["tokens", *names, "tokens/s, best"], rows),
        "",
        f"Milliseconds a prompt, without logits, and the speed against plain eager. {result['layers']} layers, "
        f"{result['dtype']}.",
    ]


def dispatch(result: dict[str, Any]) -> list[str]:
    """Each way of capturing: the host's microseconds in a replayed step."""
    columns = ("total", "replay", "segments", "split_calls", "beyond_replay")
    rows = []
    for way in result["ways"]:
        name = f"`{way['backend']}`, `{way['compiler']}`"
        cells = [way["error"], *[""] * 4] if "error" in way else [f"{way[f'{column}_us']:.0f}" for column in columns]
        rows.append([name, *cells])
    head = ["backend, compiler", "`run`", "the replay in it", "its segments", "its split calls", "beyond the replay"]
    lines = markdown(head, rows)
    parts = []
    for way in result["ways"]:
        if way.get("parts_us"):
            shown = ", ".join(f"{part} {us:.1f}" for part, us in way["parts_us"].items())
            parts.append(f"`{way['backend']}`, `{way['compiler']}`: {shown}.")
    about = f"Microseconds of the host a step. {result['layers']} layers, {result['requests']} requests. In it, "
    return [*lines, "", about + "each with what it calls: " + " ".join(parts)]


_STARTUP = (
    ("ready", "ready_s", "{:.2f} s"),
    ("first token", "first_token_s", "{:.2f} s"),
    ("every bucket at its best", "settled_s", "{:.2f} s"),
    ("buckets met", "buckets_met", "{}"),
    ("longest step", "worst_step_ms", "{:,.0f} ms"),
    ("steps over 50 ms late", "num_delayed", "{}"),
    ("decode buckets captured by their second step", "captured_by_second", "{}"),
    ("replays while workers compile, p50", "beside_p50", "{:.2f} x"),
    ("replays while workers compile, p99", "beside_p99", "{:.2f} x"),
    ("worst steady step to `eager`'s", "steady_to_eager_worst", "{:.2f} x"),
)
"""Rows of the startup table: title, key, how it is written."""


def startup(result: dict[str, Any]) -> list[str]:
    """A column a policy; below, the seconds by cause."""
    policies = result["policies"]
    rows = [
        [title, *(form.format(row[key]) if row.get(key) is not None else "-" for row in policies.values())]
        for title, key, form in _STARTUP
    ]
    buckets = list(dict.fromkeys(name for row in policies.values() for name in row.get("steady_ms", {})))
    for bucket in buckets:
        times = [row.get("steady_ms", {}).get(bucket) for row in policies.values()]
        rows.append([f"steady step, {bucket}", *("-" if ms is None else f"{ms:.2f} ms" for ms in times)])
    lines = markdown(["", *policies], rows)
    for name, row in policies.items():
        told = [
            f"{cause} {', '.join(f'{seconds:.1f} s ({_WAITED[who]})' for who, seconds in by.items())}"
            for cause, by in row.get("causes", {}).items()
        ]
        failed = f" Failed: {row['error']}." if "error" in row else ""
        lines += ["", f"{name}: {'; '.join(told) or 'nothing recorded'}.{failed}"]
    return [
        *lines,
        "",
        f"Seconds since the start of the runtime's construction, weights on the device, caches empty, a fresh process "
        f"each. {result['layers']} layers; decode buckets {', '.join(map(str, result['decode']))}, prefill buckets "
        f"{', '.join(map(str, result['prefill']))}, all met in the first {result['meet_s']:.0f} s of steps; none after "
        f"second {result['cap_s']:.0f}.",
    ]


def whole(result: dict[str, Any]) -> list[str]:
    """Each row of requests x tokens: a step of each way, then its first step and what it takes of memory."""
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["ways"]))
    steps, firsts, verdicts = [], [], []
    for row in sorted(result["rows"], key=lambda row: (row["context"], row["batch"])):
        title = f"{row['batch']} x {row['context']:,}"
        ways = [row["ways"].get(name, {}) for name in names]
        steps.append([title, *(_beside_plain(way) for way in ways)])
        firsts.append([title, *(_first_step(way) for way in ways)])
        for way in ways:
            if "whole_ms" in way.get("whole", {}):
                said = way["whole"]
                verdicts.append(
                    f"{said['whole_ms']:.2f} ms against {said['ordinary_ms']:.2f} ms of the {said['replaces']} program "
                    f"at {title} ({'taken' if said['taken'] else 'left out'})"
                )
    measured = f" On padding the runtime measured a whole forward of {'; '.join(verdicts)}." if verdicts else ""
    return [
        *markdown(["requests x tokens", *names], steps),
        "",
        f"Milliseconds a step, logits included, and as a multiple of plain torch.compile's, captured by hand; both "
        f"wholes in mode {result['mode']}. {result['layers']} layers, {result['dtype']}.{measured}",
        "",
        *markdown(["requests x tokens", *names], firsts),
        "",
        "The first step of a size, with all that it compiles and tries out, and the memory that the compiled forward "
        "takes beside weights and caches. In the first row that was measured, the wholes compiled into empty caches; "
        "after it into one that all ways share. Inductor's general program is compiled once, for all sizes.",
    ]


def _beside_plain(way: dict[str, Any]) -> str:
    if "error" in way:
        return NOT_RUN if way["error"].startswith("not begun") else "failed"
    ratio = f" ({way['to_plain']:.2f} x)" if "to_plain" in way else ""
    return f"{way['step_ms']:.2f}{ratio}" if "step_ms" in way else NOT_RUN


def _first_step(way: dict[str, Any]) -> str:
    if "error" in way or "compile_s" not in way:
        return "-"
    peak = f", {way['peak_bytes'] / MIB:,.0f} MiB" if "peak_bytes" in way else ""
    return f"{way['compile_s']:.1f} s{peak}"


def straddle(result: dict[str, Any]) -> list[str]:
    """Each program that requests were promoted to: how many got other tokens, and a step of it."""
    rows = []
    for name, way in result["ways"].items():
        step = result["steps"].get(name)
        first = way.get("first_difference_median")
        differ = way["error"] if "error" in way else f"{way['differ']} of {result['requests']} ({way['share']:.1%})"
        rows.append(
            [
                name,
                differ,
                f"token {first:.0f}" if first is not None else "-",
                f"{step['step_ms']:.2f} ms" if step is not None else "-",
            ]
        )
    lines = markdown(["promoted to", "requests with other tokens", "first one, median", "a step"], rows)
    eager = (
        f" A step of eager takes {result['steps']['eager']['step_ms']:.2f} ms." if "eager" in result["steps"] else ""
    )
    cost = f" Emulated casts cost {result['casts_cost']:+.1%} of a step." if "casts_cost" in result else ""
    return [
        *lines,
        "",
        f"Greedy requests of {result['new_tokens']} tokens, {result['batch']} at a time, promoted after "
        f"{result['promoted_after']} from the captured eager forward to Inductor's general program.{eager}{cost} "
        f"{result['layers']} layers, {result['dtype']}, random weights.",
    ]


def ops(result: dict[str, Any]) -> list[str]:
    """Each fused op and size: a call of each way in microseconds, and its share of a copy's bandwidth."""
    order = {op: place for place, op in enumerate(dict.fromkeys(row["op"] for row in result["rows"]))}
    shown = sorted(result["rows"], key=lambda row: (order[row["op"]], row["tokens"]))
    names = list(dict.fromkeys(name for row in shown for name in row["ways"]))
    rows = [[row["op"], str(row["tokens"]), *(_share(row["ways"].get(name)) for name in names)] for row in shown]
    passed_over: dict[str, None] = {}
    for row in shown:
        for name, way in row["ways"].items():
            if "passed_over" in way:
                passed_over[f"{name} for {row['op']}: {way['passed_over']}"] = None
    why = f" Passed over: {'; '.join(passed_over)}." if passed_over else ""
    return [
        *markdown(["op", "tokens", *names], rows),
        "",
        f"Microseconds a call, and the share of a copy's {result['copy_bytes_per_s'] / 1e12:.2f} TB/s at which it "
        f"moves its arguments and results; {result['dtype']}, hidden {result['sizes']['hidden']:,}. A dash: there is "
        f"no such kernel, or it cannot serve.{why}",
    ]


def _share(way: dict[str, Any] | None) -> str:
    if way is None or "passed_over" in way:
        return "-"
    if "error" in way or "us" not in way:
        return "failed" if "error" in way else NOT_RUN
    return f"{way['us']:.1f} ({way['share_of_copy']:.0%})"


def floor(result: dict[str, Any]) -> list[str]:
    """Each row of requests x tokens: a step of each way against the floor; below, what a step of ours consists of."""
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["ways"]))
    shown = sorted(result["rows"], key=lambda row: (row["context"], row["batch"]))
    steps, lines_of_time = [], []
    for row in shown:
        title = f"{row['batch']} x {row['context']:,}"
        cells = [_cell(row, name, "floor_ms", ".2f") for name in names]
        steps.append([title, f"{row['floor_ms']:.2f}", *cells])
        for name, way in row["ways"].items():
            if way.get("timeline"):
                lines_of_time.append((title, name, way["timeline"]))
    groups = list(dict.fromkeys(group for *_, found in lines_of_time for group in found["groups"]))
    parts = [
        [f"{title}, {name}", *(_group_us(found, group) for group in groups), f"{found['gaps_us']:.0f}"]
        for title, name, found in lines_of_time
    ]
    weights, bandwidth = f"{result['weight_bytes'] / 1e9:.1f} GB", f"{result['copy_bytes_per_s'] / 1e12:.2f} TB/s"
    about = (
        f"Milliseconds a step, greedy sampling and the read back of the tokens included, and as a multiple of the "
        f"floor: {weights} of weights and the KV cache, at the {bandwidth} of a copy in the same run. "
        f"{result['layers']} layers, {result['dtype']}."
    )
    lines = [*markdown(["requests x tokens", "floor", *names], steps), "", about]
    if not parts:
        return lines
    lines += ["", *markdown(["one step", *groups, "gaps"], parts), ""]
    return [*lines, "Microseconds of the device in one step, by what its kernels do, and between them."]


def _group_us(found: dict[str, Any], group: str) -> str:
    return f"{found['groups'][group]['us']:.0f}" if group in found["groups"] else "0"


_WAITED = {"before ready": "before ready", "a step": "a step waited", "nobody": "nobody waited"}


TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "capture": capture,
    "decode": decode,
    "whole": whole,
    "prefill": prefill,
    "dispatch": dispatch,
    "startup": startup,
    "straddle": straddle,
    "floor": floor,
    "ops": ops,
}
"""Name of a marker, of a part of gpu_run.py and of a file gpu_NAME.json -> the table's lines."""


if __name__ == "__main__":
    raise SystemExit(main())
