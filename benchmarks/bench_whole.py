"""A decode step whose whole forward is compiled: plain torch.compile with a capture by hand, and ours.

    python benchmarks/bench_whole.py [--device cuda] [--rows 1x128,32x128] [--mode default] [--json FILE]

A decoder of Llama-3-8B's shape in bf16 (on the CPU a tiny one, on the tape), random weights, logits included. A row is
a number of requests of one length, their new token counted. Ways, which run in turn, several rounds, medians:
- plain torch.compile: plain_model.py, which shares our weights, in `--mode`, its call then captured by hand;
- full, whole: ours with `enable_torch_compile` in the same mode, over the general program of Inductor. `whole` says
  what the runtime measured of both, and which one it took: the step is that one's;
- full and tc_piecewise: ours, captured, with Inductor's general program.
`compile_s` are the seconds of the first step of a size, where a server would wait: a trace, compiles, trying kernels
out, the capture. In the first row the two wholes have caches of their own, empty ones; afterwards all ways share one,
so that what one has tried out another one may know. Our general program is of the first row. `peak_bytes` is what a
call of the compiled forward, uncaptured, takes at most beside weights and caches (on CUDA). `to_plain` is a multiple of
the first way.
A way that fails, or for which no time is left, says so in its row.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench_decode import NUM_INPUTS, PLAIN, ROUNDS, blocks_of, rows_of
from llama import Llama, WithHead
from plain_model import PlainModel
from report import (
    NOT_BEGUN,
    Deadline,
    attempt,
    compare,
    conditions,
    count,
    errors_of,
    inductor_cache,
    write_json,
)
from timing import Call, Clock
from whole_table import table

import piecework as pw

COMPILED = "plain torch.compile, captured"
WHOLE = "full, whole"
MODE = "max-autotune-no-cudagraphs"
COMPILE_S = 40.0
"""Seconds that are left when the compile of a whole forward is begun."""
_COMPILES = ("trace", "compile_general", "compile_specialized", "compile_whole")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=count, help="default: 32, on the CPU 2")
    parser.add_argument("--rows", type=rows_of, help="requests x tokens, with commas; default: 1x128,32x128,8x128")
    parser.add_argument("--mode", default=MODE, choices=("default", MODE), help="of torch.compile, for both wholes")
    parser.add_argument("--max-seconds", type=float, default=385.0, help="no way is begun after this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parsed = parser.parse_args(arguments)
    deadline = Deadline(parsed.max_seconds)
    command = ["python", "benchmarks/bench_whole.py", *(sys.argv[1:] if arguments is None else arguments)]
    about = {**conditions(parsed.device), "command": " ".join(command)}
    result: dict[str, Any] = {}
    with inductor_cache(), Bench(parsed.device, parsed.layers, parsed.rows, parsed.mode) as bench:
        for measured in bench.measure(deadline):
            result = {**measured, **about, "seconds": deadline.passed}
            write_json(parsed.json, result)
    print(table(result))
    return 0 if not any(errors_of(row) for row in result["rows"]) else 1


class Bench:
    """One model; every way runs on it. Close it, or use it as a context manager."""

    def __init__(
        self, device: str, num_layers: int | None, rows: tuple[tuple[int, int], ...] | None, mode: str
    ) -> None:
        self.device = torch.device(device)
        self.on_cuda = self.device.type == "cuda"
        self.num_layers = num_layers or (32 if self.on_cuda else 2)
        self.mode = mode
        self.rows = rows or (((1, 128), (32, 128), (8, 128)) if self.on_cuda else ((1, 16), (2, 32)))
        self.compiler = "inductor" if self.on_cuda else "aot_eager"
        self.ways = {
            WHOLE: ("full", True),
            f"full, {self.compiler}": ("full", False),
            f"tc_piecewise, {self.compiler}": ("tc_piecewise", False),
        }
        self.clock = Clock(self.device)
        self.llama = Llama(
            self.device,
            torch.bfloat16 if self.on_cuda else torch.float32,
            num_layers=self.num_layers,
            shape="8b" if self.on_cuda else "tiny",
            num_blocks=max(batch * blocks_of(context) for batch, context in self.rows),
        )
        self.model = WithHead(self.llama.decoder)
        self.runtimes: dict[str, pw.Runtime] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        for runtime in self.runtimes.values():
            runtime.close()
        self.runtimes.clear()
        self.forget_compiled()

    def measure(self, deadline: Deadline) -> Iterator[dict[str, Any]]:
        """The result so far, after each row."""
        rows: list[dict[str, Any]] = []
        result = {
            "layers": self.num_layers,
            "dtype": str(self.llama.dtype).removeprefix("torch."),
            "mode": self.mode,
            "with_logits": True,
            "weight_bytes": self.llama.weight_bytes,
            "rounds": ROUNDS,
            "rows": rows,
        }
        yield result
        for batch, context in self.rows:
            kv_bytes = batch * context * self.llama.kv_bytes_per_token
            row: dict[str, Any] = {"batch": batch, "context": context, "kv_bytes": kv_bytes, "ways": {}}
            row["shares_caches"] = bool(rows)
            rows.append(row)
            attempt(row, lambda row=row: self.measure_row(row, deadline))
            self.forget_compiled()
            yield result

    def measure_row(self, row: dict[str, Any], deadline: Deadline) -> None:
        """Compiles each way, then times all of them in turn."""
        batch, context = row["batch"], row["context"]
        steps = [self.llama.decode_step(batch, context, seed=seed) for seed in range(NUM_INPUTS)]
        plain = PlainModel(self.llama.decoder, batch=batch, max_len=context, with_head=True)
        plain.fill_caches(self.llama.decoder, steps[0][1].block_table)
        ways, calls = row["ways"], {}
        makers: dict[str, Callable[[dict[str, Any]], Call]] = {
            PLAIN: lambda way: eager_call(plain, steps),
            **{n: lambda way, n=n: self.our_call(way, n, steps) for n in self.ways if n != WHOLE},
            # Last, for they may find no time.
            COMPILED: lambda way: self.compiled_call(way, plain, steps),
            WHOLE: lambda way: self.our_call(way, WHOLE, steps),
        }
        expected: torch.Tensor | None = None
        for name, make in makers.items():
            way = ways[name] = {}
            is_whole = name in (COMPILED, WHOLE)
            if not deadline.has(COMPILE_S if self.on_cuda and is_whole else 0.0):
                way["error"] = NOT_BEGUN
                continue
            with own_caches() if is_whole and not row["shares_caches"] else contextlib.nullcontext():
                call = attempt(way, lambda make=make, way=way: make(way))
            if call is None:
                continue
            calls[name] = call
            logits = attempt(way, lambda call=call: self.warmed(call))
            if name == PLAIN:
                expected = logits
            elif expected is not None and logits is not None:
                attempt(way, lambda way=way, x=logits, y=expected: compare(way, x, y))
        self.clock.in_turn(calls, ways, rounds=ROUNDS, target_ms=150 if self.on_cuda else 1)
        add_ratios(row)
        attempt(row, lambda: self.check_replays(row, steps))

    def compiled_call(self, way: dict[str, Any], plain: PlainModel, steps: list[Any]) -> Call:
        """A step of torch.compile's program, captured by hand; on a CPU it is called."""
        started = time.perf_counter()
        static = [steps[0][0]["input_ids"][:, None].clone(), steps[0][0]["positions"][:1].clone()]
        model = torch.compile(plain, fullgraph=True, dynamic=False, mode=self.mode)
        with torch.no_grad():
            run = self.captured(model, static)
            self.clock.wait()
            way["compile_s"] = time.perf_counter() - started
            self.add_peak(way, lambda: model(*static))

        def step(i: int) -> torch.Tensor:
            inputs = steps[i % len(steps)][0]
            static[0].copy_(inputs["input_ids"][:, None])
            static[1].copy_(inputs["positions"][:1])
            with torch.no_grad():
                return run()[:, 0]

        return step

    def captured(self, model: Callable[..., torch.Tensor], static: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Runs a compiled model on its static inputs, again at each call; on CUDA by replay, into the same results."""
        if not self.on_cuda:
            model(*static)
            return lambda: model(*static)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(*static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(*static)

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    def our_call(self, way: dict[str, Any], name: str, steps: list[Any]) -> Call:
        """A step of ours, in a runtime that was made for the first row; the first one compiles and captures."""
        if name not in self.runtimes:
            self.runtimes[name] = self.runtime(*self.ways[name])
        runtime = self.runtimes[name]
        num_known = len(runtime.events)
        started = time.perf_counter()
        runtime.run("decode", steps[0][0], context=steps[0][1])
        self.clock.wait()
        way["compile_s"] = time.perf_counter() - started
        new = list(runtime.events)[num_known:]
        way["compiles"] = _seconds_by_kind(new)
        batch = len(steps[0][0]["input_ids"])
        entry = next(entry for entry in runtime.entries if entry.bucket == batch)
        way["program"] = entry.program.kind
        if name == WHOLE:
            way["whole"] = _verdict(new)
        inputs, context = steps[0]

        def uncaptured() -> None:
            with torch.inference_mode(), pw.use_context(context):
                entry.program(inputs, {"tokens": batch})

        self.add_peak(way, uncaptured)
        return lambda i: runtime.run("decode", steps[i % len(steps)][0], context=steps[i % len(steps)][1])

    def runtime(self, backend: str, is_whole: bool) -> pw.Runtime:
        buckets = tuple(sorted({batch for batch, _ in self.rows}))
        more: dict[str, Any] = {"torch_compile_max_bs": buckets[-1], "torch_compile_mode": self.mode}
        return pw.Runtime(
            self.model,
            pw.GraphConfig(
                prefill={"backend": "disabled"},
                decode={"backend": backend, "compiler": self.compiler, "buckets": buckets},
                capture_device="cuda" if self.on_cuda else "tape",
                enable_torch_compile=is_whole,
                **(more if is_whole else {}),
            ),
            dynamic_dims={"input_ids": 0, "positions": 0},
            context_sizes={"requests": buckets[-1], "blocks": max(blocks_of(context) for _, context in self.rows)},
            example_context=self.llama.decode_step(0, 1)[1],
        )

    def add_peak(self, way: dict[str, Any], call: Callable[[], object]) -> None:
        """Writes the bytes that a call takes at most beside what is there; called twice, since the first sets up."""
        if not self.on_cuda:
            return
        call()
        self.clock.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.clock.wait()
        way["peak_bytes"] = torch.cuda.max_memory_allocated() - before

    def warmed(self, call: Call) -> torch.Tensor:
        """The logits of the first inputs, after steps that record and capture."""
        for _ in range(3):
            call(0)
        logits = call(0).clone()
        self.clock.wait()
        return logits

    def check_replays(self, row: dict[str, Any], steps: list[Any]) -> None:
        """Whether ours replay: an error where they do not."""
        for name, runtime in self.runtimes.items():
            way = row["ways"].get(name, {"error": NOT_BEGUN})
            if "error" in way:
                continue
            before = runtime.counters["replays"]
            runtime.run("decode", steps[0][0], context=steps[0][1])
            way["replayed"] = runtime.counters["replays"] > before
            if not way["replayed"]:
                way["error"] = f"no replay: {runtime.counters['fallbacks']}"

    def forget_compiled(self) -> None:
        """Gives back what the baseline of a row holds."""
        torch._dynamo.reset()
        gc.collect()
        if self.on_cuda:
            torch.cuda.empty_cache()


def eager_call(plain: PlainModel, steps: list[Any]) -> Call:
    """A step of the baseline that nothing compiles: what the others' results are compared with."""
    inputs = [(step["input_ids"][:, None], step["positions"][:1]) for step, _ in steps]

    def step(i: int) -> torch.Tensor:
        with torch.inference_mode():
            return plain(*inputs[i % len(inputs)])[:, 0]

    return step


@contextlib.contextmanager
def own_caches() -> Iterator[None]:
    """Inside, Inductor and Triton have empty caches on disk, and Inductor none in memory."""
    clear_caches = importlib.import_module("torch._inductor.utils").clear_caches
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="piecework-bench-", ignore_cleanup_errors=True) as folder:
        os.environ.update({name: os.path.join(folder, name) for name in names})
        clear_caches()
        try:
            yield
        finally:
            clear_caches()
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def add_ratios(row: dict[str, Any]) -> None:
    """Writes each way's step as a multiple of plain torch.compile's, where there is one."""
    plain_ms = row["ways"].get(COMPILED, {}).get("step_ms")
    for way in row["ways"].values():
        if plain_ms is not None and "step_ms" in way:
            way["to_plain"] = way["step_ms"] / plain_ms


def _seconds_by_kind(events: list[Any]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for event in events:
        if event.kind in _COMPILES:
            seconds[event.kind] = seconds.get(event.kind, 0.0) + event.seconds
    return seconds


def _verdict(events: list[Any]) -> dict[str, Any]:
    """What the runtime measured of the whole forward, and whether it took it. Raises: ValueError: it made none."""
    if not any(event.kind == "compile_whole" for event in events):
        raise ValueError(f"no whole forward was compiled: {[dict(e.detail) for e in events if e.kind == 'fallback']}")
    for event in events:
        if event.kind == "measure":
            return dict(event.detail)
    return {"taken": True}


if __name__ == "__main__":
    raise SystemExit(main())
