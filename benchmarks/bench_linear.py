"""The linears of Llama-3-8B for few rows: cuBLAS beside our Triton kernels, and how near both are to a copy.

    python benchmarks/bench_linear.py [--tune] [--max-seconds 150] [--json FILE]

bf16, random data (never zeros). A time is a call's: a CUDA graph of calls on a ring of weights that is together larger
than the L2 cache, so that each call reads its weights from memory; medians of replays. `of copy` is the share of a
copy's bandwidth that reading the weights once reaches. A GPU without `--tune` measures what ops/triton/linear_table.py
picks; with it, sizes are tried at each shape and number of rows, and the best are printed, or None where torch's own
linear is as good.
On the CPU (--device cpu, TRITON_INTERPRET=1) it only shows that everything runs: a tiny shape, times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from report import NOT_BEGUN, Deadline, attempt, conditions, errors_of, in_short, write_json
from timing import Clock, copy_bandwidth
from torch.nn import functional as F

from piecework.ops.triton.linear_plan import multiply
from piecework.ops.triton.linear_table import MAX_LOOPED_ROWS, MAX_SPLIT_BLOCKS, LinearTuning, pick_tuning

COLD_BYTES = 400 << 20
"""Of the ring of weights: several times the L2 cache of an H200, for it keeps what it likes."""
LLAMA = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
"""Name -> out_features, in_features."""
TINY = {"tiny": (40, 96)}
ROWS = (1, 2, 3, 4, 8, 16)
WORTH = 0.99
"""Ours has to take at most this share of cuBLAS's time to be printed as the better one."""
MAX_ERROR = 2e-2


