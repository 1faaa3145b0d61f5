"""Checks of single values of a config: each returns what its field holds, or raises with the path of the field."""

from __future__ import annotations

import os
import re
from fractions import Fraction
from reprlib import repr as short_repr

from ..errors import ConfigError
from .choices import not_one_of

_UNIT_BYTES = {"b": 1} | {
    f"{prefix}{rest}": base**power
    for rest, base in (("b", 1000), ("ib", 1024), ("i", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}
DEFAULT_MODE = "max-autotune-no-cudagraphs"
MODES = ("default", DEFAULT_MODE)
"""The modes of torch.compile that a whole forward can be compiled in."""
_MODE_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": DEFAULT_MODE}
"""Modes that make CUDA graphs -> what they are without."""
AUTO = "auto"
KERNEL_BACKENDS = (AUTO, "native", "torch", "triton", "sgl_kernel", "flashinfer")
"""Where kernels of fused ops may come from; `native` is none. A user's own op may have kernels of other names."""
ATTENTION_BACKENDS = (AUTO, "triton", "flashinfer", "torch")
"""What may serve paged attention."""
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([a-zA-Z]*)")


def check_num_bytes(value: object, where: str) -> int | None:
    """A number of bytes from an integer or from a text such as `512MiB`, `2GiB` or `1.5GB`; None stays None.

    KB, MB, GB and TB count in thousands, KiB, MiB, GiB and TiB in 1024; a bare number is bytes. A bare `2G` is
    refused: half of its readers take it for the one and half for the other.

    Raises: ConfigError if it is none of these, or less than a byte.
    """
    if value is None:
        return None
    num_bytes = None
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 30:
        value = int(value)  # as a flag brings it
    if isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
    elif isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())):
        number, unit = found[1], found[2].lower() or "b"
        if unit in _UNIT_BYTES:
            num_bytes = int(Fraction(number) * _UNIT_BYTES[unit])
        elif f"{unit}b" in _UNIT_BYTES:
            raise ConfigError(
                f"{where}: expected a size with a unit such as MiB or MB, got {short_repr(value)}; "
                f"write {number}{unit.upper()}iB or {number}{unit.upper()}B"
            )
    if num_bytes is None or num_bytes < 1:
        raise ConfigError(
            f"{where}: expected a number of bytes or a size like 512MiB, 2GiB or 1.5GB, got {short_repr(value)}; "
            "write one, or leave it out for no limit"
        )
    return num_bytes


def check_share(value: object, where: str) -> float | None:
    """Raises: ConfigError unless `value` is None or a number from 0 to 1."""
    if value is None:
        return None
    # A NaN fails the comparison, as it should.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigError(f"{where}: expected a share from 0 to 1, got {short_repr(value)}; use 0.25 for a quarter")
    return float(value)


def check_seconds(value: object, where: str, *, unit: str = "seconds") -> float:
    """Raises: ConfigError unless `value` is a finite number, 0 or more; as a float."""
    # A NaN fails the comparison, as it should.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ConfigError(f"{where}: expected a number of {unit}, 0 or more, got {short_repr(value)}; use 0 for none")
    return float(value)


def check_count(value: object, where: str) -> int:
    """Raises: ConfigError unless `value` is an integer, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{where}: expected an integer, 0 or more, got {short_repr(value)}; use 0 for none")
    return value


def check_path(value: object, where: str, what: str) -> str | None:
    """Raises: ConfigError unless `value` is None or a path, as text or path object; `what`: "a directory"."""
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{where}: expected the path of {what}, got {short_repr(value)}; name one or leave it out")
    return path


def check_mode(value: object, where: str) -> str:
    """Raises: ConfigError unless `value` is one of MODES."""
    if not isinstance(value, str) or value not in (*MODES, *_MODE_WITHOUT_GRAPHS):
        raise not_one_of(where, value, MODES)
    if value in _MODE_WITHOUT_GRAPHS:
        raise ConfigError(
            f"{where}: expected one of {', '.join(MODES)}, got {value!r}, which makes CUDA graphs of its own, as the "
            f"capture does here; use {_MODE_WITHOUT_GRAPHS[value]!r}"
        )
    return str(value)


def check_flag(value: object, where: str) -> bool:
    """Raises: ConfigError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: expected true or false, got {short_repr(value)}; use one of these")
    return value


def check_kernel_backend(value: object, where: str) -> str:
    """Raises: ConfigError unless `value` is a word that a kernel can be called. Which there are is known to the ops."""
    if not isinstance(value, str) or not value.isidentifier():
        raise not_one_of(where, value, KERNEL_BACKENDS)
    return str(value)


def check_attention_backend(value: object, where: str) -> str:
    """Raises: ConfigError unless `value` is one of ATTENTION_BACKENDS."""
    if not isinstance(value, str) or value not in ATTENTION_BACKENDS:
        raise not_one_of(where, value, ATTENTION_BACKENDS)
    return str(value)
