"""The settings of torch that a trace bakes in, set again where it is made for another process."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import TraceError


@contextlib.contextmanager
def default_dtype_of(ambient: Sequence[str]) -> Iterator[None]:
    """Sets torch's default dtype to the one among the settings, float32 if there is none; restores what was.

    Args:
        ambient: what `ambient_state` returned.

    Raises:
        TraceError: torch has no such dtype.
    """
    named = [match[1] for text in ambient if (match := re.fullmatch(r"default dtype torch\.(\w+)", text))]
    before = torch.get_default_dtype()
    torch.set_default_dtype(_dtype(named[0]) if named else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def ambient_settings(ambient: Sequence[str]) -> Iterator[None]:
    """Makes torch's settings those that `ambient_state` told elsewhere; restores what was. Holds for the process.

    Raises:
        TraceError: one of them is not known here.
    """
    for text in ambient:
        known = _AUTOCAST.fullmatch(text) or text == _DETERMINISTIC or text.startswith("default dtype ")
        if not known:
            raise TraceError(
                f"trace: expected settings that `ambient_state` tells, got {text!r}; run both processes with one "
                f"version of Piecework"
            )
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(default_dtype_of(ambient))
        stack.enter_context(autocast_of(ambient))
        torch.use_deterministic_algorithms(_DETERMINISTIC in ambient, warn_only=warn_only)
        stack.callback(torch.use_deterministic_algorithms, enabled, warn_only=warn_only)
        yield


@contextlib.contextmanager
def autocast_of(ambient: Sequence[str]) -> Iterator[None]:
    """Turns the autocast of these settings on, in this thread; the other settings are the whole process's."""
    with contextlib.ExitStack() as stack:
        for match in filter(None, map(_AUTOCAST.fullmatch, ambient)):
            # Without its cache of casts: that is the whole process's, and its lock is held while Python runs.
            stack.enter_context(torch.autocast(match[1], dtype=_dtype(match[2]), cache_enabled=False))
        yield


_DETERMINISTIC = "deterministic algorithms"
_AUTOCAST = re.compile(r"autocast (\w+) to torch\.(\w+)")


def _dtype(name: str) -> torch.dtype:
    dtype: Any = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TraceError(f"trace: expected a dtype of torch, got {name!r}; run both processes with one version of it")
    return dtype
