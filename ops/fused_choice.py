"""Which body each fused op runs: the operator's words, the compiler and the kernels that there are, in one function."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..errors import NotAvailableError
from ..phases import Compiler
from ..phases.choices import not_one_of
from ..phases.fused import Preference, check_fused_ops, named_ops, preference
from ..phases.values import AUTO, KERNEL_BACKENDS
from .fused import NATIVE, FusedOp
from .fused import fused_ops as registered
from .kernel import Kernel, KernelSpec, dtype_name

NONE_CAN_RUN = "no kernel can run"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChosenOp:
    """What one fused op runs, and why."""

    name: str
    runs: str
    """`native`, or a kernel's name."""
    reason: str
    passed_over: tuple[tuple[str, str], ...] = ()
    """(kernel, reason) of the kernels that were preferred and cannot serve."""
    by_default: bool
    """Whether the operator changed nothing here and no kernel for the device was missing."""
    is_asked: bool = False
    """Whether the operator's words, and not the default, say what runs: a forward that is compiled whole has it too."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What every fused op runs, for one compiler on one type of device."""

    compiler: Compiler
    device_type: str
    ops: tuple[ChosenOp, ...]
    """Sorted by name."""

    @property
    def runs(self) -> dict[str, str]:
        """Op -> `native` or a kernel's name."""
        return {op.name: op.runs for op in self.ops}

    @property
    def kernels(self) -> tuple[tuple[str, str], ...]:
        """(op, kernel) where a kernel runs: two choices that agree here make the same programs."""
        return tuple((op.name, op.runs) for op in self.ops if op.runs != NATIVE)

    @property
    def native_in_whole(self) -> tuple[str, ...]:
        """Ops with a kernel for which the operator did not ask: a forward that is compiled whole has their native
        bodies, for which its mode tries out kernels of its own."""
        return tuple(op.name for op in self.ops if op.runs != NATIVE and not op.is_asked)


def choose(
    fused_ops: tuple[str, ...],
    *,
    compiler: Compiler | str,
    device_type: str,
    dtype: torch.dtype | None = None,
    capability: tuple[int, int] | None = None,
    captured: bool = False,
    at_once: bool = False,
    kernel_backend: str = AUTO,
) -> Choice:
    """Decides what every fused op runs: the one place that does.

    The operator's words, the stronger first:

    - `fused_ops` where it names an op: `+name` runs a kernel (that of `kernel_backend` if it can serve), `-name` the
      native body.
    - `kernel_backend`: `native` runs the native bodies; the name of a kernel runs it, under every compiler, in each op
      that has one that can serve. The other ops go on as under `auto`, and their reasons say why.
    - the base mode of `fused_ops`: `all` runs kernels, `none` native bodies, alike under each compiler.
    - neither: the native body under `inductor` where it can fuse that and no kernel was measured to be as fast
      (`beats_inductor` of the one that would run), else a kernel.

    "A kernel" is the first in the order of registration that can serve. A kernel that only `all` or the default asks
    for may be missing, and the reason says so. Of a choice under `inductor`, a forward that is compiled whole takes
    what the operator asked for, and else the native bodies: see `Choice.native_in_whole`.

    Args:
        dtype: of the activations; None: not known.
        capability: the compute capability of a CUDA device; None: not known, or another device.
        captured: whether captures may hold what is chosen.
        at_once: whether no first call may wait for a compile.

    Raises:
        ConfigError: the list breaks a rule of `piecework.phases.fused` or names an op that does not exist, or
            `kernel_backend` is no word that is known and no kernel's name.
        NotAvailableError: no kernel of an op that the list has as `+name` can serve, or none of `kernel_backend` in
            any op.
    """
    compiler = Compiler.parse(compiler, "compiler")
    items = check_fused_ops(fused_ops, "fused_ops")
    known = {op.name: op for op in registered()}
    for name in named_ops(items):
        if name not in known:
            raise not_one_of("fused_ops", name, known, "names of fused ops:")
    spec = KernelSpec(device_type=device_type, dtype=dtype, capability=capability, captured=captured, at_once=at_once)
    _check_backend(kernel_backend, tuple(known.values()), spec)
    chosen = tuple(_choose_one(op, items, compiler, spec, kernel_backend) for op in known.values())
    return Choice(compiler=compiler, device_type=device_type, ops=chosen)


