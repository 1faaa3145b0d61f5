"""Attention alone: Triton beside FlashInfer, beside scaled_dot_product_attention and a copy's bandwidth.

    python benchmarks/bench_attention.py [--tune] [--max-seconds 200] [--json FILE]

32 query and 8 KV heads of 128, bf16, blocks of 16 in random order, random data. A time is a layer's: a CUDA graph of 20
or more calls (store and attention) on the caches of as many layers, which are together larger than the L2 cache;
medians of replays, all ways in turn. `store_us` is the store alone; rates are those of Triton. SDPA reads the same
bytes without a block table, and stores nothing. Triton and FlashInfer are each compared with float64.
FlashInfer runs through our implementation of the split op, with what that adds: the same store, and zeros for padding.
Its kernels are compiled first, which takes minutes where its cache has none (`build_s`); a plan is made outside of what
is timed, and takes the host `plan_us` once a step. Where FlashInfer cannot run, its way says why (`passed_over`).
With --tune: the sizes of ops/triton/tuning.py are tried at the important shapes, and the best are printed.
On the CPU (--device cpu, TRITON_INTERPRET=1) it only shows that everything runs: tiny shapes, times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attention_flashinfer import Planned, build, plan_us
from attention_layers import Calls, Layers, Shape, dtype_on
from report import NOT_BEGUN, Deadline, attempt, conditions, errors_of, in_short, write_json
from timing import Clock, copy_bandwidth

from piecework.ops.triton.tuning import Tuning, pick_tuning

DECODE = [(batch, context) for context in (128, 512, 2048, 4096, 32768) for batch in (1, 32, 8, 128)]
PROMPTS = [(512, 0), (2048, 0), (4096, 0), (8192, 0), (512, 3584)]
"""(new tokens, cached tokens) of one request."""
TUNED_DECODE = [(1, 128), (1, 2048), (1, 32768), (32, 128), (32, 2048), (32, 32768), (128, 2048)]
TUNED_PROMPTS = [(512, 0), (4096, 0)]
ROUNDS, REPLAYS = 3, 5
MAX_RELATIVE_ERROR = 2e-2
"""A way farther from float64 is wrong: bf16 rounds to 4e-3."""


class Budget(Deadline):
    """A deadline that can be shared out."""

    def __init__(self, max_seconds: float) -> None:
        super().__init__(max_seconds)
        self._seconds = max_seconds

    def part(self, share: float) -> Budget:
        """A share of what is left of this one."""
        return Budget(max(0.0, self._seconds - self.passed) * share)


def captured(calls: Calls, clock: Clock) -> Callable[[int], list[float]]:
    """Returns what gives a call's microseconds, of so many replays of a graph of them all."""
    for call in calls[:2]:  # the first compiles, the second makes quick what can be
        call()
    clock.wait()
    if not clock.on_cuda:
        return lambda n: [ms * 1e3 for ms in clock.back_to_back(lambda i: calls[i % len(calls)](), n)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return lambda n: [ms * 1e3 / len(calls) for ms in clock.back_to_back(lambda i: graph.replay(), n)]


def time_in_turn(calls: Mapping[str, Calls], ways: Mapping[str, dict[str, Any]], clock: Clock) -> None:
    """Writes each way's microseconds. What cannot be captured or run says so, and the others go on."""
    steps = {name: attempt(ways[name], lambda each=each: captured(each, clock)) for name, each in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS if clock.on_cuda else 1):
        for name, step in steps.items():
            if "error" not in ways[name]:
                replays = REPLAYS if clock.on_cuda else 2
                times[name] += attempt(ways[name], lambda step=step, n=replays: step(n)) or []
    for name, us in times.items():
        if "error" not in ways[name]:
            ways[name] |= {"us": statistics.median(us), "us_min": min(us), "us_max": max(us)}


def measure(shape: Shape, device: torch.device, copy_bytes_per_s: float, built: dict[str, Any]) -> dict[str, Any]:
    """One row of the table. `built`: what is known of FlashInfer."""
    clock = Clock(device)
    if clock.on_cuda:
        gc.collect()
        torch.cuda.empty_cache()  # the row before had other sizes, and these may take a third of the memory
    row: dict[str, Any] = {**dataclasses.asdict(shape), "kv_bytes": shape.kv_bytes, "ways": {}}
    attempt(row, lambda: measure_ways(row, Layers(shape, device, 20), clock, built))
    triton, flashinfer = (row["ways"].get(name, {}) for name in ("triton", "flashinfer"))
    if "us" in triton and "store_us" in row:
        attend_us = max(triton["us"] - row["store_us"], 1e-3)
        row |= {"us": triton["us"], "gb_per_s": shape.kv_bytes / attend_us / 1e3}
        row["share_of_copy"] = row["gb_per_s"] * 1e9 / copy_bytes_per_s
        row["tflop_per_s"] = shape.flops / attend_us / 1e6
        if "sdpa_us" in row:
            row["speed_to_sdpa"] = row["sdpa_us"] / attend_us
    if "us" in triton and "us" in flashinfer:
        row["flashinfer_to_triton"] = flashinfer["us"] / triton["us"]
        row["faster"] = "triton" if row["flashinfer_to_triton"] >= 1 else "flashinfer"
    return row


def measure_ways(row: dict[str, Any], layers: Layers, clock: Clock, built: dict[str, Any]) -> None:
    """Triton and FlashInfer against float64; their times in turn, with those of the store and of SDPA."""
    row["layers"] = len(layers.qkv)
    beside: dict[str, dict[str, Any]] = {"store": {}, "sdpa": {}}
    calls = {"triton": layers.ours(), "store": layers.stores()}
    if not (layers.shape.new > 1 and layers.shape.cached):
        calls["sdpa"] = layers.sdpa()
    row["ways"] = ways = {"triton": {}, "flashinfer": {}}
    if "build_s" not in built:
        ways["flashinfer"]["passed_over"] = built["passed_over"]
    elif "error" in built:
        ways["flashinfer"]["passed_over"] = f"it was not built: {built['error']}"
    else:
        ways["flashinfer"]["plan_us"] = attempt(ways["flashinfer"], lambda: plan_us(layers))
        calls["flashinfer"] = Planned(layers).calls()
    calls["store"][0]()  # the reference reads the new tokens too
    reference = layers.reference()
    for name, way in ways.items():
        if name in calls and "error" not in way:
            attempt(way, lambda way=way, call=calls[name][0]: compare(way, layers.error(call, reference)))
    wanted = {name: each for name, each in calls.items() if "error" not in ways.get(name, {})}
    time_in_turn(wanted, {**ways, **beside}, clock)
    for name, found in beside.items():
        row |= {f"{name}_{key}": found[key] for key in ("us", "error") if key in found}


def compare(way: dict[str, Any], relative_error: float) -> None:
    """Raises: ValueError if a way computes something else."""
    way["relative_error"] = relative_error
    if not relative_error <= MAX_RELATIVE_ERROR:
        raise ValueError(f"differs from float64 by {relative_error:.2g} of their norm")


# ---- tuning


def row_tunings(plain: Tuning) -> Iterator[Tuning]:
    """What is tried for decode; what needs no other compile varies fastest."""
    for tile, warps, stages in [(t, w, s) for s in (3, 5, 7) for t, w in ((64, 4), (32, 4), (128, 4), (128, 8))]:
        for min_chunk, programs in itertools.product((64, 128, 256), (1, 2, 4)):
            yield dataclasses.replace(
                plain,
                row_tile=tile,
                row_warps=warps,
                row_stages=stages,
                row_lone_stages=stages,
                row_min_chunk=max(min_chunk, tile),
                row_programs_per_sm=programs,
            )


def tile_tunings(plain: Tuning) -> Iterator[Tuning]:
    """What is tried for prompts."""
    for stages, n, (m, warps) in itertools.product((3, 2, 5), (64, 128, 32), ((128, 8), (64, 4), (128, 4))):
        yield dataclasses.replace(plain, tile_m=m, tile_n=n, tile_warps=warps, tile_stages=stages)


def tune(shapes: list[Shape], tunings: list[Tuning], device: torch.device, deadline: Budget) -> list[dict[str, Any]]:
    """Microseconds of each tuning at each shape, the best by geometric mean of what it loses to each shape's best."""
    clock = Clock(device)
    tunings = list(dict.fromkeys(tunings))
    times: dict[Shape, dict[Tuning, float]] = {}
    for number, shape in enumerate(shapes):
        if clock.on_cuda:
            torch.cuda.empty_cache()
        layers = Layers(shape, device, 6)
        # The first shape compiles for all of them; each of the others gets its part of what is left then.
        share = deadline.part(0.6 if number == 0 else 1 / (len(shapes) - number))
        found = times.setdefault(shape, {})
        for tuning in tunings:
            if not share.has():
                break
            row: dict[str, Any] = {}
            us = attempt(row, lambda t=tuning, la=layers: statistics.median(captured(la.ours(t), clock)(4)))
            if us is not None:
                found[tuning] = us
        # What was far behind is not worth trying at the next shape, nor what failed.
        best = min(found.values(), default=math.inf)
        tunings = [tuning for tuning in tunings if found.get(tuning, math.inf) <= 1.5 * best]
        del layers
    return ranked(times)


def ranked(times: dict[Shape, dict[Tuning, float]]) -> list[dict[str, Any]]:
    """A row a tuning that was timed at every shape."""
    shapes = [shape for shape, found in times.items() if found]
    common = set.intersection(*(set(times[shape]) for shape in shapes)) if shapes else set()
    rows = []
    for tuning in common:
        lost = [times[shape][tuning] / min(times[shape].values()) for shape in shapes]
        row = {"tuning": dataclasses.asdict(tuning), "lost": math.exp(statistics.fmean(map(math.log, lost)))}
        row["us"] = {f"{s.num_reqs}x{s.new}+{s.cached}": times[s][tuning] for s in shapes}
        rows.append(row)
    return sorted(rows, key=lambda row: row["lost"])


# ---- the command


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-seconds", type=float, default=200.0, help="no row is begun after this")
    parser.add_argument("--tune", action="store_true", help="tries sizes instead; give it 400 s and more")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parsed = parser.parse_args(arguments)
    deadline = Budget(parsed.max_seconds)
    device = torch.device(parsed.device)
    command = ["python", "benchmarks/bench_attention.py", *(sys.argv[1:] if arguments is None else arguments)]
    result: dict[str, Any] = {**conditions(parsed.device), "command": " ".join(command)}
    work = tune_all if parsed.tune else measure_all
    for part in work(device, deadline):
        result = {**result, **part, "seconds": deadline.passed}
        write_json(parsed.json, result)
    print(in_short(result))
    failed = "error" in result.get("flashinfer", {}) or any(errors_of(row) for row in result.get("rows", []))
    return int(failed)


def shapes_of(device: torch.device, decode: list[tuple[int, int]], prompts: list[tuple[int, int]]) -> list[Shape]:
    if device.type != "cuda":
        tiny = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16}
        return [Shape(num_reqs=2, new=1, cached=39, **tiny), Shape(num_reqs=1, new=20, cached=0, **tiny)]
    return [
        *(Shape(num_reqs=batch, new=1, cached=context - 1) for batch, context in decode),
        *(Shape(num_reqs=1, new=new, cached=cached) for new, cached in prompts),
    ]


