"""The table of entries: which there are, and how the one of a bucket comes about."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from ..errors import CompileError
from ..graphs.addresses import ModelBindings
from ..graphs.compilers import CompilerOptions
from ..graphs.debug import MutationWitness
from ..graphs.inputs import TOKENS, BoundInputs, InputContract, Signature
from ..graphs.outputs import OutputContract
from ..graphs.piece import CompiledPieces
from ..graphs.program import ProgramKind
from ..ops.fused_choice import Choice as FusedChoice
from ..phases import Backend, Compiler, Phase, PhaseConfig, Resolved
from .entries import Entry, EntryKey
from .events import Recorder, Scope
from .forward import ForwardParameters, training_modules
from .portability import BoundProgram
from .programs import AnyProgram, Builder, Choice, EagerProgram, ProgramFamily
from .startup import StartupPolicy
from .whole_forward import WholeForward

MAX_SIGNATURES = 8
"""Sets of inputs that a runtime traces for; a call with yet another one runs eagerly."""
_TOO_MANY = f"more than {MAX_SIGNATURES} sets of inputs: eager"


def is_traced(config: PhaseConfig) -> bool:
    """Whether a phase runs a traced program, and not the model's own forward."""
    return config.compiler is not Compiler.EAGER or config.backend is Backend.TC_PIECEWISE


def is_captured(config: PhaseConfig) -> bool:
    """Whether a phase's steps are to be captured."""
    return config.backend is not Backend.DISABLED


KINDS: tuple[ProgramKind, ...] = ("eager", "general", "specialized", "whole")
"""In the order in which an entry gets them."""


