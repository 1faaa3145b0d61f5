"""Steps that are like an earlier one, which was a replay: what follows from their layouts is done once.

Note [A step of a known layout]
A step is known by its layout (known_layout.py). Once a layout came again, and its step was a replay, the next ones take
a shorter way: what the checks found for that step holds for them, since they look at nothing else. What may change
between two steps of one layout is looked at again each time: that the capture is the entry's, that the entry's program
is the one that was captured, that no input is written or captured where it is, that the static context is where it was,
and that everything captured by address is where it was. If one of that is not so, or there is no plan, the step takes
the long way, which says why, and makes another plan. The debug modes always take the long way.

The last question takes a third of what such a step costs the host. Under `late_address_check` it is asked once the
replay was launched, while the device is busy. What was replayed by then cannot be taken back: a no is an error, and the
next step asks before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..graphs.capture import Capture
from ..graphs.inputs import TOKENS, BoundInputs
from ..graphs.outputs import OutputContract, map_leaves
from ..graphs.prepared_fill import PreparedFill
from ..graphs.program import TensorsByName, assemble
from ..graphs.trace import OutputRef
from ..ops.context import host_fields, reset_context, set_context
from .capture_slot import Slot, Step, Table
from .entry_table import is_plain
from .events import Scope
from .known_layout import KnownLayout, LayoutReader
from .static_context import has_default, plan_key
from .step import enter_step, leave_step

MAX_PLANS = 1024
"""Plans of a runtime; beyond that the oldest eighth goes."""
MAX_LAYOUTS = 8192
"""Layouts of which is known that they came before."""


class StepPlan:
    """A replay for steps of one layout. Its methods are called with the captures' lock held."""

    __slots__ = (
        "_capture",
        "_context",
        "_cuts",
        "_fill",
        "_generation",
        "_host_fields",
        "_output",
        "_plan_for",
        "_program",
        "_rows",
        "_share",
        "_tensors",
        "bound",
        "num_moves",
        "slot",
        "step",
        "table",
    )

    def __init__(
        self, step: Step, slot: Slot, table: Table, tensors: TensorsByName, context: object, outputs: OutputContract
    ) -> None:
        """After a replay of `step` on the static `tensors`, with what its split ops read as `context`."""
        assert slot.capture is not None
        assert slot.observed is not None
        self.slot, self.table = slot, table
        self.num_moves = -1
        """Of `Captures`: how often something had moved when it last held; -1: not asked yet."""
        # Of the step itself nothing is kept but its sizes.
        self.bound = BoundInputs({}, step.bound.signature, dict(step.bound.sizes))
        self.step = Step(step.entry, step.program, self.bound, step.sizes, None, step.recorder)
        self._capture: Capture = slot.capture
        self._program = step.program
        self._generation = table.context.generation
        self._rows = table.rows
        self._tensors = tensors
        self._context = context if slot.is_whole else None
        plan_for = getattr(self._context, "plan_for", None)
        self._plan_for: Callable[[object], None] | None = plan_for if callable(plan_for) else None
        targets = table.inputs.targets(step.bound.tensors, tensors)
        if slot.is_whole:
            targets += table.context.targets(step.context, context)
        self._fill = PreparedFill(targets)
        is_copy = slot.is_whole and type(context) is type(step.context)
        self._host_fields = tuple(f.name for f in host_fields(context) if is_copy and not has_default(f))
        self._share = step.recorder.counters.share(Scope(phase=step.entry.phase, bucket=step.entry.bucket))
        structure = slot.observed.structure
        self._output: torch.Tensor | None = None
        self._cuts: tuple[tuple[int, int], ...] = ()
        if isinstance(structure, OutputRef) and self._capture.is_buffered(structure.index):
            self._output = value = self._capture.outputs[structure.index]
            self._cuts = outputs.lone_cuts(value, **self._cut_sizes())

    def _cut_sizes(self) -> dict[str, Any]:
        rows = self._program.rows if self._program.rows is not None else self._rows
        return {"padded": self.step.sizes[TOKENS], "num_tokens": self.bound.num_tokens, "rows": rows}

    @property
    def origin(self) -> tuple[Capture, int]:
        """Plans of one origin are current or not together."""
        return self._capture, self._generation

    def is_current(self) -> bool:
        """Whether it is of a capture that is still its slot's, over static tensors that are still the phase's."""
        return self.slot.capture is self._capture and self.table.context.generation == self._generation

    def holds(self, *, late: bool = False) -> bool:
        """Whether the step may be a replay, as far as that does not follow from its layout.

        Args:
            late: `moved` is asked behind the replay.
        """
        entry, addresses = self.step.entry, self._capture.addresses
        return (
            self.is_current()
            and entry.program is self._program
            and not entry.written_inputs
            and not self.table.inputs.by_address
            and self.table.rows is self._rows
            and addresses is not None
            and (late or addresses.hold())
        )

    def moved(self) -> str | None:
        """What the capture holds by address and is no longer there, in words; None when everything is."""
        addresses = self._capture.addresses
        assert addresses is not None
        return None if addresses.hold() else addresses.moved({})

    def replay(self, sources: Sequence[torch.Tensor], context: object) -> bool:
        """Fills what is static, and replays; False if a plan of the context shows that this may not be a replay.

        Args:
            sources: see `KnownLayout`.
            context: where the forward is captured whole, the step's own; else what its split ops read.

        Raises: as `Capture.replay`; whatever `plan()` or `plan_for` of the context raises.
        """
        given = context
        if self.slot.is_whole:
            context = self._context
            for name in self._host_fields:
                object.__setattr__(context, name, getattr(given, name))
            if self.table.context.is_written:
                self.table.context.forget_tails()
        plan = getattr(context, "plan", None) if self.slot.is_whole else None
        try:
            if callable(plan):  # in the caller's mode, on a context that is filled
                with torch.no_grad():
                    self._fill.run(sources)
                plan()
            token, inside = set_context(context), enter_step()
            try:
                with torch.inference_mode():
                    if not callable(plan):
                        self._fill.run(sources)
                    if self._plan_for is not None:
                        self._plan_for(given)
                        if plan_key(context) != self.slot.plan_key:
                            self.table.forget_tails()
                            return False
                    self._capture.replay()
            finally:
                leave_step(inside)
                reset_context(token)
        except BaseException:
            self.table.forget_tails()
            raise
        return True

    def count(self) -> None:
        """Counts a step that went well."""
        self.slot.num_replays += 1
        self.step.entry.num_steps += 1
        self.step.recorder.counters.add_replay(self._share)

    def _cut(self, value: torch.Tensor) -> torch.Tensor:
        for dim, size in self._cuts:
            value = value.narrow(dim, 0, size)
        return value

    def result(self, outputs: OutputContract, *, copy: bool) -> Any:
        """What the step returns: without padded rows, and out of the phase's buffers if it is a copy."""
        if self._output is not None:
            if copy:
                return self._cut(self._output).clone()
            # Never the buffer itself: the caller may change the shape of what he gets.
            return self._cut(self._output) if self._cuts else self._output.view(self._output.shape)
        assert self.slot.observed is not None
        whole = assemble(
            self.slot.observed.structure, self._capture.handed_out(), self._tensors, self.step.sizes, self.bound.sizes
        )
        result = outputs.cut(whole, **self._cut_sizes())
        return map_leaves(result, copied) if copy else result


