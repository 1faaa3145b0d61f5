"""The Triton attention kernels alone: decode and prompts, beside scaled_dot_product_attention and a copy's bandwidth.

    python benchmarks/bench_attention.py [--tune] [--max-seconds 100] [--json FILE]

32 query and 8 KV heads of 128, bf16, blocks of 16 in random order, random data. A time is a layer's: a CUDA graph of 20
or more calls (store and attention) on the caches of as many layers, which are together larger than the L2 cache;
medians of replays. `store_us` is the store alone. SDPA reads the same bytes without a block table, and stores nothing.
With --tune: the sizes of ops/triton/tuning.py are tried at the important shapes, and the best are printed.
On the CPU (--device cpu, TRITON_INTERPRET=1) it only shows that everything runs: tiny shapes, times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from report import NOT_BEGUN, Deadline, attempt, conditions, in_short, write_json
from timing import Clock, copy_bandwidth

from piecework.ops.attention import AttentionContext
from piecework.ops.triton.kv_store import store
from piecework.ops.triton.paged_attention import prepare
from piecework.ops.triton.tuning import Tuning, pick_tuning

BLOCK_SIZE = 16
COLD_BYTES = 160 << 20
"""Caches of all layers: three times the L2 cache of an H200."""
MAX_BYTES = 48 << 30
MAX_CHECKED_BYTES = 4 << 30
DECODE = [(batch, context) for context in (128, 2048, 32768) for batch in (1, 32, 8, 128)]
PROMPTS = [(512, 0), (2048, 0), (4096, 0), (512, 3584)]
"""(new tokens, cached tokens) of one request."""
TUNED_DECODE = [(1, 128), (1, 2048), (1, 32768), (32, 128), (32, 2048), (32, 32768), (128, 2048)]
TUNED_PROMPTS = [(512, 0), (4096, 0)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a row: one step."""

    num_reqs: int
    new: int
    cached: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128

    @property
    def length(self) -> int:
        return self.new + self.cached

    @property
    def kv_bytes(self) -> int:
        return 2 * 2 * self.num_reqs * self.length * self.num_kv_heads * self.head_size

    @property
    def flops(self) -> int:
        seen = self.new * self.cached + self.new * (self.new + 1) // 2
        return 4 * self.num_reqs * self.num_heads * self.head_size * seen


class Budget(Deadline):
    """A deadline that can be shared out."""

    def __init__(self, max_seconds: float) -> None:
        super().__init__(max_seconds)
        self._seconds = max_seconds

    def part(self, share: float) -> Budget:
        """A share of what is left of this one."""
        return Budget(max(0.0, self._seconds - self.passed) * share)


