"""Captures on CUDA graphs.

Note [A capture that failed]
When cudaStreamEndCapture fails, torch raises before it has told its two allocators and its random generators that the
capture is over (2.11 to 2.14). They would refuse the next capture into the pool, never give its memory back, and
refuse random numbers outside of captures. There is no call for telling them. So a capture that cannot be ended is taken
off the stream through the driver, the stream gets a tiny valid one in its place, and torch ends that.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..errors import CaptureError, NotAvailableError
from .cuda_driver import CaptureState, CudaDriver, load_driver
from .cuda_pool import CaptureStream, CudaPool, Handle
from .cuda_steps import StepOrder
from .layouts import CallLayout
from .model_line import model_line

_CAPTURING = threading.RLock()
"""Held during a session and a replay: torch's random generators know one capture at a time, and replay nothing of
their device during one (before 2.13); its allocator gives little back."""

_idle_streams: dict[int, list[CaptureStream]] = {}
"""Device index -> streams whose device is gone."""

_UNENDED: list[torch.cuda.CUDAGraph] = []
"""Graphs of captures that torch could not be brought to end: its allocators hold on to their addresses."""


def _launch(replay: Callable[[], None]) -> None:
    with _CAPTURING:  # for a launch only: a split op between two may wait for another thread, which replays too
        replay()


class CudaSegment:
    """One CUDA graph, or nothing at all if nothing was recorded."""

    def __init__(self, graph: torch.cuda.CUDAGraph | None, pool: CudaPool, handle: Handle) -> None:
        self._graph = graph
        self._pool, self._handle = pool, handle
        self._is_empty = graph is None

    def launcher(self) -> Callable[[], None] | None:
        """Launches the graph on the current stream; after `release` it raises RuntimeError. None: nothing was recorded.

        Raises:
            CaptureError: the segment was released.
        """
        if self._graph is not None:
            return functools.partial(_launch, self._graph.replay)
        if not self._is_empty:
            raise CaptureError("replay: expected a capture, but this one was released; capture the bucket again")
        return None

    def replay(self) -> None:
        """Launches the graph on the current stream."""
        launch = self.launcher()
        if launch is not None:
            launch()

    def release(self) -> None:
        """Drops the graph. Its memory may be used by the next capture, whose replays come after on the device.

        With the last capture of a pool, torch gives the pool up, and its memory goes back to the device here.
        """
        if self._drop() and not torch.cuda.is_current_stream_capturing():
            with _CAPTURING:
                torch.cuda.empty_cache()

    def _drop(self) -> bool:
        """Returns whether it was the last one of its pool."""
        graph, self._graph = self._graph, None
        if graph is None:
            return False
        self._is_empty = False
        graph.reset()
        return self._pool.put(self._handle)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the process torch may be gone
            self._drop()


class CudaSession:
    """See `Session`. The current stream is the device's capture stream, except where the model chose another one."""

    runs_bodies = True

    def __init__(self, pool: CudaPool, stream: torch.cuda.Stream, scratch: torch.Tensor) -> None:
        self._pool, self._stream, self._scratch = pool, stream, scratch
        self._driver: CudaDriver | None = load_driver()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._handle: Handle = (0, 0)
        self._forked: dict[int, torch.cuda.Stream] = {}
        self.op: str | None = None
        """The operator that is being recorded, if somebody who sees operators says so; goes into errors."""

    @property
    def is_open(self) -> bool:
        """Whether a segment is being recorded."""
        return self._graph is not None

    def begin(self) -> None:
        """Starts a segment."""
        assert self._graph is None, "begin: the segment before was not ended"
        self._handle = self._pool.take()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._graph = graph  # from here on there is something to give up
            graph.capture_begin(pool=torch.cuda._POOL_HANDLE(self._handle), capture_error_mode="thread_local")
            for stream in self._forked.values():
                stream.wait_stream(self._stream)

    def end(self) -> CudaSegment:
        """Joins the streams that were forked off and ends the segment."""
        assert self._graph is not None, "end: no segment was begun"
        try:
            graph = self._end()
        except RuntimeError as error:
            self.give_up()
            raise CaptureError(
                f"capture: expected a recording that CUDA accepts, but it gave this one up: {_first_line(error)}; look "
                f"for work that waits for the device, or that runs on a stream which was not forked off",
                op=self.op,
            ) from error
        return CudaSegment(graph, self._pool, self._handle)

    def call(self, function: Callable[..., Any], arguments: Sequence[Any], layout: CallLayout) -> Sequence[Any]:
        """Calls it: the stream records what it launches."""
        outputs: Sequence[Any] = function(*arguments)
        return outputs

    def saw_stream(self) -> None:
        """To be called before an operator that a dispatch mode sees, so that forked streams are known.

        Raises:
            CaptureError: the current stream was not forked off the capture, so that its work would be done now and
                at no replay.
        """
        stream_id, *_ = torch._C._cuda_getCurrentStream(self._stream.device_index)
        if stream_id == self._stream.stream_id or stream_id in self._forked or self._graph is None:
            return
        if not torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "capture: expected every operator on the stream of the step or on one that was forked off it, got one "
                "on another stream; call side.wait_stream(torch.cuda.current_stream()) before torch.cuda.stream(side)",
                op=self.op,
            )
        self._forked[stream_id] = torch.cuda.current_stream()

    def give_up(self) -> bool:
        """Ends an open segment without a result, leaving streams and allocator fit for the next. Never raises.

        Returns:
            Whether one was open.
        """
        graph = self._graph
        if graph is None:
            return False
        try:
            # Valid, if it was the model's Python that raised.
            ended = self._end()
        except RuntimeError:
            self._graph = None
            was_told = self._replace(graph)
            if not was_told:
                _UNENDED.append(graph)
            graph.reset()
            self._pool.put(self._handle, spoiled=not was_told)
        else:
            if ended is not None:
                ended.reset()
                self._pool.put(self._handle)
        self._forked.clear()
        return True

    def _end(self) -> torch.cuda.CUDAGraph | None:
        """Ends the capture; None if it is empty. Raises: RuntimeError when CUDA refuses."""
        graph = self._graph
        assert graph is not None
        with torch.cuda.stream(self._stream):
            for stream in self._forked.values():
                self._stream.wait_stream(stream)
            is_empty = self._driver is not None and self._driver.capture(self._stream.cuda_stream) == (
                CaptureState.ACTIVE,
                0,
            )
            if is_empty:
                self._scratch.zero_()  # torch warns of a graph with nothing in it
            graph.capture_end()
        self._graph = None
        if not is_empty:
            return graph
        graph.reset()
        self._pool.put(self._handle)
        return None

    def _replace(self, graph: torch.cuda.CUDAGraph) -> bool:
        """See Note [A capture that failed]. Returns whether torch took it."""
        if self._driver is None:
            return False
        stream = self._stream.cuda_stream
        with torch.cuda.stream(self._stream):
            if self._driver.capture(stream)[0] is not CaptureState.NONE:
                self._driver.end_capture(stream)
            if not self._driver.begin_capture(stream):
                return False
            try:
                self._scratch.zero_()
                graph.capture_end()
            except RuntimeError:
                # It had ended, and what failed came after (such as instantiating it): there is nothing to tell torch.
                return self._driver.capture(stream)[0] is CaptureState.NONE
        return True


