"""Which body each fused op runs: the operator's list, the compiler and the kernels that there are, in one function."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..errors import NotAvailableError
from ..phases import Compiler
from ..phases.choices import not_one_of
from ..phases.fused import Preference, check_fused_ops, named_ops, preference
from .fused import NATIVE, FusedOp
from .fused import fused_ops as registered


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
    """Whether the list changed nothing here and no kernel for the device was missing."""


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


def choose(fused_ops: tuple[str, ...], *, compiler: Compiler | str, device_type: str) -> Choice:
    """Decides what every fused op runs: the one place that does, also for what compiles a whole forward at once.

    With an empty list the native body under `inductor`, which fuses it, and a kernel under the other compilers; a
    list (`all` or `none`, then `+name` and `-name`) rules alike under each compiler. Whole-forward compile calls this
    with `compiler="inductor"`. A kernel that only a list's `all` or the default asks for may be missing, and the reason
    says so.

    Raises:
        ConfigError: the list breaks a rule of `piecework.phases.fused`, or names an op that does not exist.
        NotAvailableError: no kernel of an op that the list has as `+name` can run on the device.
    """
    compiler = Compiler.parse(compiler, "compiler")
    items = check_fused_ops(fused_ops, "fused_ops")
    known = {op.name: op for op in registered()}
    for name in named_ops(items):
        if name not in known:
            raise not_one_of("fused_ops", name, known, "names of fused ops:")
    chosen = tuple(_choose_one(op, items, compiler, device_type) for op in known.values())
    return Choice(compiler=compiler, device_type=device_type, ops=chosen)


def _choose_one(op: FusedOp[Any, Any], items: tuple[str, ...], compiler: Compiler, device_type: str) -> ChosenOp:
    wish, why = preference(items, op.name, compiler)
    changed = wish is Preference.REQUIRED or wish is not preference((), op.name, compiler)[0]
    if wish is Preference.NATIVE:
        return ChosenOp(name=op.name, runs=NATIVE, reason=why, by_default=not changed)
    passed_over: list[tuple[str, str]] = []
    missing = False
    for kernel in op.kernels:
        reason = kernel.reject(device_type)
        if reason is None:
            return ChosenOp(
                name=op.name,
                runs=kernel.name,
                reason=why,
                passed_over=tuple(passed_over),
                by_default=not changed and not missing,
            )
        passed_over.append((kernel.name, reason))
        missing = missing or device_type in kernel.device_types
    if wish is Preference.REQUIRED:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in passed_over) or " it has no kernel at all"
        raise NotAvailableError(
            f"fused_ops: +{op.name} needs a kernel that runs on {device_type}, and none can; drop it:{reasons}"
        )
    details = "no kernel can run: " + "; ".join(f"{name} {reason}" for name, reason in passed_over)
    return ChosenOp(
        name=op.name,
        runs=NATIVE,
        reason=f"{why}, but {details if passed_over else 'there is no kernel'}",
        passed_over=tuple(passed_over),
        by_default=not changed and not missing,
    )
