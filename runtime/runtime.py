"""The runtime: what an engine holds, and calls once a step."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, InputError, RuntimeClosedError
from ..graphs.addresses import ModelBindings
from ..graphs.debug import MutationWitness
from ..graphs.device import open_device
from ..graphs.inputs import TOKENS, BoundInputs, InputContract
from ..graphs.outputs import OutputContract, OutputDims
from ..graphs.portable import PortableProgram
from ..ops.attention import check_attention_backend
from ..ops.attention_choice import AttentionBackend, reset_attention_backend, set_attention_backend
from ..ops.context import use_context
from ..ops.deferred import defer_compiles
from ..ops.fused import use_choice
from ..ops.fused_choice import Choice as FusedChoice
from ..phases import Compiler, GraphConfig, Phase, Startup, resolve
from .background import Background
from .cache_root import use_cache_dir
from .capture_slot import NOT_CAPTURED, Step
from .captures import Captures
from .entries import Entry
from .entry_table import EntryTable, is_captured, is_traced
from .events import Counters, Event, Recorder, Scope
from .explain import Explanation, explain
from .forward import check_arguments, check_mapping, check_written
from .fused_choices import choose_for, floating_dtype, spec_for
from .import_turns import StepGate
from .kernels import KernelQueue
from .known_layout import LayoutReader
from .portability import bind_programs, dump_programs, portable_programs
from .programs import AnyProgram, check_guards
from .promotion import Promotions
from .remembering import Remembering
from .startup import Eager, Lazy, StartupPolicy, Tiered
from .static_context import check_context_sizes
from .step import inside_step
from .step_context import check_context, pad_context
from .tiering import Tiering
from .warm_up import WarmUp

if TYPE_CHECKING:
    from .building import Workers
    from .model_factory import ModelFactory


class Runtime:
    """Runs a model phase by phase, each bucket by the best program there is for it.

    Thread-safe: steps of different threads may overlap, and each sees only whole programs. A runtime owns everything it
    makes; two can live in one process.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: GraphConfig | None = None,
        *,
        dynamic_dims: Mapping[str, Mapping[int, str] | int],
        pad: Mapping[str, int | float] | None = None,
        output_dims: OutputDims = 0,
        example_inputs: Mapping[str, Any] | None = None,
        example_context: object = None,
        context_sizes: Mapping[str, int] | None = None,
        programs: Sequence[PortableProgram] = (),
        model_factory: ModelFactory | None = None,
        workers: Workers | None = None,
        process_group: Any = None,
    ) -> None:
        """Takes the model as it is; with `startup="eager"` traces, compiles and captures here.

        Args:
            model: called as `model(**inputs)`; its tensors may be replaced later by ones of the same layout.
            config: what to compile, when; the default is `GraphConfig()`.
            dynamic_dims: input -> {dim: name}; an int `n` means `{n: "tokens"}`. Dims of one name are one size.
            pad: input -> the value of its padded rows; 0 for the others.
            output_dims: the dim of the outputs that carries the tokens: one for all, or by path (`"hidden"`, `"1"`,
                `"layers.0"`); None leaves an output as it is, and says that padded rows do not change it.
            example_inputs: inputs like those of a step, of any size and value, for tracing before the first step. One
                without dynamic dims is used as it is, and written if the forward writes it, where steps are captured.
            example_context: a context of no tokens and no requests, for capturing before the first step: each bucket
                is run once on nothing but padding.
            context_sizes: the largest size of each name in the `slots` of a context's fields, such as
                `{"requests": 256}`; see `context_field`. A step with more runs uncaptured.
            programs: what another process exported: bound here, they take the place of a trace for their inputs.
            model_factory: under `tiered`: makes a model like this one in a compile worker, where it is traced beside
                the steps; without it a thread of this process traces, and slows them down meanwhile.
            workers: under `tiered`: compile workers that were started before, as with `start_workers`, while weights
                were loaded; closed with the runtime.
            process_group: of torch.distributed, under `tiered`: its ranks promote together.

        Raises:
            ConfigError: the config asks for something that does not exist or is not available.
            InputError: `dynamic_dims`, `pad` or `example_inputs` do not fit together, or not the model's forward.
            PortableError: one of `programs` does not fit the model.
            TraceError, CompileError: under `startup="eager"`, as from `run`.
        """
        config = config if config is not None else GraphConfig()
        optional = {"pad": pad, "example_inputs": example_inputs}  # not context_sizes: no input has these names
        given = {name: value for name, value in optional.items() if value is not None}
        parameters = check_arguments(model, config, {"dynamic_dims": dynamic_dims, **given})
        device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
        self.model = model
        self.resolved = resolve(
            config,
            device_type=device.type,
            cuda_available=torch.cuda.is_available(),
        )
        self.config = self.resolved.config
        if self.config.cache_dir is not None:
            reasons = (*self.resolved.reasons, *use_cache_dir(self.config.cache_dir))
            self.resolved = dataclasses.replace(self.resolved, reasons=reasons)
        # Eager is always among them: a step that no trace holds for is eager code.
        whole = [Compiler.INDUCTOR] if self.resolved.whole else []
        compilers = (Compiler.EAGER, *whole, *(self.config.phase(phase).compiler for phase in Phase))
        spec = spec_for(self.config, device, floating_dtype(model))
        self._fused: dict[Compiler, FusedChoice] = choose_for(self.config, compilers, spec)
        check_attention_backend(self.config.attention_backend, device.type)
        self._attention = AttentionBackend(name=self.config.attention_backend)
        self.counters = Counters()
        self._recorder = Recorder(self.counters)
        self._contract = InputContract(dynamic_dims, pad)
        self._outputs = OutputContract(output_dims)
        self._witness = MutationWitness() if self.config.evaluate_guards else None
        self._closed = False
        self.ready = False
        """Whether the constructor is done; of use where a server asks while another thread builds."""
        startup_of = {phase: self.config.startup_of(phase) for phase in Phase}
        tiered = frozenset(phase for phase in Phase if startup_of[phase] is Startup.TIERED)
        bindings = ModelBindings(model)
        self._captures: Captures | None = None
        self._layouts: LayoutReader | None = None
        """None: each step goes through all checks."""
        check_context_sizes(self._contract, context_sizes or {})
        if any(is_captured(self.config.phase(phase)) for phase in Phase):
            if not self.config.debug_captures and self._witness is None:
                self._layouts = LayoutReader(self.config, device.type)
            self._captures = Captures(
                model,
                self.config,
                open_device(self.config.capture_device, device),
                self._contract,
                self._outputs,
                max_num_tokens={phase: self.resolved.ladders[phase].max for phase in Phase},
                context_sizes=context_sizes or {},
                bindings=bindings,
                reader=self._layouts,
                deferring=tiered,
                attention=self._attention,
            )
        self._examples = self._contract.bind(example_inputs) if example_inputs is not None else None
        self._programs = bind_programs(programs, model, self.config)
        self._table = EntryTable(
            model,
            self.resolved,
            self._contract,
            self._outputs,
            fused=self._fused,
            parameters=parameters,
            programs=self._programs,
            witness=self._witness,
            bindings=bindings,
            recorder=self._recorder,
        )
        self._remembering = Remembering(model, self.resolved, self, self._recorder)
        self._table.on_missed = self._remembering.missed.note
        self._warm_up = WarmUp(
            self.resolved,
            self._contract,
            self._table,
            self._captures,
            self._recorder,
            examples=self._examples,
            example_context=example_context,
            programs=self._programs,
            attention=self._attention,
        )
        self._tiering: Tiering | None = None
        self._workers = workers
        try:
            self._start(startup_of, device, model_factory, process_group)
        except BaseException:
            self.close()  # what was started must not outlive it
            raise

    def _start(
        self, startup_of: Mapping[Phase, Startup], device: torch.device, factory: ModelFactory | None, group: Any
    ) -> None:
        """The end of the constructor: what the startup policies do before ready."""
        deadline = time.monotonic() + self.config.startup_budget
        if group is None:  # else ranks would find different times
            self._table.whole.measure = self._warm_up.seconds
        policies: dict[Startup, StartupPolicy] = {Startup.LAZY: Lazy(), Startup.EAGER: Eager()}
        if Startup.TIERED in startup_of.values():
            self._tiering = self._make_tiering(device, factory, group)
            policies[Startup.TIERED] = Tiered(self._tiering, self._remembering.order, deadline)
        self._table.policies = {phase: policies[startup_of[phase]] for phase in Phase}
        for phase in Phase:
            self._table.policies[phase].on_construct(self, phase)
        if self._tiering is not None and self.config.startup_budget:
            self._tiering.settle_before_ready(deadline)
        self._remembering.ready()
        self.ready = True
        self._recorder.record("ready")

    def _make_tiering(self, device: torch.device, factory: ModelFactory | None, process_group: Any) -> Tiering:
        from .agreement import agreement_of
        from .building import WorkerBuilder, make_workers

        agreement = agreement_of(process_group)
        promotions = Promotions(self._table, self._captures, self.config, self._recorder, agreement)
        self._table.starts_at_eager = agreement is not None
        if self._workers is None:
            self._workers = make_workers(self.config, device)
        if self._workers is not None:
            self._workers.recorder.tell(self._recorder)
        kernels = KernelQueue(self._recorder, on_change=promotions.look, foreseen=self._remembering.foreseen)
        gate = StepGate()
        builder = WorkerBuilder(
            self.model,
            self._contract,
            self._outputs,
            workers=self._workers,
            factory=factory,
            call_first=self._warm_up.call_first,
            gate=gate,
            kernels=kernels,
        )
        background = Background(
            self._table, builder, self._recorder, on_change=promotions.look, foreseen=self._remembering.foreseen
        )
        if self._captures is not None:
            self._captures.on_waiting = promotions.look
            self._table.on_replaced = self._captures.drop
        promotions.may_capture = kernels.are_done
        if device.type == "cuda":
            kernels.import_early("piecework.ops.triton.paged_attention")
        return Tiering(
            self._table,
            self._captures,
            background,
            promotions,
            self._recorder,
            kernels,
            warm_up=self._warm_up,
            gate=gate,
        )

    def run(self, phase: Phase | str, inputs: Mapping[str, Any], context: object = None, *, copy: bool = False) -> Any:
        """Runs one step and returns the model's outputs without padded rows.

        Args:
            phase: `prefill` or `decode`.
            inputs: by name; tensors, or constants that are part of the program's identity.
            context: what split ops get from `get_context`; fields made with `context_field` are padded to the bucket.
            copy: returns tensors of the caller's own. Without it, what a captured phase returns is valid until the
                next step of that phase begins, which overwrites it; do not pass it back as an input.

        Returns:
            The structure that the model returns, made under `torch.inference_mode`.

        Raises:
            InputError: the inputs do not fit `dynamic_dims` or the model's forward, the context's fields do not fit
                the inputs, or an output has no token rows and `output_dims` does not say None for it.
            TraceError: the model cannot become one graph.
            CompileError: a compiler failed on a piece of the general program.
            CaptureError: a split op returned another shape, dtype or device than when its bucket was captured.
            Under `debug_captures`, whatever `check()` of the context raises, if it has that.
            RecompileError: under `evaluate_guards`, the trace no longer holds.
            RuntimeClosedError: after `close`.
        """
        if self._closed:
            raise RuntimeClosedError("run: this Runtime was closed; make a new one")
        if self._tiering is None:
            return self._step(phase, inputs, context, copy)
        kernels, gate = self._tiering.kernels, self._tiering.gate
        gate.num_begun += 1
        try:
            with defer_compiles(kernels.submit):
                if self._tiering.promotions.is_due:
                    gate.is_at_boundary = True
                    self._tiering.before_step()
                    gate.is_at_boundary = False
                return self._step(phase, inputs, context, copy)
        finally:
            if kernels.holds:
                kernels.begin_held()  # whoever looks at both finds one of them busy
            gate.num_ended, gate.is_at_boundary = gate.num_begun, False

    @contextlib.contextmanager
    def beside_steps(self) -> Iterator[None]:
        """Inside, an engine's own code behind a step (logits, sampling) runs the fused ops that eager steps run.

        Like a step, it waits for no compile of a kernel under `startup="tiered"`.
        """
        with use_choice(self._fused[Compiler.EAGER]):
            if self._tiering is None:
                yield
                return
            kernels = self._tiering.kernels
            try:
                with defer_compiles(kernels.submit):
                    yield
            finally:
                if kernels.holds:
                    kernels.begin_held()

    def _step(self, phase: Phase | str, inputs: Mapping[str, Any], context: object, copy: bool) -> Any:
        token = set_attention_backend(self._attention)
        try:
            return self._run(phase, inputs, context, copy)
        finally:
            reset_attention_backend(token)

    def _run(self, phase: Phase | str, inputs: Mapping[str, Any], context: object, copy: bool) -> Any:
        if self.config.debug_captures:
            check_context(context)
        known = self._layouts.read(phase, inputs, context) if self._layouts is not None else None
        if known is not None and self._captures is not None:
            outputs = self._captures.replay(known, context, copy=copy)
            if outputs is not NOT_CAPTURED:
                return outputs
        phase = _phase(phase)
        bound = self._contract.bind(check_mapping("inputs", inputs))
        entry, program, sizes = self._table.pick(phase, bound)
        if self._witness is not None:
            own = self._fused[self.config.phase(phase).compiler]
            check_guards(program, bound, entry.family.fused if entry.family is not None else own)
        check_written({*program.written_inputs, *entry.written_inputs}, bound.tensors)
        outputs = NOT_CAPTURED
        if self._captures is not None and entry.captures and program is entry.program:
            if self._captures.wants_largest(entry):
                self._warm_up.capture_largest(entry, bound)
            scope = Scope(phase=phase, bucket=entry.bucket, in_step=True)
            step = Step(entry, program, bound, sizes, context, self._recorder.within(scope), known)
            outputs = self._captures.run(step, copy=copy)
        if outputs is NOT_CAPTURED:
            outputs = self._run_uncaptured(entry, program, bound, sizes, context)
        entry.num_steps += 1
        self.counters.add("steps", scope=Scope(phase=phase, bucket=entry.bucket))
        return outputs

    def _run_uncaptured(
        self, entry: Entry, program: AnyProgram, bound: BoundInputs, sizes: Mapping[str, int], context: object
    ) -> Any:
        if program.kind == "eager":
            sizes = bound.sizes  # it needs no bucket
        size = sizes[TOKENS]
        tensors = bound.tensors if program.kind == "eager" else self._contract.pad_to_bucket(bound, size)
        recorder = self._recorder.within(Scope(phase=entry.phase, bucket=entry.bucket))
        padded_context = pad_context(context, bound, size, self._contract, recorder.warn)
        with torch.inference_mode(), use_context(padded_context), inside_step():
            outputs = program(tensors, sizes, bound.sizes)
            for name in program.written_inputs:
                self._contract.copy_back(name, bound.tensors[name], tensors[name])
            return self._outputs.cut(outputs, padded=size, num_tokens=bound.num_tokens, rows=program.rows)

    def warm_up(self, phase: Phase | str | None = None, *, buckets: Sequence[int] | None = None) -> None:
        """Does now what the startup policy would do later, for one phase or both, and what lies above the ladder.

        Where the backend captures, each bucket is run once, on nothing but padding and `example_context`.

        Args:
            buckets: only these; None: all of the ladder.

        Raises:
            ConfigError: `buckets` has one that the phase has not.
            InputError: the inputs are not known yet. As `run` otherwise.
        """
        for each in Phase if phase is None else (_phase(phase),):
            self._warm_up.run(each, buckets)

    @property
    def settled(self) -> bool:
        """Whether every bucket that was seen runs the best program that the config allows, and nothing is going on."""
        return self.ready and (self._tiering is None or self._tiering.is_settled)

    def wait_settled(self, timeout_s: float | None = None) -> bool:
        """Promotes between two steps until everything is settled, at most so long; whether it is.

        Like `promote`; with several ranks, call it on all of them.
        """
        return self._tiering is None or self._tiering.wait_settled(timeout_s)

    def promote(self, budget_ms: float | None = None) -> int:
        """A step boundary that the caller makes, where it has time: returns how many promotions and captures it made.

        Where `example_context` is given, buckets whose program was replaced are run on padding and captured too: what
        earlier steps returned is not valid any more.

        Args:
            budget_ms: begins nothing more after so many milliseconds; None: everything that is there.
        """
        return self._tiering.between_steps(None if budget_ms is None else budget_ms / 1000) if self._tiering else 0

    def manifest_data(self) -> dict[str, Any]:
        """What came so far and what was made for it, as the manifest would have it."""
        return self._remembering.data()

    def compact(self) -> None:
        """Makes every capture again, in a new pool, and gives the old pool's memory back to the device."""
        if self._captures is not None and not self._closed:
            self._captures.compact(self._recorder)

    @property
    def needs_inputs(self) -> bool:
        """Whether a phase has something to do for which inputs must be known: a trace, or captures."""
        return any(is_traced(config) or is_captured(config) for config in map(self.config.phase, Phase))

    @property
    def has_example_inputs(self) -> bool:
        """Whether the constructor was given inputs to trace with, or programs that know them."""
        return self._examples is not None or bool(self._programs)

    @property
    def events(self) -> tuple[Event, ...]:
        """The newest events, oldest first."""
        return self._recorder.events

    @property
    def started_s(self) -> float:
        """When it was made, on the clock of `time.perf_counter`: events count from there."""
        return self._recorder.started_s

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries made so far, by phase and bucket."""
        everything = tuple(self._table.entries.values())
        return tuple(sorted(everything, key=lambda e: (str(e.phase), e.bucket is None, e.bucket or 0)))

    def explain(self) -> Explanation:
        """What runs for each bucket and why; `str()` of it is a table, `as_dict()` plain data."""
        return explain(
            resolved=self.resolved,
            entries=self.entries,
            families=tuple(self._table.families.values()),
            counters=self.counters,
            witness=self._witness,
            fused={phase: self._fused[self.config.phase(phase).compiler] for phase in Phase},
            captures=self._captures,
            settled=self.settled,
        )

    def dump(self, directory: str | os.PathLike[str]) -> Path:
        """Writes the traced program as Python that can be read and run, one file a distinct piece, and portable.

        Returns:
            The main file. With several traces, one directory each.

        Raises:
            InputError: nothing was traced yet.
        """
        written = dump_programs(self._table.families.values(), Path(directory), self._recorder)
        if written is None:
            raise InputError("dump: nothing was traced yet; call run() or warm_up() first")
        return written

    def export(self) -> tuple[PortableProgram, ...]:
        """The traced programs in a form that leaves the process; another one passes them as `programs`.

        Raises:
            InputError: nothing was traced yet.
            PortableError: a program holds something that cannot leave the process.
        """
        with self._table.lock:
            programs = portable_programs(self._table.families.values())
        if not programs:
            raise InputError(
                "export: nothing was traced yet; call run() or warm_up() first (compiler eager traces nothing)"
            )
        return programs

    def close(self) -> None:
        """Drops every program and capture, and gives their memory back. A later `run` raises; twice is fine."""
        self._closed = True
        if self._tiering is not None:
            self._tiering.end()  # before its workers: that they are gone is then no loss
        if self._workers is not None:
            self._workers.close()
        if self._tiering is not None:
            self._tiering.close()
        self._remembering.close()
        if self._captures is not None:
            self._captures.close()
        self._table.clear()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _phase(phase: Phase | str) -> Phase:
    try:
        return Phase(phase)
    except ValueError:
        raise ConfigError(f"phase: expected one of {', '.join(Phase)}, got {phase!r}; pass one of the former") from None
