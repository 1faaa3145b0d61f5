"""The places of a runtime's captures, and the buffers that those of one phase and set of inputs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ..graphs.buffers import Buffers, StaticInputs
from ..graphs.inputs import TOKENS, InputContract, Signature
from ..phases import Backend, GraphConfig, Phase
from .capture_slot import Slot, Step, Table
from .entries import Entry
from .programs import AnyProgram
from .static_context import StaticContext

MAX_SLOTS = 4
"""Captures of one entry, for models with dynamic dims beside `tokens`: one for each set of their sizes."""
MAX_TABLES = 8
"""Sets of inputs that a phase is captured for; each has buffers of its own."""
MIN_SLOT_STEPS = 64
"""Steps of an entry after which one of its captures that did not run gives way to other sizes."""


class CaptureSlots:
    """Makes slots and tables, within the limits above. Others may read; whoever changes it holds the captures' lock."""

    def __init__(
        self,
        config: GraphConfig,
        contract: InputContract,
        *,
        max_num_tokens: Mapping[Phase, int],
        context_sizes: Mapping[str, int],
        forget: Callable[[Slot], None],
    ) -> None:
        """`forget` is told of a slot that gave way."""
        self._config = config
        self._contract = contract
        self._max_num_tokens = max_num_tokens
        self._context_sizes = context_sizes
        self._forget = forget
        self._slots: dict[tuple[Entry, frozenset[tuple[str, int]]], Slot] = {}
        self._tables: dict[tuple[Phase, Signature], Table] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._slots.values()))  # another thread may add one

    @property
    def tables(self) -> list[Table]:
        """All tables."""
        return list(self._tables.values())

    def known(self, step: Step) -> Slot | None:
        """The slot of a step, if there is one."""
        return self._slots.get(_key(step))

    def slot(self, step: Step) -> Slot:
        """The slot of a step; one that is refused and not kept, if there is no room for it."""
        key = _key(step)
        slot = self._slots.get(key)
        if slot is not None:
            return slot
        slot = Slot(step.entry, _backend(self._config.phase(step.entry.phase).backend, step.program))
        if not self._has_slot(step.entry):
            slot.refused = "too many sizes of the dims beside tokens: not captured"
            return slot
        if not self.has_table(step.entry):
            slot.refused = "too many different sets of inputs: not captured"
            return slot
        return self._slots.setdefault(key, slot)

    def of_entry(self, entry: Entry) -> list[Slot]:
        """The slots of an entry."""
        return [slot for (known, _), slot in list(self._slots.items()) if known is entry]

    def drop(self, entry: Entry) -> None:
        """Forgets the slots of an entry in whose place another one came."""
        for slot in self.of_entry(entry):
            self._forget(slot)
        self._slots = {key: slot for key, slot in self._slots.items() if slot.entry is not entry}

    def _has_slot(self, entry: Entry) -> bool:
        """Whether there is a place for yet another capture of an entry; one that nobody uses any more makes it."""
        slots = self.of_entry(entry)
        if len(slots) < MAX_SLOTS:
            return True
        oldest = min(slots, key=lambda slot: slot.last_step)
        if entry.num_steps - oldest.last_step < MIN_SLOT_STEPS:
            return False
        self._forget(oldest)
        self._slots = {key: slot for key, slot in self._slots.items() if slot is not oldest}
        return True

    def has_table(self, entry: Entry) -> bool:
        """Whether there are buffers for an entry's inputs, or room for them."""
        of_phase = {known.signature for known, _ in list(self._slots) if known.phase is entry.phase}
        return entry.signature in of_phase or len(of_phase) < MAX_TABLES

    def has_made_table(self, entry: Entry) -> bool:
        """Whether there are buffers for an entry's inputs."""
        return (entry.phase, entry.signature) in self._tables

    def table(self, entry: Entry) -> Table:
        """What an entry's captures share with those of other buckets; made when it is first asked for."""
        key = (entry.phase, entry.signature)
        if key not in self._tables:
            most = self._max_num_tokens[entry.phase]
            buffers = Buffers(most)
            self._tables[key] = Table(
                buffers=buffers,
                inputs=StaticInputs(self._contract, buffers, poison_padding=self._config.debug_captures),
                context=StaticContext(self._contract, self._context_sizes, most),
            )
        return self._tables[key]

    def clear(self) -> None:
        """Lets go of all."""
        self._slots.clear()
        self._tables.clear()


def _backend(configured: Backend, program: AnyProgram) -> Backend:
    """How a program is captured: the eager forward has no pieces, and is cut at the split ops without a trace."""
    return Backend.BREAKABLE if configured is Backend.TC_PIECEWISE and program.kind == "eager" else configured


def _key(step: Step) -> tuple[Entry, frozenset[tuple[str, int]]]:
    return step.entry, frozenset(item for item in step.bound.sizes.items() if item[0] != TOKENS)
