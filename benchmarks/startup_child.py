"""One policy of bench_startup.py, in the fresh process that it starts: drives the steps and writes what it saw.

    python benchmarks/startup_child.py SPEC.json

Seconds count from the start of the Runtime's construction; weights and caches are on the device before it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from llama import Llama
from report import write_json
from startup_spec import COMPILED, PLAIN, WHOLE, Bucket, Spec, schedule
from startup_steps import OurSteps, PlainSteps, Steps

from piecework.runtime.bench.measures import events_as_data

COMPILERS_BESIDE = {"tiered": "eager", WHOLE: None}
"""Policy -> what made the programs that ran while workers were at it; None: what the phases ask for."""
NEW_UNTIL = 0.6
"""The share of the time before the cap in which a bucket may begin whose first step takes long."""


class Child:
    """Runs a spec, and writes its result again after each part, so that what is stopped leaves what there is."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        device = torch.device(spec.device)
        on_cuda = device.type == "cuda"
        if not on_cuda:
            torch.set_num_threads(1)  # the tiny shape gains nothing by more, and they wait for each other
        dtype = torch.bfloat16 if on_cuda else torch.float32
        self.compiler = "inductor" if on_cuda else "aot_eager"
        self.llama = Llama(device, dtype, num_layers=spec.num_layers, shape=spec.shape, num_blocks=spec.num_blocks)
        self.result: dict[str, Any] = {"policy": spec.policy, "steps": []}

    def measure(self) -> None:
        """Everything, in order."""
        steps = self._make()
        if self.llama.device.type == "cuda":
            torch.cuda.synchronize()
        self.started = time.perf_counter()
        steps.begin()
        self.result["ready_s"] = self._now()
        self._paced(steps)
        self._note_events(steps)
        self._write()
        self.result["steady_ms"] = self._steady(steps)
        self._note_events(steps)  # what came after the cap is in it, too
        self._write()
        steps.close()
        if self.spec.policy in COMPILERS_BESIDE:
            # The same programs with nobody beside them: what steps beside the workers compare with.
            alone = OurSteps(self.spec, self.llama, "lazy", COMPILERS_BESIDE[self.spec.policy] or self.compiler)
            alone.begin()
            self.result["alone_ms"] = self._steady(alone, "decode")
            alone.close()
        self.result["is_whole"] = True
        self._write()

    def _make(self) -> Steps:
        if self.spec.policy in (PLAIN, COMPILED):
            return PlainSteps(self.spec, self.llama, compiled=self.spec.policy == COMPILED)
        return OurSteps(self.spec, self.llama, self.spec.policy, self.compiler)

    def _now(self) -> float:
        return time.perf_counter() - self.started

    def _paced(self, steps: Steps) -> None:
        """Steps at the spec's pace until all is settled and a little longer, or the cap."""
        met: set[Bucket] = set()
        settled_at: float | None = None
        due = self._now()
        for bucket in schedule(self.spec):
            if (wait := due - self._now()) > 0:
                time.sleep(wait)
            begun = self._now()
            if begun > self.spec.cap_s or (settled_at is not None and begun > settled_at + self.spec.linger_s):
                break
            if begun > self.spec.cap_s * NEW_UNTIL and not steps.is_prepared(bucket):
                continue  # its first step would last beyond the cap
            due = begun + self.spec.interval_s
            steps.run(bucket)
            ended = self._now()
            met.add(bucket)
            self.result["buckets_met"] = len(met)
            step = {"at_s": ended, "seconds": ended - begun, "phase": bucket[0], "bucket": bucket[1]}
            self.result["steps"].append(step | {"state": steps.state(bucket)})
            if ended - begun > 1.0:
                self._write()  # a process that is stopped in the next such step leaves this one
            if settled_at is None and len(met) == len(self.spec.buckets) and steps.is_settled:
                settled_at = ended
        self.result["settled_at_s"] = settled_at

    def _steady(self, steps: Steps, *phases: str) -> dict[str, list[float]]:
        """Milliseconds of steps that follow each other, of each bucket of these phases that is prepared."""
        times: dict[str, list[float]] = {}
        for bucket in self.spec.buckets:
            if not steps.is_prepared(bucket) or (phases and bucket[0] not in phases):
                continue
            for _ in range(3):
                steps.run(bucket)
            own = times[f"{bucket[0]} {bucket[1]}"] = []
            for _ in range(self.spec.steady_steps):
                begun = time.perf_counter()
                steps.run(bucket)
                own.append((time.perf_counter() - begun) * 1e3)
        return times

    def _note_events(self, steps: Steps) -> None:
        if isinstance(steps, OurSteps):
            runtime = steps.runtime
            offset_s = runtime.started_s - self.started
            self.result["events"] = events_as_data(runtime.events, offset_s)
            self.result["counters"] = runtime.counters.as_dict()

    def _write(self) -> None:
        write_json(Path(self.spec.out), self.result)


def main(file: Path) -> int:
    """Reads a spec, measures and writes; returns 0."""
    Child(Spec(**json.loads(file.read_text()))).measure()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
