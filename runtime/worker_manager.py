"""The thread that looks after compile workers: it starts them, hands out jobs, and replaces those that are lost."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import selectors
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import WorkerLostError
from ..graphs.recorder import Recorder
from .worker_job import Job, error_of, fail
from .worker_process import State, WorkerProcess
from .worker_protocol import Frame, ProtocolError

START_TIMEOUT_S = 300.0
"""A worker that has not imported everything by then is lost."""
MAX_START_FAILURES = 3
"""In a row, after which no more workers are started in a place."""
_BACKOFF_S = 1.0
"""Wait after the first failure to start; twice as long after each further one."""
_TICK_S = 3600.0
_JOIN_S = 30.0

logger = logging.getLogger("piecework")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerView:
    """What a worker does at the moment."""

    index: int
    pid: int | None
    """None until it is ready."""
    state: State
    kind: str | None
    """Of its job."""
    fingerprint: str | None
    gpu_bytes: int


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Place:
    """Where one worker after the other sits."""

    index: int
    worker: WorkerProcess | None = None
    num_failures: int = 0
    """Starts in a row that came to nothing."""
    not_before: float = 0.0
    given_up: bool = False


class WorkerManager:
    """Owns the workers of a pool. Its thread refers to no pool, so that an unclosed one can be collected."""

    def __init__(
        self,
        num_workers: int,
        start: Mapping[str, Any],
        directory: Path,
        recorder: Recorder,
        timeout_s: float,
    ) -> None:
        self._start = start
        self._directory = directory
        self._recorder = recorder
        self._timeout_s = timeout_s
        self._owner = os.getpid()
        self._lock = threading.RLock()  # a collection inside may end a pool that nobody holds
        self._waiting: collections.deque[Job] = collections.deque()
        self._places = [_Place(index=i) for i in range(num_workers)]
        self._broken: str | None = None
        self._closing: float | None = None
        """Seconds that the workers have to end by themselves."""
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._on_wake)
        self._thread = threading.Thread(target=self._run, name="piecework-workers", daemon=True)

    # For any thread.

    def start(self) -> None:
        """Starts the thread, which starts the workers: they are to end with the thread that started them."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queues a job; its future fails if there is nobody to do it any more."""
        forked = os.getpid() != self._owner
        with self._lock:
            if self._closing is None and self._broken is None and not forked:
                self._waiting.append(job)
                self._wake()
                return
            reason = self._broken or ("a fork of the server has none" if forked else "the pool is closed")
        fail(job, WorkerLostError(f"workers: {reason}"))

    def views(self) -> tuple[WorkerView, ...]:
        """What the workers do; without those that are being replaced."""
        with self._lock:
            workers = [place.worker for place in self._places if place.worker is not None]
            return tuple(
                WorkerView(
                    index=worker.index,
                    pid=worker.pid,
                    state=worker.state,
                    kind=worker.job.kind if worker.job is not None else None,
                    fingerprint=worker.job.detail.get("fingerprint") if worker.job is not None else None,
                    gpu_bytes=worker.gpu_bytes,
                )
                for worker in workers
            )

    def close(self, timeout_s: float) -> None:
        """Ends the workers and the thread; waits for that, unless the thread itself asks for it. Idempotent."""
        if os.getpid() != self._owner:  # a fork of the server: they are not its own
            return
        with self._lock:
            if self._closing is None:
                self._closing = timeout_s
                self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s + _JOIN_S)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
            os.write(self._wake_writer, b"x")

    # For its own thread.

    def _run(self) -> None:
        try:
            while self._closing is None:
                self._fill_places()
                self._hand_out()
                self._handle(self._seconds_to_wait())
                self._end_late()
        except BaseException as error:  # nobody must wait for ever
            logger.exception("workers: the thread that looks after them failed")
            self._break(f"the thread that looks after the workers failed ({type(error).__name__}: {error})")
        finally:
            self._shut_down()

    def _handle(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if self._selector.get_map().get(key.fd) == key:  # not of a worker that was lost meanwhile
                callback: Callable[[], None] = key.data
                callback()

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_reader, 4096):
                pass

    def _fill_places(self) -> None:
        now = time.monotonic()
        for place in self._places:
            if place.worker is None and not place.given_up and place.not_before <= now:
                self._spawn(place)

    def _spawn(self, place: _Place) -> None:
        try:
            worker = WorkerProcess(place.index, self._start, self._directory)
        except OSError as error:
            self._count_failure(place, f"a worker cannot be started ({type(error).__name__}: {error})")
            return
        worker.deadline = worker.started + START_TIMEOUT_S
        with self._lock:
            place.worker = worker
        self._selector.register(worker.answers, selectors.EVENT_READ, lambda: self._on_answer(place, worker))
        self._selector.register(worker.noise, selectors.EVENT_READ, lambda: self._on_noise(worker))

    def _hand_out(self) -> None:
        for place in self._places:
            worker = place.worker
            if worker is not None and worker.state == "idle" and (job := self._next_job()) is not None:
                with self._lock:
                    worker.give(job, self._timeout_s)
                self._selector.register(worker.jobs, selectors.EVENT_WRITE, lambda w=worker: self._on_room(w))

    def _next_job(self) -> Job | None:
        with self._lock:
            while self._waiting:
                job = self._waiting.popleft()
                if job.future.set_running_or_notify_cancel():
                    return job
        return None

    def _seconds_to_wait(self) -> float:
        times = [place.worker.deadline for place in self._places if place.worker is not None and place.worker.deadline]
        times += [place.not_before for place in self._places if place.worker is None and not place.given_up]
        return max(0.0, min(times, default=time.monotonic() + _TICK_S) - time.monotonic())

    def _end_late(self) -> None:
        now = time.monotonic()
        for place in self._places:
            worker = place.worker
            if worker is not None and worker.deadline and worker.deadline <= now:
                limit = START_TIMEOUT_S if worker.state == "starting" else self._timeout_s
                self._lose(place, worker, f"it was not done after {limit:g} s")

    def _on_room(self, worker: WorkerProcess) -> None:
        worker.send()
        if not worker.has_unsent:
            self._selector.unregister(worker.jobs)

    def _on_noise(self, worker: WorkerProcess) -> None:
        if not worker.listen():
            self._selector.unregister(worker.noise)

    def _on_answer(self, place: _Place, worker: WorkerProcess) -> None:
        try:
            for frame in worker.receive():
                if frame is None:
                    self._lose(place, worker, None)
                    return
                self._on_frame(place, worker, frame)
        except (ProtocolError, KeyError, OSError) as error:
            self._lose(place, worker, f"it said what it should not ({type(error).__name__}: {error})")

    def _on_frame(self, place: _Place, worker: WorkerProcess, frame: Frame) -> None:
        message, content = frame
        kind = message["kind"]
        worker.gpu_bytes = message.get("gpu_bytes", worker.gpu_bytes)
        if kind == "ready":
            with self._lock:
                worker.pid, worker.state, worker.deadline = message["pid"], "idle", 0.0
            self._recorder.record(
                "worker_start",
                seconds=time.monotonic() - worker.started,
                worker=worker.index,
                pid=worker.pid,
                gpu_bytes=worker.gpu_bytes,
            )
        elif kind == "warm":
            place.num_failures = 0
            logger.debug("worker %d is warm: %s", worker.index, message)
        elif worker.job is None or message["job"] != worker.job.number:
            raise ProtocolError(f"a job that it has not: {message['job']}")
        elif kind == "started":
            with self._lock:
                worker.state = "busy"
        else:
            place.num_failures = 0
            self._finish(worker, worker.job, message, content)

    def _finish(self, worker: WorkerProcess, job: Job, message: Mapping[str, Any], content: bytes) -> None:
        with self._lock:
            worker.job, worker.state, worker.deadline = None, "idle", 0.0
        error = error_of(job, message) if message["kind"] == "failed" else None
        self._recorder.record(
            "worker_job",
            seconds=time.monotonic() - job.started,
            job=job.kind,
            worker=worker.index,
            **job.detail,
            **({"error": str(error)} if error is not None else {}),
        )
        if error is not None:
            job.future.set_exception(error)
        elif job.kind == "trace":
            job.future.set_result(content)
        else:
            job.future.set_result(self._directory / Path(message["file"]).name)

    def _lose(self, place: _Place, worker: WorkerProcess, reason: str | None) -> None:
        """Ends a worker, puts another in its place, and then tells who waits for its job."""
        self._forget(worker)
        how = worker.reap()
        reason = reason or f"it {how}"
        job, tail = worker.job, worker.tail()
        with self._lock:
            place.worker = None
        self._recorder.record(
            "worker_lost",
            seconds=time.monotonic() - (job.started if job is not None else worker.started),
            reason=reason,
            worker=worker.index,
            **({"job": job.kind, **job.detail} if job is not None else {}),
        )
        text = f"worker {worker.index} was lost: {reason}"
        printed = f"; it printed last:\n{tail}" if tail else ""
        if job is None:
            self._count_failure(place, f"{text}{printed}")
            return
        self._spawn(place)  # at once: whether the job is to blame is for the caller to say
        fail(job, WorkerLostError(f"{text} in {job.kind} of {dict(job.detail)}; another takes its place{printed}"))

    def _count_failure(self, place: _Place, reason: str) -> None:
        """Tries again later, a few times."""
        place.num_failures += 1
        place.not_before = time.monotonic() + _BACKOFF_S * 2 ** (place.num_failures - 1)
        place.given_up = place.num_failures >= MAX_START_FAILURES
        if all(each.given_up for each in self._places):
            self._break(f"no compile worker can be started: {reason}")

    def _break(self, reason: str) -> None:
        """From now on there is nobody to do anything."""
        with self._lock:
            self._broken = reason
            waiting, self._waiting = self._waiting, collections.deque()
        for job in waiting:
            if job.future.set_running_or_notify_cancel():
                fail(job, WorkerLostError(f"workers: {reason}"))

    def _forget(self, worker: WorkerProcess) -> None:
        for pipe in (worker.jobs, worker.answers, worker.noise):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(pipe)

    def _shut_down(self) -> None:
        """Ends everything. Queued jobs are cancelled, those in hand fail."""
        with self._lock:
            self._closing = self._closing if self._closing is not None else 0.0
            timeout_s, waiting, self._waiting = self._closing, self._waiting, collections.deque()
            workers = [place.worker for place in self._places if place.worker is not None]
            for place in self._places:
                place.worker = None
        for worker in workers:
            self._forget(worker)
            worker.ask_to_end()
        deadline = time.monotonic() + timeout_s
        while not all(worker.has_ended() for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.01)
        for worker in workers:
            worker.reap()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._selector.close()
        with self._lock:
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            self._wake_writer = -1
        for job in waiting:
            job.future.cancel()
        for worker in workers:
            if worker.job is not None:
                fail(worker.job, WorkerLostError(f"worker {worker.index} was closed in {worker.job.kind}"))