def copied(path: str, value: Any) -> Any:
    """A leaf of an output in memory of its own."""
    return value.clone() if isinstance(value, torch.Tensor) else value


class StepPlans:
    """The plans of a runtime, by layout. Anyone may look one up; `add` and `clear` are called with the lock held."""

    def __init__(self, reader: LayoutReader, outputs: OutputContract) -> None:
        self.reader = reader
        self._outputs = outputs
        self._plans: dict[Hashable, StepPlan] = {}
        self._samples: dict[tuple[Capture, int], StepPlan] = {}
        """One of each origin: there are far fewer to look at than plans."""
        self._layouts: set[int] = set()
        """Hashes of their keys: if two are equal, a plan is made early."""
        self.num_steps = 0
        """Steps that took the shorter way."""

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, known: KnownLayout) -> StepPlan | None:
        """The plan for steps of a layout."""
        return self._plans.get(known.key)

    def came_before(self, known: KnownLayout) -> bool:
        """Notes a layout; whether it was noted before. Making a plan takes longer than it saves in one step."""
        noted = hash(known.key)
        if noted in self._layouts:
            return True
        if len(self._layouts) >= MAX_LAYOUTS:
            self._layouts = set()
        self._layouts.add(noted)
        return False

    def add(
        self, known: KnownLayout, step: Step, slot: Slot, table: Table, tensors: TensorsByName, context: object
    ) -> None:
        """Makes the plan for steps like this one, which was a replay, if all of them are to take the shorter way."""
        entry = step.entry
        if (
            step.program.written_inputs
            or entry.written_inputs
            or table.inputs.by_address
            or not is_plain(entry, step.sizes, step.bound.num_tokens)
            or not all(self.reader.knows(tensor.device) for tensor in step.bound.tensors.values())
            or slot.capture is None
            or slot.work is None
            or any(slot.work.tensors[name].data_ptr() != tensor.data_ptr() for name, tensor in tensors.items())
        ):
            return
        plan = StepPlan(step, slot, table, tensors, context, self._outputs)
        self._drop_old()
        self._plans.pop(known.key, None)  # the newest is the last
        self._plans[known.key] = plan
        self._samples.setdefault(plan.origin, plan)

    def _drop_old(self) -> None:
        """Lets go of plans that no step can take any more, and makes room for another one."""
        # Keys are not looked up: what a user's object in one hashes to may have changed.
        current = {origin: plan for origin, plan in self._samples.items() if plan.is_current()}
        if len(current) < len(self._samples):
            self._samples = current
            self._plans = {key: plan for key, plan in self._plans.items() if plan.origin in current}
        if len(self._plans) >= MAX_PLANS:  # many at once, since it takes as long
            self._plans = dict(itertools.islice(self._plans.items(), max(1, MAX_PLANS // 8), None))

    def clear(self) -> None:
        """Lets go of all."""
        self._plans, self._samples, self._layouts = {}, {}, set()
