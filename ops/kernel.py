"""One kernel of a fused op: what it supports, and what it is asked to serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from ..errors import RegistrationError

COMPILING = ("triton", "flashinfer")
"""Names of kernels whose first call compiles them, unless they say otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpec:
    """What a kernel is asked to serve. What is None is not known, and then no reason to reject."""

    device_type: str
    """Where the tensors live: "cpu", "cuda", ..."""
    dtype: torch.dtype | None = None
    """Of the activations."""
    capability: tuple[int, int] | None = None
    """The compute capability of a CUDA device, such as (9, 0)."""
    captured: bool = False
    """Whether a capture may hold its calls."""
    at_once: bool = False
    """Whether its first call may wait for no compile."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One kernel of a fused op."""

    name: str
    """Where it comes from: "torch", "triton", "sgl_kernel", "flashinfer", or a word of whoever registers it."""
    device_types: tuple[str, ...]
    """Where it runs: "cpu", "cuda", ..."""
    location: str
    """`file:line` of the registration."""
    body: Callable[..., Any]
    available: Callable[[], str | None] | None
    """Says why it cannot run in this process, or None when it can."""
    dtypes: tuple[torch.dtype, ...] | None = None
    """The dtypes of the activations that it serves; None: all."""
    min_capability: tuple[int, int] | None = None
    """The least compute capability on CUDA; None: any."""
    captures: bool = True
    """Whether a capture may hold its calls: it does the same on the device in each step, and waits for nothing."""
    compiles: bool = False
    """Whether its first call compiles it, which takes a second and more."""
    beats_inductor: bool = False
    """Whether it was measured no slower than what Inductor makes of the native body: the default there then."""
    operators: tuple[OpOverload, ...] = ()
    """What a trace of its calls holds in the native body's place. Each takes the native body's leading arguments."""
    why: str = ""
    """What speaks for it, in a few words."""

    def reject(self, spec: KernelSpec) -> str | None:
        """Why it cannot serve `spec`, or None when it can. What no installation mends comes first."""
        if spec.device_type not in self.device_types:
            return f"runs on {', '.join(self.device_types)}, not on {spec.device_type}"
        if self.dtypes is not None and spec.dtype is not None and spec.dtype not in self.dtypes:
            return f"serves {', '.join(map(dtype_name, self.dtypes))}, not {dtype_name(spec.dtype)}"
        if self.min_capability is not None and spec.capability is not None and spec.capability < self.min_capability:
            least, got = (".".join(map(str, version)) for version in (self.min_capability, spec.capability))
            return f"needs compute capability {least} or higher, not {got}"
        if spec.captured and not self.captures:
            return "cannot be captured"
        if spec.at_once and self.compiles:
            return "is compiled at its first call, for which the first steps of a tiered start do not wait"
        try:
            reason = self.available() if self.available is not None else None
        except ImportError as error:
            return f"cannot be imported: {error}"
        if reason is not None and (not isinstance(reason, str) or not reason):
            raise RegistrationError(
                f"{self.location}: available of kernel {self.name}: expected None or the reason why it cannot run, "
                f"got {reason!r}; return None where it can run"
            )
        return reason


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def overload_of(function: Any) -> OpOverload | None:
    """The operator that a function is, if it is one; its only overload."""
    packet = getattr(function, "_opoverload", function)  # a torch.library.custom_op's
    if isinstance(packet, OpOverloadPacket):
        packet = packet.default
    return packet if isinstance(packet, OpOverload) else None


def check_operators(where: str, operators: Any) -> tuple[OpOverload, ...]:
    """The operators of a tuple. Raises: RegistrationError unless it holds nothing else."""
    found = [overload_of(each) for each in operators] if isinstance(operators, tuple) else [None]
    if None in found:
        raise RegistrationError(
            f"{where}: operators: expected a tuple of torch operators, got {operators!r}; name what the function calls "
            f"and torch.library or piecework.ops.opaque defined, or leave it out"
        )
    return tuple(each for each in found if each is not None)


def check_support(where: str, dtypes: Any, min_capability: Any) -> None:
    """Raises: RegistrationError unless each is None or what a Kernel holds."""
    if dtypes is not None and not (
        isinstance(dtypes, tuple) and dtypes and all(isinstance(dtype, torch.dtype) for dtype in dtypes)
    ):
        raise RegistrationError(
            f"{where}: dtypes: expected a tuple of dtypes, got {dtypes!r}; write dtypes=(torch.bfloat16,), or leave it "
            f"out where it serves all"
        )
    if min_capability is not None and not (
        isinstance(min_capability, tuple)
        and len(min_capability) == 2
        and all(isinstance(part, int) for part in min_capability)
    ):
        raise RegistrationError(
            f"{where}: min_capability: expected two integers, got {min_capability!r}; write min_capability=(8, 0), or "
            f"leave it out where any will do"
        )
