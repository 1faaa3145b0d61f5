"""Backend `full`: the whole forward as one segment, split ops included."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ..ops import registry
from ..ops.capturing import capturing_whole, refuse_uncapturable
from .capture import Observed, Work, call_watched, reserve_outputs, store_outputs
from .device import Segment, Session
from .program import Program
from .split_calls import SplitCall


def observe(work: Work) -> tuple[Sequence[Any], Observed]:
    """Runs the forward once, uncaptured; returns its flat outputs and what a capture needs to know."""
    observed = Observed()

    def hook(name: str, call: Any, arguments: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        returned = call_watched(work, call, arguments, kwargs)
        if registry.match(call) is None:
            observed.note(name, arguments, returned)
        return returned

    outputs, observed.structure = work.forward.flat(work.tensors, work.sizes, hook)
    reserve_outputs(work, outputs)
    return outputs, observed


def capture(session: Session, work: Work, observed: Observed) -> tuple[list[Segment | SplitCall], list[Any]]:
    """Captures the forward. Raises: CaptureError; whatever the forward raises."""

    def hook(name: str, call: Any, arguments: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        op = registry.match(call)
        if op is not None:
            refuse_uncapturable(op, arguments, kwargs)
            return call(*arguments, **kwargs)
        return session.call(call, arguments, observed.calls[name])

    if isinstance(work.forward, Program) and (found := work.forward.graph.data_size) is not None:
        raise found.error()
    # Bodies of our own refuse by themselves, where they run; a mode costs time, and hides compiled callables.
    asked = session.runs_bodies and registry.REGISTRY.bodies.keys() >= {o.name for o in registry.REGISTRY.ops.values()}
    refusing = contextlib.nullcontext() if asked else _RefuseSplitOps()
    session.begin()
    with capturing_whole(), refusing:
        outputs, _ = work.forward.flat(work.tensors, work.sizes, hook)
    outputs = store_outputs(work, outputs)
    return [session.end()], outputs


class _RefuseSplitOps(TorchDispatchMode):
    """Asks each split op whether it can be captured, where its body, which asks too, does not run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_uncapturable(func, args, kwargs)
        return func(*args, **kwargs)
