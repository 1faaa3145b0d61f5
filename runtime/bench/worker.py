"""The fresh process of one startup policy: `python -m piecework.runtime.bench.worker FOLDER`; see fresh.py."""

from __future__ import annotations

import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ... import __version__
from ...phases import GraphConfig
from ..console import exit_code
from ..engine.engine import LLMEngine
from ..engine.output import RequestOutput
from ..engine.params import SamplingParams
from .fresh import CACHES, RESULT, SPEC, WorkerSpec
from .traffic import Batch

if TYPE_CHECKING:
    from ..runtime import Runtime


class StepTimes:
    """Measures steps from outside, by the tokens that come out of them: what a client waits for."""

    def __init__(self, runtime: Runtime, started: float) -> None:
        """`started`: on the clock of `time.perf_counter`; every time below counts from it."""
        self.step_s: list[float] = []
        """Of each step, from the request or the token before it until its first token."""
        self.first_token_s: float | None = None
        self.settled_s = time.perf_counter() - started
        """The end of the last step that came with a trace, a compile, a capture or a promotion."""
        self._counters = runtime.counters
        self._started = started
        self._waiting_since = time.perf_counter()
        self._num_steps, self._num_changes = self._look()

    def send(self) -> None:
        """A batch is sent: its first step starts now."""
        self._waiting_since = time.perf_counter()

    def on_output(self, index: int, output: RequestOutput) -> None:
        """A token has come, the first of a step or another of the same step."""
        now = time.perf_counter()
        num_steps, num_changes = self._look()
        if num_steps != self._num_steps:
            self.step_s.append(now - self._waiting_since)
        if num_changes != self._num_changes:
            self.settled_s = now - self._started
        if self.first_token_s is None:
            self.first_token_s = now - self._started
        self._num_steps, self._num_changes = num_steps, num_changes
        self._waiting_since = time.perf_counter()

    def _look(self) -> tuple[int, int]:
        counters = self._counters.as_dict()
        changes = ("traces", "compiles_general", "compiles_specialized", "compiles_whole", "captures", "promotions")
        return counters["steps"], sum(counters[name] for name in changes)


def measure(spec: WorkerSpec, *, cold: bool) -> dict[str, Any]:
    """Builds the engine, sends the requests, and returns what the epilog of `bench startup --help` describes.

    Args:
        cold: whether the compile caches of this process are empty, for the record.
    """
    started = time.perf_counter()
    config = GraphConfig.from_json(spec.config)
    with LLMEngine(spec.model_dir, config, dtype=spec.dtype, device=spec.device) as engine:
        runtime = engine.runtime
        times = StepTimes(runtime, started)
        ready_s = times.settled_s
        at_ready = runtime.counters.as_dict()
        num_steps_before_last = 0
        for batches in spec.rounds:
            num_steps_before_last = len(times.step_s)
            _send(engine, batches, spec.max_new_tokens, times)
        counters, explained = runtime.counters.as_dict(), runtime.explain().as_dict()
        assert times.first_token_s is not None
        return {
            "policy": str(runtime.config.startup),
            "cold": cold,
            "ready_s": ready_s,
            "first_token_s": times.first_token_s,
            "settled_s": times.settled_s,
            "worst_step_s": max(times.step_s),
            "steady_step_s": statistics.median(times.step_s[num_steps_before_last:]),
            "in_step_compiles": sum(e.kind.startswith("compile") and e.scope.in_step for e in runtime.events),
            "in_step_seconds": counters["in_step_seconds"],
            "compiles_before_ready": sum(n for name, n in at_ready.items() if name.startswith("compiles_")),
            "captures": counters["captures"],
            "in_step_captures": sum(e.kind == "capture" and e.scope.in_step for e in runtime.events),
            "pool_bytes": explained["memory"]["pool_bytes"],
            "peak_bytes": _peak_bytes(engine.device),
            "entries": explained["entries"],
            "counters": counters,
            "conditions": _conditions(engine, spec),
        }


def _send(engine: LLMEngine, batches: Sequence[Batch], max_new_tokens: int, times: StepTimes) -> None:
    # Without an end, so that every policy and every checkpoint gets the same steps.
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    for prompts in batches:
        times.send()
        engine.generate(prompts, params, on_output=times.on_output)


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    try:
        # Not getrusage: Linux lets its ru_maxrss start at what the parent had when it started this process.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        [peak] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(peak.split()[1]) * 1024
    except (OSError, ValueError):
        peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak_rss if sys.platform == "darwin" else peak_rss * 1024


def _conditions(engine: LLMEngine, spec: WorkerSpec) -> dict[str, Any]:
    config, model = engine.runtime.config, engine.model_config
    on_cuda = engine.device.type == "cuda"
    return {
        "piecework": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(engine.device) if on_cuda else f"cpu, {torch.get_num_threads()} threads",
        "cuda": torch.version.cuda if on_cuda else None,
        "model": {
            "architecture": model.architecture,
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "dtype": str(next(engine.model.parameters()).dtype).removeprefix("torch."),
        },
        "config": config.as_dict(),
        "buckets": {str(phase): list(ladder) for phase, ladder in engine.runtime.resolved.ladders.items()},
        "num_rounds": len(spec.rounds),
        "num_batches": sum(len(batches) for batches in spec.rounds),
        "num_requests": sum(len(batch) for batches in spec.rounds for batch in batches),
        "max_new_tokens": spec.max_new_tokens,
    }


def main(folder: Path) -> int:
    """Reads the spec in `folder`, measures, and writes the result there; returns 0."""
    spec = WorkerSpec(**json.loads((folder / SPEC).read_text(encoding="utf-8")))
    cold = not any(path.is_file() for path in (folder / CACHES).rglob("*"))
    (folder / RESULT).write_text(json.dumps(measure(spec, cold=cold)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(lambda: main(Path(sys.argv[1]))))
