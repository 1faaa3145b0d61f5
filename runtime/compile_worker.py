"""A compile worker: `python -m piecework.runtime.compile_worker START`, started by `piecework.runtime.workers`.

It speaks `piecework.runtime.worker_protocol` over stdin and stdout. What anything else prints goes to stderr.

Note [A worker dies with its server]
What the server starts is a small supervisor, which forks the worker before torch is there. The kernel wakes it when the
thread that started it ends, whatever ends that (PR_SET_PDEATHSIG): it kills the worker, ends what that had started,
such as a C++ compiler, and removes the pool's directory. It does the first two also when the worker ends in any other
way. Should something kill the supervisor, the kernel kills the worker. The end of stdin ends a worker too, also in
mid-compile; elsewhere than on Linux, that is all there is.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import json
import os
import queue
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CompileError, NoArtifactError, PieceworkError, PortableError, TraceError
from .worker_protocol import ASSUMED_GPU_BYTES, Frame, encode_frame, read_frame

if TYPE_CHECKING:
    import torch

    from ..graphs.portable import PortableProgram

NICENESS = 10
_WARM_UP_AFTER_S = 0.2
"""A worker that has had no job for so long compiles something trivial, to start Inductor's machinery."""
_GRACE_S = 1.0
"""What a worker started has so long to clean up after itself."""
END_SIGNAL = signal.SIGUSR1
"""Sent to a supervisor, it ends the worker."""
_DEATH_SIGNAL = signal.SIGUSR2
"""What the kernel sends it when the server's thread that started it is gone."""
_SUPERVISOR_BLOCKS = (END_SIGNAL, _DEATH_SIGNAL, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SIGNALLED = 128
"""A supervisor exits with this and the number of the signal that ended its worker."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: Sequence[str]) -> None:
    """Runs until stdin ends. `arguments`: one JSON object with `parent`, `directory`, `device` and `options`."""
    start = json.loads(arguments[0])
    jobs, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # whatever prints while it compiles must not get among the frames
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if sys.platform == "linux":
        _supervise(start, jobs, answers)
    # Whoever ends all processes of the server ends the server, and that ends this one. Caught and not ignored: what is
    # ignored stays so in what a worker starts.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    _Worker(jobs, answers, start).run()


def _supervise(start: Mapping[str, Any], jobs: int, answers: int) -> None:
    """Forks the worker, and returns there only. See Note [A worker dies with its server]."""
    prctl = ctypes.CDLL(None).prctl
    signal.pthread_sigmask(signal.SIG_BLOCK, _SUPERVISOR_BLOCKS)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(_PR_SET_PDEATHSIG, _DEATH_SIGNAL, 0, 0, 0)
    if os.getppid() != start["parent"]:  # it was gone before that
        shutil.rmtree(start["directory"], ignore_errors=True)
        os._exit(1)
    supervisor = os.getpid()
    worker = os.fork()
    if not worker:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SUPERVISOR_BLOCKS)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(1)
        return
    try:
        for inherited in (0, 1, 2, answers):  # else the server would not see the worker's end
            os.close(inherited)
        status, is_orphan = _wait_for(worker)
        is_rest = not _end_the_rest()
        pipe = select.poll()
        pipe.register(jobs, 0)
        # Nobody writes to it any more, once a server that was killed has given its memory back.
        if any(events & select.POLLHUP for _, events in pipe.poll(_SERVER_ENDS_MS if is_orphan else 0)):
            shutil.rmtree(start["directory"], ignore_errors=True)
        if is_rest:
            os.killpg(0, signal.SIGKILL)  # and this process
        os._exit(status if status >= 0 else SIGNALLED - status)
    finally:
        os._exit(1)


_SERVER_ENDS_MS = 60_000


def _wait_for(worker: int) -> tuple[int, bool]:
    """Waits until the worker ends, or kills it when asked to or when the server dies.

    Returns its status, below 0 for a signal, and whether the server was seen to die: its pipes close somewhat later.
    """
    is_orphan = False
    while True:
        number = signal.sigwait({END_SIGNAL, _DEATH_SIGNAL, signal.SIGCHLD})
        is_orphan = is_orphan or number == _DEATH_SIGNAL
        if number in (END_SIGNAL, _DEATH_SIGNAL):
            os.kill(worker, signal.SIGKILL)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                return os.waitstatus_to_exitcode(ended[1]), is_orphan or _DEATH_SIGNAL in signal.sigpending()


def _end_the_rest() -> bool:
    """Ends what the worker had started, which is this process's own now: a C++ compiler cleans up after itself.

    Returns whether nothing is left after a while.
    """
    if os.getpgrp() != os.getpid():
        return True
    deadline = time.monotonic() + _GRACE_S
    with contextlib.suppress(ChildProcessError):  # there is nothing left
        os.waitpid(-1, os.WNOHANG)
        os.killpg(0, signal.SIGTERM)
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
        return False
    return True


class _Worker:
    """Takes one job after the other."""

    def __init__(self, jobs: int, answers: int, start: Mapping[str, Any]) -> None:
        self._jobs = os.fdopen(jobs, "rb")
        self._answers = os.fdopen(answers, "wb")
        self._start = start
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._gpu: dict[str, Any] = {}

    def run(self) -> None:
        """Never returns; the thread that reads ends the process."""
        threading.Thread(target=self._read, name="piecework-jobs", daemon=True).start()
        started = time.monotonic()
        self._import()
        self._say("ready", pid=os.getpid(), seconds=time.monotonic() - started)
        is_warm = False
        while True:
            try:
                message, content = self._frames.get(timeout=None if is_warm else _WARM_UP_AFTER_S)
            except queue.Empty:
                error = _warm_up(self._device)
                _free_gpu_memory(self._device)
                self._gpu = _gpu_bytes(self._device)
                self._say("warm", error=error)
                is_warm = True
                continue
            self._do(message, content)
            is_warm = is_warm or message["kind"] == "compile"

    def _read(self) -> None:
        """Ends the process at the end of the file, whatever it does at the moment."""
        try:
            while (frame := read_frame(self._jobs)) is not None:
                self._frames.put(frame)
        finally:
            os._exit(0)

    def _say(self, kind: str, content: bytes = b"", **message: Any) -> None:
        try:
            self._answers.write(encode_frame({"kind": kind, **message, **self._gpu}, content))
            self._answers.flush()
        except OSError:  # nobody listens
            os._exit(1)

    def _import(self) -> None:
        """What takes a worker's first seconds."""
        import torch

        from ..graphs.compilers import CompilerOptions, import_compilers
        from ..ops.fused import fused_ops

        self._device = torch.device(self._start["device"])
        self._options = CompilerOptions(**self._start["options"])
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        import_compilers()
        fused_ops()  # the operators that pieces may call

    def _do(self, message: Mapping[str, Any], content: bytes) -> None:
        job = message["job"]
        self._say("started", job=job)
        try:
            missing = _import_modules(tuple(message["modules"]))
            _apply(message["settings"])
            if message["kind"] == "trace":
                self._say("done", self._trace(message), job=job)
            else:
                file = self._compile(message, content, missing)
                _free_gpu_memory(self._device)
                self._gpu = _gpu_bytes(self._device)
                self._say("done", job=job, file=file)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # a factory may do anything
            kind = TraceError if message["kind"] == "trace" else CompileError
            known = isinstance(error, PieceworkError)
            self._say(
                "failed",
                job=job,
                error=type(error).__name__ if known else kind.__name__,
                message=str(error) if known else f"{message['kind']}: {type(error).__name__}: {error}",
                traceback="".join(traceback.format_exception(type(error), error, error.__traceback__)),
            )

    def _trace(self, message: Mapping[str, Any]) -> bytes:
        from .model_factory import ModelFactory, TraceRequest, trace_from_factory

        factory, request = ModelFactory.from_json(message["factory"]), TraceRequest.from_json(message["request"])
        return trace_from_factory(factory, request, self._device)

    def _compile(self, message: Mapping[str, Any], content: bytes, missing: Sequence[str]) -> str:
        """Leaves an artifact; returns its name in the pool's directory."""
        from ..graphs.ambient import ambient_settings
        from ..graphs.artifact import check_saveable, save_piece
        from ..graphs.compilers import benchmarks_capped, inductor_set
        from ..phases import Compiler

        compiler = Compiler.parse(message["compiler"], "compiler")
        options = dataclasses.replace(self._options, mode=message["mode"])
        try:
            program = _program(content)
            with ambient_settings(program.signature.ambient):
                piece = program.piece(message["fingerprint"])
                if message["bucket"] is not None:
                    piece = piece.specialized(message["bucket"])
                check_saveable(piece, compiler)
                with inductor_set(self._start["inductor"]), benchmarks_capped():
                    compiled = piece.compile(compiler, options)
        except PortableError as error:
            notes = f"; it could not import {', '.join(missing)}" if missing else ""
            raise NoArtifactError(f"worker: it cannot build the piece: {error}{notes}") from error
        directory = Path(self._start["directory"])
        return save_piece(compiled, piece, directory, compiler=compiler, options=options).path.name


@functools.lru_cache(maxsize=1)
def _program(content: bytes) -> PortableProgram:
    """A program's pieces come one after the other, each with the whole program."""
    from ..graphs.portable import PortableProgram

    return PortableProgram.from_bytes(content)


@functools.lru_cache
def _import_modules(names: tuple[str, ...]) -> tuple[str, ...]:
    """Imports what defines the server's operators; returns those that could not be imported, and why."""
    missing = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # somebody else's module
            missing.append(f"{name} ({type(error).__name__}: {error})")
    return tuple(missing)


def _apply(settings: Mapping[str, Any]) -> None:
    """Sets what compilers bake in and no program tells, as in the server."""
    import torch

    wanted = settings["float32_matmul_precision"]
    # Saying what is so already changes another setting of torch's, which is in the keys of Inductor's cache.
    if wanted is not None and torch.get_float32_matmul_precision() != wanted:
        torch.set_float32_matmul_precision(wanted)
    torch.set_num_threads(settings["num_threads"])  # Inductor writes it into its C++ code


def _warm_up(device: torch.device) -> str | None:
    """Compiles something trivial; returns what went wrong, if anything did: a job will say so itself."""
    from ..graphs.compilers import compile_something

    try:
        compile_something(device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _free_gpu_memory(device: torch.device) -> None:
    """Gives back what configurations were tried on."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()


def _gpu_bytes(device: torch.device) -> dict[str, Any]:
    """`gpu_bytes`: what this process holds of the GPU; `assumed`: whether nobody could tell."""
    if device.type != "cuda":
        return {"gpu_bytes": 0, "assumed": False}
    with contextlib.suppress(Exception):  # no pynvml, no right to ask, another namespace of process ids
        nvml = importlib.import_module("pynvml")
        ask: Callable[[Any], Any] = nvml.nvmlDeviceGetComputeRunningProcesses
        nvml.nvmlInit()
        devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        found = [p.usedGpuMemory for handle in devices for p in ask(handle) if p.pid == os.getpid()]
        if found and all(found):
            return {"gpu_bytes": sum(found), "assumed": False}
    return {"gpu_bytes": ASSUMED_GPU_BYTES, "assumed": True}


if __name__ == "__main__":
    main(sys.argv[1:])
