"""The table of entries: what a phase holds for each bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..graphs.inputs import Signature
from ..graphs.program import ProgramKind
from ..phases import Phase
from .programs import AnyProgram, ProgramFamily


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Entry:
    """What a phase runs for one bucket."""

    phase: Phase
    signature: Signature
    bucket: int | None
    """None: a step without padding, above the ladder or beyond the padding-waste limit."""
    family: ProgramFamily | None
    """Where its programs come from; None for the eager forward."""
    program: AnyProgram
    size: int | None
    """The number of tokens it runs at; None for whatever is asked."""
    why: str
    fallback: str | None = None
    """Why each of its steps is a fallback; None when it is the plain case."""
    build_s: float
    """Seconds of traces and compiles that this entry caused."""
    num_steps: int = 0
    captures: bool = False
    """Whether its steps are to be captured, by the phase's backend."""
    written_inputs: set[str] = dataclasses.field(default_factory=set)
    """Inputs that its program was seen to write, where no trace says so."""
    was_watched: bool = False
    """Whether a padded run of it was looked at for that."""
    source: ProgramFamily | None = None
    """Where a better general or specialised program will come from, if the config allows one."""
    whole_source: ProgramFamily | None = None
    """Where a whole program will come from."""
    kinds: tuple[ProgramKind, ...] = ()
    """The kinds of programs that are still to come or have come, in that order; the last one is the best."""
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The sizes by name at its first step: what a better program is traced and chosen with."""
    why_not_whole: str | None = None
    """Why its bucket, which was to get a whole program, has none."""
    given_up: str | None = None
    """Why no better program will come, although the config allows one."""

    @property
    def target(self) -> ProgramKind:
        """The kind of the best program that it will have, as far as it is known."""
        kinds = self.kinds  # another thread may take one back
        return kinds[-1] if kinds else self.program.kind

    @property
    def is_at_best(self) -> bool:
        """Whether its program will not be replaced by a better one."""
        return self.program.kind == self.target or self.given_up is not None

    def forgo_whole(self, why: str) -> None:
        """Takes back that a whole program is to come."""
        self.kinds = tuple(kind for kind in self.kinds if kind != "whole")
        self.whole_source = None
        self.why_not_whole = why
        if not self.kinds:  # it was to be the first program that was compiled
            self.why = f"{self.program.kind}: {why}"


EntryKey = tuple[Phase, Signature, int | None]
"""A bucket is None for steps without padding."""
