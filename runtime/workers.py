"""Compile workers: processes of low priority that trace and compile beside the steps, and leave artifacts.

They are spawned and not forked from the server, which may have a CUDA context. One thread looks after them all: see
`WorkerManager`.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..errors import WorkerLostError
from ..graphs.compilers import CompilerOptions
from ..graphs.recorder import Recorder
from ..ops.fused import fused_ops
from ..ops.registry import REGISTRY
from ..phases import Compiler
from .worker_job import Job
from .worker_manager import WorkerManager, WorkerView
from .worker_protocol import encode_frame

if TYPE_CHECKING:
    from .model_factory import ModelFactory
    from .trace_request import TraceRequest

__all__ = ["WorkerPool", "WorkerView"]

_LEFT_OPEN_S = 1.0
"""What the workers of a pool that nobody closed have to end by themselves."""


class WorkerPool:
    """A number of compile workers. Thread-safe.

    Jobs wait until a worker is idle; the first waiting is the first done. A future of a job that waits can be
    cancelled. Futures are completed in the pool's thread: what is to be called then must be quick.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        device: torch.device,
        recorder: Recorder,
        timeout_s: float,
        emulate_precision_casts: bool = False,
        inductor: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts nothing.

        Args:
            device: where the pieces are to run; of `cuda` without an index, the current one.
            recorder: gets the events `worker_start`, `worker_job` and `worker_lost`, from the pool's thread.
            timeout_s: after which a worker that is not done with a job is ended; 0: never.
            inductor: settings of Inductor that are others than its defaults, as `inductor_changes` tells them.
        """
        assert num_workers > 0
        self._num_workers = num_workers
        self._device = device
        self._recorder = recorder
        self._timeout_s = timeout_s
        self._options = CompilerOptions(emulate_precision_casts=emulate_precision_casts)
        self._changes = dict(inductor or {})
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._manager: WorkerManager | None = None
        self._problem: str | None = None

    def start(self) -> None:
        """Starts the workers and returns at once; they take some ten seconds until they can do something. Idempotent.

        It does not raise: where no worker can be started, jobs fail with WorkerLostError.
        """
        with self._lock:
            if self._manager is not None or self._problem is not None:
                return
            try:
                directory = Path(tempfile.mkdtemp(prefix="piecework-workers-"))
                manager = WorkerManager(
                    self._num_workers, self._start_message(), directory, self._recorder, self._timeout_s
                )
                try:
                    manager.start()
                except BaseException:
                    shutil.rmtree(directory, ignore_errors=True)
                    raise
                self._manager = manager
            except (OSError, RuntimeError) as error:  # no room or right to write; no thread can be started
                self._problem = (
                    f"compile workers cannot be started ({type(error).__name__}: {error}); make room in the temporary "
                    f"directory, or choose another one (TMPDIR)"
                )
                self._recorder.record("worker_lost", reason=self._problem)
                return
            weakref.finalize(self, self._manager.close, _LEFT_OPEN_S)

    def compile(
        self, program: bytes, fingerprint: str, *, compiler: Compiler, bucket: int | None, mode: str | None = None
    ) -> Future[Path]:
        """Has a piece of a portable program compiled, for any size or for `bucket` tokens.

        Args:
            mode: a mode of torch.compile, whose settings of Inductor apply.

        The future's result is an artifact for `load_piece`, in a directory that `close` removes.

        Its errors: CompileError: the compiler failed. NoArtifactError: it has to be compiled in this process.
        ArtifactError: the artifact could not be written. WorkerLostError: the worker crashed or was late; another one
        takes its place.
        """
        detail = {"fingerprint": fingerprint, "bucket": bucket}
        return self._submit("compile", program, detail, compiler=str(compiler), mode=mode, **detail)

    def trace(self, factory: ModelFactory, request: TraceRequest) -> Future[bytes]:
        """Has a model made and traced; the result is a portable program.

        Its errors: TraceError and the others of `trace_from_factory`; WorkerLostError as in `compile`.
        """
        detail = {"factory": factory.target}
        return self._submit("trace", b"", detail, factory=factory.to_json(), request=request.to_json())

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """What each worker does at the moment."""
        return self._manager.views() if self._manager is not None else ()

    @property
    def num_alive(self) -> int:
        """How many workers there are, ready or not yet."""
        return len(self.workers)

    @property
    def gpu_bytes(self) -> int:
        """What they hold of the GPU, where the driver does not tell an assumed number each; 0 on CPU."""
        return sum(worker.gpu_bytes for worker in self.workers)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the workers, also in mid-compile, and removes their artifacts. Idempotent.

        Waits until they have ended; after `timeout_s` they are killed. Jobs that wait are cancelled, those in hand fail
        with WorkerLostError.
        """
        with self._lock:
            self._problem = self._problem or "the pool is closed"
            manager = self._manager
        if manager is not None:
            manager.close(timeout_s)

    def _submit(
        self, kind: Literal["compile", "trace"], content: bytes, detail: dict[str, Any], **message: Any
    ) -> Future[Any]:
        self.start()
        number = next(self._numbers)
        frame = encode_frame(
            {"kind": kind, "job": number, "settings": _settings(), "modules": [*_defining_modules()], **message},
            content,
        )
        job = Job(number=number, kind=kind, frame=frame, future=Future(), detail=detail)
        if self._manager is not None:
            self._manager.submit(job)
        else:
            job.future.set_exception(WorkerLostError(f"workers: {self._problem}"))
        return job.future

    def _start_message(self) -> dict[str, Any]:
        device = self._device
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return {"device": str(device), "options": dataclasses.asdict(self._options), "inductor": self._changes}


def _settings() -> dict[str, Any]:
    """What compilers bake in, and neither a program nor the environment tells."""
    try:
        precision: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set through the interface that replaces this one
        precision = None
    return {"float32_matmul_precision": precision, "num_threads": torch.get_num_threads()}


def _defining_modules() -> Iterator[str]:
    """The modules that define operators which a piece may call, split ops too: a whole forward is one piece."""
    functions = [*REGISTRY.bodies.values()]
    for op in fused_ops():
        functions += [op.native, *(kernel.body for kernel in op.kernels)]
    names = {function.__module__ for function in functions if inspect.isfunction(function)}
    yield from sorted(names - {"__main__"})
