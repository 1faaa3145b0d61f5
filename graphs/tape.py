"""The capture device of machines without a GPU: a capture is a list of calls.

It is as strict as a CUDA graph, so that CI, or a user on a laptop, sees what a GPU would not let pass. While a segment
is open, nothing is computed and no state changes; the model gets real tensors full of poison (NaN), real views, and the
addresses of every replay. Whatever a GPU would have to wait for is refused with the operator and the model's line. A
replay makes the recorded calls into the same memory, without the model's Python, and equals the same calls made
eagerly to the bit, whatever grad mode, autocast or default dtype is on by then. Random operators draw anew.

What only CUDA can catch:
- Triton kernels, and C extensions that are no operators: no mode sees them. On a tape they run while capturing.
- `torch.cuda.synchronize`, events and streams: work on a stream that never joins, a wait for an event of outside.
- Memory: the tape keeps each tensor (see Note [What a tape's pool counts]), so a pointer that is kept without its
  tensor, or a result that is used after the next replay has overwritten it, does no harm here.
- Lazy initialisation and allocation in a library (cuBLAS, NCCL), copies from memory that is not pinned, and tensors of
  the CPU among those of the GPU: `x.to(device)` does nothing on a tape.
- `torch.cuda.is_current_stream_capturing()` is False: a model that asks, such as those of transformers, which then
  leave out checks of their masks, must be given what spares it the question (a mask, positions).
- `torch.compile`: while a segment is open, a compiled function that is called by the model runs uncompiled and is
  recorded as operators; older torch also runs the first call of another thread's uncompiled.
- A data pointer that is read by the model, and what a C++ operator does behind the dispatcher.
- `torch.nn.TransformerEncoderLayer` and `MultiheadAttention` take another path when any mode is on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..errors import CaptureError
from .device import GraphDevice, Pool, Segment, Session
from .layouts import CallLayout
from .tape_fakes import Fakes
from .tape_mode import Recording, TapeFunctionMode, TapeMode
from .tape_pool import TapePool, poison
from .tape_steps import Ambient, CallStep, replay_modes

_thread = threading.local()
"""`recording`: whether a segment is open in this thread, as a stream knows that it is being captured."""


class TapeSegment:
    """Recorded calls, and strong references to all that they touch."""

    def __init__(self, recording: Recording) -> None:
        self._recording: Recording | None = recording
        self._default_dtype = torch.get_default_dtype()

    def replay(self) -> None:
        """Makes the recorded calls, in the memory of the capture.

        Raises:
            CaptureError: a segment is being recorded in this thread; or a call returned another shape or dtype.
        """
        assert self._recording is not None, "a released segment cannot be replayed"
        if getattr(_thread, "recording", False):
            raise CaptureError(
                "replay: expected no open segment in this thread, got a replay while one is being recorded; replay "
                "before the capture, or after it"
            )
        with replay_modes(self._default_dtype):
            for step in self._recording.steps:
                step.run()

    def release(self) -> None:
        """Lets go of all tensors; a second call does nothing."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.clear()
            recording.pool.closed()

    def __del__(self) -> None:
        self.release()


class TapeSession:
    """A capture in the making. Of one thread."""

    runs_bodies = False
    """Operators are recorded as calls; their bodies run at the replays."""

    def __init__(self, pool: TapePool, function_mode: TapeFunctionMode) -> None:
        self._pool = pool
        self._function_mode = function_mode
        self.op: str | None = None
        self._fakes = Fakes()
        self._mode: TapeMode | None = None

    def begin(self) -> None:
        """Starts a segment."""
        assert self._mode is None, "begin: the segment before has not ended"
        assert not getattr(_thread, "recording", False), "begin: another session records in this thread"
        recording = Recording(self._pool)
        mode = TapeMode(recording, self._fakes)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._function_mode.recording = recording
        _thread.recording = True
        self._pool.opened()

    def end(self) -> Segment:
        """Ends it.

        Raises:
            CaptureError: something was refused, and the model went on as if nothing had been.
        """
        recording = self._close()
        if recording.error is not None:
            recording.clear()
            self._pool.closed()
            raise CaptureError(
                f"the model caught this error and went on, but the capture was void from there: {recording.error}",
                op=recording.error.op,
                line=recording.error.line,
            ) from recording.error
        return TapeSegment(recording)

    def saw_stream(self) -> None:
        """Nothing: a tape has no streams."""

    def call(self, function: Callable[..., Any], arguments: Sequence[Any], layout: CallLayout) -> Sequence[Any]:
        """Records the call of a compiled callable, which is not made; its outputs are poisoned."""
        assert self._mode is not None, "call: no segment is open"
        recording = self._mode.recording
        self._mode.paused = True
        try:
            outputs = layout.build(arguments, self._pool.allocate_memory)
            filled: list[torch.Tensor | None] = []
            for output, memory in zip(outputs, layout.memories, strict=True):
                is_new = isinstance(output, torch.Tensor) and memory is not None and memory < 0
                filled.append(recording.alias(output) if is_new else None)
                if is_new:
                    poison(output)
            recording.steps.append(
                CallStep(
                    function=function,
                    arguments=self._held(arguments),
                    layout=layout,
                    outputs=tuple(filled),
                    ambient=Ambient.now(),
                )
            )
        finally:
            self._mode.paused = False
        return outputs

    def give_up(self) -> None:
        """Closes a segment that is still open, and forgets it."""
        if self._mode is not None:
            self._close().clear()
            self._pool.closed()

    def _held(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """What a step holds of arguments: the very tensors, whose class and identity a compiled callable may look at.

        Those of the pool are plain tensors, and the model's hold on them is counted: an alias, the same for the same.
        """
        assert self._mode is not None
        held: dict[int, Any] = {}
        for argument in arguments:
            if id(argument) not in held:
                is_own = isinstance(argument, torch.Tensor) and self._pool.block_of(argument) is not None
                held[id(argument)] = self._mode.recording.alias(argument) if is_own else argument
        return tuple(held[id(argument)] for argument in arguments)

    def _close(self) -> Recording:
        mode, self._mode = self._mode, None
        assert mode is not None, "end: no segment is open"
        self._function_mode.recording = None
        _thread.recording = False
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return mode.recording


class TapeDevice(GraphDevice):
    """Captures on a machine without a GPU."""

    name = "tape"
    wants_largest_first = False

    def open_pool(self) -> TapePool:
        """A new pool, with nothing in it."""
        return TapePool()

    @contextlib.contextmanager
    def session(self, pool: Pool) -> Iterator[Session]:
        """Starts a capture. What is done between its segments is done as ever.

        Raises:
            CaptureError: from the body, when the model does something that cannot be recorded.
        """
        assert isinstance(pool, TapePool), "a pool of another device"
        with TapeFunctionMode() as function_mode:
            session = TapeSession(pool, function_mode)
            try:
                yield session
            finally:
                session.give_up()

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Nothing: a CPU does its work in order."""
        return contextlib.nullcontext()

    def give_back(self) -> None:
        """Nothing: memory goes back when its last tensor dies."""
