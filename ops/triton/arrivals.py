"""Memory in which programs that share a result count themselves: zero before and after each launch.

Note [Arrivals of a stream]
Launches on one stream follow each other and share this memory. A capture has that of the stream it is made on, and no
two devices that capture share one: see Note [cuBLAS workspaces], which work alike. It is made outside of captures, for
many streams at once: memory that a capture gives is zero at its replays only if the capture holds a kernel for that.
"""

from __future__ import annotations

import threading

import torch

NUM_ARRIVALS = 1024
"""Counters of a stream: results that are shared in one launch, at most."""
_STREAMS_AT_ONCE = 32

_ARRIVALS: dict[tuple[torch.device, int], torch.Tensor] = {}
"""By device and stream. Never given up: captures hold the addresses."""
_SPARE: dict[torch.device, list[torch.Tensor]] = {}
_LOCK = threading.Lock()


def arrivals_of(device: torch.device, stream: int) -> torch.Tensor:
    """The counters of a stream: [NUM_ARRIVALS], int32, zeros between launches.

    Args:
        stream: its handle; the current one.
    """
    found = _ARRIVALS.get((device, stream))
    if found is not None:
        return found
    with _LOCK:
        if (device, stream) not in _ARRIVALS:
            if not _SPARE.get(device):
                if _is_capturing(device):  # nobody prepared any: a kernel of the capture makes these zero
                    return torch.zeros(NUM_ARRIVALS, dtype=torch.int32, device=device)
                _add_spare(device)
            _ARRIVALS[device, stream] = _SPARE[device].pop()
        return _ARRIVALS[device, stream]


def prepare_arrivals(device: torch.device) -> None:
    """Has counters ready for streams that come, captures among them. Does nothing in a capture."""
    if _SPARE.get(device) or _is_capturing(device):
        return
    with _LOCK:
        if not _SPARE.get(device):
            _add_spare(device)


def _add_spare(device: torch.device) -> None:
    """Counters for some streams more. Waits for them, since any stream may be the next to use them."""
    with torch.inference_mode(False):
        zeros = torch.zeros(_STREAMS_AT_ONCE, NUM_ARRIVALS, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    _SPARE.setdefault(device, []).extend(zeros.unbind())


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
