"""What the device does in a step: its kernels by name and by group, and the time between them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

GROUPS: tuple[tuple[str, str], ...] = (
    ("attention", r"attend_rows|attend_tiles|attention|flash(?!infer)|fmha|(decode|prefill)with|merge_?states?"),
    ("store", r"store_rows|rotate_and_store|index_copy|index_put|kv_?cache"),
    ("sampling", r"argmax|draw_rows|sort|scan|cumsum|softmax"),
    ("linears", r"multiply_rows|multiply_tiles|gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|triton_tem|(^|_)mm(_|$)"),
    ("activation", r"silu|swiglu|act_and_mul|sigmoid"),
    ("norm", r"norm|rsqrt"),
    ("copies", r"memcpy|memset|copy"),
)
"""(group, what is in the name), the first that fits; Inductor names a kernel after the operations that it fused."""
OTHER = "other"
READ_BACK = re.compile(r"Memcpy DtoH")
"""What a step ends with."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A kernel, or a copy, on the device."""

    name: str
    start_us: float
    end_us: float


def group_of(name: str) -> str:
    """Which group a kernel's name belongs to."""
    return next((group for group, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE)), OTHER)


def timeline_of(events: Iterable[Event]) -> dict[str, Any]:
    """The last step of several that each end with a copy to the host.

    Returns:
        `step_us`: from the end of the step before to its own end. `wait_us` of it are before its first kernel, while
        the host prepares and launches, and `gaps_us` between kernels; `groups` has the others by group, with their
        number, and `kernels` by name, the longest first. What overlaps counts in each.

    Raises:
        ValueError: there are no two such steps.
    """
    ordered = sorted(events, key=lambda event: event.start_us)
    ends = [index for index, event in enumerate(ordered) if READ_BACK.search(event.name)]
    # A step may copy several things; then they follow each other without a kernel between them.
    ends = [index for index in ends if index + 1 not in ends]
    if len(ends) < 2:
        raise ValueError(f"expected two steps that end with a copy to the host, got {len(ends)} among {len(ordered)}")
    before, step = ordered[ends[-2]], ordered[ends[-2] + 1 : ends[-1] + 1]
    groups: dict[str, dict[str, Any]] = {}
    kernels: dict[str, dict[str, Any]] = {}
    busy_until, gaps = step[0].start_us, 0.0
    for event in step:
        group = group_of(event.name)
        for place, key in ((groups, group), (kernels, event.name)):
            row = place.setdefault(key, {"us": 0.0, "count": 0})
            row["us"] += event.end_us - event.start_us
            row["count"] += 1
        kernels[event.name]["group"] = group
        gaps += max(0.0, event.start_us - busy_until)
        busy_until = max(busy_until, event.end_us)
    named = sorted(({"name": name[:120], **row} for name, row in kernels.items()), key=lambda row: -row["us"])
    return {
        "step_us": busy_until - before.end_us,
        "wait_us": max(0.0, step[0].start_us - before.end_us),
        "gaps_us": gaps,
        "groups": dict(sorted(groups.items(), key=lambda item: -item[1]["us"])),
        "kernels": named,
    }


def profiled(call: Callable[[int], object], *, num_steps: int = 4) -> dict[str, Any]:
    """`timeline_of` steps on a CUDA device; a profiler slows the host, so that `wait_us` is more than without.

    Raises: ValueError: as `timeline_of`.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for i in range(num_steps):
            call(i)
        torch.cuda.synchronize()
    return timeline_of(
        Event(name=event.name, start_us=event.time_range.start, end_us=event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    )