def measure_all(device: torch.device, deadline: Budget) -> Iterator[dict[str, Any]]:
    shapes = shapes_of(device, DECODE, PROMPTS)
    built = build(shapes[0], device)
    print("FlashInfer:", ", ".join(f"{key} {value}" for key, value in built.items()), flush=True)
    yield {"flashinfer": built, "rows": []}
    bandwidth = copy_bandwidth(device)
    rows: list[dict[str, Any]] = []
    print(f"a copy moves {bandwidth / 1e9:.0f} GB/s; microseconds, with the store; ratio: FlashInfer to Triton")
    heads = f"{'Triton':>9} {'FlashInfer':>10} {'ratio':>6} {'faster':>10} {'plan':>6}"
    print(
        f"{'requests x new + cached':>24} {heads} {'store':>6} {'GB/s':>6} {'of copy':>7} {'TFLOP/s':>7} {'to SDPA':>7}"
    )
    for shape in sorted(shapes, key=lambda shape: shape.kv_bytes):
        if deadline.has():
            row = measure(shape, device, bandwidth, built)
        else:
            row = {**dataclasses.asdict(shape), "ways": {}, "error": NOT_BEGUN}
        rows.append(row)
        print(f"{shape.name:>24} {line_of(row)}", flush=True)
        yield {"flashinfer": built, "copy_bytes_per_s": bandwidth, "rows": rows}


