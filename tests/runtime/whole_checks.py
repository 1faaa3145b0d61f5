"""What tests of whole-forward compile read off generated code, and a server that starts on a cache directory.

    python -m tests.runtime.whole_checks cpu DIR        # one start: prints JSON

Shared by tests for the CPU and for a GPU.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import piecework as pw

ROOT = Path(__file__).resolve().parent.parent.parent
HEADS, WIDTH, NUM_TOKENS = 4, 96, 8


def allocations(code: str) -> Iterator[int]:
    """Elements of each buffer that the code allocates which Inductor generated."""
    for sizes in re.findall(r"\bempty_strided\w*\(\(([\d, ]*)\)", code):
        yield math.prod(int(size) for size in sizes.split(",") if size.strip())


def has_number(code: str, number: int) -> bool:
    """Whether generated code works through so many elements: a kernel's bounds are written into it."""
    return re.search(rf"(?<![\w.]){number}L?(?![\w.])", code) is not None


@pw.split_op(mutates_args=("cache", "out"), name="piecework_whole::add_to", capturable=True)
def add_to(x: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
    """Keeps the rows, and gives them back with what was kept before."""
    torch.add(x, cache[: x.shape[0]], out=out)
    cache[: x.shape[0]].copy_(x)


class Batched(torch.nn.Module):
    """A product that Inductor has several kernels for, on a CPU too, and a split op behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(HEADS, WIDTH, WIDTH) / WIDTH**0.5)
        self.register_buffer("cache", torch.zeros(64, WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.bmm(x.expand(HEADS, -1, -1).contiguous(), self.weight).sum(0)
        out = torch.empty_like(y)
        add_to(y, self.cache, out)
        return torch.tanh(out)


def start(device: str, cache_dir: str) -> dict[str, Any]:
    """One step of a server that compiles its whole forward: what that tried out, how long it took, what it computed."""
    torch.manual_seed(0)
    model = Batched().to(device).eval().requires_grad_(False)
    x = torch.randn(NUM_TOKENS, WIDTH).to(device)
    with torch.inference_mode():
        expected = model(x)
        model.cache.zero_()
    benchmarks = watch_benchmarks()
    config = pw.GraphConfig(
        prefill={"backend": "disabled"},
        decode={"backend": "full", "buckets": (NUM_TOKENS,)},
        capture_device="tape" if device == "cpu" else "cuda",
        enable_torch_compile=True,
        cache_dir=cache_dir,
    )
    started = time.perf_counter()
    with pw.Runtime(model, config, dynamic_dims={"x": 0}) as runtime:
        result = runtime.run("decode", {"x": x}, copy=True)
        seconds = time.perf_counter() - started
        compiles = [event for event in runtime.events if event.kind == "compile_whole"]
        return {
            "num_benchmarks": sum(benchmarks.values()),
            "benchmarks": dict(benchmarks),
            "seconds": seconds,
            "compile_s": sum(event.seconds for event in compiles),
            "compiles_whole": runtime.counters["compiles_whole"],
            "difference": float((result - expected).abs().max()),
            "inductor": os.environ["TORCHINDUCTOR_CACHE_DIR"],
        }


def watch_benchmarks() -> Counter[str]:
    """Counts from now on how often Inductor tries a kernel out in this process, by who asks for it."""
    from torch._inductor.runtime.benchmarking import benchmarker

    seen: Counter[str] = Counter()
    names = [name for name in dir(type(benchmarker)) if name.startswith("benchmark")]

    def counted(call: Any) -> Any:
        def benchmark(*arguments: Any, **options: Any) -> Any:
            frames = traceback.extract_stack(limit=7)[:-1]
            seen[" < ".join(f"{Path(f.filename).name}:{f.name}" for f in reversed(frames))] += 1
            return call(*arguments, **options)

        return benchmark

    for name in names:
        if callable(getattr(benchmarker, name)):
            setattr(benchmarker, name, counted(getattr(benchmarker, name)))
    return seen


def start_twice(device: str, cache_dir: Path, timeout_s: float = 240.0) -> tuple[dict[str, Any], dict[str, Any]]:
    """What two servers say that start one after the other, each in a process of its own, with nothing but the cache."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    command = [sys.executable, "-W", "ignore", "-m", "tests.runtime.whole_checks", device, str(cache_dir)]
    said = []
    for _ in range(2):
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        said.append(json.loads(done.stdout.splitlines()[-1]))
    return said[0], said[1]


if __name__ == "__main__":
    print(json.dumps(start(*sys.argv[1:3])))
