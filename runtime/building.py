"""Makes programs with the help of compile workers: what they cannot do is done here, and counted."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ArtifactError, CompileError, PieceworkError, PortableError, WorkerLostError
from ..graphs.artifact import has_artifacts, load_piece
from ..graphs.compilers import CompilerOptions, inductor_changes, prepare_to_load, start_compiling
from ..graphs.inputs import InputContract, Signature
from ..graphs.outputs import OutputContract
from ..graphs.piece import BuiltPiece
from ..graphs.portable import PortableProgram
from ..graphs.program import Program
from ..graphs.recorder import NullRecorder
from ..graphs.stitched import PiecewiseGraph
from ..phases import Compiler, GraphConfig, Phase, Startup
from .cache_root import use_cache_dir
from .entry_table import is_traced
from .events import Recorder, logger
from .import_turns import StepGate, imports_between_steps
from .lock_turns import short_turns
from .programs import ProgramFamily, record_remarks
from .whole_forward import is_whole_asked
from .worker_protocol import ASSUMED_GPU_BYTES

if TYPE_CHECKING:
    from .kernels import KernelQueue
    from .model_factory import ModelFactory
    from .workers import WorkerPool


PREPARE_AFTER_S = 10.0
"""Imports begin when neither the first step runs nor a kernel is being compiled that steps wait for, or after so many
seconds."""
_LOOK_S = 0.1
MAX_TRACES_LOST = 3
"""After so many the factory is not asked again."""


class _LateRecorder:
    """Keeps what happens until there is a runtime to tell."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runtime: Recorder | None = None
        self._held: list[tuple[str, float, dict[str, Any]]] = []

    def record(self, kind: str, *, seconds: float = 0.0, **detail: Any) -> None:
        with self._lock:
            if self._runtime is None:
                self._held.append((kind, seconds, detail))
                return
        self._runtime.record(kind, seconds=seconds, **detail)

    def progress(
        self, title: str, *, total: int | None = None
    ) -> contextlib.AbstractContextManager[Callable[[], None]]:
        return NullRecorder().progress(title, total=total)

    def tell(self, recorder: Recorder) -> None:
        """From now on, and what was held, to the recorder of a runtime."""
        with self._lock:
            self._runtime, held = recorder, self._held
            self._held = []
        for kind, seconds, detail in held:
            recorder.record(kind, seconds=seconds, **detail)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """Compile workers for one runtime."""

    pool: WorkerPool
    recorder: _LateRecorder
    reserved_bytes: int
    """What they will hold of a GPU: a CUDA context each; 0 on a CPU."""

    def close(self) -> None:
        """Ends the processes; twice is fine."""
        self.pool.close()


def start_workers(config: GraphConfig, device: torch.device | str) -> Workers | None:
    """Starts the compile workers that a runtime with this config will use; returns at once.

    A worker takes ten seconds until it can compile: start them before weights load, and pass them to the `Runtime`.

    Args:
        config: as it is given to the runtime.
        device: of the model.

    Returns:
        None if the runtime will use none: also where Inductor's configuration holds what cannot be sent, such as a pass
        of the caller's.
    """
    workers = make_workers(config, device)
    if workers is not None and any(
        has_artifacts(config.phase(phase).compiler) or is_whole_asked(config, phase) for phase in _built(config)
    ):
        # Seconds of imports, the first time: beside what the caller does before it has a model to run.
        threading.Thread(target=_prepare, name="piecework-prepare", daemon=True).start()
    return workers


def _prepare() -> None:
    with short_turns():
        prepare_to_load()


def make_workers(config: GraphConfig, device: torch.device | str) -> Workers | None:
    """As `start_workers`, for a runtime that serves at once: nothing goes on in this process."""
    if not _built(config) or not config.compile_workers:
        return None
    if config.cache_dir is not None:
        use_cache_dir(config.cache_dir)  # they inherit where it is
    changes, others = inductor_changes()
    if others:
        logger.warning(
            "compile workers: Inductor's settings %s cannot be sent to another process; a thread of this one compiles",
            ", ".join(others),
        )
        return None
    from .workers import WorkerPool

    recorder = _LateRecorder()
    pool = WorkerPool(
        config.compile_workers,
        device=torch.device(device),
        recorder=recorder,
        timeout_s=config.compile_timeout_s,
        emulate_precision_casts=config.emulates_precision_casts,
        inductor=changes,
    )
    pool.start()
    on_gpu = torch.device(device).type == "cuda"
    return Workers(
        pool=pool, recorder=recorder, reserved_bytes=config.compile_workers * ASSUMED_GPU_BYTES if on_gpu else 0
    )


