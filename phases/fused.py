"""Who runs the fused ops, as far as the operator's list and the compiler say. Knows no op and no kernel.

The list has one base mode, `all` or `none`, and then exceptions, `+name` and `-name`. Which names exist is known where
the ops are: `piecework.ops.fused_choice.choose` checks them, and finds the kernels. Where kernels should come from is
the operator's `kernel_backend`, which `choose` weighs as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from reprlib import repr as short_repr

from ..errors import ConfigError
from .choices import Compiler

ALL = "all"
NONE = "none"


class Preference(str, Enum):
    """What a fused op should run."""

    NATIVE = "native"
    """Its native body."""
    KERNEL = "kernel"
    """A kernel if the device has one, else the native body."""
    REQUIRED = "required"
    """A kernel; having none is an error."""


def preference(
    fused_ops: Sequence[str], name: str, compiler: Compiler, *, fuses: bool = True, beats_inductor: bool = False
) -> tuple[Preference, str]:
    """What the op `name` should run under a list that `check_fused_ops` has passed, and the reason in words.

    Args:
        fuses: whether a compiler can fuse its native body; where it cannot, a compiler that fuses changes nothing.
        beats_inductor: whether the kernel that would run was measured no slower than what Inductor makes of that.
    """
    if not fused_ops:
        if compiler is not Compiler.INDUCTOR:
            return Preference.KERNEL, f"{compiler} does not fuse"
        if not fuses:
            return Preference.KERNEL, "inductor does not fuse the native body"
        if beats_inductor:
            return Preference.KERNEL, "measured no slower than what inductor makes of the native body"
        return Preference.NATIVE, "inductor fuses the native body"
    if f"+{name}" in fused_ops:
        return Preference.REQUIRED, f"fused_ops has +{name}"
    if f"-{name}" in fused_ops:
        return Preference.NATIVE, f"fused_ops has -{name}"
    return (Preference.KERNEL, "fused_ops has all") if ALL in fused_ops else (Preference.NATIVE, "fused_ops has none")


def named_ops(fused_ops: Sequence[str]) -> tuple[str, ...]:
    """The names that a list makes exceptions for, in its order."""
    return tuple(item[1:] for item in fused_ops if item not in (ALL, NONE))


def check_fused_ops(value: object, where: str) -> tuple[str, ...]:
    """`value` as a tuple. Raises: ConfigError at `where` if it is neither empty nor one base mode with exceptions."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(
            f'{where}: expected a list like ["none", "+rms_norm"], got {short_repr(value)}; '
            "list all or none, then +name and -name"
        )
    for item in value:
        if not isinstance(item, str) or not (item in (ALL, NONE) or (item[:1] in "+-" and item[1:].isidentifier())):
            known = isinstance(item, str) and item.isidentifier()
            raise ConfigError(
                f"{where}: expected all, none, +name or -name, got {short_repr(item)}; "
                + (f"write +{item} or -{item}" if known else "remove or correct it")
            )
    items: tuple[str, ...] = tuple(value)
    for item, times in Counter(items).items():
        if times > 1:
            raise ConfigError(f"{where}: expected each item once, got {item} more than once; keep one")
    for name, times in Counter(named_ops(items)).items():
        if times > 1:
            raise ConfigError(f"{where}: expected one sign for {name}, got +{name} and -{name}; keep one")
    modes = [item for item in items if item in (ALL, NONE)]
    if items and len(modes) != 1:
        got = " and ".join(modes) if modes else f"only {', '.join(items)}"
        do = "keep one" if modes else "add none to name what takes a kernel, or all to name what does not"
        raise ConfigError(f"{where}: expected exactly one of all and none, got {got}; {do}")
    return items
