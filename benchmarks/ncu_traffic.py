"""Measured bytes of fused add + RMSNorm (Nsight Compute) beside those of the traffic model, piecework.ops.traffic.

    python benchmarks/ncu_traffic.py [--tokens 1,512,4096] [--hidden 4096] [--json FILE]

One call in bf16 of each kernel that can serve here, and of the unfused reference, under `ncu` in a process of its own:
`dram__bytes_read.sum` and `dram__bytes_write.sum`, summed over the call's kernels. ncu empties the caches before each
kernel, so that all that is read comes from memory; what is written may stay in the L2 cache, and is counted where it
leaves it within the kernel: writes of small calls measure as little as 0. Where there is no ncu, no GPU, or no right to
use its counters (ERR_NVGPUCTRPERM: the driver keeps them to the administrator), the result says so (`unavailable`) and
has the model's numbers alone.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import Deadline, attempt, conditions, count, in_short, write_json

from piecework.ops.fused import KernelSpec
from piecework.ops.norm import fused_add_rms_norm
from piecework.ops.traffic import fused_bytes, unfused_add_rms_norm, unfused_bytes

UNFUSED = "unfused reference"
METRICS = {"dram__bytes_read.sum": "read_bytes", "dram__bytes_write.sum": "written_bytes"}
DTYPE = torch.bfloat16
EPS = 1e-5
CALL_S = 60.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=_counts, default=(1, 512, 4096), help="with commas")
    parser.add_argument("--hidden", type=count, default=4096)
    parser.add_argument("--max-seconds", type=float, default=80.0, help="no call is begun after this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", metavar="WAY", help="make one call of this way, to be watched by ncu")
    parsed = parser.parse_args(arguments)
    if parsed.only is not None:
        call_once(parsed.only, parsed.tokens[0], parsed.hidden)
        return 0
    deadline = Deadline(parsed.max_seconds)
    command = ["python", "benchmarks/ncu_traffic.py", *(sys.argv[1:] if arguments is None else arguments)]
    about = {**conditions("cuda" if torch.cuda.is_available() else "cpu"), "command": " ".join(command)}
    result: dict[str, Any] = {**about, "dtype": "bfloat16", "hidden": parsed.hidden, "rows": []}
    ncu = find_ncu()
    reason = unavailable(ncu)
    for tokens in parsed.tokens:
        sizes = (tokens, parsed.hidden, DTYPE)
        model = {"fused": fused_bytes(*sizes), "unfused": unfused_bytes(*sizes)}
        row: dict[str, Any] = {"tokens": tokens, "model_bytes": model, "ways": {}}
        result["rows"].append(row)
        for name in () if reason is not None else ways():
            if reason is None and deadline.has():
                way = row["ways"][name] = {}
                reason = measure(way, str(ncu), name, tokens, parsed.hidden)
    if reason is not None:
        result["unavailable"] = reason
    result["seconds"] = deadline.passed
    write_json(parsed.json, result)
    print(table(result))
    return 0 if not any("error" in way for row in result["rows"] for way in row["ways"].values()) else 1


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(count, text.split(",")))


def find_ncu() -> str | None:
    """ncu, on PATH or where CUDA and Nsight Compute are installed; the newest."""
    places = [Path("/usr/local").glob("cuda*/bin/ncu"), Path("/opt/nvidia/nsight-compute").glob("*/ncu")]
    installed = sorted(str(path) for place in places for path in place)
    return shutil.which("ncu") or next(reversed(installed), None)


def unavailable(ncu: str | None) -> str | None:
    """Why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if ncu is None:
        return "no ncu on PATH, in /usr/local/cuda*/bin or /opt/nvidia/nsight-compute; install Nsight Compute"
    return None


def bodies() -> dict[str, Callable[..., Any]]:
    """What can run on this CUDA device, by name."""
    spec = KernelSpec(device_type="cuda", dtype=DTYPE, capability=torch.cuda.get_device_capability())
    kernels = [kernel for kernel in fused_add_rms_norm.kernels if kernel.reject(spec) is None]
    return {UNFUSED: unfused_add_rms_norm, **{kernel.name: kernel.body for kernel in kernels}}


def ways() -> list[str]:
    """The names of `bodies`."""
    return list(bodies())


def call_once(name: str, tokens: int, hidden: int) -> None:
    """One call between a start and a stop of the profiler, after others that compile and set up."""
    body = bodies()[name]
    with torch.inference_mode():
        x, residual = torch.randn(2, tokens, hidden, device="cuda", dtype=DTYPE).unbind(0)
        weight = torch.randn(hidden, device="cuda", dtype=DTYPE)
        for _ in range(3):
            body(x, residual, weight, EPS)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        body(x, residual, weight, EPS)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def measure(way: dict[str, Any], ncu: str, name: str, tokens: int, hidden: int) -> str | None:
    """Runs one call under ncu and writes its bytes; returns why none can be measured at all, or None."""
    watch = [ncu, "--csv", "--print-units", "base", "--profile-from-start", "off", "--metrics", ",".join(METRICS)]
    call = [sys.executable, str(Path(__file__).resolve()), "--only", name]
    options = ["--tokens", str(tokens), "--hidden", str(hidden)]
    done = attempt(
        way,
        lambda: subprocess.run([*watch, *call, *options], capture_output=True, text=True, check=False, timeout=CALL_S),
    )
    if done is None:
        return None
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        return "no right to use the GPU's counters (ERR_NVGPUCTRPERM)"
    attempt(way, lambda: way.update(bytes_of(done.stdout, done.stderr)))
    return None


def bytes_of(printed: str, errors: str = "") -> dict[str, Any]:
    """Bytes read, written and both, and the kernels, of what ncu printed as CSV.

    Raises:
        ValueError: it has no such metrics.
    """
    lines = printed.splitlines()
    start = next((i for i, line in enumerate(lines) if '"Metric Name"' in line), None)
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:])))) if start is not None else []
    found: dict[str, Any] = dict.fromkeys(METRICS.values(), 0)
    kernels: dict[str, str] = {}
    for row in rows:
        if row["Metric Name"] in METRICS:
            found[METRICS[row["Metric Name"]]] += round(float(row["Metric Value"].replace(",", "")))
            kernels[row["ID"]] = row["Kernel Name"]
    if not kernels:
        last = next((line for line in reversed((printed + errors).splitlines()) if line.strip()), "nothing")
        raise ValueError(f"ncu printed no {' and '.join(METRICS)}; its last line: {last[:200]}")
    return {**found, "moved_bytes": sum(found.values()), "kernels": list(kernels.values())}


def table(result: dict[str, Any]) -> str:
    """A line a size and way, its bytes as a multiple of the model's."""
    lines = [f"{'tokens':>8} {'way':<20} {'model, bytes':>14} {'read':>14} {'written':>14} {'to model':>9}  kernels"]
    for row in result["rows"]:
        for name, way in (row["ways"] or {"fused": {}, UNFUSED: {}}).items():
            model = row["model_bytes"]["unfused" if name == UNFUSED else "fused"]
            told = f"{'-':>14} {'-':>14} {'-':>9}  {way.get('error', '')}"
            if "moved_bytes" in way:
                told = f"{way['read_bytes']:>14,} {way['written_bytes']:>14,} {way['moved_bytes'] / model:8.2f} x"
                told += f"  {len(way['kernels'])}"
            lines.append(f"{row['tokens']:>8} {name:<20} {model:>14,} {told}".rstrip())
    if "unavailable" in result:
        lines.append(f"not measured: {result['unavailable']}")
    return "\n".join([*lines, in_short(result)])


if __name__ == "__main__":
    raise SystemExit(main())
