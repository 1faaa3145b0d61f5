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
    """Where a better program will come from; None: this is the best there will be."""
    target: ProgramKind = "eager"
    """The kind of the best program that the config allows, where there is a source."""
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The sizes by name at its first step: what a better program is traced and chosen with."""
    given_up: str | None = None
    """Why no better program will come, although the config allows one."""

    @property
    def is_at_best(self) -> bool:
        """Whether its program will not be replaced by a better one."""
        return self.source is None or self.program.kind == self.target or self.given_up is not None


EntryKey = tuple[Phase, Signature, int | None]
"""A bucket is None for steps without padding."""
