"""The engine's own decode step, sampling included, against the floor of the bytes that it reads, and what is between.

    python benchmarks/bench_floor.py [--device cuda] [--rows 1x128,32x128] [--max-seconds 420] [--json FILE]

A decoder of Llama-3-8B's shape in bf16 (on the CPU a tiny one, on the tape), random weights. A row is a number of
requests of one length, their new token counted. A step goes from token ids on the device to the next ones on the host:
the runtime's step, then, as in the engine, logits of the last rows and the sampler's greedy tokens, read back, so that
no step begins before the one before is done. Scheduling and building a step's inputs are not in it. Ways, in turn,
medians:
- full, inductor, auto and native: ours, with these `kernel_backend`s; `ops` says what the fused ops run; `late check`
  with `late_address_check`;
- plain, reduce-overhead: plain_model.py, which shares our weights, as torch.compile captures it;
- plain, max-autotune captured: mode max-autotune-no-cudagraphs, its call captured by hand.
The plain ones compute logits in what is compiled, and argmax and read back behind it. `to_floor` is a multiple of the
floor: weights and KV bytes over the bandwidth of a large copy, measured in the same run; `to_plain` of the better plain
way. `timeline` is one step under the profiler (timeline.py): kernels, their groups, gaps between them, and the wait
before the first one.
A way that fails, or for which no time is left, says so in its row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench_decode import NUM_INPUTS, ROUNDS, blocks_of, rows_of
from bench_whole import MODE, eager_call
from bench_whole import Bench as WholeBench
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
from timeline import OTHER, profiled
from timing import Call, copy_bandwidth

import piecework as pw
from piecework.runtime.engine.models import build_model
from piecework.runtime.engine.params import SamplingParams
from piecework.runtime.engine.sampler import Draw, Sampler
from piecework.runtime.fused_choices import choose_for, floating_dtype, spec_for

REDUCED, TUNED = "plain, reduce-overhead", "plain, max-autotune captured"
LATE = "auto, late check"
BACKENDS = ("auto", LATE, "native")
"""`kernel_backend`s; `LATE` with `late_address_check`."""
COMPILE_S = {REDUCED: 40.0, TUNED: 90.0}
"""Seconds that are left when such a compile is begun."""
Logits = Callable[[int], torch.Tensor]
"""The logits of the step on the inputs of this number."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=count, help="default: 32, on the CPU 2")
    parser.add_argument("--rows", type=rows_of, help="requests x tokens, with commas; default: 32, 128, 1 and 8 x 128")
    parser.add_argument(
        "--plain-from",
        type=count,
        default=1,
        metavar="REQUESTS",
        help="the plain ways, whose compiles take longest, from here",
    )
    parser.add_argument("--max-seconds", type=float, default=420.0, help="no way is begun after this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parsed = parser.parse_args(arguments)
    deadline = Deadline(parsed.max_seconds)
    command = ["python", "benchmarks/bench_floor.py", *(sys.argv[1:] if arguments is None else arguments)]
    about = {**conditions(parsed.device), "command": " ".join(command)}
    result: dict[str, Any] = {}
    with inductor_cache(), Bench(parsed.device, parsed.layers, parsed.rows, parsed.plain_from) as bench:
        for measured in bench.measure(deadline):
            result = {**measured, **about, "seconds": deadline.passed}
            write_json(parsed.json, result)
    print(table(result))
    return 0 if not any(errors_of(row) for row in result["rows"]) else 1


class Bench(WholeBench):
    """One model; every way runs on it. What the two benchmarks share is in bench_whole.py."""

    def __init__(
        self, device: str, num_layers: int | None, rows: tuple[tuple[int, int], ...] | None, plain_from: int = 1
    ) -> None:
        on_cuda = torch.device(device).type == "cuda"
        # The rows whose plain compile is asked for come first: it takes longest.
        rows = rows or (((32, 128), (128, 128), (1, 128), (8, 128)) if on_cuda else ((2, 32), (1, 16)))
        super().__init__(device, num_layers, rows, MODE)
        self.plain_from = plain_from
        self.bandwidth = copy_bandwidth(self.device)
        self.causal = build_model(self.llama.config)
        self.causal.model = self.llama.decoder  # its head is the table of embeddings, which is there
        self.sampler = Sampler()

    def measure(self, deadline: Deadline) -> Iterator[dict[str, Any]]:
        """The result so far, after each row."""
        rows: list[dict[str, Any]] = []
        result = {
            "layers": self.num_layers,
            "dtype": str(self.llama.dtype).removeprefix("torch."),
            "weight_bytes": self.llama.weight_bytes,
            "copy_bytes_per_s": self.bandwidth,
            "rounds": ROUNDS,
            "rows": rows,
        }
        yield result
        for batch, context in self.rows:
            kv_bytes = batch * context * self.llama.kv_bytes_per_token
            floor_ms = (self.llama.weight_bytes + kv_bytes) / self.bandwidth * 1e3
            row = {"batch": batch, "context": context, "kv_bytes": kv_bytes, "floor_ms": floor_ms, "ways": {}}
            rows.append(row)
            attempt(row, lambda row=row: self.measure_row(row, deadline))
            self.forget_compiled()
            yield result

    def measure_row(self, row: dict[str, Any], deadline: Deadline) -> None:
        """Compiles each way, times all of them in turn, then looks at one step of each."""
        batch, context = row["batch"], row["context"]
        steps = [self.llama.decode_step(batch, context, seed=seed) for seed in range(NUM_INPUTS)]
        plain = PlainModel(self.llama.decoder, batch=batch, max_len=context, with_head=True)
        plain.fill_caches(self.llama.decoder, steps[0][1].block_table)
        expected = eager_call(plain, steps)(0)
        ways, calls = row["ways"], {}
        makers: dict[str, Callable[[dict[str, Any]], tuple[Call, Logits]]] = {
            **{self.name_of(b): lambda way, b=b: self.our_way(way, b, steps) for b in BACKENDS},
        }
        if batch >= self.plain_from:
            makers[REDUCED] = lambda way: self.plain_way(self.reduced(plain), steps)
            makers[TUNED] = lambda way: self.plain_way(self.tuned(plain, steps), steps)
        for name, make in makers.items():
            way = ways[name] = {}
            if not deadline.has(COMPILE_S.get(name, 0.0) if self.on_cuda else 0.0):
                way["error"] = NOT_BEGUN
                continue
            made = attempt(way, lambda make=make, way=way: make(way))
            if made is None:
                continue
            call, logits_of = made
            logits = attempt(way, lambda f=logits_of: self.warmed(f))
            if logits is not None:
                attempt(way, lambda way=way, x=logits: compare(way, x, expected))
            calls[name] = call
        self.clock.in_turn(calls, ways, rounds=ROUNDS, target_ms=150 if self.on_cuda else 1)
        add_ratios(row, [self.name_of(backend) for backend in BACKENDS])
        attempt(row, lambda: self.check_replays(row, steps))
        for name, call in calls.items():
            if self.on_cuda and "error" not in ways[name]:
                ways[name]["timeline"] = attempt(ways[name], lambda call=call: profiled(call))

    def name_of(self, backend: str) -> str:
        return f"full, {self.compiler}, {backend}"

    def our_way(self, way: dict[str, Any], backend: str, steps: list[Any]) -> tuple[Call, Logits]:
        """A step of ours, in a runtime that was made for the first row."""
        name = self.name_of(backend)
        if name not in self.runtimes:
            self.runtimes[name] = self.our_runtime(backend)
        runtime = self.runtimes[name]
        config = runtime.config
        spec = spec_for(config, self.device, floating_dtype(self.llama.decoder))
        compiler = config.decode.compiler
        way["ops"] = choose_for(config, [compiler], spec)[compiler].runs
        batch = len(steps[0][0]["input_ids"])
        last_rows = torch.arange(batch, device=self.device)
        draws = [Draw(params=SamplingParams(), place=0)] * batch

        def logits(i: int) -> torch.Tensor:
            inputs, context = steps[i % len(steps)]
            hidden = runtime.run("decode", inputs, context=context)
            with torch.inference_mode(), runtime.beside_steps():
                return self.causal.logits(hidden[last_rows])

        def step(i: int) -> object:
            inputs, context = steps[i % len(steps)]
            hidden = runtime.run("decode", inputs, context=context)
            with torch.inference_mode(), runtime.beside_steps():
                return self.sampler.sample(self.causal.logits(hidden[last_rows]), draws)

        return step, logits

    def our_runtime(self, backend: str) -> pw.Runtime:
        buckets = tuple(sorted({batch for batch, _ in self.rows}))
        return pw.Runtime(
            self.llama.decoder,
            pw.GraphConfig(
                prefill={"backend": "disabled"},
                decode={"backend": "full", "compiler": self.compiler, "buckets": buckets},
                capture_device="cuda" if self.on_cuda else "tape",
                kernel_backend="auto" if backend == LATE else backend,
                late_address_check=backend == LATE,
            ),
            dynamic_dims={"input_ids": 0, "positions": 0},
            context_sizes={"requests": buckets[-1], "blocks": max(blocks_of(context) for _, context in self.rows)},
            example_context=self.llama.decode_step(0, 1)[1],
        )

    def reduced(self, plain: PlainModel) -> Logits:
        """torch.compile with its own CUDA graphs, called as its user would."""
        how = {"mode": "reduce-overhead"} if self.on_cuda else {"backend": "aot_eager"}
        model = torch.compile(plain, fullgraph=True, dynamic=False, **how)

        def run(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return model(inputs["input_ids"][:, None], inputs["positions"][:1])

        return run

    def tuned(self, plain: PlainModel, steps: list[Any]) -> Logits:
        """The program of max-autotune, captured by hand."""
        static = [steps[0][0]["input_ids"][:, None].clone(), steps[0][0]["positions"][:1].clone()]
        how = {"mode": self.mode} if self.on_cuda else {"backend": "aot_eager"}
        with torch.no_grad():
            replay = self.captured(torch.compile(plain, fullgraph=True, dynamic=False, **how), static)

        def run(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            static[0].copy_(inputs["input_ids"][:, None])
            static[1].copy_(inputs["positions"][:1])
            return replay()

        return run

    def plain_way(self, run: Callable[..., torch.Tensor], steps: list[Any]) -> tuple[Call, Logits]:
        def logits(i: int) -> torch.Tensor:
            with torch.no_grad():
                return run(steps[i % len(steps)][0])[:, 0]

        return lambda i: logits(i).argmax(-1).tolist(), logits


def add_ratios(row: dict[str, Any], ours: list[str]) -> None:
    """Writes each way's step as a multiple of the floor, and ours as one of the better plain way's."""
    times = {name: way["step_ms"] for name, way in row["ways"].items() if "step_ms" in way and "error" not in way}
    plain = [ms for name, ms in times.items() if name not in ours]
    for name, ms in times.items():
        row["ways"][name]["to_floor"] = ms / row["floor_ms"]
        if name in ours and plain:
            row["ways"][name]["to_plain"] = ms / min(plain)


def table(result: dict[str, Any]) -> str:
    """Steps of all ways and rows; then each timeline by group."""
    rows = result["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["ways"]))
    head = "".join(f"{row['batch']}x{row['context']}".rjust(16) for row in rows)
    lines = [f"{'step, ms (to floor)':<32}{head}", f"{'floor':<32}" + "".join(f"{r['floor_ms']:16.3f}" for r in rows)]
    for name in names:
        ways = [row["ways"].get(name, {}) for row in rows]
        cells = [f"{way['step_ms']:.3f} ({way['to_floor']:.2f})" if "to_floor" in way else "-" for way in ways]
        lines.append(f"{name:<32}" + "".join(cell.rjust(16) for cell in cells))
    for row in rows:
        for name, way in [("", row), *row["ways"].items()]:
            title = f"{row['batch']}x{row['context']} {name}"
            if "error" in way:
                lines.append(f"{title}: {way['error']}")
            if way.get("timeline"):
                found = way["timeline"]
                parts = {g: part["us"] for g, part in found["groups"].items()}
                parts |= {"gaps": found["gaps_us"], "wait": found["wait_us"]}
                told = ", ".join(f"{group} {us:.0f}" for group, us in parts.items())
                lines.append(f"{title}, us: {told}")
                rest = [k for k in found["kernels"] if k["group"] == OTHER][:4]
                lines += [f"    {k['us']:8.1f} {k['count']:4} x {k['name']}" for k in rest]
    lines.append(
        f"{result['layers']} layers, {result['dtype']}, {result['weight_bytes'] / 1e9:.1f} GB of weights, copies at "
        f"{result['copy_bytes_per_s'] / 1e12:.2f} TB/s; {in_short(result)}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
