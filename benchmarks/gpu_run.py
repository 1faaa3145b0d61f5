"""`make gpu`: everything that is to be run on a GPU, in one call; prints a short table and writes JSON.

    python benchmarks/gpu_run.py [--only tests,memcheck] [--out benchmarks/results] [--logs DIR]

Each part runs in a process of its own, with a time limit of its own, the next one also if it fails. Exits with 1 if a
part failed, or no test ran. Where a command may take ten minutes, these go together (seconds at most):

    --only tests,memcheck                               420 + 150
    --only dispatch,whole                               110 + 420
    --only decode                                       540
    --only prefill,capture                              200 + 200
    --only attention,exec_update,trace                  240 + 60 + 120
    --only startup                                      540
    --only straddle                                     360
    --only floor                                        540
    --only ops,linear                                   300 + 240
    --only ncu_traffic                                  150
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
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
    status = run([sys.executable, *command], log, timeout_s=420)
    text = log.read_text()
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", text[-300:])}
    if status != 0:
        print(text[-9000:], flush=True)
    (out / "gpu_tests.json").write_text(json.dumps({"tests": counts, "exit_code": status}, indent=2) + "\n")
    shown = ", ".join(f"{number} {word}" for word, number in counts.items()) or "nothing ran"
    return shown if status == 0 and counts.get("passed") else f"FAILED: {shown} (exit code {status}, {log})"


def memcheck(out: Path, logs: Path) -> str:
    """tests/gpu/memcheck.py under compute-sanitizer, if there is one; what it found is printed."""
    sanitizer = find_sanitizer()
    script = ROOT / "tests" / "gpu" / "memcheck.py"
    if sanitizer is None:
        return "skipped: no compute-sanitizer on PATH or in /usr/local/cuda*/bin"
    log = logs / "memcheck.log"
    options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    command = [sanitizer, *options, sys.executable, str(script)]
    status = run(command, log, timeout_s=150)
    lines = log.read_text().splitlines()
    summary = next((line for line in reversed(lines) if "ERROR SUMMARY" in line), "no summary").lstrip("= ")
    result = {"summary": summary, "exit_code": status, "command": " ".join(command)}
    (out / "gpu_memcheck.json").write_text(json.dumps(result, indent=2) + "\n")
    is_clean = status == 0 and re.search(r"ERROR SUMMARY: 0 errors", summary) is not None
    print("\n".join(lines[-12 if is_clean else -80 :]), flush=True)
    return summary if is_clean else f"FAILED: {summary} (exit code {status}, {log})"


def find_sanitizer() -> str | None:
    """compute-sanitizer, on PATH or where CUDA is installed."""
    installed = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
    return shutil.which("compute-sanitizer") or next(map(str, reversed(installed)), None)


def benchmark(script: str, *options: str, timeout_s: float) -> Callable[[Path, Path], str]:
    """A part that runs a script, which prints its own table and writes its own JSON."""

    def part(out: Path, logs: Path) -> str:
        name = script.removeprefix("bench_").removeprefix("probe_")
        file, log = out / f"gpu_{name}.json", logs / f"{name}.log"
        command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), *options, "--json", str(file)]
        started = time.time()
        status = run(command, log, timeout_s=timeout_s)
        print(log.read_text()[-5000:], flush=True)
        # An older file may lie there; a second's grace, since file systems round times.
        has_written = file.exists() and file.stat().st_mtime > started - 1
        wrote = f"wrote {file.name}" if has_written else "wrote nothing"
        return wrote if status == 0 and has_written else f"FAILED: exit code {status}, {wrote}, {log}"

    return part


def run(command: list[str], log: Path, *, timeout_s: float) -> int:
    """Runs a command, its output going to `log`; returns its exit code, or -9 if it took too long."""
    with log.open("w") as file:
        # A group of its own: what it started (compile workers, the program under the sanitizer) ends with it. No
        # session of its own: it is to end with whoever ends this one.
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, preexec_fn=os.setpgrp)
        try:
            return process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            file.write(f"\nstopped after {timeout_s:g} s\n")
            return -9
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


PARTS: dict[str, Callable[[Path, Path], str]] = {
    "tests": tests,
    "memcheck": memcheck,
    "dispatch": benchmark("bench_dispatch", "--device", "cuda", "--max-seconds", "80", timeout_s=110),
    "decode": benchmark("bench_decode", "--device", "cuda", "--max-seconds", "420", timeout_s=540),
    "whole": benchmark("bench_whole", "--device", "cuda", "--max-seconds", "385", timeout_s=420),
    "prefill": benchmark("bench_prefill", "--device", "cuda", "--max-seconds", "150", timeout_s=200),
    "attention": benchmark("bench_attention", "--device", "cuda", "--max-seconds", "200", timeout_s=240),
    "capture": benchmark("bench_capture", "--device", "cuda", "--max-seconds", "130", timeout_s=200),
    "exec_update": benchmark("probe_exec_update", timeout_s=60),
    "trace": benchmark("bench_trace", "--device", "cuda", "--max-seconds", "80", timeout_s=120),
    "startup": benchmark("bench_startup", "--device", "cuda", "--max-seconds", "425", timeout_s=539),
    "straddle": benchmark("bench_straddle", "--device", "cuda", "--max-seconds", "240", timeout_s=360),
    "floor": benchmark("bench_floor", "--device", "cuda", "--max-seconds", "420", timeout_s=540),
    "linear": benchmark("bench_linear", "--device", "cuda", "--max-seconds", "150", timeout_s=240),
    "ops": benchmark("bench_ops", "--device", "cuda", "--max-seconds", "200", timeout_s=300),
    "ncu_traffic": benchmark("ncu_traffic", "--max-seconds", "80", timeout_s=150),
}
"""In the order in which they run, the most telling first."""


if __name__ == "__main__":
    raise SystemExit(main())
