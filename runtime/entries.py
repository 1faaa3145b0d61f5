"""The table of entries: what a phase holds for each bucket."""

from __future__ import annotations

import dataclasses

from ..graphs.inputs import Signature
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


EntryKey = tuple[Phase, Signature, int | None]
"""A bucket is None for steps without padding."""
