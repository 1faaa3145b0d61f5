"""The start of a server: our three policies, plain torch.compile and plain PyTorch, each in a fresh, cold process.

    python benchmarks/bench_startup.py [--device cuda] [--policies tiered,eager,lazy] [--max-seconds 500] [--json FILE]

A decoder of Llama-3-8B's shape in bf16 (on the CPU a tiny one, on the tape), random weights, on the device before the
clock starts: seconds count from the start of the Runtime's construction, or for plain PyTorch of nothing at all. Eight
decode buckets and four prefill buckets; compile caches are private and empty. Steps come at a steady pace, each with
the likeliest tokens read back as an engine does, never two at once; every bucket has come after ten seconds of them, in
a mixed order with repeats between; then they go round, until everything is settled and five seconds longer, or until
second 60. Then each bucket runs alone for its steady time. Plain torch.compile is `reduce-overhead` with a graph of its
own for each bucket; a bucket that did not come before second 36 is not begun, and not in its numbers.

`beside_workers` compares replays of the eager forward while a worker compiles with the same replays alone, in the same
process after the runtime is closed: each decode step as a multiple of its bucket's median alone. The policy
`tiered+whole`, which runs when it is named, also compiles the whole forward of decode bucket 1, and compares replays of
the general program of the other buckets while a worker tries kernels out. `delayed` lists steps
that took over 50 ms longer than their own kind does; where fewer than three of a kind came, that waited so long for
events.
`causes` are seconds by kind of event, and by who waited: before ready, a step, or nobody.
A policy that fails says so in its row; results are written after each.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from report import NOT_BEGUN, Deadline, attempt, conditions, count, in_short, write_json
from startup_numbers import against, row_of
from startup_spec import POLICIES, WHOLE, Spec

from piecework.runtime.bench.fresh import CACHE_VARIABLES

HERE = Path(__file__).resolve().parent
POLICY_S = 110.0
"""Seconds that one policy has, its imports and weights counted."""
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "num_layers": 32,
        "decode": [1, 2, 4, 8, 16, 32, 64, 128],
        "prefill": [64, 256, 1024, 2048],
        "seq_len": 256,
        "interval_s": 0.05,
        "meet_s": 10.0,
        "linger_s": 5.0,
        "cap_s": 60.0,
        "steady_steps": 15,
    },
    "tiny": {
        "num_layers": 2,
        "decode": [1, 2],
        "prefill": [8, 16],
        "seq_len": 32,
        "interval_s": 0.02,
        "meet_s": 1.0,
        "linger_s": 0.3,
        "cap_s": 60.0,
        "steady_steps": 5,
    },
}
"""What there is to run."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=SHAPES, help="default: 8b, on the CPU tiny")
    parser.add_argument("--layers", type=count, help="default: those of the shape")
    parser.add_argument("--policies", type=policies_of, default=POLICIES, metavar="NAMES", help="default: all five")
    parser.add_argument("--max-seconds", type=float, default=500.0, help="no policy is begun after this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parsed = parser.parse_args(arguments)
    deadline = Deadline(parsed.max_seconds)
    shape = parsed.shape or ("8b" if parsed.device.startswith("cuda") else "tiny")
    command = ["python", "benchmarks/bench_startup.py", *(sys.argv[1:] if arguments is None else arguments)]
    about = {**conditions(parsed.device), "command": " ".join(command)}
    chosen = SHAPES[shape] | ({"num_layers": parsed.layers} if parsed.layers is not None else {})
    result: dict[str, Any] = {"shape": shape, **chosen, "layers": chosen["num_layers"], "policies": {}, **about}
    for policy in parsed.policies:
        row = result["policies"][policy] = {}
        spec = Spec(policy=policy, device=parsed.device, shape=shape, **chosen, out="")
        if not deadline.has():
            row["error"] = NOT_BEGUN
        else:
            attempt(row, lambda spec=spec, row=row: measure(spec, row, POLICY_S))
        against(result["policies"])
        result["seconds"] = deadline.passed
        write_json(parsed.json, result)
    print(table(result))
    return 0 if not any("error" in row for row in result["policies"].values()) else 1


def policies_of(text: str) -> tuple[str, ...]:
    """Names with commas. Raises: argparse.ArgumentTypeError: one is none of them."""
    names = tuple(name.strip() for name in text.split(","))
    if unknown := sorted(set(names) - {*POLICIES, WHOLE}):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join((*POLICIES, WHOLE))}, got {', '.join(unknown)}")
    return names


