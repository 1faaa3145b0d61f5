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
import importlib.util
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import piecework as pw
from piecework.ops.attention import AttentionContext
from piecework.runtime.engine.config import ModelConfig
from piecework.runtime.engine.kv_cache import allocate_kv_cache
from piecework.runtime.engine.models import build_model
from piecework.runtime.engine.rope import Rope

WAYS = (
    ("full", "eager"),
    ("tc_piecewise", "aot_eager"),
    ("full", "inductor"),
    ("tc_piecewise", "inductor"),
    ("breakable", "eager"),
)
BLOCK_SIZE = 16
MIB = 1 << 20


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, help="default: 32, on the CPU 2")
    parser.add_argument("--max-seconds", type=float, default=100.0, help="no way is begun after this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parsed = parser.parse_args(arguments)
    started = time.monotonic()
    bench = Bench(parsed.device, parsed.layers)
    result = bench.measure(lambda: time.monotonic() - started < parsed.max_seconds)
    command = ["python", "benchmarks/bench_capture.py", *(sys.argv[1:] if arguments is None else arguments)]
    result |= {"seconds": time.monotonic() - started, **conditions(parsed.device), "command": " ".join(command)}
    print(table(result))
    if parsed.json is not None:
        parsed.json.parent.mkdir(parents=True, exist_ok=True)
        parsed.json.write_text(json.dumps(result, indent=2) + "\n")
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
        self.num_blocks = self.max_num_reqs + self.timed_sizes[-1] * self.blocks_per_request
        config = model_config(self.num_layers, tiny=not self.on_cuda)
        model = build_model(config)
        model.allocate(self.device, self.dtype)
        allocate_kv_cache(model, config, num_blocks=self.num_blocks, block_size=BLOCK_SIZE)
        with torch.inference_mode():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name.endswith("norm.weight"):
                    tensor.fill_(1)
                elif not name.endswith("inv_freq"):
                    tensor.normal_(std=0.02)
        self.model = model.model

    @property
    def blocks_per_request(self) -> int:
        return -(-self.seq_len // BLOCK_SIZE)

    def step(self, num_reqs: int, seq_len: int) -> tuple[dict[str, torch.Tensor], AttentionContext]:
        """A decode step of requests of one length, each with blocks of its own."""
        width = -(-seq_len // BLOCK_SIZE)
        context = AttentionContext.build(
            query_lens=[1] * num_reqs,
            seq_lens=[seq_len] * num_reqs,
            block_tables=[range(r * width, (r + 1) * width) for r in range(num_reqs)],
            block_size=BLOCK_SIZE,
            device=self.device,
        )
        ids = torch.randint(0, 250, (num_reqs,), device=self.device)
        return {"input_ids": ids, "positions": torch.full_like(ids, seq_len - 1)}, context

    def runtime(self, backend: str, compiler: str, *, largest_first: bool = True) -> pw.Runtime:
        decode: dict[str, Any] = {"backend": backend, "compiler": compiler, "max_num_tokens": self.max_num_reqs}
        if not self.on_cuda:
            decode = {**decode, "buckets": (1, 2, 4, 8)}
        return pw.Runtime(
            self.model,
            pw.GraphConfig(
                prefill={"backend": "disabled"}, decode=decode, capture_device="cuda" if self.on_cuda else "tape"
            ),
            dynamic_dims={"input_ids": 0, "positions": 0},
            context_sizes={"requests": self.max_num_reqs, "blocks": self.blocks_per_request},
            example_context=self.step(0, 1)[1] if largest_first else None,
        )

    def measure(self, is_time_left: Any) -> dict[str, Any]:
        with self.runtime("disabled", "eager") as runtime:
            uncaptured = self.step_ms(runtime, repeat=max(3, self.repeat // 4))
        ways: list[dict[str, Any]] = []
        for backend, compiler in WAYS if self.on_cuda else WAYS[:2]:
            way: dict[str, Any] = {"backend": backend, "compiler": compiler}
            ways.append(way)
            if not is_time_left():
                way["error"] = "not begun: no time left"
                continue
            try:
                with self.runtime(backend, compiler) as runtime:
                    way |= self.way(runtime)
                if compiler != "inductor":  # the same allocations again, for another minute of compiling
                    with self.runtime(backend, compiler, largest_first=False) as runtime:
                        self.arrive(runtime)
                        way["pool_bytes_arrival"] = runtime.explain().as_dict()["memory"]["pool_bytes"]
            except Exception as error:  # the other ways are worth having
                traceback.print_exc()
                way["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        return {
            "layers": self.num_layers,
            "dtype": str(self.dtype).removeprefix("torch."),
            "seq_len": self.seq_len,
            "uncaptured_step_ms": uncaptured,
            "ways": ways,
        }

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
            for _ in range(3):
                runtime.run("decode", inputs, context=context)
            result[str(num_reqs)] = statistics.median(
                self._timed(lambda i=inputs, c=context: runtime.run("decode", i, context=c), repeat)
            )
        return result

    def _timed(self, call: Any, repeat: int) -> list[float]:
        """Milliseconds of each call, back to back; by the device's clock where it has one."""
        if not self.on_cuda:
            moments = [time.perf_counter()]
            for _ in range(repeat):
                call()
                moments.append(time.perf_counter())
            return [(b - a) * 1e3 for a, b in itertools.pairwise(moments)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def model_config(num_layers: int, *, tiny: bool) -> ModelConfig:
    """Llama-3-8B's shape, or a tiny one."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=256 if tiny else 128256,
        hidden_size=64 if tiny else 4096,
        intermediate_size=128 if tiny else 14336,
        num_layers=num_layers,
        num_heads=4 if tiny else 32,
        num_kv_heads=2 if tiny else 8,
        head_size=16 if tiny else 128,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope=Rope(theta=500000.0),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        window_sizes=(0,) * num_layers,
        tie_word_embeddings=True,  # the runtime does not see an lm_head
        dtype=None,
        eos_token_ids=frozenset(),
    )


def conditions(device: str) -> dict[str, Any]:
    """Where and with what it was measured."""
    commit = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    triton = importlib.util.find_spec("triton")
    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or "cpu",
        "driver": said_by(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__ if triton is not None else "none",
        "commit": said_by(commit),
    }


def said_by(command: list[str]) -> str:
    """The first line that a command prints, or `unknown`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return next(iter(done.stdout.split("\n")), "").strip() or "unknown"


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
        f"pool in random order of arrival and the largest first; {result['device']}, driver {result['driver']}, torch "
        f"{result['torch']}, triton {result['triton']}, {result['seconds']:.0f} s"
    )
    return "\n".join(lines)


def _steps(step_ms: dict[str, float]) -> str:
    return "".join(f"{ms:>13.3f}" for ms in step_ms.values())


if __name__ == "__main__":
    raise SystemExit(main())