class EntryTable:
    """Makes entries, and is the only place where programs are traced and compiled.

    Looking up needs no lock: entries and programs are only ever added or put in the place of another one, each when it
    is whole. There are two locks, so that a step under `tiered` never waits for a compile: `lock` is held for as long
    as something is built, `_opening` for what takes no time.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        resolved: Resolved,
        contract: InputContract,
        outputs: OutputContract,
        *,
        fused: Mapping[Compiler, FusedChoice],
        parameters: ForwardParameters,
        programs: Sequence[BoundProgram],
        witness: MutationWitness | None,
        bindings: ModelBindings,
        recorder: Recorder,
    ) -> None:
        self.policies: Mapping[Phase, StartupPolicy] = {}
        """Set before the first step."""
        self.starts_at_eager = False
        """Whether `open` takes the eager forward also where a better program exists: ranks promote together."""
        self.entries: dict[EntryKey, Entry] = {}
        self.families: dict[tuple[Signature, Compiler], ProgramFamily] = {}
        self.compiled: CompiledPieces = {}
        self.lock = threading.RLock()
        """Held while anything is built."""
        self._opening = threading.RLock()
        self.on_replaced: Callable[[Entry], None] = lambda entry: None
        """Called with an entry in whose place another one came."""
        self.on_missed: Callable[[Phase, int], None] = lambda phase, num_tokens: None
        """Called with the size of each step that no bucket takes."""
        self._model = model
        self._config = resolved.config
        self._resolved = resolved
        self._contract = contract
        self._outputs = outputs
        self._fused = fused
        self._parameters = parameters
        self._programs = programs
        self._witness = witness
        self._bindings = bindings
        self._recorder = recorder
        self.whole = WholeForward(resolved.whole)

    def clear(self, timeout_s: float = 60.0) -> None:
        """Drops every entry and program; waits at most so long for one that is being built: that is dropped too."""
        is_mine = self.lock.acquire(timeout=timeout_s)
        try:
            self.entries.clear()
            self.families.clear()
            self.compiled.clear()
            self.whole.clear()
        finally:
            if is_mine:
                self.lock.release()

    def pick(self, phase: Phase, bound: BoundInputs) -> tuple[Entry, AnyProgram, Mapping[str, int]]:
        """The entry for a step, the program that runs, and the sizes it runs at."""
        num_tokens = bound.num_tokens
        bucket, why = self._resolved.ladders[phase].choose(num_tokens, self._config.phase(phase).max_padding_waste)
        if bucket is None:
            self.on_missed(phase, num_tokens)
        entry = self.entries.get((phase, bound.signature, bucket))
        if entry is None:
            entry = self.policies[phase].first_entry(self, phase, bound, bucket)
        # The eager forward needs no bucket, but for a capture.
        if why is not None and (entry.family is not None or is_captured(self._config.phase(phase))):
            recorder = self._recorder.within(Scope(phase=phase, in_step=True))
            recorder.fallback(why, phase=phase, last_bucket=self._resolved.ladders[phase].max)
        size = entry.size if entry.size is not None else num_tokens
        sizes = {**bound.sizes, TOKENS: size}
        settled = _holds_at(entry, sizes)
        scope = Scope(phase=phase, bucket=bucket, in_step=True)
        if settled and not entry.program.holds_padded_from(num_tokens):
            # Its branch is the bucket's, and this step's is another one.
            reason = "the model decides on a size between the step's and the bucket: unpadded"
            self._recorder.within(scope).fallback(reason, sizes=bound.sizes)
            settled, size, sizes = False, num_tokens, {**bound.sizes}
        if settled or entry.family is None:
            if entry.fallback is not None:
                self._recorder.within(scope).fallback(entry.fallback)
            return entry, entry.program, sizes
        # The entry's program does not hold at this size: of a step without padding, or of another dim.
        recorder = self._recorder.within(Scope(phase=phase, in_step=True))
        choice = entry.family.known(size, bound.sizes) or self.policies[phase].missing(self, entry, size, bound.sizes)
        if choice.fallback is not None:
            recorder.fallback(choice.fallback, sizes=sizes)
        program = choice.program or self._eager(bound)
        return entry, program, {**sizes, TOKENS: choice.size if choice.program is not None else num_tokens}

    def choose(self, entry: Entry, size: int, sizes: Mapping[str, int]) -> Choice:
        """The program for sizes at which the entry's own does not hold, made now. Raises: as `ProgramFamily.choose`."""
        assert entry.family is not None
        with self.lock:
            recorder = self._recorder.within(Scope(phase=entry.phase, in_step=True))
            return entry.family.choose(size, sizes, recorder)

    def build(self, phase: Phase, bound: BoundInputs, bucket: int | None, *, in_step: bool) -> Entry:
        """Makes the entry of a bucket with the best program that the config allows, now."""
        key = (phase, bound.signature, bucket)
        with self.lock:
            known = self.entries.get(key)
            if known is not None and known.is_at_best:
                return known
            recorder = self._recorder.within(Scope(phase=phase, bucket=bucket, in_step=in_step))
            started = time.perf_counter()
            entry = self._make_entry(phase, bound, bucket, recorder)
            entry.build_s = time.perf_counter() - started
            with self._opening:
                # A step may have opened it meanwhile, or a boundary replaced it.
                if key in self.entries:
                    self.replace(self.entries[key], entry)
                else:
                    self.entries[key] = entry
            recorder.record("entry", seconds=entry.build_s, program=entry.program.kind, why=entry.why)
        return entry

    def open(self, phase: Phase, bound: BoundInputs, bucket: int | None) -> Entry:
        """Makes the entry of a bucket with the best program that exists; nothing is traced or compiled."""
        key = (phase, bound.signature, bucket)
        with self._opening:
            if key in self.entries:
                return self.entries[key]
            recorder = self._recorder.within(Scope(phase=phase, bucket=bucket, in_step=True))
            entry = self._opened(phase, bound, bucket, recorder)
            if not self.starts_at_eager:
                entry = self.better(entry) or entry
            self.entries[key] = entry
            recorder.record("entry", program=entry.program.kind, why=entry.why)
        return entry

    def _opened(self, phase: Phase, bound: BoundInputs, bucket: int | None, recorder: Recorder) -> Entry:
        config = self._config.phase(phase)
        entry = self._eager_entry(phase, bound, bucket, recorder)
        # Until its program is there, the eager forward is captured. Not that of a phase that will capture pieces, whose
        # backend that is not; but decode gains too much by it to wait: there it is cut at the split ops.
        in_pieces = config.backend is Backend.TC_PIECEWISE
        entry.captures = bucket is not None and is_captured(config) and (phase is Phase.DECODE or not in_pieces)
        entry.size = bucket if entry.captures else None
        if is_traced(config):
            entry.source = self._family(bound.signature, config.compiler, recorder)
            if entry.source is None:
                entry.why = _TOO_MANY
                return entry
            entry.kinds = ("general", "specialized") if self._is_specialized(entry) else ("general",)
        if self.whole.is_wanted(phase, bucket):
            entry.whole_source = self._family(bound.signature, Compiler.INDUCTOR, recorder)
            if entry.whole_source is not None:
                entry.kinds = (*entry.kinds, "whole")
            else:
                entry.why_not_whole = _TOO_MANY
        if entry.kinds:
            entry.why = "eager until its program is compiled"
        return entry

    def better(self, entry: Entry, *, most: ProgramKind = "whole") -> Entry | None:
        """The entry that can take its place now; None: nothing better is there. Compiles nothing.

        Where it turns out that nothing better will come, the entry says so from then on.

        Args:
            most: the best kind of program that is wanted.
        """
        if most == "whole" and (whole := self._better_whole(entry)) is not None:
            return whole
        family, bucket = entry.source, entry.bucket
        if family is None or entry.is_at_best or most == "eager":
            return None
        size = bucket if bucket is not None else entry.sizes[TOKENS]
        choice = family.known(size, entry.sizes)
        if choice is None:
            return None
        if choice.program is None:
            entry.given_up = choice.fallback
            return None
        special = None
        if "specialized" in entry.kinds and most != "general":
            special = family.known_specialized(choice.size, choice.program)
        program = special or choice.program
        if KINDS.index(program.kind) <= KINDS.index(entry.program.kind):
            return None
        return dataclasses.replace(
            entry,
            family=family,
            program=program,
            size=choice.size if bucket is not None else None,
            captures=bucket is not None and is_captured(self._config.phase(entry.phase)),
            why=self._why(entry, choice, special is not None),
            fallback=choice.fallback,
            written_inputs=set(),
            was_watched=False,
        )

    def make_whole(self, entry: Entry, recorder: Recorder, builder: Builder) -> None:
        """Makes the whole program of an entry's bucket, and measures it against what the entry will have by then.

        The caller holds `lock`. Raises: WorkerLostError.
        """
        assert entry.whole_source is not None
        ordinary = entry.program
        if entry.source is not None:
            choice = entry.source.known(entry.bucket or 0, entry.sizes)
            if choice is not None and choice.program is not None:
                special = entry.source.known_specialized(choice.size, choice.program)
                ordinary = special if special is not None and "specialized" in entry.kinds else choice.program
        self.whole.judge(entry, entry.whole_source, ordinary, recorder, builder)

    def _better_whole(self, entry: Entry) -> Entry | None:
        """The entry with its whole program, if that is there and to be taken; else it may have to do without."""
        if entry.whole_source is None or (verdict := self.whole.known(entry)) is None:
            return None
        if verdict.program is None:
            entry.forgo_whole(verdict.why)
            return None
        if entry.is_at_best:
            return None
        return dataclasses.replace(
            entry,
            family=entry.whole_source,
            program=verdict.program,
            size=entry.bucket,
            captures=True,
            why=verdict.why,
            fallback=None,
            written_inputs=set(),
            was_watched=False,
        )

    def replace(self, old: Entry, new: Entry) -> bool:
        """Puts `new` in the place of `old`, for all later steps at once; whether `old` was still there."""
        key = (old.phase, old.signature, old.bucket)
        with self._opening:
            if self.entries.get(key) is not old:
                return False
            new.num_steps = old.num_steps
            self.entries[key] = new
        self.on_replaced(old)
        return True

    def is_traced(self, phase: Phase) -> bool:
        """Whether a phase runs traced programs."""
        return is_traced(self._config.phase(phase))

    def _is_specialized(self, entry: Entry) -> bool:
        specialize = self._config.phase(entry.phase).specialize
        return entry.bucket is not None and (specialize == "all" or entry.bucket in specialize)

    def _why(self, entry: Entry, choice: Choice, is_special: bool) -> str:
        if is_special:
            return "specialize names the bucket"
        return choice.fallback or ("general" if entry.bucket is not None else "no bucket fits: general, unpadded")

    def _eager_entry(self, phase: Phase, bound: BoundInputs, bucket: int | None, recorder: Recorder) -> Entry:
        names = [*(name for name, *_ in bound.signature.tensors), *dict(bound.signature.constants)]
        self._parameters.check_inputs(names)
        if not self.entries and (text := training_modules(self._model)) is not None:
            recorder.warn(text)
        return Entry(
            phase=phase,
            signature=bound.signature,
            bucket=bucket,
            family=None,
            program=self._eager(bound),
            size=None,
            why="compiler eager" + ("; specialize has no effect" if self._config.phase(phase).specialize else ""),
            build_s=0,
            sizes=dict(bound.sizes),
        )

    def _make_entry(self, phase: Phase, bound: BoundInputs, bucket: int | None, recorder: Recorder) -> Entry:
        config = self._config.phase(phase)
        entry = self._eager_entry(phase, bound, bucket, recorder)
        self._take_ordinary(entry, config, bound, recorder)
        if self.whole.is_wanted(phase, bucket):
            self._take_whole(entry, recorder)
        return entry

    def _take_whole(self, entry: Entry, recorder: Recorder) -> None:
        """Gives an entry the whole program of its bucket, made now, if that is better."""
        family = self._family(entry.signature, Compiler.INDUCTOR, recorder)
        if family is None:
            entry.why_not_whole = _TOO_MANY
            return
        verdict = self.whole.judge(entry, family, entry.program, recorder)
        if verdict.program is None:
            entry.why_not_whole = verdict.why
            return
        entry.family, entry.program, entry.size = family, verdict.program, entry.bucket
        entry.captures, entry.why, entry.fallback = True, verdict.why, None

    def _take_ordinary(self, entry: Entry, config: PhaseConfig, bound: BoundInputs, recorder: Recorder) -> None:
        """Gives an entry the best program that is not of the whole forward, made now."""
        bucket = entry.bucket
        if not is_traced(config):
            if bucket is not None and is_captured(config):
                entry.captures, entry.size = True, bucket
            return
        family = self._family(bound.signature, config.compiler, recorder)
        if family is None:
            entry.why = _TOO_MANY
            return
        size = bucket if bucket is not None else bound.num_tokens
        choice = family.choose(size, bound.sizes, recorder)
        entry.family = family
        if choice.program is None:
            entry.why = choice.fallback or entry.why
            return
        entry.program, entry.size = choice.program, choice.size if bucket is not None else None
        entry.captures = bucket is not None and is_captured(config)
        entry.fallback = choice.fallback
        entry.why = self._why(entry, choice, is_special=False)
        if self._is_specialized(entry):
            try:
                entry.program = family.specialized(choice.size, choice.program, recorder)
                entry.why = self._why(entry, choice, is_special=True)
            except CompileError as error:
                # The general program is right for this bucket too; the entry is not built again.
                entry.why = f"specialising failed, general instead: {error}"
                recorder.fallback("specialising failed: general", error=str(error))

    def _eager(self, bound: BoundInputs) -> EagerProgram:
        return EagerProgram(self._model, bound.signature.constants, self._fused[Compiler.EAGER], self._bindings)

    def _family(self, signature: Signature, compiler: Compiler, recorder: Recorder) -> ProgramFamily | None:
        with self._opening:
            return self.families.get((signature, compiler)) or self._new_family(signature, compiler, recorder)

    def _new_family(self, signature: Signature, compiler: Compiler, recorder: Recorder) -> ProgramFamily | None:
        others = [known for known, used in self.families if used is compiler]
        if len(others) >= MAX_SIGNATURES:
            recorder.fallback("too many different sets of inputs: eager", inputs=str(signature), first=str(others[0]))
            return None
        if others:
            recorder.fallback(
                "the set of inputs differs: traced another program", inputs=str(signature), first=str(others[0])
            )
        fused = self._fused[compiler]
        ready = [g for p, g in self._programs if p.signature == signature and p.kernels == fused.kernels]
        if self._programs and not ready:
            recorder.fallback("none of the given programs is for these inputs and kernels", inputs=str(signature))
        family = ProgramFamily(
            self._model,
            signature,
            self._contract,
            self._outputs,
            compiler,
            fused,
            self.compiled,
            self._witness,
            ready,
            CompilerOptions(emulate_precision_casts=self._config.emulates_precision_casts),
            self._config.torch_compile_mode,
        )
        self.families[signature, compiler] = family
        return family


def is_plain(entry: Entry, sizes: Mapping[str, int], num_tokens: int) -> bool:
    """Whether `pick` counts nothing for a step that it gives the entry's own program and these sizes."""
    if entry.fallback is not None:
        return False
    return entry.family is None or (_holds_at(entry, sizes) and entry.program.holds_padded_from(num_tokens))


def _holds_at(entry: Entry, sizes: Mapping[str, int]) -> bool:
    return entry.family is not None and entry.program.kind != "eager" and entry.program.holds_at(sizes)
