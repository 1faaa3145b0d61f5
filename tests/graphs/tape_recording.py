"""Recording on the tape, for its tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from piecework.graphs.device import Segment
from piecework.graphs.tape import TapeDevice
from piecework.graphs.tape_pool import TapePool

DEVICE = TapeDevice()
AMBIENTS = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}
"""The grad modes that a caller may have on."""


def record(function: Callable[..., Any], *args: Any, pool: TapePool | None = None) -> tuple[Any, Segment]:
    """What a function returns while it is recorded, and the segment."""
    with DEVICE.session(pool or DEVICE.open_pool()) as session:
        session.begin()
        outputs = function(*args)
        return outputs, session.end()
