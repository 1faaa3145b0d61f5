"""How long programs take on their device, measured beside steps that run on it.

On a GPU a program that is not captured waits for Python between its kernels. What is measured is what a capture of it
would take: a kernel that does nothing holds the stream until Python has launched everything behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

ROUNDS = 7
_WARM_CALLS = 2
_CYCLES_PER_SECOND = 2e9
"""No less than any GPU makes; a hold that is too long does no harm."""
_LONGEST_HOLD_S = 0.5


def least_seconds(calls: Sequence[Callable[[], object]], *, on_gpu: bool) -> list[float]:
    """The least seconds of the device that each call took, of `ROUNDS` in turn; on the current stream.

    The least: what else runs on the device only adds to it.
    """
    measure = _gpu_seconds if on_gpu else _cpu_seconds
    for call in calls:
        for _ in range(_WARM_CALLS):  # the first one loads and sets up
            call()
    times = [[measure(call) for call in calls] for _ in range(ROUNDS)]
    return [min(column) for column in zip(*times, strict=True)]


def _cpu_seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _gpu_seconds(call: Callable[[], object]) -> float:
    stream = torch.cuda.current_stream()
    stream.synchronize()
    host = _cpu_seconds(call)
    stream.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(min(2 * host + 1e-3, _LONGEST_HOLD_S) * _CYCLES_PER_SECOND))
    begin.record(stream)
    call()
    end.record(stream)
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3
