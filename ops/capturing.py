"""Which split ops may run inside the capture of a whole forward, and how the others are kept out of one.

A captured body is not run again at a replay: whatever its Python read on the host stays as it was. So an operator has
to say that its body can bear that: see `capturable` of `piecework.ops.split_op`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from torch._ops import OpOverload

from ..errors import CaptureError, RegistrationError
from . import registry

_WHOLE: ContextVar[bool] = ContextVar("piecework_capturing_whole", default=False)

is_capturing_whole: Callable[[], bool] = _WHOLE.get
"""Whether a whole forward is being captured in this thread. The bare method: each call of a split op asks."""


@contextlib.contextmanager
def capturing_whole() -> Iterator[None]:
    """While a whole forward is captured in this thread: split ops that cannot be captured refuse to run.

    The bodies of operators that `split_op` defined raise CaptureError. An operator that somebody else defined has no
    body that could: whoever sees the call first asks `capture_refusal`.
    """
    token = _WHOLE.set(True)
    try:
        yield
    finally:
        _WHOLE.reset(token)


def capture_refusal(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why this call cannot be captured as part of a whole forward; None when it can, or when `op` is no split op.

    Raises:
        RegistrationError: the operator's `capturable` returned something else than a text or None.
    """
    entry = registry.REGISTRY.ops.get(op)
    if entry is None:
        return None
    capturable = registry.REGISTRY.capturable.get(op, False)
    if not callable(capturable):
        return None if capturable else _undeclared(entry)
    reason = capturable(*args, **kwargs)
    if reason is not None and not isinstance(reason, str):
        raise RegistrationError(
            f"{entry.location}: {entry.name}: capturable: expected the reason why a call cannot be captured, or None, "
            f"got {reason!r}; return a text, or pass capturable=True or False"
        )
    if reason is None:
        return None
    return f"{entry.name}: this call cannot be captured: {reason}; use backend tc_piecewise or breakable"


def refuse_uncapturable(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises CaptureError with the operator's name when `capture_refusal` has a reason."""
    reason = capture_refusal(op, args, kwargs)
    if reason is not None:
        raise CaptureError(reason, op=op._schema.name)


def _undeclared(entry: registry.SplitOp) -> str:
    ours = entry.name in registry.REGISTRY.bodies
    how = "pass capturable=True to @split_op" if ours else f'write split_op.register("{entry.name}", capturable=True)'
    return (
        f"{entry.name} does not say that it can be captured; {how} if its body only launches kernels and reads its "
        f"context from device tensors, or use backend tc_piecewise or breakable"
    )
