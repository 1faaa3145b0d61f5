"""What captures cost and give: seconds and bytes for each bucket, and a decode step's time by replay and uncaptured.

    python benchmarks/bench_capture.py [--device cuda] [--layers 32] [--json FILE]

A decoder of Llama-3-8B's shape in bf16 (on the CPU a tiny one, on the tape), random weights, our paged attention, 512
tokens a request. For each way of capturing: the default decode ladder appears in random order, where on CUDA the
runtime captures the largest bucket before the first that comes; then everything is captured anew, the largest first.
"arrival" is the pool of a runtime that may not do that, for want of an example context.
Steps of all ways and of the uncaptured eager forward, median of CUDA events.
A way that fails, or for which no time is left, is a row that says so.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from llama import BLOCK_SIZE, Llama
from report import NOT_BEGUN, Deadline, attempt, conditions, count, in_short, write_json
from timing import Clock

import piecework as pw
from piecework.ops.attention import AttentionContext

WAYS = (
    ("full", "eager"),
    ("tc_piecewise", "aot_eager"),
    ("full", "inductor"),
    ("tc_piecewise", "inductor"),
    ("breakable", "eager"),
)
MIB = 1 << 20


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=count, help="default: 32, on the CPU 2")
    parser.add_argument("--max-seconds", type=float, default=130.0, help="no way is begun after this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parsed = parser.parse_args(arguments)
    deadline = Deadline(parsed.max_seconds)
    bench = Bench(parsed.device, parsed.layers)
    command = ["python", "benchmarks/bench_capture.py", *(sys.argv[1:] if arguments is None else arguments)]
    about = {**conditions(parsed.device), "command": " ".join(command)}
    result: dict[str, Any] = {}
    for measured in bench.measure(deadline):
        result = {**measured, **about, "seconds": deadline.passed}
        write_json(parsed.json, result)
    print(table(result))
    return 0 if all("error" not in way for way in result["ways"]) else 1


class Bench:
    """One model and its KV cache; every way runs on them."""

    def __init__(self, device: str, num_layers: int | None) -> None:
        self.device = torch.device(device)
        self.on_cuda = self.device.type == "cuda"
        self.num_layers = num_layers or (32 if self.on_cuda else 2)
        self.dtype = torch.bfloat16 if self.on_cuda else torch.float32
        self.seq_len = 512 if self.on_cuda else 32
        self.timed_sizes = (1, 64) if self.on_cuda else (1, 4)
        self.max_num_reqs = 256 if self.on_cuda else 8
        self.repeat = 100 if self.on_cuda else 3
        self.clock = Clock(self.device)
        self.llama = Llama(
            self.device,
            self.dtype,
            num_layers=self.num_layers,
            shape="8b" if self.on_cuda else "tiny",
            num_blocks=self.max_num_reqs + self.timed_sizes[-1] * self.blocks_per_request,
        )

    @property
    def blocks_per_request(self) -> int:
        return -(-self.seq_len // BLOCK_SIZE)

    def step(self, num_reqs: int, seq_len: int) -> tuple[dict[str, torch.Tensor], AttentionContext]:
        """A decode step of requests of one length, each with blocks of its own."""
        return self.llama.decode_step(num_reqs, seq_len)

    def runtime(self, backend: str, compiler: str, *, largest_first: bool = True) -> pw.Runtime:
        decode: dict[str, Any] = {"backend": backend, "compiler": compiler, "max_num_tokens": self.max_num_reqs}
        if not self.on_cuda:
            decode = {**decode, "buckets": (1, 2, 4, 8)}
        return pw.Runtime(
            self.llama.decoder,
            pw.GraphConfig(
                prefill={"backend": "disabled"}, decode=decode, capture_device="cuda" if self.on_cuda else "tape"
            ),
            dynamic_dims={"input_ids": 0, "positions": 0},
            context_sizes={"requests": self.max_num_reqs, "blocks": self.blocks_per_request},
            example_context=self.step(0, 1)[1] if largest_first else None,
        )

    def measure(self, deadline: Deadline) -> Iterator[dict[str, Any]]:
        """The result so far, after each way."""
        with self.runtime("disabled", "eager") as runtime:
            uncaptured = self.step_ms(runtime, repeat=max(3, self.repeat // 4))
        ways: list[dict[str, Any]] = []
        result = {
            "layers": self.num_layers,
            "dtype": str(self.dtype).removeprefix("torch."),
            "seq_len": self.seq_len,
            "uncaptured_step_ms": uncaptured,
            "ways": ways,
        }
        for backend, compiler in WAYS if self.on_cuda else WAYS[:2]:
            way: dict[str, Any] = {"backend": backend, "compiler": compiler}
            ways.append(way)
            if deadline.has():
                attempt(way, lambda way=way: self.measure_way(way))
            else:
                way["error"] = NOT_BEGUN
            yield result

    def measure_way(self, way: dict[str, Any]) -> None:
        """Writes what one way costs and gives to its row."""
        with self.runtime(way["backend"], way["compiler"]) as runtime:
            way |= self.way(runtime)
        if way["compiler"] != "inductor":  # the same allocations again, for another minute of compiling
            with self.runtime(way["backend"], way["compiler"], largest_first=False) as runtime:
                self.arrive(runtime)
                way["pool_bytes_arrival"] = runtime.explain().as_dict()["memory"]["pool_bytes"]

    def way(self, runtime: pw.Runtime) -> dict[str, Any]:
        """One way of capturing."""
        started = time.monotonic()
        captures = self.arrive(runtime)
        random_bytes = runtime.explain().as_dict()["memory"]
        capture_ms = [event.seconds * 1e3 for event in captures]
        compact_started = time.monotonic()
        runtime.compact()
        compact_s = time.monotonic() - compact_started
        largest_first = runtime.explain().as_dict()["memory"]
        return {
            "buckets": len(captures),
            "segments": captures[0].detail["segments"],
            "capture_ms_median": statistics.median(capture_ms),
            "capture_ms_max": max(capture_ms),
            "capture_ms_first": capture_ms[0],
            "entry_bytes": {str(event.scope.bucket): event.detail["bytes"] for event in captures},
            "pool_bytes_random": random_bytes["pool_bytes"],
            "pool_bytes_largest_first": largest_first["pool_bytes"],
            "pool_ratio": random_bytes["pool_bytes"] / max(1, largest_first["pool_bytes"]),
            "buffer_bytes": random_bytes["buffer_bytes"],
            "compact_s": compact_s,
            "compact_ms_a_capture": compact_s * 1e3 / len(captures),
            "step_ms": self.step_ms(runtime, repeat=self.repeat),
            "seconds": time.monotonic() - started,
        }

    def arrive(self, runtime: pw.Runtime) -> list[Any]:
        """Runs a step of each bucket, in random order; returns the events of their captures."""
        buckets = list(runtime.resolved.ladders[pw.Phase.DECODE].buckets)
        for bucket in random.Random(1).sample(buckets, len(buckets)):
            inputs, context = self.step(bucket, 1)
            runtime.run("decode", inputs, context=context)
        captures = [event for event in runtime.events if event.kind == "capture"]
        if len(captures) != len(buckets):
            raise RuntimeError(f"{len(buckets)} buckets, {len(captures)} captures: {runtime.counters['fallbacks']}")
        return captures

    def step_ms(self, runtime: pw.Runtime, repeat: int) -> dict[str, float]:
        """Number of requests -> the median time of a step, everything of the runtime included."""
        result = {}
        for num_reqs in self.timed_sizes:
            inputs, context = self.step(num_reqs, self.seq_len)
            call = functools.partial(runtime.run, "decode", inputs, context=context)
            for _ in range(3):
                call()
            result[str(num_reqs)] = statistics.median(self.clock.back_to_back(lambda i, c=call: c(), repeat))
        return result


def table(result: dict[str, Any]) -> str:
    """A short table."""
    sizes = list(result["uncaptured_step_ms"])
    steps = "".join(f"  step at {size:>3}" for size in sizes)
    lines = [f"{'':<24} ms/bucket   max  segm.  pool MiB  sorted  ratio  arrival{steps}"]
    lines.append(f"{'uncaptured eager':<24}{'':>55}" + _steps(result["uncaptured_step_ms"]))
    for way in result["ways"]:
        name = f"{way['backend']}, {way['compiler']}"
        if "error" in way:
            lines.append(f"{name:<24} {way['error']}")
            continue
        lines.append(
            f"{name:<24}{way['capture_ms_median']:>10.1f}{way['capture_ms_max']:>7.1f}{way['segments']:>6}"
            f"{way['pool_bytes_random'] / MIB:>10.1f}{way['pool_bytes_largest_first'] / MIB:>8.1f}"
            f"{way['pool_ratio']:>6.2f}{way.get('pool_bytes_arrival', float('nan')) / MIB:>9.1f}"
            + _steps(way["step_ms"])
        )
    lines.append(
        f"{result['layers']} layers, {result['dtype']}, {result['seq_len']} tokens a request; steps in ms, medians; "
        f"pool in random order of arrival and the largest first; {in_short(result)}"
    )
    return "\n".join(lines)


def _steps(step_ms: dict[str, float]) -> str:
    return "".join(f"{ms:>13.3f}" for ms in step_ms.values())


if __name__ == "__main__":
    raise SystemExit(main())
