"""Where a Triton kernel may be launched, on which device, and how with little Python.

An ordinary launch of a JIT function binds and inspects each argument, every time: 20 us and more. What it launches in
the end is a compiled kernel, which takes addresses as plain numbers; `quick_launch` keeps that one for launches whose
arguments are known to be of the same kinds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import triton

from ...errors import NotAvailableError

Grid = tuple[int, int, int]
_KNOBS = triton.knobs.runtime


def check_device(kernel: Any, tensor: torch.Tensor) -> None:
    """Raises NotAvailableError if `tensor` is on no GPU, unless the kernel was made for Triton's interpreter."""
    if not tensor.is_cuda and not is_interpreted(kernel):
        raise NotAvailableError(
            f"triton kernels: expected tensors on a GPU, got {tensor.device}; move them there, or set "
            f"TRITON_INTERPRET=1 before the process imports triton to run them, slowly, on the CPU"
        )


def launch_on(kernel: Any, tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Makes the device of `tensor` the current one, on which Triton launches.

    Raises:
        NotAvailableError: it is no GPU, and the kernel was not made for Triton's interpreter.
    """
    check_device(kernel, tensor)
    if not tensor.is_cuda:
        return contextlib.nullcontext()
    guard: contextlib.AbstractContextManager[None] = torch.cuda.device(tensor.device)
    return guard


def is_interpreted(kernel: Any) -> bool:
    """Whether a kernel runs in Triton's interpreter, on the CPU."""
    return not isinstance(kernel, triton.runtime.JITFunction)


Launch = Callable[..., None]
"""`run(grid_0, grid_1, grid_2, stream, *middle, *arguments)`."""


Way = tuple[Launch, tuple[Any, ...], Any]
"""(run, middle) of such a launch, and the compiled kernel, which a Triton unloads when nobody holds it (3.9)."""


def addresses_of(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Where they begin."""
    return tuple(map(torch.Tensor.data_ptr, tensors))


def quick_launch(compiled: Any) -> Way | None:
    """(run, middle, kernel) of what an ordinary launch returned.

    `run(*grid, stream, *middle, *arguments)` launches it again.

    The arguments are those of the JIT function, constants included; a pointer is an address. They must be of the kinds
    for which it was compiled: dtypes, addresses and numbers that are multiples of 16, numbers that are 1. No launch
    hook is called. None if this Triton has another form of launch, or the kernel needs memory of its own.
    """
    try:
        metadata = compiled.metadata
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            return None
        run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    except AttributeError:
        return None
    if not callable(run) or not isinstance(function, int):
        return None
    return run, (function, packed, None, None, None), compiled


def has_hooks() -> bool:
    """Whether a profiler listens to launches: then they must go the ordinary way."""
    knobs = _KNOBS
    try:
        return bool(knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls)
    except AttributeError:  # someone put a function or None there instead of adding to the chain
        hooks = (knobs.launch_enter_hook, knobs.launch_exit_hook)
        return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