class Layers:
    """Tensors of one step in as many layers as make the L2 cache cold."""

    def __init__(self, shape: Shape, device: torch.device, at_least: int) -> None:
        self.shape, self.device = shape, device
        num_blocks = -(-shape.length // BLOCK_SIZE)
        cold = -(-COLD_BYTES // shape.kv_bytes)
        count = min(max(at_least, min(cold, 160)), max(1, MAX_BYTES // shape.kv_bytes)) if device.type == "cuda" else 2
        order = torch.randperm(shape.num_reqs * num_blocks).view(shape.num_reqs, num_blocks).tolist()
        own = AttentionContext.build(
            query_lens=[shape.new] * shape.num_reqs,
            seq_lens=[shape.length] * shape.num_reqs,
            block_tables=order,
            block_size=BLOCK_SIZE,
            device=device,
        )
        # A decode step is captured with the static copy, a prompt is not.
        self.context = own.as_static({}) if shape.new == 1 else own
        rows = shape.num_reqs * shape.new
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        heads = shape.num_heads + 2 * shape.num_kv_heads
        projections = torch.randn(count, rows, heads, shape.head_size, device=device, dtype=dtype)
        self.qkv = [p.split([shape.num_heads, *[shape.num_kv_heads] * 2], 1) for p in projections]
        cache = (shape.num_reqs * num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_size)
        self.caches = [torch.randn(2, *cache, device=device, dtype=dtype).unbind() for _ in range(count)]
        self.outs = [torch.empty(rows, shape.num_heads, shape.head_size, device=device, dtype=dtype) for _ in self.qkv]

    def ours(self, tuning: Tuning | None = None) -> list[Callable[[], Any]]:
        """A call a layer."""
        # A context of its own: the memory of another tuning's splits goes away with it.
        context = dataclasses.replace(self.context, scratch={})
        calls = [
            prepare(*qkv, *caches, out, self.shape.head_size**-0.5, 0, _tuning=tuning)
            for qkv, caches, out in zip(self.qkv, self.caches, self.outs, strict=True)
        ]
        return [lambda call=call: call(context) for call in calls]

    def stores(self) -> list[Callable[[], Any]]:
        slots = self.context.slot_mapping
        return [lambda kv=kv, c=c: store(*kv, *c, slots) for (_, *kv), c in zip(self.qkv, self.caches, strict=True)]

    def sdpa(self) -> list[Callable[[], Any]]:
        """The same bytes in the order in which they lie. Without a cached prefix, or for one new token."""
        shape = self.shape
        calls: list[Callable[[], Any]] = []
        for (q, *_), caches in zip(self.qkv, self.caches, strict=True):
            query = q.view(shape.num_reqs, shape.new, *q.shape[1:]).transpose(1, 2)
            key, value = (self._in_order(cache) for cache in caches)
            calls.append(lambda q=query, k=key, v=value: self._attend(q, k, v))
        return calls

    def error(self) -> float:
        """Of the first layer's output, by relative norm, against SDPA on the gathered blocks."""
        shape = self.shape
        blocks = self.context.block_table.flatten().long()
        key, value = (self._in_order(cache[blocks]) for cache in self.caches[0])
        query = self.qkv[0][0].view(shape.num_reqs, shape.new, shape.num_heads, shape.head_size).transpose(1, 2)
        want = self._attend(query, key, value).transpose(1, 2).flatten(0, 1).double()
        return float((self.outs[0].double() - want).norm() / want.norm())

    def _in_order(self, cache: torch.Tensor) -> torch.Tensor:
        by_request = cache.view(self.shape.num_reqs, -1, *cache.shape[2:])
        return by_request[:, : self.shape.length].transpose(1, 2)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        is_causal = self.shape.new > 1
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


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


def measure(shape: Shape, device: torch.device, copy_bytes_per_s: float, replays: int) -> dict[str, Any]:
    """One row of the table."""
    clock = Clock(device)
    if clock.on_cuda:
        torch.cuda.empty_cache()  # the row before had other sizes, and these may take a third of the memory
    row: dict[str, Any] = {**dataclasses.asdict(shape), "kv_bytes": shape.kv_bytes}
    layers = attempt(row, lambda: Layers(shape, device, 20))
    if layers is None:
        return row
    row["layers"] = len(layers.qkv)
    us = attempt(row, lambda: captured_us(layers.ours(), clock, replays))
    store_us = attempt(row, lambda: captured_us(layers.stores(), clock, replays))
    if us is None or store_us is None:
        return row
    attend_us = max(us - store_us, 1e-3)
    row |= {"us": us, "store_us": store_us, "gb_per_s": shape.kv_bytes / attend_us / 1e3}
    row["share_of_copy"] = row["gb_per_s"] * 1e9 / copy_bytes_per_s
    row["tflop_per_s"] = shape.flops / attend_us / 1e6
    if shape.new > 1 and shape.cached:
        return row
    if shape.kv_bytes <= MAX_CHECKED_BYTES:
        row["relative_error"] = layers.error()
        if not row["relative_error"] < 2e-2:
            row["error"] = f"differs from SDPA by {row['relative_error']:.2g} of its norm"
    baseline: dict[str, Any] = {}
    row["sdpa_us"] = attempt(baseline, lambda: captured_us(layers.sdpa(), clock, replays))
    if row["sdpa_us"] is not None:
        row["speed_to_sdpa"] = row["sdpa_us"] / attend_us
    return row | ({"sdpa_error": baseline["error"]} if baseline else {})


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
            us = attempt(row, lambda t=tuning, la=layers: captured_us(la.ours(t), clock, 4))
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
    parser.add_argument("--max-seconds", type=float, default=100.0, help="no row is begun after this")
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
    return 0 if not any("error" in row for row in result.get("rows", [])) else 1


def shapes_of(device: torch.device, decode: list[tuple[int, int]], prompts: list[tuple[int, int]]) -> list[Shape]:
    if device.type != "cuda":
        tiny = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16}
        return [Shape(num_reqs=2, new=1, cached=39, **tiny), Shape(num_reqs=1, new=20, cached=0, **tiny)]
    return [
        *(Shape(num_reqs=batch, new=1, cached=context - 1) for batch, context in decode),
        *(Shape(num_reqs=1, new=new, cached=cached) for new, cached in prompts),
    ]


def measure_all(device: torch.device, deadline: Budget) -> Iterator[dict[str, Any]]:
    bandwidth = copy_bandwidth(device)
    rows: list[dict[str, Any]] = []
    shapes = shapes_of(device, DECODE, PROMPTS)
    print(f"a copy moves {bandwidth / 1e9:.0f} GB/s")
    heads = f"{'us':>9} {'store':>7} {'GB/s':>7} {'of copy':>8} {'TFLOP/s':>8} {'to SDPA':>8}"
    print(f"{'requests x new + cached':>24} {heads}")
    for shape in sorted(shapes, key=lambda shape: shape.kv_bytes):
        has_time = deadline.has()
        name = f"{shape.num_reqs} x {shape.new} + {shape.cached}"
        row = measure(shape, device, bandwidth, 9) if has_time else {**dataclasses.asdict(shape), "error": NOT_BEGUN}
        rows.append(row)
        if "us" in row:
            to_sdpa = f"{row['speed_to_sdpa']:.2f} x" if "speed_to_sdpa" in row else "-"
            rates = f"{row['gb_per_s']:7.0f} {row['share_of_copy']:8.2f} {row['tflop_per_s']:8.1f} {to_sdpa:>8}"
            print(f"{name:>24} {row['us']:9.2f} {row['store_us']:7.2f} {rates} {row.get('error', '')}", flush=True)
        else:
            print(f"{name:>24} {row['error']}", flush=True)
        yield {"copy_bytes_per_s": bandwidth, "rows": rows}


def tune_all(device: torch.device, deadline: Budget) -> Iterator[dict[str, Any]]:
    shapes = shapes_of(device, TUNED_DECODE, TUNED_PROMPTS)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plain = pick_tuning(dtype, shapes[0].head_size, shapes[0].num_heads // shapes[0].num_kv_heads)
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