def _built(config: GraphConfig) -> list[Phase]:
    """The phases for which programs are made beside the steps."""
    tiered = [phase for phase in Phase if config.startup_of(phase) is Startup.TIERED]
    return [phase for phase in tiered if is_traced(config.phase(phase)) or is_whole_asked(config, phase)]


class WorkerBuilder:
    """The builder of a background thread."""

    def __init__(
        self,
        model: torch.nn.Module,
        contract: InputContract,
        outputs: OutputContract,
        *,
        workers: Workers | None,
        factory: ModelFactory | None,
        call_first: Callable[[Program, Signature, Recorder], None],
        gate: StepGate,
        kernels: KernelQueue,
    ) -> None:
        self._model = model
        self._contract = contract
        self._outputs = outputs
        self._workers = workers.pool if workers is not None else None
        self._factory = factory
        self._call_first = call_first
        self._gate = gate
        self._kernels = kernels
        self._is_prepared = False
        self._num_lost = 0
        """Traces in which a worker was lost."""
        self._contents: weakref.WeakKeyDictionary[PiecewiseGraph, bytes] = weakref.WeakKeyDictionary()
        """The portable form of graphs."""

    def trace(
        self, family: ProgramFamily, sizes: Mapping[str, int], recorder: Recorder, *, backed: bool
    ) -> PiecewiseGraph | None:
        """Lets a worker build the model and trace it. Raises: WorkerLostError."""
        if self._workers is None:
            start_compiling(family.compiler)  # here, beside the trace
            return None
        if self._num_lost >= MAX_TRACES_LOST:
            return None
        if self._factory is None:
            recorder.warn(
                "the model is traced in a thread beside the steps, which slows them down meanwhile: pass "
                "model_factory=ModelFactory(...) to Runtime, and a worker does it"
            )
            return None
        from .model_factory import TraceRequest

        started = time.perf_counter()
        try:
            request = TraceRequest.of(
                family.signature,
                self._contract,
                self._outputs,
                sizes,
                family.fused,
                model=self._model,
                backed=backed,
            )
            job = self._workers.trace(self._factory, request)
            if has_artifacts(family.compiler) and not self._is_prepared:
                until = time.monotonic() + PREPARE_AFTER_S
                while not job.done() and time.monotonic() < until and self._is_step_waiting():
                    pass
                self._prepare()
            content = job.result()
            program = PortableProgram.from_bytes(content)
            graph = program.bind(self._model)
        except WorkerLostError as error:
            self._num_lost += 1
            if self._num_lost < MAX_TRACES_LOST:
                raise
            recorder.fallback("a worker was lost at each trace: traced in a thread", because=str(error))
            return None
        except PieceworkError as error:
            recorder.fallback("a worker could not trace the model: traced in a thread", because=str(error))
            return None
        graph.trace_s = time.perf_counter() - started
        self._contents[graph] = content
        recorder.record(
            "trace",
            seconds=graph.trace_s,
            where="worker",
            mode=graph.traced.mode,
            interval=str(graph.traced.interval),
            signature=str(family.signature),
            kernels=dict(family.fused.kernels),
        )
        recorder.counters.add("regions_reused", graph.traced.regions_reused, recorder.scope)
        record_remarks(program.remarks, recorder)
        return graph

    def _is_step_waiting(self) -> bool:
        """Looks for a while whether imports would hold up what the first answers wait for."""
        if self._gate.is_in_first:
            time.sleep(_LOOK_S)
            return True
        return not self._kernels.wait_idle(_LOOK_S)

    def _prepare(self) -> None:
        """Imports what binding and loading will need, while a worker is at work; once is enough."""
        if self._is_prepared:
            return
        self._is_prepared = True
        with imports_between_steps(self._gate):
            prepare_to_load()

    def precompile(self, family: ProgramFamily, graph: PiecewiseGraph, bucket: int | None, recorder: Recorder) -> None:
        """Lets workers compile the distinct pieces side by side, and loads what they made.

        Raises: WorkerLostError; CompileError.
        """
        if self._workers is None or not has_artifacts(family.compiler):
            return
        missing: dict[str, BuiltPiece] = {}
        for fingerprint, (first, *_) in graph.distinct_pieces().items():
            built = graph.built(first) if bucket is None else graph.built(first).specialized(bucket)
            if (built.fingerprint, family.compiler) not in family.compiled:
                missing[fingerprint] = built
        if not missing or (content := self._content(family, graph, recorder)) is None:
            return
        jobs = {
            fingerprint: self._workers.compile(content, fingerprint, compiler=family.compiler, bucket=bucket)
            for fingerprint in missing
        }
        started = time.perf_counter()
        self._prepare()
        kind = "general" if bucket is None else "specialized"
        detail = {} if bucket is None else {"bucket": bucket}
        with recorder.progress(
            f"compiling the {kind} program in {self._workers.num_alive} workers", total=len(jobs)
        ) as done:
            for fingerprint, job in jobs.items():
                built = missing[fingerprint]
                try:
                    path = job.result()
                    seconds = time.perf_counter() - started
                    compiled = load_piece(path, built, family.compiler)
                except ArtifactError as error:
                    recorder.fallback("a piece is compiled in a thread: it has no artifact", because=str(error))
                    continue
                except CompileError as error:  # it may be the worker's state; else it fails here in the same way
                    recorder.fallback("a piece is compiled in a thread: a worker failed on it", because=str(error))
                    continue
                family.compiled[built.fingerprint, family.compiler] = compiled
                graph.num_compiles += 1
                recorder.record(
                    f"compile_{kind}",
                    seconds=seconds,
                    where="worker",
                    fingerprint=built.fingerprint,
                    compiler=str(family.compiler),
                    **detail,
                )
                recorder.record("load", seconds=compiled.seconds, fingerprint=built.fingerprint)
                done()
        graph.compile_s += time.perf_counter() - started  # side by side: not the sum of them

    def precompile_whole(
        self, family: ProgramFamily, graph: PiecewiseGraph, bucket: int, options: CompilerOptions, recorder: Recorder
    ) -> None:
        """Lets a worker compile the one piece of a whole graph. Raises: WorkerLostError."""
        if self._workers is None:
            return
        built = graph.built(graph.split.pieces[0])
        key = (built.fingerprint, Compiler.INDUCTOR)
        if key in family.compiled or (content := self._content(family, graph, recorder)) is None:
            return
        started = time.perf_counter()
        with recorder.progress(f"compiling the whole forward for {bucket} tokens in a worker"):
            job = self._workers.compile(
                content, built.fingerprint, compiler=Compiler.INDUCTOR, bucket=None, mode=options.mode
            )
            self._prepare()
            try:
                compiled = load_piece(job.result(), built, Compiler.INDUCTOR, options=options)
            except (ArtifactError, CompileError) as error:
                recorder.fallback(
                    "the whole forward is compiled in a thread: a worker left nothing to load", because=str(error)
                )
                return
        family.compiled[key] = compiled
        seconds = time.perf_counter() - started
        recorder.record(
            "compile_whole",
            seconds=seconds,
            where="worker",
            fingerprint=built.fingerprint,
            compiler=str(Compiler.INDUCTOR),
            bucket=bucket,
            mode=options.mode,
        )
        recorder.record("load", seconds=compiled.seconds, fingerprint=built.fingerprint)

    def call_first(self, family: ProgramFamily, program: Program, recorder: Recorder) -> None:
        """Calls it once on padding."""
        self._call_first(program, family.signature, recorder)

    def _content(self, family: ProgramFamily, graph: PiecewiseGraph, recorder: Recorder) -> bytes | None:
        """The graph as bytes for a worker; None if it cannot travel."""
        if graph not in self._contents:
            try:
                program = PortableProgram.from_graph(graph, family.signature, kernels=family.fused.kernels)
                self._contents[graph] = program.to_bytes()
            except PortableError as error:
                recorder.fallback("a program is compiled in a thread: it cannot leave the process", because=str(error))
                return None
        return self._contents[graph]
