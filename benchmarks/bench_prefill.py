"""A prompt of one request at bucket sizes: plain eager PyTorch, ours eager, and ours by replay.

    python benchmarks/bench_prefill.py [--device cuda] [--layers 32] [--max-seconds 150] [--json FILE]

A decoder of Llama-3-8B's shape in bf16 (on the CPU a tiny one, on the tape), random weights, no cached prefix. A step
goes from token ids to the hidden states of all tokens, for all ways: an engine wants the logits of the last one only.
It writes the KV cache. Plain eager (plain_model.py) shares our weights, attends with scaled_dot_product_attention, and
has a contiguous cache that is as long as the prompt. Inputs are on the device, two of them in turn; all ways of a row
run in turn, several rounds: medians. `step_ms` is a step by the device's clock when steps follow each other, `wall_ms`
by the host's when it waits after each. A way that fails, or for which no time is left, says so in its row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from llama import BLOCK_SIZE, Llama
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
from timing import Call, Clock

import piecework as pw

PLAIN, UNCAPTURED = "plain eager", "uncaptured eager"
SIZES = (1024, 64, 4096, 256, 2048, 128, 512)
"""In tokens, the most telling first."""
ROUNDS = 3


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=count, help="default: 32, on the CPU 2")
    parser.add_argument("--max-seconds", type=float, default=150.0, help="no row is begun after this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parsed = parser.parse_args(arguments)
    deadline = Deadline(parsed.max_seconds)
    command = ["python", "benchmarks/bench_prefill.py", *(sys.argv[1:] if arguments is None else arguments)]
    about = {**conditions(parsed.device), "command": " ".join(command)}
    result: dict[str, Any] = {}
    with inductor_cache():
        for measured in Bench(parsed.device, parsed.layers).measure(deadline):
            result = {**measured, **about, "seconds": deadline.passed}
            write_json(parsed.json, result)
    print(table(result))
    return 0 if not any(errors_of(row) for row in result["rows"]) else 1


class Bench:
    """One model; every way runs on it."""

    def __init__(self, device: str, num_layers: int | None) -> None:
        self.device = torch.device(device)
        self.on_cuda = self.device.type == "cuda"
        self.sizes = SIZES if self.on_cuda else (32, 16)
        self.clock = Clock(self.device)
        self.llama = Llama(
            self.device,
            torch.bfloat16 if self.on_cuda else torch.float32,
            num_layers=num_layers or (32 if self.on_cuda else 2),
            shape="8b" if self.on_cuda else "tiny",
            num_blocks=2 * max(self.sizes) // BLOCK_SIZE,
        )
        compiler = "inductor" if self.on_cuda else "aot_eager"
        self.ways = {
            UNCAPTURED: ("disabled", "eager"),
            f"tc_piecewise, {compiler}": ("tc_piecewise", compiler),
            "breakable, eager": ("breakable", "eager"),
        }
        self.runtimes: dict[str, pw.Runtime] = {}

    def measure(self, deadline: Deadline) -> Iterator[dict[str, Any]]:
        """The result so far, after each row."""
        rows: list[dict[str, Any]] = []
        result = {
            "layers": len(self.llama.decoder.layers),
            "dtype": str(self.llama.dtype).removeprefix("torch."),
            "with_logits": False,
            "weight_bytes": self.llama.weight_bytes,
            "rounds": ROUNDS,
            "rows": rows,
        }
        yield result
        for num_tokens in self.sizes:
            row: dict[str, Any] = {"tokens": num_tokens, "ways": {}}
            rows.append(row)
            if deadline.has():
                attempt(row, lambda row=row: self.measure_row(row))
            else:
                row["error"] = NOT_BEGUN
            rows.sort(key=lambda row: row["tokens"])
            yield result
        for runtime in self.runtimes.values():
            runtime.close()

    def measure_row(self, row: dict[str, Any]) -> None:
        """All ways, in turn."""
        num_tokens, ways = row["tokens"], row["ways"]
        steps = [self.llama.step([num_tokens], [num_tokens], seed=seed) for seed in range(2)]
        plain = PlainModel(self.llama.decoder, batch=1, max_len=num_tokens, with_head=False)
        makers: dict[str, Callable[[], Call]] = {
            PLAIN: lambda: plain_call(plain, steps),
            **{name: lambda name=name: self.our_call(name, steps) for name in self.ways},
        }
        calls: dict[str, Call] = {}
        expected: torch.Tensor | None = None
        for name, make in makers.items():
            ways[name] = {}
            call = attempt(ways[name], make)
            if call is None:
                continue
            hidden = attempt(ways[name], lambda call=call: self.warmed(call))
            if name == PLAIN:
                expected = hidden
            elif expected is not None and hidden is not None:
                attempt(ways[name], lambda n=name, x=hidden, y=expected: compare(ways[n], x, y))
            calls[name] = call
        self.clock.in_turn(calls, ways, rounds=ROUNDS, target_ms=150 if self.on_cuda else 1)
        eager_ms = ways[PLAIN].get("step_ms")
        for name, way in ways.items():
            if "step_ms" in way:
                way["tokens_per_s"] = num_tokens / way["step_ms"] * 1e3
                if eager_ms is not None:
                    way["speed_of_plain_eager"] = eager_ms / way["step_ms"]
                if "step_ms" in ways[UNCAPTURED]:
                    way["speed_of_our_eager"] = ways[UNCAPTURED]["step_ms"] / way["step_ms"]
            if name in self.ways and "error" not in way:
                attempt(way, lambda name=name: self.check_replays(name, ways[name], steps))

    def our_call(self, name: str, steps: list[Any]) -> Call:
        """A step of ours, in a runtime that was made for the first row."""
        if name not in self.runtimes:
            backend, compiler = self.ways[name]
            self.runtimes[name] = pw.Runtime(
                self.llama.decoder,
                pw.GraphConfig(
                    prefill={"backend": backend, "compiler": compiler, "buckets": sorted(self.sizes)},
                    decode={"backend": "disabled"},
                    capture_device="cuda" if self.on_cuda else "tape",
                ),
                dynamic_dims={"input_ids": 0, "positions": 0},
                context_sizes={"requests": 1, "blocks": max(self.sizes) // BLOCK_SIZE},
            )
        runtime = self.runtimes[name]
        return lambda i: runtime.run("prefill", steps[i % len(steps)][0], context=steps[i % len(steps)][1])

    def warmed(self, call: Call) -> torch.Tensor:
        """The hidden states of the first inputs, after steps that compile and capture."""
        call(0)
        call(0)
        hidden = call(0).clone()
        self.clock.wait()
        return hidden

    def check_replays(self, name: str, way: dict[str, Any], steps: list[Any]) -> None:
        """Raises: RuntimeError when a way that captures does not replay."""
        runtime = self.runtimes[name]
        before = runtime.counters["replays"]
        self.our_call(name, steps)(0)
        way["replayed"] = runtime.counters["replays"] > before
        if way["replayed"] != (self.ways[name][0] != "disabled"):
            raise RuntimeError(f"no replay: {runtime.counters['fallbacks']}")


def plain_call(plain: PlainModel, steps: list[Any]) -> Call:
    """A prompt through the baseline."""
    inputs = [(s["input_ids"][None], s["positions"]) for s, _ in steps]

    def call(i: int) -> torch.Tensor:
        with torch.inference_mode():
            return plain(*inputs[i % len(inputs)])[0]

    return call


def table(result: dict[str, Any]) -> str:
    """A short table."""
    rows = result["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["ways"]))
    lines = [f"{'tokens':<9}" + "".join(f"{name + ', ms':>28}" for name in names)]
    errors = []
    for row in rows:
        cells = []
        for name in names:
            way = row["ways"].get(name, {})
            speed = f" ({way['speed_of_plain_eager']:.2f} x)" if "speed_of_plain_eager" in way else ""
            cells.append("error" if "error" in way else f"{way['step_ms']:.3f}{speed}" if "step_ms" in way else "-")
            if "error" in way:
                errors.append(f"{row['tokens']} {name}: {way['error']}")
        if "error" in row:
            errors.append(f"{row['tokens']}: {row['error']}")
        lines.append(f"{row['tokens']:<9}" + "".join(cell.rjust(28) for cell in cells))
    about = f"{result['layers']} layers, {result['dtype']}; (speed against plain eager); {in_short(result)}"
    return "\n".join([*lines, *errors, about])


if __name__ == "__main__":
    raise SystemExit(main())
