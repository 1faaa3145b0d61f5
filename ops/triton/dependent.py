"""Kernels that come up while the one before them in their stream still runs: programmatic dependent launch.

Between two kernels that follow each other the ordinary way a GPU drains, launches and fills up again: about a
microsecond, which a step of 300 short kernels feels. A dependent launch may begin as soon as each program of the kernel
before it has begun and there is room; until `wait_for_previous` returns such a program reads and writes nothing. See
"Programmatic Dependent Launch and Synchronization" in the CUDA C++ Programming Guide. (To fetch weights into the L2
cache before that was tried too, on an H200: it did not help.)

Every kernel that is launched with `overlap_options` must call `wait_for_previous` before its first load and its first
store, on every path: what comes behind it relies on it for all that came before.
"""

from __future__ import annotations

import ctypes
import functools

import torch
import triton
import triton.language as tl

_MIN_DRIVER = 12_030
"""CUDA 12.3: the first whose captures can hold such launches."""


def overlaps_on(device: torch.device) -> bool:
    """Whether kernels there are launched as dependent ones: NVIDIA's from compute capability 9.0 on."""
    return device.type == "cuda" and _overlaps(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _overlaps(index: int) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(index) < (9, 0):
        return False
    # Not in a Triton before 3.4.
    return hasattr(tl.extra.cuda, "gdc_wait") and driver_version() >= _MIN_DRIVER


def driver_version() -> int:
    """The CUDA version that the installed driver was made for, as 1000 x major + 10 x minor; 0 where there is none."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value if status == 0 else 0


def overlap_options(overlaps: bool) -> dict[str, bool]:
    """The options of the compiler for such a launch."""
    return {"launch_pdl": True} if overlaps else {}


@triton.jit
def wait_for_previous(overlaps: tl.constexpr) -> None:
    """Lets the next kernel come up, and returns when all that the kernels before this one wrote is there."""
    if overlaps:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
