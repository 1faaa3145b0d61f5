"""When traces, compiles and captures happen: strategies over the same entries, one for each phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ..errors import ConfigError
from ..graphs.inputs import BoundInputs
from ..phases import Phase
from .entries import Entry
from .programs import Choice, eager_choice

if TYPE_CHECKING:
    from .entry_table import EntryTable
    from .runtime import Runtime
    from .tiering import Tiering


class StartupPolicy(Protocol):
    """What a phase does when something appears for the first time."""

    def on_construct(self, runtime: Runtime, phase: Phase) -> None:
        """The end of the runtime's constructor."""

    def first_entry(self, table: EntryTable, phase: Phase, bound: BoundInputs, bucket: int | None) -> Entry:
        """The entry of a bucket that has none yet; a step waits for it."""

    def missing(self, table: EntryTable, entry: Entry, size: int, sizes: Mapping[str, int]) -> Choice:
        """The program for sizes at which that of the entry does not hold; a step waits for it."""


class Lazy:
    """Everything at its first appearance, inside the step that needs it."""

    def on_construct(self, runtime: Runtime, phase: Phase) -> None:
        """Does nothing."""

    def first_entry(self, table: EntryTable, phase: Phase, bound: BoundInputs, bucket: int | None) -> Entry:
        """Traces and compiles it. Raises: TraceError, CompileError, InputError."""
        if not table.is_traced(phase) and not table.whole.is_wanted(phase, bucket):
            return table.open(phase, bound, bucket)  # waits for nothing that another phase compiles
        return table.build(phase, bound, bucket, in_step=True)

    def missing(self, table: EntryTable, entry: Entry, size: int, sizes: Mapping[str, int]) -> Choice:
        """Traces and compiles it. Raises: TraceError, CompileError, InputError."""
        return table.choose(entry, size, sizes)


class Eager(Lazy):
    """Everything that the config lists, before the runtime is ready; what else appears, as under `lazy`."""

    def on_construct(self, runtime: Runtime, phase: Phase) -> None:
        """Warms up every bucket. Raises: ConfigError without example inputs to do it with."""
        if runtime.needs_inputs and not runtime.has_example_inputs:
            raise ConfigError(
                "startup: 'eager' traces and captures in the constructor, and needs to know the inputs; pass "
                "example_inputs={name: tensor, ...} (any values, any size), or use startup='lazy'"
            )
        runtime.warm_up(phase)


class Tiered:
    """Serves at once with what there is; the background makes better programs, and boundaries swap them in."""

    def __init__(self, tiering: Tiering, order: Callable[[Phase], Sequence[int]], deadline: float) -> None:
        """See `Tiering.prewarm` for the order of a phase's buckets, and for the deadline."""
        self._tiering = tiering
        self._order = order
        self._deadline = deadline

    def on_construct(self, runtime: Runtime, phase: Phase) -> None:
        """Begins with what the manifest says will come."""
        self._tiering.prewarm(phase, self._order(phase), self._deadline)

    def first_entry(self, table: EntryTable, phase: Phase, bound: BoundInputs, bucket: int | None) -> Entry:
        """Takes the best program that exists, and asks the background for a better one."""
        entry = table.open(phase, bound, bucket)
        self._tiering.background.want(entry)
        return entry

    def missing(self, table: EntryTable, entry: Entry, size: int, sizes: Mapping[str, int]) -> Choice:
        """The eager forward; asks the background for a program."""
        self._tiering.background.want_sizes(entry, size, sizes)
        return eager_choice(size, "no program for this size is ready: eager")