class CudaDevice:
    """Captures and replays on one CUDA device. See `GraphDevice`.

    A captured random operator draws anew at each replay. Other threads may use the device during a capture: they may
    allocate, launch, copy and wait for their streams. What would break the capture or raise in them is
    `torch.cuda.synchronize`, and before torch 2.13 the device's random generators.
    """

    name = "cuda"
    wants_largest_first = True

    def __init__(self, device: torch.device | str = "cuda") -> None:
        """Takes a device such as `cuda:1`; without an index the current one.

        Raises:
            NotAvailableError: there is no such device, or its allocator has no private pools.
        """
        device = torch.device(device)
        if device.type != "cuda" or not torch.cuda.is_available():
            got = "torch sees no CUDA device" if device.type == "cuda" else f"the model is on {device}"
            raise NotAvailableError(
                f"capture_device: cuda needs a model on a CUDA device, but {got}; use capture_device 'tape' or backend "
                f"'disabled'"
            )
        index = device.index if device.index is not None else torch.cuda.current_device()
        if index >= torch.cuda.device_count():
            raise NotAvailableError(
                f"capture_device: expected one of the {torch.cuda.device_count()} CUDA devices, got cuda:{index}; use "
                f"a smaller index"
            )
        if torch.cuda.get_allocator_backend() != "native":
            raise NotAvailableError(
                f"capture_device: cuda needs torch's own allocator, whose pools can be measured, got "
                f"{torch.cuda.get_allocator_backend()}; take backend: out of PYTORCH_CUDA_ALLOC_CONF"
            )
        self.device = torch.device("cuda", index)
        self._order = StepOrder(self.device)
        self._capture_stream: CaptureStream | None = None

    def open_pool(self) -> CudaPool:
        """A new pool, with nothing in it."""
        return CudaPool(self.device, self)

    @contextlib.contextmanager
    def session(self, pool: CudaPool) -> Iterator[CudaSession]:
        """Starts a capture into `pool`, on this device's own stream and behind what the current stream has to do.

        Raises:
            CaptureError: from the body, when torch or CUDA refuses what the model does, or the caller is itself being
                captured.
        """
        with _CAPTURING, torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError(
                    "capture: expected a stream that is not being captured, got one that is; run the step outside of "
                    "torch.cuda.graph, or with backend 'disabled'"
                )
            own = self._prepare()
            stream, caller = own.stream, torch.cuda.current_stream()
            stream.wait_stream(caller)
            session = CudaSession(pool, stream, own.scratch)
            try:
                with gc_paused():  # also while a capture is given up
                    try:
                        with torch.cuda.stream(stream):
                            yield session
                    except RuntimeError as error:
                        if not session.give_up():
                            raise
                        raise _capture_error(error, session.op) from error
                    finally:
                        session.give_up()
            finally:
                caller.wait_stream(stream)

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Around a step: one at a time, and on the device after the one before, whatever stream that used."""
        return self._order

    def give_back(self) -> None:
        """Returns to the device what pools without captures held, and whatever else torch's allocator has to spare."""
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def _prepare(self) -> CaptureStream:
        """The stream that captures are made on, made or taken over before the first one."""
        if self._capture_stream is None:
            # No garbage is collected first, which takes half a second of a large process: `gc_paused` is what counts.
            idle = _idle_streams.setdefault(self.device.index, [])
            self._capture_stream = idle.pop() if idle else CaptureStream(self.device)
            weakref.finalize(self, idle.append, self._capture_stream)
        self._capture_stream.warm_up()
        return self._capture_stream


_gc_lock = threading.Lock()
_gc_depth = 0
_gc_was_enabled = False


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage is collected inside, in the whole process; afterwards it is as before. Nests, also across threads."""
    global _gc_depth, _gc_was_enabled
    with _gc_lock:
        if _gc_depth == 0:
            _gc_was_enabled = gc.isenabled()
            gc.disable()
        _gc_depth += 1
    try:
        yield
    finally:
        with _gc_lock:
            _gc_depth -= 1
            if _gc_depth == 0 and _gc_was_enabled:
                gc.enable()


def _capture_error(error: RuntimeError, op: str | None) -> CaptureError:
    """What a capture refused, with the place in the model."""
    line, called = model_line(error.__traceback__)
    op = op if op is not None else called
    who = " in ".join(part for part in (op, line) if part is not None) or "the model"
    return CaptureError(
        f"capture: expected work that only launches kernels, but {who} cannot be recorded: {_first_line(error)}; take "
        f"it out of the forward, or put it into a split op, which runs outside of captures under tc_piecewise and "
        f"breakable",
        op=op,
        line=line,
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
