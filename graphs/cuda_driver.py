"""The few calls of the CUDA driver that torch has no name for: looking into a stream's capture, and getting out of it.

The driver and not the runtime library, because its name is the same for every CUDA version and it is always loaded
where CUDA is in use.
"""

from __future__ import annotations

import ctypes
import enum
import functools

_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL."""


class CaptureState(enum.IntEnum):
    """CUstreamCaptureStatus."""

    NONE = 0
    ACTIVE = 1
    INVALIDATED = 2
    """It broke a rule; all that can be done with it is to end it, which fails."""


class CudaDriver:
    """A stream is what `torch.cuda.Stream.cuda_stream` is. Errors of the driver are no exceptions here."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        # The third version has one more result, which is not wanted either.
        version, num_unwanted = ("_v2", 2) if hasattr(library, "cuStreamGetCaptureInfo_v2") else ("_v3", 3)
        self._capture_info = getattr(library, f"cuStreamGetCaptureInfo{version}")
        self._unwanted = (None,) * num_unwanted

    def capture(self, stream: int) -> tuple[CaptureState, int]:
        """The state of a stream's capture, and how many nodes its graph has so far (0 if it is not active)."""
        state, capture_id, num_nodes = ctypes.c_int(0), ctypes.c_uint64(0), ctypes.c_size_t(0)
        graph = ctypes.c_void_p()
        found = (state, capture_id, graph)
        status = self._capture_info(ctypes.c_void_p(stream), *map(ctypes.byref, found), *self._unwanted)
        if status != 0:
            return CaptureState.INVALIDATED, 0
        if state.value == CaptureState.ACTIVE:
            # The graph may be looked at while it grows. An error leaves 1: nobody must take it for empty.
            if self._library.cuGraphGetNodes(graph, None, ctypes.byref(num_nodes)) != 0:
                num_nodes.value = 1
        return CaptureState(state.value), num_nodes.value

    def end_capture(self, stream: int) -> None:
        """Ends a capture, valid or not; what it recorded is lost."""
        graph = ctypes.c_void_p()
        self._library.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
        if graph.value:
            self._library.cuGraphDestroy(graph)

    def begin_capture(self, stream: int) -> bool:
        """Begins a capture that torch knows nothing of. Returns whether it did."""
        status: int = self._library.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), ctypes.c_int(_THREAD_LOCAL))
        return status == 0


@functools.cache
def load_driver() -> CudaDriver | None:
    """The driver of this process, or None where there is none that looks like one (such as under ROCm)."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name in ("cuGraphGetNodes", "cuGraphDestroy", "cuStreamEndCapture", "cuStreamBeginCapture_v2"):
            getattr(library, name)
        return CudaDriver(library)
    except (OSError, AttributeError):
        return None
