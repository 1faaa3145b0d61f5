"""A decode step: ours, uncaptured and by replay, plain PyTorch, plain torch.compile, and the floor of the bytes read.

    python benchmarks/bench_decode.py [--device cuda] [--rows 1x128,32x128] [--max-seconds 420] [--json FILE]

A decoder of Llama-3-8B's shape in bf16 (on the CPU a tiny one, on the tape), random weights. A row is a number of
requests of one length, their new token counted: `8x2048`. A step is everything from token ids to the logits of each
request, in the weights' dtype; inputs and contexts are on the device before it, four of them in turn, and nothing is
sampled. All ways of a row run in turn in one process, several rounds: medians.

`step_ms` is a step by the device's clock when steps follow each other, `wall_ms` by the host's when it waits after
each. The plain baselines (plain_model.py) share our weights; their caches are as long as the requests, which spares
them a mask. The floor is weights and KV bytes over the bandwidth of a large copy, measured in the same run. Each way's
logits are compared with plain eager PyTorch's: `relative_error`. `to_floor` and `to_compiled` are multiples. Rows of
32,768 tokens, at the end, are ours against the floor; there, later layers share the caches of earlier ones
(`distinct_caches`): 32 do not fit the memory.
A way that fails, or for which no time is left, says so in its row.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from llama import BLOCK_SIZE, Llama, WithHead
from plain_model import PlainModel
from report import (
    NOT_BEGUN,
    Deadline,
    attempt,
    compare,
    conditions,
    count,
    errors_of,
    in_short,
    inductor_cache,
    write_json,
)
from timing import Call, Clock, copy_bandwidth
from torch._dynamo.utils import counters as dynamo_counters

import piecework as pw

PLAIN, COMPILED = "plain eager", "plain torch.compile"
NUM_INPUTS = 4
ROUNDS = 3
SHORT_ROWS = ((1, 128), (32, 128), (8, 128), (128, 128), (1, 2048), (32, 2048), (8, 2048), (128, 2048))
LONG_ROWS = ((1, 32768), (32, 32768))
LONG_S = 60.0
"""Seconds that are kept for the long rows."""
LONG_CACHE_BYTES = 72 << 30


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=count, help="default: 32, on the CPU 2")
    parser.add_argument(
        "--rows", type=rows_of, help="requests x tokens, with commas; default: all, on the CPU tiny ones"
    )
    parser.add_argument("--max-seconds", type=float, default=420.0, help="no row is begun after this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parsed = parser.parse_args(arguments)
    deadline = Deadline(parsed.max_seconds)
    command = ["python", "benchmarks/bench_decode.py", *(sys.argv[1:] if arguments is None else arguments)]
    about = {**conditions(parsed.device), "command": " ".join(command)}
    result: dict[str, Any] = {}
    with inductor_cache():
        bench = Bench(parsed.device, parsed.layers, parsed.rows)
        for measured in bench.measure(deadline):
            result = {**measured, **about, "seconds": deadline.passed}
            write_json(parsed.json, result)
    print(table(result))
    return 0 if not any(errors_of(row) for row in result["rows"]) else 1


def rows_of(text: str) -> tuple[tuple[int, int], ...]:
    """`1x128,32x128` as pairs. Raises: argparse.ArgumentTypeError: it is something else."""
    pairs = [pair.split("x") for pair in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"expected requests x tokens with commas, such as 1x128,32x128, got {text!r}")
    return tuple((count(batch), count(context)) for batch, context in pairs)


class Bench:
    """One model; every way runs on it."""

    def __init__(self, device: str, num_layers: int | None, rows: tuple[tuple[int, int], ...] | None) -> None:
        self.device = torch.device(device)
        self.on_cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_cuda else torch.float32
        self.num_layers = num_layers or (32 if self.on_cuda else 2)
        self.compiler = "inductor" if self.on_cuda else "aot_eager"
        every = rows or ((*SHORT_ROWS, *LONG_ROWS) if self.on_cuda else ((1, 16), (2, 32), (2, 64)))
        longest = LONG_ROWS[0][1] if self.on_cuda else 64
        self.short = [row for row in every if row[1] < longest]
        self.long = [row for row in every if row[1] >= longest]
        self.clock = Clock(self.device)
        self.bandwidth = copy_bandwidth(self.device)
        num_blocks = max((batch * blocks_of(context) for batch, context in self.short), default=1)
        shape = "8b" if self.on_cuda else "tiny"
        self.llama = Llama(self.device, self.dtype, num_layers=self.num_layers, shape=shape, num_blocks=num_blocks)
        self.model = WithHead(self.llama.decoder)
        self.ways = {
            "uncaptured eager": ("disabled", "eager"),
            "uncaptured general": ("disabled", self.compiler),
            f"full, {self.compiler}": ("full", self.compiler),
            f"tc_piecewise, {self.compiler}": ("tc_piecewise", self.compiler),
            "full, eager": ("full", "eager"),
            "breakable, eager": ("breakable", "eager"),
        }
        self.rows_at_hand = self.short
        """Those that the runtimes and the caches have room for."""
        self.runtimes: dict[str, pw.Runtime] = {}

    def measure(self, deadline: Deadline) -> Iterator[dict[str, Any]]:
        """The result so far, after each row."""
        rows: list[dict[str, Any]] = []
        result = {
            "layers": self.num_layers,
            "dtype": str(self.dtype).removeprefix("torch."),
            "with_logits": True,
            "weight_bytes": self.llama.weight_bytes,
            "copy_bytes_per_s": self.bandwidth,
            "rounds": ROUNDS,
            "rows": rows,
        }
        yield result
        for batch, context in self.short:
            rows.append(row := self.row(batch, context))
            if deadline.has(LONG_S if self.long and self.on_cuda else 0.0):
                attempt(row, lambda row=row: self.measure_short(row))
                self.forget_compiled()
            else:
                row["error"] = NOT_BEGUN
            yield result
        self.close()
        for batch, context in self.long:
            rows.append(row := self.row(batch, context))
            if deadline.has():
                attempt(row, lambda row=row: self.measure_long(row))
            else:
                row["error"] = NOT_BEGUN
            yield result
        self.close()

    def row(self, batch: int, context: int) -> dict[str, Any]:
        """A row in which nothing but the floor is known."""
        kv_bytes = batch * context * self.llama.kv_bytes_per_token
        floor_ms = (self.llama.weight_bytes + kv_bytes) / self.bandwidth * 1e3
        return {"batch": batch, "context": context, "kv_bytes": kv_bytes, "floor_ms": floor_ms, "ways": {}}

    def measure_short(self, row: dict[str, Any]) -> None:
        """All ways, in turn."""
        batch, context = row["batch"], row["context"]
        steps = [self.llama.decode_step(batch, context, seed=seed) for seed in range(NUM_INPUTS)]
        plain = PlainModel(self.llama.decoder, batch=batch, max_len=context, with_head=True)
        plain.fill_caches(self.llama.decoder, steps[0][1].block_table)
        ways, calls = row["ways"], {}
        skips = dynamo_counters["inductor"]["cudagraph_skips"]
        makers: dict[str, Callable[[], Call]] = {
            PLAIN: lambda: self.plain_call(plain, steps, compiled=False),
            COMPILED: lambda: self.plain_call(plain, steps, compiled=True),
            **{name: lambda name=name: self.our_call(name, steps) for name in self.ways},
        }
        expected: torch.Tensor | None = None
        for name, make in makers.items():
            ways[name] = {}
            call = attempt(ways[name], make)
            if call is None:
                continue
            logits = attempt(ways[name], lambda call=call: self.warmed(call))
            if expected is None and name == PLAIN:
                expected = logits
            elif expected is not None and logits is not None:
                attempt(ways[name], lambda n=name, x=logits, y=expected: compare(ways[n], x, y))
            calls[name] = call
        if COMPILED in calls:  # a baseline without graphs would be a weak one: the table says so
            ways[COMPILED]["cudagraph_skips"] = dynamo_counters["inductor"]["cudagraph_skips"] - skips
        self.clock.in_turn(calls, ways, rounds=ROUNDS, target_ms=150 if self.on_cuda else 1)
        add_ratios(row)
        attempt(row, lambda: self.check_replays(ways, steps))

    def measure_long(self, row: dict[str, Any]) -> None:
        """The captured compiled forward against the floor."""
        batch, context = row["batch"], row["context"]
        row["distinct_caches"] = self.begin_long()
        steps = [self.llama.decode_step(batch, context, seed=seed) for seed in range(2)]
        name = f"full, {self.compiler}"
        row["ways"][name] = {}
        call = self.our_call(name, steps)
        self.warmed(call)
        self.clock.in_turn({name: call}, row["ways"], rounds=ROUNDS, target_ms=300 if self.on_cuda else 1)
        add_ratios(row)
        self.check_replays({name: row["ways"][name]}, steps)

    def begin_long(self) -> int:
        """Gives the layers caches for the long rows; returns how many there are."""
        num_blocks = max(batch * blocks_of(context) for batch, context in self.long)
        layer_bytes = num_blocks * BLOCK_SIZE * self.llama.kv_bytes_per_token // self.num_layers
        most = LONG_CACHE_BYTES // layer_bytes if self.on_cuda else self.num_layers // 2
        num_distinct = max(1, min(self.num_layers, most))
        if self.rows_at_hand is not self.long:
            self.llama.allocate_caches(num_blocks, num_distinct=num_distinct)
            self.rows_at_hand = self.long
        return num_distinct

    def our_call(self, name: str, steps: list[Any]) -> Call:
        """A step of ours, in a runtime that was made for the first row."""
        if name not in self.runtimes:
            self.runtimes[name] = self.runtime(*self.ways[name])
        runtime = self.runtimes[name]
        return lambda i: runtime.run("decode", steps[i % len(steps)][0], context=steps[i % len(steps)][1])

    def runtime(self, backend: str, compiler: str) -> pw.Runtime:
        rows = self.rows_at_hand
        buckets = tuple(sorted({batch for batch, _ in rows}))
        return pw.Runtime(
            self.model,
            pw.GraphConfig(
                prefill={"backend": "disabled"},
                decode={"backend": backend, "compiler": compiler, "buckets": buckets},
                capture_device="cuda" if self.on_cuda else "tape",
            ),
            dynamic_dims={"input_ids": 0, "positions": 0},
            context_sizes={"requests": max(buckets), "blocks": max(blocks_of(context) for _, context in rows)},
        )

    def plain_call(self, plain: PlainModel, steps: list[Any], *, compiled: bool) -> Call:
        """A step of the baseline, as its user would call it."""
        inputs = [(s["input_ids"][:, None], s["positions"][:1]) for s, _ in steps]
        if not compiled:

            def eager(i: int) -> torch.Tensor:
                with torch.inference_mode():
                    return plain(*inputs[i % len(inputs)])[:, 0]

            return eager
        how = {"mode": "reduce-overhead"} if self.on_cuda else {"backend": "aot_eager"}
        model = torch.compile(plain, fullgraph=True, dynamic=False, **how)

        def step(i: int) -> torch.Tensor:
            with torch.no_grad():
                torch.compiler.cudagraph_mark_step_begin()
                return model(*inputs[i % len(inputs)])[:, 0]

        return step

    def warmed(self, call: Call) -> torch.Tensor:
        """The logits of the first inputs, after steps that compile, capture and record."""
        for _ in range(3):
            call(0)
        logits = call(0).clone()
        self.clock.wait()
        return logits

    def check_replays(self, ways: dict[str, dict[str, Any]], steps: list[Any]) -> None:
        """Whether the captured ways replay, and the others do not."""
        for name, (backend, _) in self.ways.items():
            if name not in ways or "error" in ways[name]:
                continue
            runtime = self.runtimes[name]
            before = runtime.counters["replays"]
            self.our_call(name, steps)(0)
            ways[name]["replayed"] = runtime.counters["replays"] > before
            if ways[name]["replayed"] != (backend != "disabled"):
                ways[name]["error"] = f"no replay: {runtime.counters['fallbacks']}"

    def forget_compiled(self) -> None:
        """Gives back what the baselines of a row hold: each row compiles its own."""
        torch._dynamo.reset()
        gc.collect()
        if self.on_cuda:
            torch.cuda.empty_cache()

    def close(self) -> None:
        for runtime in self.runtimes.values():
            runtime.close()
        self.runtimes.clear()
        self.forget_compiled()


def add_ratios(row: dict[str, Any]) -> None:
    """Writes each way's step as a multiple of the floor, and of plain torch.compile's step where there is one."""
    compiled_ms = row["ways"].get(COMPILED, {}).get("step_ms")
    for way in row["ways"].values():
        if "step_ms" in way:
            way["to_floor"] = way["step_ms"] / row["floor_ms"]
            if compiled_ms is not None:
                way["to_compiled"] = way["step_ms"] / compiled_ms


def blocks_of(context: int) -> int:
    """Cache blocks of one request."""
    return -(-context // BLOCK_SIZE)


def table(result: dict[str, Any]) -> str:
    """A short table: a line a way, a column a row."""
    rows = result["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["ways"]))
    head = "".join(f"{row['batch']}x{row['context']}".rjust(10) for row in rows)
    lines = [f"{'step, ms':<32}{head}", f"{'floor':<32}" + "".join(f"{row['floor_ms']:10.3f}" for row in rows)]
    for key, suffix in (("step_ms", ""), ("wall_ms", ", waiting")):
        for name in names:
            cells = [row["ways"].get(name, {}) for row in rows]
            shown = ["error" if "error" in c else f"{c[key]:.3f}" if key in c else "-" for c in cells]
            lines.append(f"{name + suffix:<32}" + "".join(cell.rjust(10) for cell in shown))
    for row in rows:
        for name, way in [("", row), *row["ways"].items()]:
            if "error" in way:
                lines.append(f"{row['batch']}x{row['context']} {name}: {way['error']}")
            if way.get("cudagraph_skips"):
                lines.append(f"{row['batch']}x{row['context']} {name}: without CUDA graphs")
    lines.append(
        f"{result['layers']} layers, {result['dtype']}, {result['weight_bytes'] / 1e9:.1f} GB of weights, copies at "
        f"{result['copy_bytes_per_s'] / 1e12:.2f} TB/s; {in_short(result)}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
