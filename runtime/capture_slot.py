"""The place of one capture: what it was made of, what it relies on, and whether that still holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from ..graphs.buffers import Buffers, StaticInputs
from ..graphs.capture import Capture, Observed, Work
from ..graphs.inputs import BoundInputs
from ..graphs.outputs import Rows
from ..graphs.program import SizesByName
from ..phases import Backend
from .capture_checks import plain_attributes
from .context_values import plain_values
from .entries import Entry
from .events import Recorder
from .known_layout import KnownLayout
from .programs import AnyProgram
from .static_context import AddressKey, StaticContext, has_grown, plan_key

MAX_STALE = 4
"""Times in a row that a capture may go stale early before its bucket is captured no more."""
EARLY_REPLAYS = 16
"""A capture that was replayed as often was worth its time, even if it goes stale."""

_GREW = "a size in the slots of its context grew; context_sizes gives it room from the start"


class NotCaptured:
    """What `Captures.run` returns for a step that has to run uncaptured; nothing of it ran."""


NOT_CAPTURED = NotCaptured()


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step: what runs, at which sizes, on what."""

    entry: Entry
    program: AnyProgram
    bound: BoundInputs
    sizes: SizesByName
    """By name, `tokens` being the bucket."""
    context: object
    recorder: Recorder
    known: KnownLayout | None = None
    """By what a later step like this one is known; None: by nothing."""


@dataclasses.dataclass(slots=True)
class Table:
    """What the captures of one phase and set of inputs share."""

    buffers: Buffers
    inputs: StaticInputs
    context: StaticContext
    rows: Mapping[str, Rows] | None = None
    """The token rows of an eager forward's outputs by path, once they are known."""

    def forget_tails(self) -> None:
        """Something else than a fill may have written into the static inputs or the static context."""
        self.buffers.forget_tails()
        self.context.forget_tails()


@dataclasses.dataclass(slots=True, eq=False)
class Slot:
    """Of an entry, at certain sizes of the dims beside `tokens`."""

    entry: Entry
    backend: Backend
    capture: Capture | None = None
    work: Work | None = None
    """What it was made of; kept to make it again in another pool."""
    observed: Observed | None = None
    context: object = None
    """The static context that it was made with; None where captured code reads none."""
    plain: tuple[Any, ...] = ()
    """What else of the context it has frozen: its class, and its values that are no tensors."""
    reads_context: bool = False
    """Whether what is captured has read the context itself, and not only its split ops."""
    address_key: AddressKey = ()
    plan_key: Hashable = None
    """What it has frozen of the plans of the static context."""
    attributes: Mapping[str, Any] | None = None
    """The debug mode: plain attributes of the model's modules that it has frozen."""
    waits: bool = False
    """Whether it can be captured, and waits for a boundary between two steps."""
    awaited: frozenset[Hashable] = frozenset()
    """Keys of the compiles that it waits for, too."""
    refused: str | None = None
    """Why there will be no capture any more."""
    num_bytes: int = 0
    """What it added to the pool."""
    seconds: float = 0.0
    num_replays: int = 0
    num_stale: int = 0
    last_step: int = 0
    """The entry's number of steps when it last ran."""

    @property
    def is_whole(self) -> bool:
        """Whether split ops are captured too, and with them what they read of the context."""
        return self.backend is Backend.FULL

    @property
    def reads_static_context(self) -> bool:
        """Whether captured code may read the context's tensors."""
        return self.backend is not Backend.TC_PIECEWISE

    def freeze(self, context: object, table: Table) -> None:
        """Notes what a capture with this context relies on."""
        self.context = context if self.reads_static_context else None
        self.plain = (type(context), *plain_values(context))
        self.address_key = table.context.address_key(context, tokens_only=not self.is_whole)
        self.plan_key = plan_key(context) if self.is_whole else None

    def stale(
        self, table: Table, step: Step, tensors: Mapping[str, torch.Tensor], context: object, model: torch.nn.Module
    ) -> str | None:
        """Why the capture does not fit the step any more; None when it does.

        Args:
            tensors: the static inputs, filled for the step.
            context: the static context, filled for the step.
        """
        assert self.capture is not None
        assert self.capture.addresses is not None
        assert self.work is not None
        if self.work.forward is not step.program:
            return "the entry has another program"
        if (why := self.capture.addresses.moved(step.bound.tensors)) is not None:
            return why
        for name in table.inputs.by_address & tensors.keys():
            if self.work.tensors[name] is not tensors[name] and not self.capture.addresses.has_input(name):
                return f"another bucket writes the input {name}, which is captured where it is from now on"
        if self.attributes is None:  # the debug mode, which has them, refuses that; see check_static_inputs
            for name, tensor in tensors.items():
                if self.work.tensors[name].data_ptr() != tensor.data_ptr():
                    # Its buffer was replaced, and what lay over the old one is no longer known to be there.
                    return f"the static input {name} moved"
        if (why := self.context_changed(table, context)) is not None:
            return why
        if self.attributes is not None and plain_attributes(model) != self.attributes:
            return "an attribute of a module that is no tensor changed"
        return None

    def context_changed(self, table: Table, context: object) -> str | None:
        """Why the capture does not fit the context, filled for a step; None when it does."""
        kind = type(context).__name__
        if (self.is_whole or self.reads_context) and (type(context), *plain_values(context)) != self.plain:
            return f"a value of the context {kind} that is no tensor changed"
        if self.reads_static_context:
            address_key = table.context.address_key(context, tokens_only=not self.is_whole)
            if address_key != self.address_key:
                grew = has_grown(self.address_key, address_key)
                return _GREW if grew else f"the static tensors of the context {kind} moved"
        if self.is_whole and plan_key(context) != self.plan_key:
            return f"a plan of the context {kind} is of another form"
        return None

    def went_stale(self, why: str) -> None:
        """Counts it; too many times in a row, and there will be no further capture."""
        if why != _GREW:  # by powers of two, so it comes to an end
            self.num_stale = self.num_stale + 1 if self.num_replays < EARLY_REPLAYS else 1
        if self.num_stale >= MAX_STALE:
            self.refuse(f"not captured any more, since captures of it go stale at once: {why}")

    def refuse(self, reason: str) -> None:
        """There will be no capture; lets go of what one would be made of."""
        self.refused, self.waits = reason, False
        self.work = self.observed = self.context = None
