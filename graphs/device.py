"""What the capture backends need from a device: to record work, to replay it, and to know what it costs.

Two implementations: cuda.py, on CUDA graphs, and tape.py, on a list of calls for machines without a GPU. Backends know
only this file.

Note [Who owns captured memory]
Whatever a capture allocates lies in its runtime's pool. It is scratch: the allocator may give it to the next capture as
soon as no tensor holds it, so its content means something only within one replay of the capture that wrote it. That is
enough, since a capture is replayed as a whole, one at a time per pool, in the order in which it was recorded. What
outlives that, or what Python touches at a replay (inputs, a step's context, arguments and results of split ops, the
outputs), lies in the phase's buffers (buffers.py), which are allocated outside of captures and held strongly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from ..phases import CaptureDevice
from .layouts import CallLayout


class Pool(Protocol):
    """The memory that all captures of a runtime share."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the pool holds of the device, in use or not; it gives them back when no capture of it lives."""


class Segment(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Does the work again, on the caller's stream, reading and writing the addresses of the capture."""

    def release(self) -> None:
        """Lets go of what it holds; it cannot be replayed afterwards. A second call does nothing."""


@runtime_checkable
class Launchable(Segment, Protocol):
    """A segment whose replay can be had as a function, with everything looked up."""

    def launcher(self) -> Callable[[], None] | None:
        """What `replay` does, and nothing besides; None: nothing was recorded.

        Not to be called after `release`; the caller sees to that.

        Raises:
            CaptureError: the segment was released before.
        """


class Session(Protocol):
    """A capture in the making: one segment, or several with breaks between them. Of one thread.

    Inside a segment, work on the device is recorded and not done. During a break nothing of the model may run.
    """

    runs_bodies: bool
    """Whether the Python bodies of operators run while capturing, to have their kernels recorded."""
    op: str | None
    """The operator that is being recorded, where somebody who sees operators says so; for errors."""

    def begin(self) -> None:
        """Starts a segment."""

    def end(self) -> Segment:
        """Ends it. Streams that were forked off in it are joined first, and forked off again in the next one.

        Raises:
            CaptureError: the device gave the recording up.
        """

    def saw_stream(self) -> None:
        """Notes that work is being recorded on the current stream, which may have been forked off."""

    def call(self, function: Callable[..., Any], arguments: Sequence[Any], layout: CallLayout) -> Sequence[Any]:
        """Records the call of a compiled callable, which a dispatch mode cannot look into.

        Args:
            layout: how its outputs lay when it really ran with such arguments.

        Returns:
            Its outputs, with the addresses that they have at each replay.
        """


class GraphDevice(Protocol):
    """Where captures are made and replayed."""

    name: str
    """`cuda` or `tape`."""
    wants_largest_first: bool
    """Whether captures in another order than from the largest down take more memory."""

    def open_pool(self) -> Pool:
        """A new pool, with nothing in it."""

    def session(self, pool: Any) -> contextlib.AbstractContextManager[Session]:
        """Starts a capture into one of its own pools. A segment that is open when the body ends or raises is given up.

        Raises:
            CaptureError: from the body, when the model does something that cannot be recorded; names the operator
                and the line of the model, where they are known.
        """

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Around a step: orders its work on the device after that of earlier steps, whatever streams they used."""

    def give_back(self) -> None:
        """Returns to the device what pools without captures held."""


def open_device(kind: CaptureDevice, device: torch.device) -> GraphDevice:
    """The capture device for a model on `device`; its file is imported only now.

    Raises:
        NotAvailableError: there is none.
    """
    if kind is CaptureDevice.CUDA:
        from .cuda import CudaDevice

        return CudaDevice(device)
    from .tape import TapeDevice

    return TapeDevice()
