"""What is made before a step needs it: entries and captures of buckets, and first calls, on nothing but padding."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from ..errors import CompileError, ConfigError, ContextError, InputError
from ..graphs.ambient import autocast_of
from ..graphs.inputs import TOKENS, BoundInputs, InputContract, Signature
from ..graphs.program import Program
from ..ops.attention_choice import AttentionBackend, use_attention_backend
from ..ops.context import use_context
from ..phases import Phase, Resolved
from .capture_slot import Step
from .captures import Captures
from .entries import Entry
from .entry_table import MAX_SIGNATURES, EntryTable, is_captured, is_traced
from .events import Recorder, Scope
from .measuring import least_seconds
from .padding_step import free_sizes, step_of_padding, under_ambient_state
from .portability import BoundProgram
from .programs import AnyProgram
from .step import inside_step
from .step_context import pad_context

FIRST_CALL_TOKENS = 16
"""Rows of padding in a program's first call, where it holds there."""


class WarmUp:
    """Of one runtime."""

    def __init__(
        self,
        resolved: Resolved,
        contract: InputContract,
        table: EntryTable,
        captures: Captures | None,
        recorder: Recorder,
        *,
        examples: BoundInputs | None,
        example_context: object,
        programs: Sequence[BoundProgram],
        attention: AttentionBackend,
    ) -> None:
        self._resolved = resolved
        self._config = resolved.config
        self._contract = contract
        self._table = table
        self._captures = captures
        self._recorder = recorder
        self._examples = examples
        self._example_context = example_context
        self._programs = programs
        self._attention = attention

    def run(self, phase: Phase, buckets: Sequence[int] | None) -> None:
        """Builds and captures buckets of a phase, all if None, and builds what lies above the ladder.

        Raises: ConfigError for what is no bucket; InputError when the inputs are not known; as `Runtime.run` otherwise.
        """
        ladder = self._resolved.ladders[phase]
        for bucket in buckets or ():
            if bucket not in ladder:
                raise ConfigError(
                    f"warm_up: expected buckets of {phase}, {', '.join(map(str, ladder))}, got {bucket!r}; leave it out"
                )
        if not is_traced(self._config.phase(phase)) and not is_captured(self._config.phase(phase)):
            return
        for bound in self.known_inputs():
            # The largest first: a pool in which it has been needs little more for the others.
            for bucket in sorted(ladder if buckets is None else buckets, reverse=True):
                entry = self._table.build(phase, bound, bucket, in_step=False)
                if entry.captures:
                    self.capture(entry, bound, in_step=False)
            above = {**bound.sizes, TOKENS: ladder.max + 1}
            self._table.build(phase, dataclasses.replace(bound, sizes=above), None, in_step=False)

    def capture_largest(self, entry: Entry, bound: BoundInputs) -> None:
        """Captures a phase's largest bucket before its first step, if it may be run on padding.

        What comes later finds room in the memory that it needed; in order of arrival each larger bucket would add its
        own.
        """
        config, largest = self._config.phase(entry.phase), self._resolved.ladders[entry.phase].max
        needs_compile = config.specialize == "all" or largest in config.specialize
        needs_compile = needs_compile or self._table.whole.is_wanted(entry.phase, largest)
        if entry.bucket == largest or self._example_context is None or needs_compile:
            return
        try:
            other = self._table.build(entry.phase, bound, largest, in_step=True)
            self.capture(other, bound, in_step=True)
        except Exception as error:  # the step itself does not need it
            scope = Scope(phase=entry.phase, bucket=largest, in_step=True)
            self._recorder.within(scope).fallback(f"the largest bucket could not be captured first: {error}")

    def capture(self, entry: Entry, bound: BoundInputs, *, in_step: bool) -> None:
        """Runs an entry's program on padding, and captures it. Raises: InputError if that needs a context."""
        assert self._captures is not None
        scope = Scope(phase=entry.phase, bucket=entry.bucket, in_step=in_step)
        padding = step_of_padding(bound, self._examples, self._contract)
        sizes = {**padding.sizes, TOKENS: entry.size or padding.num_tokens}
        step = Step(entry, entry.program, padding, sizes, self._example_context, self._recorder.within(scope))
        try:
            self._captures.run(step, is_padding=True)
        except ContextError as error:
            if self._example_context is not None:
                raise
            raise InputError(
                f"warm_up: capturing runs each bucket once, and a split op asked for the step's context; pass "
                f"example_context=... to Runtime, a context of no tokens. {error}"
            ) from error

    def capture_entry(self, entry: Entry) -> bool:
        """Captures an entry on padding between two steps, if there is a context for that; whether it did."""
        if self._captures is None or self._example_context is None:
            return False
        with autocast_of(entry.signature.ambient):
            if under_ambient_state(entry.signature) != entry.signature:
                return False  # under other settings of torch it would be another one
            self.capture(entry, BoundInputs({}, entry.signature, entry.sizes), in_step=False)
        return True

    def call_first(self, program: Program, signature: Signature, recorder: Recorder) -> None:
        """Calls a new program once on padding, beside the steps: what it loads and sets up then is not in a step.

        Not where it writes into its inputs or its model, or a context is missing: then its first step does.
        """
        low, high = program.interval.low, program.interval.high
        size = low if low > FIRST_CALL_TOKENS or (high is not None and high < FIRST_CALL_TOKENS) else FIRST_CALL_TOKENS
        bound = BoundInputs({}, signature, free_sizes(signature))
        if program.written_inputs or program.graph.pieces_write_model or under_ambient_state(signature) != signature:
            return
        if self._may_write([program]):
            return
        padding = step_of_padding(bound, self._examples, self._contract)
        if not program.holds_at({**padding.sizes, TOKENS: size}):
            return
        started = time.perf_counter()
        try:
            with self._on_padding(padding, size, recorder) as call:
                call(program)
        except Exception as error:  # a step finds out, and says so
            recorder.record(
                "first_call", seconds=time.perf_counter() - started, error=f"{type(error).__name__}: {error}"
            )
            return
        recorder.record("first_call", seconds=time.perf_counter() - started)

    def seconds(
        self, programs: Sequence[AnyProgram], signature: Signature, size: int, recorder: Recorder
    ) -> list[float] | None:
        """What each program takes of the device at `size` tokens, in seconds: the least of some calls on padding.

        None where they cannot be called on padding: one writes into its inputs or its model, or a context is missing.
        What they draw of random generators is put back, where that would not rewind other threads.

        Raises: CompileError: the last program fails, and the others do not.
        """
        bound = BoundInputs({}, signature, free_sizes(signature))
        writes = [p.written_inputs or (isinstance(p, Program) and p.graph.pieces_write_model) for p in programs]
        if any(writes) or self._may_write(programs) or under_ambient_state(signature) != signature:
            return None
        gpus = [device for _, _, device, _ in signature.tensors if device.type == "cuda"]
        padding = step_of_padding(bound, self._examples, self._contract)
        if not all(program.holds_at({**padding.sizes, TOKENS: size}) for program in programs):
            return None
        *others, last = programs
        try:
            with torch.random.fork_rng(gpus), self._on_padding(padding, size, recorder) as call:
                for program in others:
                    call(program)
                try:
                    call(last)
                except Exception as error:
                    raise CompileError(
                        f"the {last.kind} program fails when it is called on padding ({type(error).__name__}: {error})"
                    ) from error
                return least_seconds([functools.partial(call, program) for program in programs], on_gpu=bool(gpus))
        except CompileError:
            raise
        except Exception as error:  # a step finds out, and says so
            recorder.record("measure", error=f"{type(error).__name__}: {error}")
            return None

    def _may_write(self, programs: Sequence[AnyProgram]) -> bool:
        """Whether a call on padding may write: a split op is kept from that by a context of no tokens alone."""
        split = any(isinstance(program, Program) and program.graph.split.matches for program in programs)
        return split and self._example_context is None

    @contextlib.contextmanager
    def _on_padding(
        self, padding: BoundInputs, size: int, recorder: Recorder
    ) -> Iterator[Callable[[AnyProgram], object]]:
        """Lets programs be called on `size` rows of nothing but padding; on CUDA on a stream of their own."""
        sizes = {**padding.sizes, TOKENS: size}
        devices = {tensor.device for tensor in padding.tensors.values() if tensor.is_cuda}
        with _streams_of_its_own(devices):
            context = pad_context(self._example_context, padding, size, self._contract, recorder.warn)
            tensors = self._contract.pad_to_bucket(padding, size)
            attention = use_attention_backend(self._attention)
            with torch.inference_mode(), use_context(context), attention, inside_step():
                yield lambda program: program(tensors, sizes, padding.sizes)

    @property
    def missing(self) -> str | None:
        """What keeps work from being done before the first step, in words."""
        if self._examples is None and not self._programs:
            return "nothing can be made before the first step without example_inputs: pass them to Runtime"
        if self._captures is not None and self._example_context is None:
            return "nothing is captured before the first step without an example_context of no tokens: give Runtime one"
        return None

    def example_inputs(self) -> list[BoundInputs]:
        """Inputs that are known before the first step; there may be none."""
        return self.known_inputs() if self._examples is not None or self._programs else []

    def known_inputs(self) -> list[BoundInputs]:
        """Inputs to warm up with: those of earlier steps, else the examples. Raises: InputError without any."""
        signatures = [family.signature for family in list(self._table.families.values())]
        if self._examples is not None:
            signatures.insert(0, self._examples.signature)
        signatures += [program.signature for program, _ in self._programs]
        signatures += [signature for _, signature, _ in list(self._table.entries)]
        signatures = list(dict.fromkeys(map(under_ambient_state, signatures)))
        if not signatures:
            raise InputError(
                "warm_up: the inputs are not known before the first step; pass example_inputs={name: tensor, ...} to "
                "Runtime, or call run() first"
            )
        return [BoundInputs({}, signature, free_sizes(signature)) for signature in signatures[:MAX_SIGNATURES]]


@contextlib.contextmanager
def _streams_of_its_own(devices: set[torch.device]) -> Iterator[None]:
    """On CUDA: another stream, whose work is done at the end, so that steps need not wait for it."""
    with contextlib.ExitStack() as stack:
        streams = [torch.cuda.Stream(device) for device in devices]
        for stream in streams:
            # What the padding was filled with comes first.
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            stack.enter_context(torch.cuda.stream(stream))
        yield
        for stream in streams:
            stream.synchronize()
