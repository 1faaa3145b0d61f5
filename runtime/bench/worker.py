"""The fresh process of one startup policy: `python -m piecework.runtime.bench.worker FOLDER`; see fresh.py."""

from __future__ import annotations

import json
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...phases import GraphConfig, Phase
from ..console import exit_code
from ..engine.engine import LLMEngine
from .feeder import Feeder, WallClock
from .fresh import CACHES, RESULT, SPEC, WorkerSpec
from .measures import Run, events_as_data, measures
from .traffic import TimedRequest

SETTLE_LIMIT_S = 120.0
"""How long after the last answer a policy may take to bring every bucket to its best."""


def measure(spec: WorkerSpec, *, cold: bool) -> dict[str, Any]:
    """Builds the engine, sends the requests, and returns what the epilog of `bench startup --help` describes.

    Args:
        cold: whether the compile caches of this process are empty, for the record.
    """
    clock = WallClock()
    config = GraphConfig.from_json(spec.config)
    with LLMEngine(
        spec.model_dir,
        config,
        dtype=spec.dtype,
        device=spec.device,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
    ) as engine:
        runtime = engine.runtime
        ready_s = clock.now()
        feeder = Feeder(engine, clock)
        feeder.feed([TimedRequest(**request) for request in spec.trace])
        served_s = clock.now()
        settled = runtime.wait_settled(SETTLE_LIMIT_S)
        for prompts in spec.steady:  # what the trace did not meet at this policy's pace
            feeder.send_at_once(prompts, spec.steady_new_tokens)
        settled = runtime.wait_settled(SETTLE_LIMIT_S) and settled
        num_before = len(feeder.steps)
        for prompts in spec.steady:
            feeder.send_at_once(prompts, spec.steady_new_tokens)
        # The runtime's clock began inside the engine's construction.
        offset_s = runtime.started_s - clock.started
        run = Run(
            ready_s=ready_s,
            served_s=served_s,
            settled=settled,
            feeder=feeder,
            num_steps_before_steady=num_before,
            events=events_as_data(runtime.events, offset_s),
        )
        counters, explained = runtime.counters.as_dict(), runtime.explain().as_dict()
        return {
            "policy": " and ".join(dict.fromkeys(str(runtime.config.startup_of(phase)) for phase in Phase)),
            "cold": cold,
            **measures(run),
            "promotions": counters["promotions"],
            "captures": counters["captures"],
            "in_step_seconds": counters["in_step_seconds"],
            "pool_bytes": explained["memory"]["pool_bytes"],
            "peak_bytes": _peak_bytes(engine.device),
            "entries": explained["entries"],
            "counters": counters,
            "conditions": _conditions(engine, spec),
        }


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
        "num_requests": len(spec.trace),
        "num_trace_tokens": sum(request["max_new_tokens"] for request in spec.trace),
        "last_arrival_s": spec.trace[-1]["arrival_s"],
        "num_steady_requests": sum(map(len, spec.steady)),
    }


def main(folder: Path) -> int:
    """Reads the spec in `folder`, measures, and writes the result there; returns 0."""
    spec = WorkerSpec(**json.loads((folder / SPEC).read_text(encoding="utf-8")))
    cold = not any(path.is_file() for path in (folder / CACHES).rglob("*"))
    (folder / RESULT).write_text(json.dumps(measure(spec, cold=cold)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(lambda: main(Path(sys.argv[1]))))
