"""The programs of one signature and compiler: traced when a size needs one, specialised when a bucket asks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch._dynamo.exc import RecompileError as DynamoRecompileError
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ..errors import CompileError, InputError, RecompileError, TraceError
from ..graphs.addresses import ModelBindings
from ..graphs.bindings import Bindings
from ..graphs.compilers import DEFAULT_OPTIONS, CompilerOptions, start_compiling
from ..graphs.debug import MutationWitness
from ..graphs.dynamo import COMPILE_LOCK
from ..graphs.inputs import TOKENS, BoundInputs, Constant, InputContract, Signature
from ..graphs.outputs import OutputContract, Rows, map_leaves
from ..graphs.piece import CompiledPieces
from ..graphs.program import Hook, Program, ProgramKind, SizesByName, TensorsByName
from ..graphs.remarks import Remark, remarks_on
from ..graphs.rows import check_token_rows
from ..graphs.stitched import PiecewiseGraph
from ..graphs.trace import OutputRef, trace
from ..graphs.whole import whole_graph
from ..ops import registry
from ..ops.fused import native_bodies, tracing_with, use_choice
from ..ops.fused_choice import Choice as FusedChoice
from ..phases import Compiler
from .events import Recorder

MAX_TRACES = 4
"""Traces of one signature at different sizes, for models that branch on the size; further sizes run eagerly."""


class AnyProgram(Protocol):
    """What an entry can hold: the eager forward, or a compiled program."""

    kind: ProgramKind
    rows: Mapping[str, Rows] | None
    """Which output dims grow with `tokens`; None when only the run can tell."""
    written_inputs: tuple[str, ...]
    """Inputs that it writes into: what a padded copy got is copied back."""

    def holds_at(self, sizes: Mapping[str, int]) -> bool: ...

    def holds_padded_from(self, num_tokens: int) -> bool: ...

    @property
    def bindings(self) -> Bindings: ...

    def flat(
        self, tensors: TensorsByName, sizes: SizesByName, hook: Hook | None = None
    ) -> tuple[Sequence[Any], Any]: ...

    def __call__(self, tensors: TensorsByName, sizes: SizesByName, asked: SizesByName | None = None) -> Any: ...


class EagerProgram:
    """The model's own forward. It needs no bucket, so uncaptured it runs at the size that was asked for.

    Its fused ops run what `fused` says, whatever compiles the phase: also a fallback is eager code.
    """

    kind: ProgramKind = "eager"
    rows: Mapping[str, Rows] | None = None
    written_inputs: tuple[str, ...] = ()

    def __init__(
        self,
        model: torch.nn.Module,
        constants: tuple[tuple[str, Constant], ...],
        fused: FusedChoice,
        bindings: ModelBindings | None = None,
    ) -> None:
        self._model = model
        self._constants = dict(constants)
        self._fused = fused
        self._all = bindings or ModelBindings(model)
        self._bindings: Bindings | None = None

    @property
    def bindings(self) -> Bindings:
        """All tensors of the model, as `look_again` found them: nobody knows which of them the forward uses."""
        if self._bindings is None:
            self.look_again()
        assert self._bindings is not None
        return self._bindings

    def look_again(self) -> None:
        """Finds the model's tensors anew, before a capture."""
        self._bindings = self._all.current()

    def flat(self, tensors: TensorsByName, sizes: SizesByName, hook: Hook | None = None) -> tuple[Sequence[Any], Any]:
        """Runs the forward; returns its tensors, and the structure that `assemble` makes of them. `hook`: unused."""
        outputs: list[torch.Tensor] = []

        def leaf(path: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            outputs.append(value)
            return OutputRef(len(outputs) - 1)

        structure = map_leaves(self(tensors, sizes), leaf)
        return outputs, structure

    def holds_at(self, sizes: Mapping[str, int]) -> bool:
        """Always: nothing was assumed."""
        return True

    def holds_padded_from(self, num_tokens: int) -> bool:
        """Always: it is not padded."""
        return True

    def __call__(self, tensors: TensorsByName, sizes: SizesByName, asked: SizesByName | None = None) -> Any:
        """Runs the forward on the inputs as they are."""
        with use_choice(self._fused):
            return self._model(**tensors, **self._constants)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The program for a size, the size it runs at, and why that is not the plain case."""

    program: Program | None
    """None when no trace holds at this size: the eager forward has to do."""
    size: int
    fallback: str | None = None


Sizes = frozenset[tuple[str, int]]
"""Sizes by name, as a key."""


class Builder(Protocol):
    """Does elsewhere what takes long: traces and compiles of a family, in other processes."""

    def trace(
        self, family: ProgramFamily, sizes: Mapping[str, int], recorder: Recorder, *, backed: bool
    ) -> PiecewiseGraph | None:
        """A graph of the family's model, traced elsewhere; None: trace it here."""

    def precompile(self, family: ProgramFamily, graph: PiecewiseGraph, bucket: int | None, recorder: Recorder) -> None:
        """Puts what was compiled elsewhere into `family.compiled`; what is then missing is compiled here."""

    def precompile_whole(
        self, family: ProgramFamily, graph: PiecewiseGraph, bucket: int, options: CompilerOptions, recorder: Recorder
    ) -> None:
        """The same for the one piece of a whole graph."""

    def call_first(self, family: ProgramFamily, program: Program, recorder: Recorder) -> None:
        """Makes a new program's first call, before a step can find it."""


class _Here:
    """The builder of steps that wait: everything in this thread."""

    def trace(
        self, family: ProgramFamily, sizes: Mapping[str, int], recorder: Recorder, *, backed: bool
    ) -> PiecewiseGraph | None:
        start_compiling(family.compiler)  # beside the trace
        return None

    def precompile(self, family: ProgramFamily, graph: PiecewiseGraph, bucket: int | None, recorder: Recorder) -> None:
        pass

    def precompile_whole(
        self, family: ProgramFamily, graph: PiecewiseGraph, bucket: int, options: CompilerOptions, recorder: Recorder
    ) -> None:
        pass

    def call_first(self, family: ProgramFamily, program: Program, recorder: Recorder) -> None:
        pass


HERE: Builder = _Here()


class ProgramFamily:
    """Every program of one signature and compiler. The caller holds the runtime's build lock."""

    def __init__(
        self,
        model: torch.nn.Module,
        signature: Signature,
        contract: InputContract,
        outputs: OutputContract,
        compiler: Compiler,
        fused: FusedChoice,
        compiled: CompiledPieces,
        witness: MutationWitness | None,
        ready: Sequence[PiecewiseGraph] = (),
        options: CompilerOptions = DEFAULT_OPTIONS,
        whole_mode: str | None = None,
    ) -> None:
        self.signature = signature
        self.compiler = compiler
        self.fused = fused
        """What the fused ops are in its traces."""
        self.general: list[Program] = []
        self.unmatched: tuple[str, ...] = ()
        self._model = model
        self._contract = contract
        self._outputs = outputs
        self.compiled = compiled
        """What was compiled so far, of all families of the runtime."""
        self._witness = witness
        self._options = options
        self._whole_options = dataclasses.replace(options, mode=whole_mode)
        self._whole: dict[int, Program] = {}
        self._uncompiled: list[PiecewiseGraph] = []
        """Traces of which only whole programs were made so far."""
        self._ready = [*ready]
        """Graphs that need no trace, of which no program has been made yet."""
        self._specialized: dict[tuple[int, Program], Program] = {}
        self._hopeless: set[Sizes] = set()
        self._failures: dict[Sizes, TraceError | CompileError | InputError] = {}

    def choose(self, size: int, sizes: Mapping[str, int], recorder: Recorder, builder: Builder = HERE) -> Choice:
        """The general program valid at `size` tokens, traced and compiled now if there is none.

        A backed trace starts at 2, since torch takes 0 and 1 for constants: a smaller size is padded up to 2. Any
        other size outside takes another trace.

        Raises:
            TraceError: the model cannot be traced at this size.
            CompileError: a compiler failed.
            InputError: an output is computed from the tokens and has no rows; see `check_token_rows`.
        """
        sizes = {**sizes, TOKENS: size}
        known = self.known(size, sizes)
        if known is None:
            self._take_ready(sizes, recorder, builder)
            known = self.known(size, sizes)
        if known is not None:
            return known
        key = frozenset(sizes.items())
        self._raise_known_failure(key)
        another = bool(self.general)
        try:
            program = self._trace(sizes, recorder, builder)
            builder.call_first(self, program, recorder)
            self.general.append(program)
        except (TraceError, CompileError, InputError) as error:
            self._failures[key] = error
            raise
        if another:
            recorder.fallback("the size is outside of every program's interval: traced another program", sizes=sizes)
        found = self._find(size, sizes)
        if found is None:
            self._hopeless.add(key)
        return found or _eager(size)

    def known(self, size: int, sizes: Mapping[str, int]) -> Choice | None:
        """What `choose` returns when nothing has to be made for it, else None.

        The one method that needs no lock: programs are only ever added, one by one.
        """
        sizes = {**sizes, TOKENS: size}
        found = self._find(size, sizes)
        if found is not None or self._ready_for(sizes):
            return found
        tried = frozenset(sizes.items()) in self._hopeless or len(self.general) >= MAX_TRACES
        return _eager(size) if tried or self._no_trace_could_hold(sizes) else None

    def _find(self, size: int, sizes: Mapping[str, int]) -> Choice | None:
        for program in self.general:
            if program.holds_at(sizes):
                return Choice(program=program, size=size)
        for program in self.general:
            backed = program.graph.traced.mode == "backed"
            if backed and size < program.interval.low == 2 and program.holds_at({**sizes, TOKENS: 2}):
                return Choice(program=program, size=2, fallback="padded up to the program's interval")
        return None

    def _no_trace_could_hold(self, sizes: Mapping[str, int]) -> bool:
        """A model that had to be traced backed once never holds for a 0 or 1, and only `tokens` can be padded up."""
        backed = any(program.graph.traced.mode == "backed" for program in self.general)
        return backed and any(size < 2 for name, size in sizes.items() if name != TOKENS)

    def _raise_known_failure(self, key: Sizes) -> None:
        """Raises a failure again without another attempt: each step would pay for it."""
        if key in self._failures:
            raise self._failures[key]
        if len(self._failures) >= MAX_TRACES:
            raise next(reversed(self._failures.values()))

    def forget_failures(self) -> None:
        """Lets what failed be tried again: something outside of the model was the reason."""
        self._failures.clear()

    def known_specialized(self, bucket: int, general: Program) -> Program | None:
        """What `specialized` returns when nothing has to be made for it, else None. Needs no lock."""
        return self._specialized.get((bucket, general))

    def specialized(self, bucket: int, general: Program, recorder: Recorder, builder: Builder = HERE) -> Program:
        """The program for exactly `bucket` tokens, compiled now if there is none. Raises: CompileError."""
        key = (bucket, general)
        if key not in self._specialized:
            builder.precompile(self, general.graph, bucket, recorder)
            program = general.graph.compile_specialized(bucket, self.compiler, self.compiled, recorder, self._options)
            builder.call_first(self, program, recorder)
            self._specialized[key] = self._prepare(program)
        return self._specialized[key]

    def known_whole(self, bucket: int) -> Program | None:
        """What `whole` returns when nothing has to be made for it, else None. Needs no lock."""
        return self._whole.get(bucket)

    def whole(self, bucket: int, sizes: Mapping[str, int], recorder: Recorder, builder: Builder = HERE) -> Program:
        """The program of the whole forward for exactly `bucket` tokens, compiled now if there is none.

        Where the graph has kernels for which the operator did not ask, it has their native bodies.

        Raises: TraceError; CompileError; InputError: see `choose`.
        """
        if bucket not in self._whole:
            cut = self._graph_at({**sizes, TOKENS: bucket}, recorder, builder)
            graph = whole_graph(cut, bucket, native_bodies(self.fused.native_in_whole))
            builder.precompile_whole(self, graph, bucket, self._whole_options, recorder)
            program = graph.compile_whole(bucket, self.compiled, recorder, self._whole_options)
            builder.call_first(self, program, recorder)
            self._whole[bucket] = self._prepare(program)
        return self._whole[bucket]

    def _graph_at(self, sizes: Mapping[str, int], recorder: Recorder, builder: Builder) -> PiecewiseGraph:
        """The trace that holds at these sizes, made now if there is none; nothing is compiled."""
        found = [program.graph for program in self.general if program.holds_at(sizes)]
        found += [*self._ready_for(sizes), *(graph for graph in self._uncompiled if _holds(graph, sizes))]
        if found:
            check_token_rows(found[0].reduced, self._outputs)
            return found[0]
        if len(self.general) + len(self._uncompiled) >= MAX_TRACES:
            raise CompileError(f"whole: {MAX_TRACES} traces do not hold at {dict(sizes)}, and no more are made")
        key = frozenset(sizes.items())
        self._raise_known_failure(key)
        try:
            graph = self._traced(sizes, recorder, builder, backed=False)
        except (TraceError, InputError) as error:
            self._failures[key] = error
            raise
        self._uncompiled.append(graph)
        return graph

    def _ready_for(self, sizes: Mapping[str, int]) -> list[PiecewiseGraph]:
        return [graph for graph in self._ready if _holds(graph, sizes)]

    def _take_ready(self, sizes: Mapping[str, int], recorder: Recorder, builder: Builder) -> None:
        """Compiles the graphs that came from another process and hold at these sizes. Raises: CompileError."""
        for graph in self._ready_for(sizes):
            check_token_rows(graph.reduced, self._outputs)
            started = time.perf_counter()
            self._count(graph, recorder)
            builder.precompile(self, graph, None, recorder)
            program = self._prepare(graph.compile_general(self.compiler, self.compiled, recorder, self._options))
            builder.call_first(self, program, recorder)
            self.general.append(program)
            self._ready = [other for other in self._ready if other is not graph]
            recorder.record("bind", seconds=time.perf_counter() - started, interval=str(graph.traced.interval))

    def _trace(
        self, sizes: Mapping[str, int], recorder: Recorder, builder: Builder, *, backed: bool = False
    ) -> Program:
        graph = self._traced(sizes, recorder, builder, backed=backed)
        try:
            builder.precompile(self, graph, None, recorder)
            return self._prepare(graph.compile_general(self.compiler, self.compiled, recorder, self._options))
        except CompileError as error:
            if graph.traced.mode == "backed" or not _needs_sizes(error):
                raise
            recorder.fallback(
                "the compiler decides on a size: traced backed",
                because=str(error.__cause__ or error).strip().partition("\n")[0],
            )
            return self._trace(sizes, recorder, builder, backed=True)

    def _traced(
        self, sizes: Mapping[str, int], recorder: Recorder, builder: Builder, *, backed: bool
    ) -> PiecewiseGraph:
        """A trace that holds at these sizes, of which no general program has been made."""
        for graph in () if backed else self._uncompiled:
            if _holds(graph, sizes):
                self._uncompiled = [other for other in self._uncompiled if other is not graph]
                return graph
        elsewhere = builder.trace(self, sizes, recorder, backed=backed)
        if elsewhere is None:
            return self._trace_graph(sizes, recorder, backed)
        check_token_rows(elsewhere.reduced, self._outputs)
        self._count(elsewhere, recorder)
        return elsewhere

    def _trace_graph(self, sizes: Mapping[str, int], recorder: Recorder, backed: bool) -> PiecewiseGraph:
        registry.load_entry_points()
        started = time.perf_counter()
        guarded = self._witness is not None
        with recorder.progress("tracing the model"), COMPILE_LOCK, tracing_with(self.fused):
            traced = trace(
                self._model, self.signature, self._contract, sizes=sizes, evaluate_guards=guarded, backed=backed
            )
            graph = PiecewiseGraph.from_trace(traced, self._contract, ambient=self.signature.ambient)
            check_token_rows(graph.reduced, self._outputs)
        graph.trace_s = time.perf_counter() - started
        recorder.record(
            "trace",
            seconds=graph.trace_s,
            mode=traced.mode,
            interval=str(traced.interval),
            signature=str(self.signature),
            kernels=dict(self.fused.kernels),
        )
        recorder.counters.add("regions_reused", traced.regions_reused, recorder.scope)
        record_remarks(remarks_on(traced, self._contract), recorder)
        self._count(graph, recorder)
        return graph

    def _count(self, graph: PiecewiseGraph, recorder: Recorder) -> None:
        self.unmatched = registry.record_matches(graph.split.matches)
        recorder.counters.add("pieces", len(graph.split.pieces), recorder.scope)
        recorder.counters.add("distinct_pieces", graph.num_distinct, recorder.scope)
        recorder.counters.add("opaque_regions", graph.split.num_opaque, recorder.scope)

    def _prepare(self, program: Program) -> Program:
        if self._witness is not None:
            program.watched(self._witness.watch)
        return program


def _holds(graph: PiecewiseGraph, sizes: Mapping[str, int]) -> bool:
    return all(sizes[name] in interval for name, interval in graph.traced.intervals.items())


def record_remarks(remarks: Sequence[Remark], recorder: Recorder) -> None:
    """Counts and logs what is to be said of a trace."""
    for remark in remarks:
        if remark.because is None:
            recorder.warn(remark.text)
        else:
            recorder.fallback(remark.text, because=remark.because)


def eager_choice(size: int, why: str) -> Choice:
    """The eager forward, and why."""
    return Choice(program=None, size=size, fallback=why)


def _eager(size: int) -> Choice:
    return eager_choice(size, "no trace is valid at this size: eager")


def _needs_sizes(error: BaseException | None) -> bool:
    """Whether a compiler failed because a size is unknown in an unbacked trace."""
    while error is not None:
        if isinstance(error, GuardOnDataDependentSymNode) or "GuardOnDataDependentSymNode" in str(error):
            return True
        error = error.__cause__
    return False


def check_guards(program: AnyProgram, bound: BoundInputs, fused: FusedChoice) -> None:
    """Under `evaluate_guards`: raises RecompileError when this call, with `fused`, would need another trace."""
    if not isinstance(program, Program) or program.graph.traced.guards is None:
        return
    try:
        with COMPILE_LOCK, tracing_with(fused):
            program.graph.traced.guards.check(bound, program.graph.traced.mode)
    except DynamoRecompileError as error:
        raise RecompileError(
            f"evaluate_guards: the program was traced under conditions that no longer hold, so its result would be "
            f"wrong; undo the change, or make a new Runtime. Dynamo says:\n{error}"
        ) from error
