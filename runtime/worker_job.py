"""Something for a compile worker to do, and how who waits for it learns what became of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Literal

from .. import errors
from ..errors import PieceworkError


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """Something for a worker to do, and who waits for it."""

    number: int
    kind: Literal["compile", "trace"]
    frame: bytes
    future: Future[Any]
    detail: Mapping[str, Any]
    """For events: the fingerprint and the bucket."""
    started: float = 0.0
    """When a worker got it, on the monotonic clock."""


def fail(job: Job, error: BaseException) -> None:
    """Tells the error to who waits, if anybody does."""
    with contextlib.suppress(Exception):  # it was cancelled
        job.future.set_exception(error)


def error_of(job: Job, message: Mapping[str, Any]) -> PieceworkError:
    """The worker's error, as one of this process; its traceback is the cause."""
    fallback = errors.TraceError if job.kind == "trace" else errors.CompileError
    kind: Any = getattr(errors, message["error"], None)
    ours = isinstance(kind, type) and issubclass(kind, PieceworkError)
    error: PieceworkError = (kind if ours else fallback)(message["message"])
    error.__cause__ = PieceworkError(f"in a compile worker:\n{message['traceback']}")
    return error