def _choose_one(
    op: FusedOp[Any, Any], items: tuple[str, ...], compiler: Compiler, spec: KernelSpec, backend: str
) -> ChosenOp:
    """What `op` runs; `backend` is a word of `kernel_backend` that was checked."""
    beats = _beats_inductor(op, spec)
    wish, why = preference(items, op.name, compiler, fuses=op.fuses, beats_inductor=beats)
    default = preference((), op.name, compiler, fuses=op.fuses, beats_inductor=beats)[0]
    kernels, is_named = op.kernels, op.name in named_ops(items)
    passed_over: list[tuple[str, str]] = []
    if backend == NATIVE and not is_named:
        wish, why = Preference.NATIVE, "kernel_backend is native"
    elif backend not in (AUTO, NATIVE):
        kernels = tuple(sorted(kernels, key=lambda kernel: kernel.name != backend))
        if not is_named:
            first = kernels[0] if kernels and kernels[0].name == backend else None
            reason = first.reject(spec) if first is not None else "kernel"
            if reason is None:
                same = _choose_one(op, (), compiler, spec, AUTO).runs == backend
                return ChosenOp(
                    name=op.name, runs=backend, reason=f"kernel_backend is {backend}", by_default=same, is_asked=True
                )
            why = f"{why} (kernel_backend: {'it has no ' if first is None else ''}{backend} {reason})"
            if first is not None:
                passed_over.append((backend, reason))
                kernels = kernels[1:]
    changed = wish is Preference.REQUIRED or wish is not default
    chosen = ChosenOp(
        name=op.name,
        runs=NATIVE,
        reason=why,
        passed_over=tuple(passed_over),
        by_default=not changed,
        is_asked=bool(items) or backend == NATIVE,
    )
    return chosen if wish is Preference.NATIVE else _first_that_serves(op, kernels, spec, wish, chosen)


def _beats_inductor(op: FusedOp[Any, Any], spec: KernelSpec) -> bool:
    """Whether the first kernel that can serve was measured no slower than what Inductor makes of it."""
    if not any(kernel.beats_inductor for kernel in op.kernels):
        return False
    return next((kernel.beats_inductor for kernel in op.kernels if kernel.reject(spec) is None), False)


def _first_that_serves(
    op: FusedOp[Any, Any], kernels: tuple[Kernel, ...], spec: KernelSpec, wish: Preference, chosen: ChosenOp
) -> ChosenOp:
    """`chosen` with the first of `kernels` that can serve, or the native body; it has what was passed over already."""
    runs, why, passed_over = NATIVE, chosen.reason, [*chosen.passed_over]
    for kernel in kernels:
        reason = kernel.reject(spec)
        if reason is None:
            runs = kernel.name
            break
        passed_over.append((kernel.name, reason))
    if runs == NATIVE and wish is Preference.REQUIRED:
        reasons = _listed(passed_over) or " it has no kernel at all"
        raise NotAvailableError(
            f"fused_ops: +{op.name} needs a kernel that runs {_asked(spec)}, and none can; drop it:{reasons}"
        )
    if runs == NATIVE:
        details = f"{NONE_CAN_RUN}: " + "; ".join(f"{name} {reason}" for name, reason in passed_over)
        why = f"{why}, but {details if passed_over else 'there is no kernel'}"
    for_device = {kernel.name for kernel in op.kernels if spec.device_type in kernel.device_types}
    missing = any(name in for_device for name, _ in passed_over)
    return dataclasses.replace(
        chosen,
        runs=runs,
        reason=why,
        passed_over=tuple(passed_over),
        by_default=chosen.by_default and not missing,
    )


def _check_backend(backend: str, ops: tuple[FusedOp[Any, Any], ...], spec: KernelSpec) -> None:
    """Raises: ConfigError, NotAvailableError: as `choose`, for `kernel_backend`."""
    if backend in (AUTO, NATIVE):
        return
    kernels = [(op, kernel) for op in ops for kernel in op.kernels]
    others = sorted({kernel.name for _, kernel in kernels} - set(KERNEL_BACKENDS))
    if backend not in (*KERNEL_BACKENDS, *others):
        raise not_one_of("kernel_backend", backend, (*KERNEL_BACKENDS, *others))
    reasons = [(op.name, kernel.reject(spec)) for op, kernel in kernels if kernel.name == backend]
    if any(reason is None for _, reason in reasons):
        return
    can = {kernel.name for _, kernel in kernels if kernel.reject(spec) is None}
    allowed = ", ".join((AUTO, NATIVE, *(name for name in (*KERNEL_BACKENDS, *others) if name in can)))
    listed = _listed([(name, str(reason)) for name, reason in reasons]) or " no fused op has one"
    raise NotAvailableError(
        f"kernel_backend: expected one with a kernel that runs {_asked(spec)}, got {backend}, which has none; "
        f"use one of {allowed}:{listed}"
    )


def _listed(reasons: list[tuple[str, str]]) -> str:
    return "".join(f"\n  {name}: {reason}" for name, reason in reasons)


def _asked(spec: KernelSpec) -> str:
    """`on cuda`, or `on cuda in bfloat16`."""
    return f"on {spec.device_type}" + (f" in {dtype_name(spec.dtype)}" if spec.dtype is not None else "")
