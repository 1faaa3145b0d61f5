"""FlashInfer for bench_attention.py: through our implementation of the split op, planned outside of what is timed."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from attention_layers import BLOCK_SIZE, Calls, Layers, Shape, dtype_on
from report import attempt
from timing import Clock

from piecework.ops import attention
from piecework.ops.attention_choice import AttentionBackend, use_attention_backend
from piecework.ops.context import use_context

NAME = "flashinfer"


def passed_over(shape: Shape, device: torch.device) -> str | None:
    """Why it cannot attend here; None when it can."""
    dtype = dtype_on(device)
    spec = attention.AttentionSpec(
        device_type=device.type,
        dtype=dtype,
        cache_dtype=dtype,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        block_size=BLOCK_SIZE,
        is_static=shape.new == 1,
    )
    [row] = [row for row in attention.IMPLEMENTATIONS if row.name == NAME]
    return row.reject(spec)


def build(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Has FlashInfer compile what heads like those of `shape` need, in seconds; or why it does not, or what failed.

    It takes what it has compiled before from its cache in the home directory: then that is a second or two.
    """
    if (reason := passed_over(shape, device)) is not None:
        return {"passed_over": reason}
    found: dict[str, Any] = {"version": version(), "build_s": {}}
    for name, new in {"decode": 1, "prefill": 16}.items():
        small = dataclasses.replace(shape, num_reqs=1, new=new, cached=16)
        found["build_s"][name] = attempt(found, lambda small=small: first_call_s(Layers(small, device, 1)))
    return found


def version() -> str:
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def first_call_s(layers: Layers) -> float:
    """Seconds until a first call is done."""
    clock = Clock(layers.device)
    layers.stores()[0]()  # compiles a kernel of ours
    [call, *_] = Planned(layers).calls()
    clock.wait()
    started = time.perf_counter()
    call()
    clock.wait()
    return time.perf_counter() - started


class Planned:
    """A step whose context is planned for, once: at the first call, which is to be outside of a capture."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        # Holds the memory of its plans. Another plan under the same one would move what a capture reads.
        self._backend = AttentionBackend(name=NAME)
        self.context = layers.fresh_context()
        if self.context.is_static:
            self.context.plan_for(layers.own)

    def calls(self) -> Calls:
        """Store, attend, and zeros for padding if the context is static."""
        return [functools.partial(self._call, tensors) for tensors in self.layers.tensors()]

    def _call(self, tensors: tuple[torch.Tensor, ...]) -> None:
        with use_attention_backend(self._backend), use_context(self.context):
            attention.paged_attention(*tensors, self.layers.shape.scale)

    def plan_again(self) -> None:
        """What precedes each replay with a static context."""
        with use_attention_backend(self._backend):
            self.context.plan_for(self.layers.own)


def plan_us(layers: Layers, repeat: int = 5) -> float:
    """Host microseconds of a plan, which serves all layers of a step; the median.

    A static context is planned by `plan_for`. A step's own is planned in its first call: how much longer that is than
    the second one.
    """
    clock = Clock(layers.device)
    planned = Planned(layers)
    [call, *_] = planned.calls()
    call()  # makes the wrapper and its buffers
    times = []
    for _ in range(repeat):
        if planned.context.is_static:
            times.append(host_us(planned.plan_again, clock))
        else:
            planned.context = layers.fresh_context()
            times.append(host_us(call, clock) - host_us(call, clock))
    return statistics.median(times)


def host_us(call: Callable[[], Any], clock: Clock) -> float:
    """Microseconds until the call returns, with nothing to wait for on the device."""
    clock.wait()
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e6
