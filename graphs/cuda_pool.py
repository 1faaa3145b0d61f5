"""What captures on CUDA share: the stream they are made on, and the private pools of torch's allocator."""

from __future__ import annotations

import threading

import torch

Handle = tuple[int, int]
"""What torch calls a private pool of its allocator."""


class CaptureStream:
    """A stream that captures are made on, with what is made at its first use. One for each live `CudaDevice`.

    Note [cuBLAS workspaces]
    torch keeps a cuBLAS workspace for each thread and stream, and captures write into the one of their stream. So two
    devices never share a stream, since their replays may overlap, and a device whose last capture is gone leaves its
    stream to the next one. Anybody may make torch give up all workspaces (torch.compile does where it records CUDA
    graphs), and a replay would write into memory that is another's by then, or nobody's. So these lie in a pool that
    nobody else allocates from and that is never given up; a workspace that is made again comes to the same place.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        with torch.inference_mode(False), torch.cuda.device(device):
            self.scratch = torch.zeros(1, device=device)  # for a write that does nothing
            self._workspaces = torch.cuda.MemPool()
        self.stream.wait_stream(torch.cuda.current_stream())
        self._warm = threading.local()

    def warm_up(self) -> None:
        """Makes this thread's cuBLAS workspaces, if they are not there (any more); before each capture.

        Made inside a capture, they would lie in its pool for good.
        """
        dtypes = (torch.float32, torch.bfloat16, torch.float16) if not hasattr(self._warm, "done") else (torch.float32,)
        device = self.scratch.device
        with (
            torch.cuda.stream(self.stream),
            torch.inference_mode(),
            torch.autocast("cuda", enabled=False),
            torch.cuda.use_mem_pool(self._workspaces, device),
        ):
            for dtype in dtypes:
                matrix = torch.ones(64, 64, dtype=dtype, device=device)
                torch.nn.functional.linear(torch.mm(matrix, matrix), matrix, matrix[0])
        self._warm.done = True


class CudaPool:
    """The private pools of torch's allocator that a runtime's captures use: one at a time.

    torch gives a private pool up when its last capture is released and then refuses new captures into it, so that the
    capture after that begins another one. Memory of one that was given up goes back to the device in `give_back`.
    """

    def __init__(self, device: torch.device, owner: object = None) -> None:
        self._device = device
        self._owner = owner  # its stream must be nobody else's while captures of this pool live
        self._current: Handle | None = None
        self._num_captures: dict[Handle, int] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes that the pool holds of the device, in use or not. Takes about a millisecond."""
        total = 0
        for handle, num_captures in list(self._num_captures.items()):
            segments = torch.cuda.memory_snapshot(handle, include_traces=False)
            held = sum(
                int(segment["total_size"])
                for segment in segments
                # A torch that does not filter by pool returns all segments.
                if segment["device"] == self._device.index
                and tuple(segment.get("segment_pool_id", handle)) == tuple(handle)
            )
            if not held and not num_captures:
                with self._lock:
                    if self._num_captures.get(handle) == 0:
                        del self._num_captures[handle]
            total += held
        return total

    def take(self) -> Handle:
        """The private pool for a capture that is about to begin."""
        with self._lock:
            if self._current is None:
                self._current = torch.cuda.graph_pool_handle()
            self._num_captures[self._current] = self._num_captures.get(self._current, 0) + 1
            return self._current

    def put(self, handle: Handle, *, spoiled: bool = False) -> bool:
        """A capture into it was released, or failed; `spoiled`: torch takes no capture into it any more.

        Returns:
            Whether torch has given the private pool up.
        """
        with self._lock:
            self._num_captures[handle] -= 1
            was_last = self._num_captures[handle] == 0
            if handle == self._current and (spoiled or was_last):
                self._current = None
            return was_last
