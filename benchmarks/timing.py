"""Times of steps by the device's clock, of several ways in turn, and the bandwidth of a large copy."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from report import attempt

Call = Callable[[int], Any]
"""Does one step on the inputs of this number."""


class Clock:
    """Milliseconds, by CUDA events where the device has them."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"

    def wait(self) -> None:
        """Until the device has done its work."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def back_to_back(self, call: Call, repeat: int, *, first: int = 0) -> list[float]:
        """The time of each of `repeat` steps that follow each other; whichever of host and device is slower shows."""
        call(first)  # so that the device is busy when the first step that counts is launched
        if not self.on_cuda:
            moments = [time.perf_counter()]
            for i in range(repeat):
                call(first + i)
                moments.append(time.perf_counter())
            return [(b - a) * 1e3 for a, b in itertools.pairwise(moments)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
        events[0].record()
        for i, event in enumerate(events[1:]):
            call(first + i)
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]

    def one_by_one(self, call: Call, repeat: int, *, first: int = 0) -> list[float]:
        """The wall time of each step when the host waits for the device after it, as an engine that samples does."""
        times = []
        for i in range(repeat):
            self.wait()
            started = time.perf_counter()
            call(first + i)
            self.wait()
            times.append((time.perf_counter() - started) * 1e3)
        return times

    def in_turn(
        self, calls: Mapping[str, Call], rows: Mapping[str, dict[str, Any]], *, rounds: int, target_ms: float
    ) -> None:
        """Times all ways in turn, `rounds` times; writes medians to each way's row. A way that fails is left out.

        Args:
            target_ms: about how long a way runs each time; never less than 3 steps.
        """
        steps: dict[str, list[float]] = {name: [] for name in calls}
        walls: dict[str, list[float]] = {name: [] for name in calls}
        for each in range(rounds):
            for name, call in calls.items():
                if "error" not in rows[name]:
                    attempt(rows[name], lambda n=name, c=call, e=each: self._round(c, steps[n], walls[n], target_ms, e))
        for name, row in rows.items():
            if name in calls and "error" not in row:
                row["step_ms"] = statistics.median(steps[name])
                row["step_ms_min"], row["step_ms_max"] = min(steps[name]), max(steps[name])
                row["wall_ms"] = statistics.median(walls[name])
                row["steps"] = len(steps[name])

    def _round(self, call: Call, steps: list[float], walls: list[float], target_ms: float, first: int) -> None:
        rough = steps[-1] if steps else min(self.one_by_one(call, 2))
        repeat = max(3, min(50, round(target_ms / max(rough, 1e-3))))
        steps += self.back_to_back(call, repeat, first=first)
        walls += self.one_by_one(call, max(3, repeat // 3), first=first)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written ones counted, of a copy that is far larger than any cache; the median of 20."""
    clock = Clock(device)
    num_elements = (1 << 31 if clock.on_cuda else 1 << 26) // 4
    source = torch.empty(num_elements, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    times = clock.back_to_back(lambda i: target.copy_(source), 20 if clock.on_cuda else 3)
    return 2 * source.nbytes / (statistics.median(times) / 1e3)
