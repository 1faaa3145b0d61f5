"""Where a Triton kernel may be launched, on which device, and how with little Python.

An ordinary launch of a JIT function binds and inspects each argument, every time: 20 us and more. What it launches in
the end is a compiled kernel, which takes addresses as plain numbers; `quick_launch` keeps that one for launches whose
arguments are known to be of the same kinds. A `Call` is an ordinary launch that is not made yet: it can be compiled
ahead, in another thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

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


class Call(NamedTuple):
    """An ordinary launch: of a kernel, with these arguments."""

    kernel: Any
    grid: Grid
    arguments: tuple[Any, ...]
    """The first one is a tensor."""
    options: dict[str, int]
    """Of the compiler."""

    def launch(self) -> Any:
        """Launches on the current device, after a compile if it needs one; returns the compiled kernel."""
        return self.kernel[self.grid](*self.arguments, **self.options)

    def compile(self) -> Way | None:
        """Compiles and loads what `launch` would launch, and launches nothing; returns its quick launch.

        Raises:
            NotAvailableError: as `launch_on`.
            Exception: whatever Triton raises.
        """
        with launch_on(self.kernel, self.arguments[0]):
            return quick_launch(self.kernel.warmup(*self.arguments, grid=self.grid, **self.options))

    @property
    def key(self) -> Hashable:
        """Equal for calls that one compiled kernel serves; not for kernels of the interpreter, which compile nothing.

        That is what Triton specialises on (`native_specialize_impl` in its runtime/jit.py): of the arguments that the
        kernel does not exempt, constants, numbers that are 1, numbers and addresses that are multiples of 16; of all
        others, the type.
        """
        kinds = map(_kind, self.kernel.params, self.arguments)
        # By its function: the hash of a kernel would be that of its source, which takes long.
        return (self.kernel.fn, self.arguments[0].device, *self.options.items(), *kinds)


def _kind(parameter: Any, argument: Any) -> Hashable:
    if isinstance(argument, torch.Tensor):
        is_exempt = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        return argument.dtype, is_exempt or argument.data_ptr() % 16 == 0
    if parameter.is_constexpr:
        return type(argument), argument
    if isinstance(argument, float):
        return float
    is_wide = not -(2**31) <= argument < 2**31
    return is_wide if parameter.do_not_specialize else (is_wide, argument == 1, argument % 16 == 0)


def has_hooks() -> bool:
    """Whether a profiler listens to launches: then they must go the ordinary way."""
    knobs = _KNOBS
    try:
        return bool(knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls)
    except AttributeError:  # someone put a function or None there instead of adding to the chain
        hooks = (knobs.launch_enter_hook, knobs.launch_exit_hook)
        return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
