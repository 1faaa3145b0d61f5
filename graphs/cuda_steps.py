"""The order of steps on a CUDA device: one at a time, each behind the one before, whatever stream that used."""

from __future__ import annotations

import threading
from types import TracebackType

import torch


class StepOrder:
    """Entered around each step, by one thread at a time; re-entrant. Costs a step a few microseconds, so nothing is
    made anew: no generator, no guard and no stream object; and a step's end is marked when a step on another stream
    comes, if torch owns the stream and it will still be there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.RLock()
        self._guard = torch.cuda.device(device)
        self._entered: list[tuple[torch.cuda.device, torch.cuda.Stream]] = []
        self._last: torch.cuda.Stream | None = None
        self._last_address = 0
        self._is_foreign = False
        self._done: torch.cuda.Event | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            guard = self._guard if not self._entered else torch.cuda.device(self._device)
            guard.idx = self._device.index  # leaving one changes it
            guard.__enter__()
            self._entered.append((guard, self._follow()))
        except BaseException:
            self._lock.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        guard, stream = self._entered.pop()
        try:
            if stream is not self._last:
                self._last, self._last_address = stream, stream.cuda_stream
                self._is_foreign = _is_foreign(stream)
            if self._is_foreign:
                self._mark(stream)
        finally:
            guard.__exit__(kind, error, traceback)
            self._lock.release()

    def _follow(self) -> torch.cuda.Stream:
        """The current stream, made to wait for the step before if that used another one."""
        index = self._device.index
        if self._last is not None and torch._C._cuda_getCurrentRawStream(index) == self._last_address:
            return self._last
        stream = torch.cuda.current_stream(index)
        if self._last is not None:
            if not self._is_foreign:
                self._mark(self._last)
            assert self._done is not None
            stream.wait_event(self._done)
        return stream

    def _mark(self, stream: torch.cuda.Stream) -> None:
        if self._done is None:
            self._done = torch.cuda.Event()
        self._done.record(stream)


def _is_foreign(stream: torch.cuda.Stream) -> bool:
    """Whether somebody else made the stream, and may destroy it (`torch.cuda.ExternalStream`): its id is its address.

    The default stream has neither.
    """
    return stream.stream_id == stream.cuda_stream != 0