class Ring:
    """Weights of one shape, as many as make the L2 cache cold, and rows for them."""

    def __init__(self, out_features: int, in_features: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        count = max(4, -(-COLD_BYTES // (2 * out_features * in_features))) if on_cuda else 2
        shape = (out_features, in_features)
        weights = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(count)]
        self.weights = [weight.mul_(in_features**-0.5) for weight in weights]
        self.in_features, self.device = in_features, device

    def rows(self, num_rows: int) -> torch.Tensor:
        """[num_rows, in_features], of a size at which results are about 1."""
        return torch.randn(num_rows, self.in_features, device=self.device, dtype=torch.bfloat16)

    def calls(self, call: Callable[[torch.Tensor], Any]) -> list[Callable[[], Any]]:
        """A call on each weight; at least 20, so that what a replay costs does not count."""
        rounds = max(1, -(-20 // len(self.weights))) if self.device.type == "cuda" else 1
        return [lambda w=weight: call(w) for weight in self.weights * rounds]


def captured_us(calls: list[Callable[[], Any]], clock: Clock, replays: int) -> float:
    """Microseconds of one call, by replays of a graph of them all."""
    for call in calls[:2]:  # the first compiles, the second makes quick what can be
        call()
    clock.wait()
    if not clock.on_cuda:
        return statistics.median(clock.back_to_back(lambda i: calls[i % len(calls)](), 2)) * 1e3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = clock.back_to_back(lambda i: graph.replay(), replays)
    return statistics.median(times) * 1e3 / len(calls)


def ours(x: torch.Tensor, weight: torch.Tensor, tuning: LinearTuning | None = None) -> torch.Tensor:
    """Raises: ValueError where torch's own linear would be called."""
    result = multiply(x, weight, None, tuning=tuning)
    if result is None:
        raise ValueError("the table leaves it to torch's own linear")
    return result


def measure(name: str, ring: Ring, num_rows: int, bandwidth: float, replays: int) -> dict[str, Any]:
    """One row of the table."""
    weight, x, clock = ring.weights[0], ring.rows(num_rows), Clock(ring.device)
    out_features, in_features = weight.shape
    row: dict[str, Any] = {"linear": name, "num_rows": num_rows, "weight_bytes": weight.nbytes, "ways": {}}
    row |= {"out_features": out_features, "in_features": in_features, "weights": len(ring.weights)}
    expected = F.linear(x.double(), weight[:4096].double())
    for way, call in {"torch": F.linear, "triton": ours}.items():
        found = row["ways"][way] = {}
        us = attempt(found, lambda c=call: captured_us(ring.calls(lambda w: c(x, w)), clock, replays))
        if us is None:
            continue
        difference = (call(x, weight)[:, :4096].double() - expected).norm() / expected.norm()
        found |= {"us": us, "share_of_copy": weight.nbytes / us * 1e6 / bandwidth}
        found["relative_error"] = difference.item()
        if not found["relative_error"] < MAX_ERROR:
            found["error"] = f"differs from float64 by {found['relative_error']:.2g} of its norm"
    return row


# ---- tuning


def tunings(num_rows: int, out_features: int, in_features: int, num_sms: int) -> Iterator[LinearTuning]:
    """What is tried: the table's own first."""
    plain = pick_tuning(num_rows, out_features, in_features, num_sms)
    if plain is not None:
        yield plain
    if num_rows <= MAX_LOOPED_ROWS:
        for block_n, block_k, warps, unroll in itertools.product((1, 2, 4), (1024, 2048, 4096), (4, 8), (1, 2)):
            if num_rows * block_n * block_k <= 64 * 32 * warps and block_n * block_k >= 8 * 32 * warps:
                yield LinearTuning(uses_tiles=False, block_n=block_n, block_k=block_k, num_warps=warps, unroll=unroll)
    if num_rows > 1:
        sizes = itertools.product((16, 32, 64), (128, 256), (4,), (4, 6), (1, 2, 4, 8))
        for block_n, block_k, warps, stages, splits in sizes:
            num_blocks = -(-out_features // block_n)
            is_sensible = splits == 1 or (num_blocks <= MAX_SPLIT_BLOCKS and num_blocks * splits <= 8 * num_sms)
            if is_sensible and 2 * (block_n + 16) * block_k * stages <= 200 << 10:
                yield LinearTuning(
                    uses_tiles=True,
                    block_n=block_n,
                    block_k=block_k,
                    num_warps=warps,
                    num_stages=stages,
                    splits=splits,
                )


def tune(row: dict[str, Any], ring: Ring, seconds: float) -> None:
    """Tries sizes for a row and writes the best; only as many as there is time for."""
    clock, deadline = Clock(ring.device), Deadline(seconds)
    num_rows, shape = row["num_rows"], (row["out_features"], row["in_features"])
    x = ring.rows(num_rows)
    num_sms = torch.cuda.get_device_properties(ring.device).multi_processor_count if clock.on_cuda else 4
    tried = list(dict.fromkeys(tunings(num_rows, *shape, num_sms)))
    times: dict[LinearTuning, float] = {}
    for tuning in tried if clock.on_cuda else tried[:2]:
        if times and not deadline.has():
            break
        failed: dict[str, Any] = {}
        us = attempt(failed, lambda t=tuning: captured_us(ring.calls(lambda w: ours(x, w, t)), clock, 5))
        if us is not None:
            times[tuning] = us
    ranked = sorted(times, key=lambda tuning: times[tuning])
    row["tried"], row["of"] = len(times), len(tried)
    row["best"] = [{"us": times[tuning], **dataclasses.asdict(tuning)} for tuning in ranked[:5]]
    torch_us = row["ways"]["torch"].get("us", float("inf"))
    if ranked:
        best = repr(ranked[0]) if times[ranked[0]] <= WORTH * torch_us else "None"
        times_us = f"{times[ranked[0]]:.2f} us, torch {torch_us:.2f} us, {len(times)} of {len(tried)} tried"
        print(f"    {(*shape, num_rows)}: {best},  # {times_us}", flush=True)


# ---- the command


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-seconds", type=float, default=150.0, help="no row is begun after this")
    parser.add_argument("--tune", action="store_true", help="tries sizes too; give it 500 s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parsed = parser.parse_args(arguments)
    deadline = Deadline(parsed.max_seconds)
    device = torch.device(parsed.device)
    command = ["python", "benchmarks/bench_linear.py", *(sys.argv[1:] if arguments is None else arguments)]
    result: dict[str, Any] = {**conditions(parsed.device), "command": " ".join(command)}
    bandwidth = copy_bandwidth(device)
    print(f"a copy moves {bandwidth / 1e9:.0f} GB/s")
    print(f"{'linear':>8} {'rows':>5} {'torch us':>9} {'triton us':>10} {'of copy':>8} {'of copy':>8}")
    rows: list[dict[str, Any]] = []
    for row in measure_all(device, bandwidth, deadline, parsed):
        rows.append(row)
        result |= {"copy_bytes_per_s": bandwidth, "rows": rows, "seconds": deadline.passed}
        write_json(parsed.json, result)
    print(in_short(result))
    return 0 if not any(errors_of(row) for row in rows) else 1


def measure_all(
    device: torch.device, bandwidth: float, deadline: Deadline, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    shapes = LLAMA if device.type == "cuda" else TINY
    num_left = len(shapes) * len(ROWS)
    for name, shape in shapes.items():
        ring = Ring(*shape, device) if deadline.has() else None
        for num_rows in ROWS:
            if ring is None or not deadline.has():
                yield {"linear": name, "num_rows": num_rows, "ways": {}, "error": NOT_BEGUN}
                continue
            row = measure(name, ring, num_rows, bandwidth, 20)
            ways = [row["ways"][way] for way in ("torch", "triton")]
            times = [f"{way['us']:.2f}" if "us" in way else "failed" for way in ways]
            shares = [f"{way['share_of_copy']:.3f}" if "us" in way else "-" for way in ways]
            print(f"{name:>8} {num_rows:>5} {times[0]:>9} {times[1]:>10} {shares[0]:>8} {shares[1]:>8}", flush=True)
            if options.tune:
                tune(row, ring, (options.max_seconds - deadline.passed) / num_left)
            num_left -= 1
            yield row
        del ring
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(main())