def line_of(row: dict[str, Any]) -> str:
    """A row in the columns of the table, and what went wrong behind them."""

    def shown(found: Mapping[str, Any], key: str, form: str, width: int) -> str:
        return f"{found[key]:{form}}".rjust(width) if found.get(key) is not None else "-".rjust(width)

    flashinfer = row["ways"].get("flashinfer", {})
    cells = [
        shown(row, "us", ".2f", 9),
        shown(flashinfer, "us", ".2f", 10),
        shown(row, "flashinfer_to_triton", ".2f", 6),
        shown(row, "faster", "", 10),
        shown(flashinfer, "plan_us", ".0f", 6),
        shown(row, "store_us", ".2f", 6),
        shown(row, "gb_per_s", ".0f", 6),
        shown(row, "share_of_copy", ".2f", 7),
        shown(row, "tflop_per_s", ".1f", 7),
        shown(row, "speed_to_sdpa", ".2f", 7),
    ]
    wrong = [f"{name}: {way['error']}" for name, way in row["ways"].items() if "error" in way]
    return " ".join([*cells, *([row["error"]] if "error" in row else []), *wrong])


def tune_all(device: torch.device, deadline: Budget) -> Iterator[dict[str, Any]]:
    shapes = shapes_of(device, TUNED_DECODE, TUNED_PROMPTS)
    plain = pick_tuning(dtype_on(device), shapes[0].head_size, shapes[0].num_heads // shapes[0].num_kv_heads)
    parts = {"row": (row_tunings(plain), 0.65), "tile": (tile_tunings(plain), 1.0)}
    tuned: dict[str, Any] = {}
    for kind, (tunings, share) in parts.items():
        chosen = [shape for shape in shapes if (shape.new > 1) == (kind == "tile")]
        tried = [plain, *tunings] if device.type == "cuda" else [plain]
        tuned[kind] = tune(chosen, tried, device, deadline.part(share))
        for row in tuned[kind][:12]:
            sizes = {key: value for key, value in row["tuning"].items() if key.startswith(kind)}
            print(f"{row['lost']:.3f} x", {n: round(us, 2) for n, us in row["us"].items()}, sizes, flush=True)
        yield {"tuned": tuned, "plain": dataclasses.asdict(plain)}


if __name__ == "__main__":
    raise SystemExit(main())
