"""`make gpu`: everything that is to be run on a GPU, in one call; prints a short table and writes JSON.

    python benchmarks/gpu_run.py [--only tests,capture,exec_update,trace] [--out benchmarks/results] [--logs DIR]

Each part runs in a process of its own, the next one also if it fails: tests/gpu, what captures cost, what a trace
costs, and what sharing graph executables would bring. Exits with 1 if a part failed, or no test ran.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help="some of the parts, with commas")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="where each part's output goes; default: a new folder")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"--only: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="piecework-gpu-"))
    for folder in (arguments.out, logs):
        folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    failed = False
    for name in chosen:
        started = time.monotonic()
        try:
            said = PARTS[name](arguments.out, logs)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            said = f"FAILED: {type(error).__name__}: {error}"
        failed |= said.startswith("FAILED")
        lines.append(f"{name:<12} {time.monotonic() - started:6.1f} s  {said}")
        print(lines[-1], flush=True)
    print("", *lines, sep="\n")
    return int(failed)


def tests(out: Path, logs: Path) -> str:
    """tests/gpu; what failed is printed."""
    log = logs / "tests.log"
    command = [
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "--durations=8",
        "--tb=short",
        "--timeout=80",
        str(ROOT / "tests" / "gpu"),
    ]
    status = run(command, log, timeout_s=210)
    text = log.read_text()
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", text[-300:])}
    if status != 0:
        print(text[-9000:], flush=True)
    (out / "gpu_tests.json").write_text(json.dumps({"tests": counts, "exit_code": status}, indent=2) + "\n")
    shown = ", ".join(f"{number} {word}" for word, number in counts.items()) or "nothing ran"
    return shown if status == 0 and counts.get("passed") else f"FAILED: {shown} (exit code {status}, {log})"


def benchmark(script: str, *options: str, timeout_s: float) -> Callable[[Path, Path], str]:
    """A part that runs a script, which prints its own table and writes its own JSON."""

    def part(out: Path, logs: Path) -> str:
        name = script.removeprefix("bench_").removeprefix("probe_")
        file, log = out / f"gpu_{name}.json", logs / f"{name}.log"
        command = [str(ROOT / "benchmarks" / f"{script}.py"), *options, "--json", str(file)]
        status = run(command, log, timeout_s=timeout_s)
        print(log.read_text()[-3500:], flush=True)
        return f"wrote {file.name}" if status == 0 else f"FAILED: exit code {status}, {log}"

    return part


def run(command: list[str], log: Path, *, timeout_s: float) -> int:
    """Runs Python with `command`, its output going to `log`; returns its exit code, or -9 if it took too long."""
    with log.open("w") as file:
        try:
            python = [sys.executable, *command]
            done = subprocess.run(python, cwd=ROOT, stdout=file, stderr=file, check=False, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            file.write(f"\nstopped after {timeout_s:g} s\n")
            return -9
    return done.returncode


PARTS: dict[str, Callable[[Path, Path], str]] = {
    "tests": tests,
    "capture": benchmark("bench_capture", "--device", "cuda", "--max-seconds", "75", timeout_s=140),
    "exec_update": benchmark("probe_exec_update", timeout_s=60),
    "trace": benchmark("bench_trace", "--device", "cuda", timeout_s=120),
}
"""In the order in which they run, the most telling first."""


if __name__ == "__main__":
    raise SystemExit(main())