def measure(spec: Spec, row: dict[str, Any], timeout_s: float) -> None:
    """Runs a policy in a fresh process with empty caches, and writes its numbers to `row`, also when it is stopped.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="piecework-bench-", ignore_cleanup_errors=True) as folder:
        out, file, log = Path(folder) / "result.json", Path(folder) / "spec.json", Path(folder) / "log"
        file.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(spec, out=str(out)))))
        environment = {**os.environ, **{name: str(Path(folder) / name.lower()) for name in CACHE_VARIABLES}}
        # A worker imports what makes the model.
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        with log.open("w") as stream, running(file, stream, environment) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=timeout_s)
            status = process.poll()
        said = log.read_text(errors="replace")
        print(f"---- {spec.policy}: exit code {status}\n{said[-1500:]}", file=sys.stderr, flush=True)
        if out.exists():
            row.update(row_of(json.loads(out.read_text()), spec))
        if status != 0:
            last = next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
            raise RuntimeError(f"stopped after {timeout_s:.0f} s" if status is None else f"exit code {status}: {last}")


@contextlib.contextmanager
def running(file: Path, stream: Any, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A child on a spec; ended if it still runs afterwards. Its group is ours, so that it ends with us."""
    command = [sys.executable, str(HERE / "startup_child.py"), str(file)]
    process = subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


LINES = (
    ("ready", "ready_s", "{:.2f} s"),
    ("first token", "first_token_s", "{:.2f} s"),
    ("settled", "settled_s", "{:.2f} s"),
    ("buckets met", "buckets_met", "{}"),
    ("longest step", "worst_step_ms", "{:.0f} ms"),
    ("steps over 50 ms late", "num_delayed", "{}"),
    ("captured by 2nd step", "captured_by_second", "{}"),
    ("beside workers, p50", "beside_p50", "{:.3f} x"),
    ("beside workers, p99", "beside_p99", "{:.3f} x"),
    ("steady to eager's, worst", "steady_to_eager_worst", "{:.3f} x"),
    ("promotions", "promotions", "{}"),
)


def table(result: dict[str, Any]) -> str:
    """A short table: a column a policy; then steady steps and seconds by cause."""
    policies = result["policies"]
    width = 2 + max(map(len, [*policies, "not settled"]))
    lines = [f"{'':<28}" + "".join(name.rjust(width) for name in policies)]
    for title, key, form in LINES:
        cells = ["-" if row.get(key) is None else form.format(row[key]) for row in policies.values()]
        lines.append(f"{title:<28}" + "".join(cell.rjust(width) for cell in cells))
    buckets = list(dict.fromkeys(name for row in policies.values() for name in row.get("steady_ms", {})))
    for bucket in buckets:
        times = [row.get("steady_ms", {}).get(bucket) for row in policies.values()]
        cells = ["-" if ms is None else f"{ms:.2f} ms" for ms in times]
        lines.append(f"{'steady ' + bucket:<28}" + "".join(cell.rjust(width) for cell in cells))
    for name, row in policies.items():
        causes = "; ".join(
            f"{cause} {', '.join(f'{who} {seconds:.2f} s' for who, seconds in by.items())}"
            for cause, by in row.get("causes", {}).items()
        )
        lines.append(f"{name}: {row.get('error', '')}{'  ' if 'error' in row else ''}{causes}")
    return "\n".join([*lines, f"{result['layers']} layers; {in_short(result)}"])


if __name__ == "__main__":
    raise SystemExit(main())
