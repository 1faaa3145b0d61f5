"""The table of entries: which there are, and how the one of a bucket comes about."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import torch

from ..errors import CompileError
from ..graphs.addresses import ModelBindings
from ..graphs.debug import MutationWitness
from ..graphs.inputs import TOKENS, BoundInputs, InputContract, Signature
from ..graphs.outputs import OutputContract
from ..graphs.piece import CompiledPieces
from ..ops.fused_choice import Choice as FusedChoice
from ..phases import Backend, Compiler, Phase, PhaseConfig, Resolved
from .entries import Entry, EntryKey
from .events import Recorder, Scope
from .forward import ForwardParameters, training_modules
from .portability import BoundProgram
from .programs import AnyProgram, EagerProgram, ProgramFamily

MAX_SIGNATURES = 8
"""Sets of inputs that a runtime traces for; a call with yet another one runs eagerly."""


def is_traced(config: PhaseConfig) -> bool:
    """Whether a phase runs a traced program, and not the model's own forward."""
    return config.compiler is not Compiler.EAGER or config.backend is Backend.TC_PIECEWISE


def is_captured(config: PhaseConfig) -> bool:
    """Whether a phase's steps are to be captured."""
    return config.backend is not Backend.DISABLED


class EntryTable:
    """Makes entries, and is the only place where programs are traced and compiled.

    Looking up needs no lock: entries and programs are only ever added, each when it is whole.
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
        self.entries: dict[EntryKey, Entry] = {}
        self.families: dict[tuple[Signature, Compiler], ProgramFamily] = {}
        self.compiled: CompiledPieces = {}
        self.lock = threading.RLock()
        """Held while anything is built."""
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

    def clear(self) -> None:
        """Drops every entry and program."""
        with self.lock:
            self.entries.clear()
            self.families.clear()
            self.compiled.clear()

    def pick(self, phase: Phase, bound: BoundInputs) -> tuple[Entry, AnyProgram, Mapping[str, int]]:
        """The entry for a step, the program that runs, and the sizes it runs at."""
        num_tokens = bound.num_tokens
        bucket, why = self._resolved.ladders[phase].choose(num_tokens, self._config.phase(phase).max_padding_waste)
        entry = self.entries.get((phase, bound.signature, bucket)) or self.build(phase, bound, bucket, in_step=True)
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
        choice = entry.family.known(size, bound.sizes)
        if choice is None:
            with self.lock:
                choice = entry.family.choose(size, bound.sizes, recorder)
        if choice.fallback is not None:
            recorder.fallback(choice.fallback, sizes=sizes)
        program = choice.program or self._eager(bound)
        return entry, program, {**sizes, TOKENS: choice.size if choice.program is not None else num_tokens}

    def build(self, phase: Phase, bound: BoundInputs, bucket: int | None, *, in_step: bool) -> Entry:
        """Makes the entry of a bucket: the only place where programs are traced and compiled."""
        key = (phase, bound.signature, bucket)
        with self.lock:
            if key in self.entries:
                return self.entries[key]
            recorder = self._recorder.within(Scope(phase=phase, bucket=bucket, in_step=in_step))
            started = time.perf_counter()
            entry = self._make_entry(phase, bound, bucket, recorder)
            entry.build_s = time.perf_counter() - started
            self.entries[key] = entry
            recorder.record("entry", seconds=entry.build_s, program=entry.program.kind, why=entry.why)
        return entry

    def _make_entry(self, phase: Phase, bound: BoundInputs, bucket: int | None, recorder: Recorder) -> Entry:
        config = self._config.phase(phase)
        names = [*(name for name, *_ in bound.signature.tensors), *dict(bound.signature.constants)]
        self._parameters.check_inputs(names)
        if not self.entries and (text := training_modules(self._model)) is not None:
            recorder.warn(text)
        eager = self._eager(bound)
        why = "compiler eager" + ("; specialize has no effect" if config.specialize else "")
        entry = Entry(
            phase=phase,
            signature=bound.signature,
            bucket=bucket,
            family=None,
            program=eager,
            size=None,
            why=why,
            build_s=0,
        )
        if not is_traced(self._config.phase(phase)):
            if bucket is not None and is_captured(self._config.phase(phase)):
                entry.captures, entry.size = True, bucket
            return entry
        family = self._family(bound.signature, config.compiler, recorder)
        if family is None:
            entry.why = f"more than {MAX_SIGNATURES} sets of inputs: eager"
            return entry
        size = bucket if bucket is not None else bound.num_tokens
        choice = family.choose(size, bound.sizes, recorder)
        entry.family = family
        if choice.program is None:
            entry.why = choice.fallback or entry.why
            return entry
        entry.program, entry.size = choice.program, choice.size if bucket is not None else None
        entry.captures = bucket is not None and is_captured(self._config.phase(phase))
        entry.fallback = choice.fallback
        entry.why = choice.fallback or ("general" if bucket is not None else "no bucket fits: general, unpadded")
        if bucket is not None and (config.specialize == "all" or bucket in config.specialize):
            try:
                entry.program = family.specialized(choice.size, choice.program, recorder)
                entry.why = "specialize names the bucket"
            except CompileError as error:
                # The general program is right for this bucket too; the entry is not built again.
                entry.why = f"specialising failed, general instead: {error}"
                recorder.fallback("specialising failed: general", error=str(error))
        return entry

    def _eager(self, bound: BoundInputs) -> EagerProgram:
        return EagerProgram(self._model, bound.signature.constants, self._fused[Compiler.EAGER], self._bindings)

    def _family(self, signature: Signature, compiler: Compiler, recorder: Recorder) -> ProgramFamily | None:
        family = self.families.get((signature, compiler))
        if family is not None:
            return family
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
