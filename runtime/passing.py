"""Errors that may be over by another attempt."""

from __future__ import annotations

import errno

from ..errors import WorkerLostError


def passing(error: BaseException) -> str | None:
    """What may be over by another attempt, in words; None for what would fail again."""
    if isinstance(error, WorkerLostError):
        return "a compile worker was lost"
    cause: BaseException | None = error
    while cause is not None:
        is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full or "No space left on device" in str(cause):
            return "a disk is full (TMPDIR or TORCHINDUCTOR_CACHE_DIR)"
        cause = cause.__cause__
    return None
