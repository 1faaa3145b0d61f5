"""A machine without a GPU on which replays take no time: what is left of a step is the host's Python."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from piecework.graphs import tape
from piecework.ops import attention


class NullSegment:
    """Work that is not done again."""

    def __init__(self, recorded: Any) -> None:
        self._recorded = recorded

    def replay(self) -> None:
        """Nothing."""

    def release(self) -> None:
        self._recorded.release()


class NullDevice(tape.TapeDevice):
    """Records on the tape, and replays nothing."""

    @contextlib.contextmanager
    def session(self, pool: Any) -> Iterator[Any]:
        with super().session(pool) as session:
            end = session.end
            session.end = lambda: NullSegment(end())  # type: ignore[method-assign]
            yield session


def _nothing(*arguments: Any) -> None:
    """Attends to nothing."""


NULL_ATTENTION = attention.AttentionImplementation(
    name="null",
    why="does nothing",
    reject=lambda spec: None,
    load=lambda: _nothing,
    captures=True,
    load_prepare=lambda: lambda *arguments: _nothing,
)


@contextlib.contextmanager
def null_device() -> Iterator[None]:
    """Inside, `capture_device="tape"` is a `NullDevice`, and attention does nothing: outputs mean nothing."""
    with (
        mock.patch.object(tape, "TapeDevice", NullDevice),
        mock.patch.object(attention, "IMPLEMENTATIONS", (NULL_ATTENTION,)),
    ):
        yield
