"""Whole programs: which buckets get one, and whether it takes the place of what would run without it.

A whole program costs a long compile, so it is bounded by a size; and what is fused across split ops is little, so it is
measured against the program that it would replace, and left out where it is not faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from ..errors import CompileError, InputError, TraceError
from ..graphs.audit import ANY_SIZE
from ..graphs.inputs import TOKENS, Signature
from ..graphs.program import Program
from ..phases import Backend, GraphConfig, Phase
from .entries import Entry, EntryKey
from .events import Recorder
from .passing import passing
from .programs import HERE, AnyProgram, Builder, ProgramFamily

NEEDED_GAIN = 0.01
"""The share of a step that a whole program must save: what two measurements of one program differ by."""

Measure = Callable[[Sequence[AnyProgram], Signature, int, Recorder], list[float] | None]
"""Seconds of the device of each program at so many tokens; None where that cannot be measured. Raises CompileError:
the last one fails where the others do not."""


def is_whole_asked(config: GraphConfig, phase: Phase) -> bool:
    """Whether a phase may have whole programs; also before "auto" is resolved, which makes decode `full` at best."""
    backend = config.phase(phase).backend
    may_be_full = backend is Backend.FULL or (backend is Backend.AUTO and phase is Phase.DECODE)
    return config.enable_torch_compile and may_be_full


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What became of a bucket's whole program."""

    program: Program | None
    """None: the ordinary program stays."""
    why: str


class WholeForward:
    """The whole programs of one runtime. The caller of `judge` holds the runtime's build lock."""

    def __init__(self, largest: Mapping[Phase, int]) -> None:
        """Args: largest: the largest bucket of each phase that gets one."""
        self.measure: Measure | None = None
        """None: whole programs are taken as they are."""
        self._largest = largest
        self._verdicts: dict[EntryKey, Verdict] = {}

    def is_wanted(self, phase: Phase, bucket: int | None) -> bool:
        """Whether a bucket is to get a whole program."""
        return bucket is not None and bucket <= self._largest.get(phase, 0)

    def known(self, entry: Entry) -> Verdict | None:
        """What `judge` has said of the entry's bucket, if it was asked. Needs no lock."""
        return self._verdicts.get((entry.phase, entry.signature, entry.bucket))

    def judge(
        self, entry: Entry, family: ProgramFamily, ordinary: AnyProgram, recorder: Recorder, builder: Builder = HERE
    ) -> Verdict:
        """Makes the whole program of an entry's bucket now, and measures it against the ordinary one; once.

        Raises: what the builder raises that is worth another attempt: WorkerLostError, a full disk.
        """
        key = (entry.phase, entry.signature, entry.bucket)
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(entry, family, ordinary, recorder, builder)
        return self._verdicts[key]

    def clear(self) -> None:
        """Drops every program."""
        self._verdicts.clear()

    def _judge(
        self, entry: Entry, family: ProgramFamily, ordinary: AnyProgram, recorder: Recorder, builder: Builder
    ) -> Verdict:
        bucket = entry.bucket
        assert bucket is not None
        try:
            program = family.whole(bucket, entry.sizes, recorder, builder)
            times = self.measure([ordinary, program], entry.signature, bucket, recorder) if self.measure else None
        except (TraceError, CompileError, InputError) as error:
            if builder is not HERE and passing(error) is not None:
                raise
            recorder.fallback("whole-forward compile failed: the ordinary program stays", error=str(error))
            return Verdict(program=None, why=f"whole-forward compile failed: {str(error).strip().splitlines()[0]}")
        if (name := _narrower(program, ordinary)) is not None:
            recorder.fallback("the whole forward holds for fewer sizes: the ordinary program stays", dim=name)
            return Verdict(program=None, why=f"the whole forward holds for fewer sizes of {name}")
        if self.measure is None:
            return Verdict(program=program, why="the whole forward; not measured, since ranks would differ")
        if times is None:
            return Verdict(program=program, why="the whole forward; it could not be measured on padding")
        before, after = times
        said = f"the whole forward takes {after * 1e3:.3f} ms of the device, {ordinary.kind} {before * 1e3:.3f} ms"
        is_faster = after <= before * (1 - NEEDED_GAIN)
        recorder.record(
            "measure",
            seconds=after,
            replaces=ordinary.kind,
            ordinary_ms=before * 1e3,
            whole_ms=after * 1e3,
            taken=is_faster,
        )
        if is_faster:
            return Verdict(program=program, why=said)
        recorder.counters.add("whole_not_faster", scope=recorder.scope)
        return Verdict(program=None, why=f"{said}: not faster, left out")


def _narrower(program: Program, ordinary: AnyProgram) -> str | None:
    """A dim other than tokens of which the program takes fewer sizes than the ordinary one does, if there is one."""
    others = ordinary.intervals if isinstance(ordinary, Program) else {}
    for name, interval in program.intervals.items():
        known = others.get(name, ANY_SIZE)
        above = interval.high is not None and (known.high is None or known.high > interval.high)
        if name != TOKENS and (interval.low > known.low or above):
            return name
    return None
