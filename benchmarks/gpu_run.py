"""`make gpu`: everything that is to be run on a GPU, in one call; prints a short table and writes JSON.

    python benchmarks/gpu_run.py [--out benchmarks/results]

Runs tests/gpu in a process of its own, then each benchmark. Exits with 1 if a test failed or none ran.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(ROOT / "tests" / "gpu")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", done.stdout)}
    if done.returncode != 0:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n")
    print(f"tests/gpu: {counts or 'nothing ran'}\n", flush=True)
    benchmark = [sys.executable, str(ROOT / "benchmarks" / "bench_trace.py"), "--device", "cuda"]
    file = arguments.out / "gpu_trace.json"
    measured = subprocess.run([*benchmark, "--json", str(file)], cwd=ROOT, check=False)
    if measured.returncode == 0:
        file.write_text(json.dumps({"tests": counts, **json.loads(file.read_text())}, indent=2) + "\n")
    return 0 if done.returncode == 0 and measured.returncode == 0 and counts.get("passed") else 1


if __name__ == "__main__":
    raise SystemExit(main())
