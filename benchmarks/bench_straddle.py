"""Requests that straddle a promotion: how many get other tokens than without it, and what emulated casts cost.

    python benchmarks/bench_straddle.py [--device cuda] [--layers 32] [--requests 200] [--json FILE]

A decoder of Llama-3-8B's shape in bf16 (on the CPU a tiny one in float32, on the tape), random weights. Greedy requests
with prompts of 8 to 48 tokens get 32 tokens each, in batches that are one decode bucket. Without a promotion every step
replays the captured eager forward; with one, the second half of the steps replays the captured general program of
Inductor, with and without `emulate_precision_casts`. Both halves are what a runtime runs before and after a promotion,
over the same weights, caches and prompts. `differ` counts requests of which any token is another one; `no promotion` is
the same run twice, and has to be 0. Then a step of each program is timed, in turn: medians.
A way that fails says so in its row. Weights are random, so that logits are closer to each other than a trained
model's, and tokens change more readily.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from llama import BLOCK_SIZE, Llama
from report import Deadline, attempt, conditions, count, in_short, inductor_cache, write_json
from timing import Clock
from torch.nn import functional as F

import piecework as pw
from piecework.ops.attention import AttentionContext

NUM_NEW = 32
SHORTEST, LONGEST = 8, 48
EAGER, GENERAL, CASTS = "eager", "general", "general, emulated casts"
SAME = "no promotion"
ROUNDS = 5


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=count, help="default: 32, on the CPU 2")
    parser.add_argument("--requests", type=count, help="default: 200, on the CPU 12")
    parser.add_argument("--batch", type=count, help="requests that run together, default: 50, on the CPU 6")
    parser.add_argument("--max-seconds", type=float, default=300.0, help="no way is begun after this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parsed = parser.parse_args(arguments)
    deadline = Deadline(parsed.max_seconds)
    command = ["python", "benchmarks/bench_straddle.py", *(sys.argv[1:] if arguments is None else arguments)]
    about = {**conditions(parsed.device), "command": " ".join(command)}
    result: dict[str, Any] = {}
    with inductor_cache():
        bench = Bench(parsed.device, parsed.layers, parsed.requests, parsed.batch)
        for measured in bench.measure(deadline):
            result = {**measured, **about, "seconds": deadline.passed}
            write_json(parsed.json, result)
    print(table(result))
    return 0 if not any("error" in way for way in result["ways"].values()) else 1


class Bench:
    """One model, a runtime for each program, and the prompts."""

    def __init__(self, device: str, num_layers: int | None, num_requests: int | None, batch: int | None) -> None:
        self.device = torch.device(device)
        self.on_cuda = self.device.type == "cuda"
        dtype, shape = (torch.bfloat16, "8b") if self.on_cuda else (torch.float32, "tiny")
        self.num_layers = num_layers or (32 if self.on_cuda else 2)
        self.num_requests = num_requests or (200 if self.on_cuda else 12)
        self.batch = min(batch or (50 if self.on_cuda else 6), self.num_requests)
        self.blocks_each = -(-(LONGEST + NUM_NEW) // BLOCK_SIZE)
        num_blocks = self.batch * self.blocks_each
        self.llama = Llama(self.device, dtype, num_layers=self.num_layers, shape=shape, num_blocks=num_blocks)
        draw = random.Random(0)
        vocab_size = self.llama.config.vocab_size
        self.prompts = [
            [draw.randrange(vocab_size) for _ in range(draw.randint(SHORTEST, LONGEST))]
            for _ in range(self.num_requests)
        ]
        self.runtimes: dict[str, pw.Runtime] = {}

    def measure(self, deadline: Deadline) -> Iterator[dict[str, Any]]:
        """The result so far, after each way."""
        ways: dict[str, dict[str, Any]] = {}
        result: dict[str, Any] = {
            "layers": self.num_layers,
            "dtype": str(self.llama.dtype).removeprefix("torch."),
            "requests": self.num_requests,
            "batch": self.batch,
            "new_tokens": NUM_NEW,
            "promoted_after": NUM_NEW // 2,
            "ways": ways,
        }
        expected = self.tokens(EAGER, EAGER)
        for name, after in ((SAME, EAGER), (GENERAL, GENERAL), (CASTS, CASTS)):
            ways[name] = {}
            if deadline.has():
                attempt(ways[name], lambda row=ways[name], after=after: self.compare(row, after, expected))
            else:
                ways[name]["error"] = "not begun: no time left"
            yield result
        attempt(result, lambda: self.time_steps(result))
        self.close()
        yield result

    def compare(self, row: dict[str, Any], after: str, expected: Sequence[Sequence[int]]) -> None:
        """Counts the requests that get other tokens when `after` takes over in the middle."""
        got = self.tokens(EAGER, after)
        firsts = [
            next(i for i, (a, b) in enumerate(zip(own, other, strict=True)) if a != b)
            for own, other in zip(got, expected, strict=True)
            if own != other
        ]
        row["differ"] = len(firsts)
        row["share"] = len(firsts) / len(expected)
        row["first_difference_median"] = statistics.median(firsts) if firsts else None
        if firsts and min(firsts) <= NUM_NEW // 2 - 1:
            raise ValueError(f"a token before the promotion differs: token {min(firsts)}")

    def tokens(self, before: str, after: str) -> list[list[int]]:
        """The new tokens of every request, the second half of them by the program `after`."""
        answers: list[list[int]] = []
        for begin in range(0, self.num_requests, self.batch):
            answers += self.answers(self.prompts[begin : begin + self.batch], before, after)
        return answers

    def answers(self, prompts: Sequence[Sequence[int]], before: str, after: str) -> list[list[int]]:
        """Those of one batch. The first token is the prompt's, by the eager forward, in every way."""
        lengths = [len(prompt) for prompt in prompts]
        hidden = self.run(EAGER, "prefill", [token for prompt in prompts for token in prompt], lengths, lengths)
        lasts = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        new = [self.greedy(hidden[lasts])]
        for i in range(1, NUM_NEW):
            name = before if i < NUM_NEW // 2 else after
            seq_lens = [length + i for length in lengths]
            new.append(self.greedy(self.run(name, "decode", new[-1], [1] * len(prompts), seq_lens)))
        return [list(tokens) for tokens in zip(*new, strict=True)]

    def run(
        self, name: str, phase: str, tokens: Sequence[int], query_lens: Sequence[int], seq_lens: Sequence[int]
    ) -> torch.Tensor:
        """A step of one program, on blocks that are the same in every way."""
        inputs, context = self.step(tokens, query_lens, seq_lens)
        hidden: torch.Tensor = self.runtime(name).run(phase, inputs, context=context)
        return hidden

    def step(
        self, tokens: Sequence[int], query_lens: Sequence[int], seq_lens: Sequence[int]
    ) -> tuple[dict[str, torch.Tensor], AttentionContext]:
        """The inputs and the context of a step."""
        context = AttentionContext.build(
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_tables=[
                list(range(self.blocks_each * i, self.blocks_each * (i + 1))) for i in range(len(query_lens))
            ],
            block_size=BLOCK_SIZE,
            device=self.device,
        )
        positions = [p for n, s in zip(query_lens, seq_lens, strict=True) for p in range(s - n, s)]
        both = {"input_ids": list(tokens), "positions": positions}
        return {name: torch.tensor(values, device=self.device) for name, values in both.items()}, context

    def greedy(self, hidden: torch.Tensor) -> list[int]:
        """The likeliest token of each row."""
        with torch.inference_mode():
            tokens: list[int] = F.linear(hidden, self.llama.decoder.embed_tokens.weight).argmax(-1).tolist()
        return tokens

    def runtime(self, name: str) -> pw.Runtime:
        """The one that runs a program; made when it is first asked for."""
        if name not in self.runtimes:
            compiler = "eager" if name == EAGER else "inductor"
            sizes = sorted({self.batch, self.num_requests % self.batch or self.batch})
            self.runtimes[name] = pw.Runtime(
                self.llama.decoder,
                pw.GraphConfig(
                    prefill={"backend": "disabled"},
                    decode={"backend": "full", "compiler": compiler, "buckets": tuple(sizes)},
                    capture_device="cuda" if self.on_cuda else "tape",
                    emulate_precision_casts=name == CASTS,
                ),
                dynamic_dims={"input_ids": 0, "positions": 0},
                context_sizes={"requests": self.batch, "blocks": self.blocks_each},
            )
        return self.runtimes[name]

    def time_steps(self, result: dict[str, Any]) -> None:
        """Times a step of each program in turn, and checks that they were replays."""
        inputs, context = self.step([1] * self.batch, [1] * self.batch, [LONGEST + NUM_NEW] * self.batch)
        rows: dict[str, dict[str, Any]] = {name: {} for name in self.runtimes}
        calls = {
            name: lambda i, runtime=runtime: runtime.run("decode", inputs, context=context)
            for name, runtime in self.runtimes.items()
        }
        for call in calls.values():
            for _ in range(3):
                call(0)
        before = {name: runtime.counters["replays"] for name, runtime in self.runtimes.items()}
        Clock(self.device).in_turn(calls, rows, rounds=ROUNDS, target_ms=200 if self.on_cuda else 1)
        for name, runtime in self.runtimes.items():
            if runtime.counters["replays"] <= before[name]:
                rows[name]["error"] = f"no replay: {runtime.counters['fallbacks']}"
        result["steps"] = rows
        if all("step_ms" in rows.get(name, {}) for name in (GENERAL, CASTS)):
            result["casts_cost"] = rows[CASTS]["step_ms"] / rows[GENERAL]["step_ms"] - 1

    def close(self) -> None:
        """Gives back what the runtimes hold."""
        for runtime in self.runtimes.values():
            runtime.close()
        self.runtimes.clear()


def table(result: dict[str, Any]) -> str:
    """A line a way, then a step of each program."""
    lines = [f"{'promoted to':<28}{'differ':>12}{'share':>9}{'first at':>10}"]
    for name, way in result["ways"].items():
        if "error" in way:
            lines.append(f"{name:<28}{way['error']}")
            continue
        at = "-" if way["first_difference_median"] is None else f"{way['first_difference_median']:.0f}"
        of = f"{way['differ']} of {result['requests']}"
        lines.append(f"{name:<28}{of:>12}{way['share']:>9.1%}{at:>10}")
    for name, row in result.get("steps", {}).items():
        lines.append(f"a step, {name:<20}" + (row.get("error") or f"{row['step_ms']:.3f} ms"))
    if "casts_cost" in result:
        lines.append(f"emulated casts cost {result['casts_cost']:+.1%} of a step")
    lines.append(f"{result['layers']} layers, {result['dtype']}; {in_short(result)}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
