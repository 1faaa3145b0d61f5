"""What compile workers cannot do is done in a thread, counted; and Inductor's settings go with the jobs."""

from __future__ import annotations

import errno
import logging
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config

import piecework as pw
from piecework.errors import CompileError, TraceError, WorkerLostError
from piecework.graphs.compilers import inductor_changes, inductor_set
from piecework.graphs.recorder import NullRecorder
from piecework.runtime import building, programs
from piecework.runtime.building import Workers, start_workers
from piecework.runtime.workers import WorkerPool

from .toy_captures import Toy, config_of, plain, step

SETTING = "max_autotune_gemm_backends"


class Pool:
    """A pool whose jobs all end in one way."""

    num_alive = 1

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.jobs: list[str] = []

    def compile(self, *arguments: Any, **options: Any) -> Future[Path]:
        return self._failed("compile")

    def trace(self, *arguments: Any) -> Future[bytes]:
        return self._failed("trace")

    def _failed(self, kind: str) -> Future[Any]:
        self.jobs.append(kind)
        future: Future[Any] = Future()
        future.set_exception(self.error)
        return future

    def close(self, timeout_s: float = 5) -> None:
        """Nothing runs."""


def runtime_with(pool: Pool, monkeypatch: pytest.MonkeyPatch, *, factory: bool = False) -> Any:
    # aot_eager in place of Inductor, which takes seconds a piece; it has no artifacts otherwise.
    monkeypatch.setattr(building, "has_artifacts", lambda compiler: True)
    monkeypatch.setattr("piecework.runtime.background.BACKOFF_S", 0.001)
    workers: Any = Workers(pool=pool, recorder=building._LateRecorder(), reserved_bytes=0)  # type: ignore[arg-type]
    more = {"model_factory": pw.ModelFactory(target=f"{Toy.__module__}:Toy")} if factory else {}
    config = config_of("full", "aot_eager", startup="tiered")
    return pw.Runtime(Toy(), config, dynamic_dims={"x": 0}, workers=workers, **more)  # type: ignore[arg-type]


def settle(runtime: Any) -> None:
    reference = Toy()
    until, seed = time.monotonic() + 100, 0
    while time.monotonic() < until:
        torch.testing.assert_close(step(runtime, 4, seed), plain(reference, 4, seed))
        if runtime.settled:
            return
        runtime._tiering.background.wait(0.005)
        seed += 1
    raise AssertionError("never settled")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CompileError("compiler inductor: the worker's state is spoilt"), "a worker failed on it"),
        (pw.NoArtifactError("artifact: inputs share memory"), "it has no artifact"),
    ],
)
def test_what_a_worker_cannot_compile_a_thread_does(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(error)
    with runtime_with(pool, monkeypatch) as runtime:
        settle(runtime)
        assert [entry.program.kind for entry in runtime.entries] == ["general"]
        assert runtime.counters["fallbacks"][f"a piece is compiled in a thread: {reason}"] == len(pool.jobs) == 3


def test_a_factory_that_ends_each_worker_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(WorkerLostError("compile worker 0: ended with exit code 3"))
    with runtime_with(pool, monkeypatch, factory=True) as runtime:
        pool_compile = Pool(pw.NoArtifactError("artifact: none"))
        monkeypatch.setattr(pool, "compile", pool_compile.compile)
        settle(runtime)
        step(runtime, 2)
        assert pool.jobs == ["trace"] * building.MAX_TRACES_LOST
        assert [event.detail.get("where") for event in runtime.events if event.kind == "trace"] == [None]
        assert runtime.counters["fallbacks"]["a worker was lost at each trace: traced in a thread"] == 1


def test_a_trace_that_is_there_waits_for_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes with it is imported when no kernel is being compiled, unless the worker is done before that."""
    pool = Pool(TraceError("model factory: no"))
    prepared: list[int] = []
    monkeypatch.setattr(building, "prepare_to_load", lambda: prepared.append(1))
    with runtime_with(pool, monkeypatch, factory=True) as runtime:
        go = threading.Event()
        runtime._tiering.kernels.submit("long", lambda: go.wait(60))
        started = time.monotonic()
        step(runtime, 2)
        while runtime.counters["traces"] == 0 and time.monotonic() - started < 60:
            step(runtime, 2)
        assert time.monotonic() - started < building.PREPARE_AFTER_S / 2
        go.set()
        settle(runtime)
    assert prepared == [1], "once is enough"


def test_inductors_processes_start_where_this_process_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(building, "prepare_to_load", lambda: None)
    for module in (building, programs):
        monkeypatch.setattr(module, "start_compiling", lambda compiler: started.append(str(compiler)))
    with runtime_with(Pool(pw.NoArtifactError("none")), monkeypatch) as runtime:
        settle(runtime)
    assert started == [], "workers were to compile"
    config = config_of("full", "aot_eager", startup="tiered", compile_workers=0)
    with pw.Runtime(Toy(), config, dynamic_dims={"x": 0}) as runtime:
        settle(runtime)
    assert started == ["aot_eager"]
    with pw.Runtime(Toy(), config_of("full", "aot_eager"), dynamic_dims={"x": 0}) as runtime:
        step(runtime, 2)
    assert started == ["aot_eager"] * 2


def test_a_full_disk_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from piecework.graphs import piece

    compile_piece, calls = piece.compile_piece, []

    def full_at_first(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise CompileError("compiler aot_eager: failed") from OSError(errno.ENOSPC, "No space left on device")
        return compile_piece(*arguments)

    monkeypatch.setattr(piece, "compile_piece", full_at_first)
    with runtime_with(Pool(pw.NoArtifactError("none")), monkeypatch) as runtime:
        settle(runtime)
        assert [entry.program.kind for entry in runtime.entries] == ["general"]
        [reason] = [text for text in runtime.counters["fallbacks"] if text.startswith("a disk is full")]
        assert "TORCHINDUCTOR_CACHE_DIR" in reason


def test_settings_of_inductor_that_were_changed() -> None:
    default = getattr(inductor_config, SETTING)
    with inductor_config.patch({SETTING: "ATEN", "triton.max_tiles": 3}):
        changes, others = inductor_changes()
        assert (changes[SETTING], changes["triton.max_tiles"]) == ("ATEN", 3)
        assert others == []
    assert inductor_changes()[0].get(SETTING, default) == default
    with inductor_set({SETTING: "ATEN"}):
        assert getattr(inductor_config, SETTING) == "ATEN"
    with inductor_config.patch(post_grad_custom_post_pass=lambda graph: None):
        assert inductor_changes()[1] == ["post_grad_custom_post_pass"]


def test_workers_get_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(WorkerPool, "start", lambda pool: started.append(pool._start_message()))
    config = config_of("disabled", "inductor", startup="tiered")
    with inductor_config.patch({SETTING: "ATEN"}):
        assert start_workers(config, "cpu") is not None
    assert started[0]["inductor"][SETTING] == "ATEN"


def test_imports_of_inductor_begin_before_there_is_a_runtime_or_beside_what_workers_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A runtime that serves at once has nothing of it in its process meanwhile."""
    prepared = threading.Event()
    monkeypatch.setattr(WorkerPool, "start", lambda pool: None)
    monkeypatch.setattr(building, "prepare_to_load", prepared.set)
    for compiler, is_prepared in (("aot_eager", False), ("inductor", True)):
        prepared.clear()
        config = config_of("disabled", compiler, startup="tiered")
        assert building.make_workers(config, "cpu") is not None
        assert not prepared.wait(0.05)
        assert start_workers(config, "cpu") is not None
        assert prepared.wait(60 if is_prepared else 0.05) is is_prepared


def test_with_a_pass_of_the_callers_a_thread_compiles(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerPool, "start", lambda pool: pytest.fail("no worker can do that"))
    config = config_of("disabled", "inductor", startup="tiered")
    with inductor_config.patch(post_grad_custom_post_pass=print), caplog.at_level(logging.WARNING, "piecework"):
        assert start_workers(config, "cpu") is None
    assert "post_grad_custom_post_pass cannot be sent to another process" in caplog.text


def test_jobs_of_a_pool_that_could_not_start_fail_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from piecework.runtime.worker_manager import WorkerManager

    def no_thread(manager: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(WorkerManager, "start", no_thread)
    pool = WorkerPool(1, device=torch.device("cpu"), recorder=NullRecorder(), timeout_s=60)
    pool.start()
    job = pool.compile(b"", "f", compiler=pw.Compiler.INDUCTOR, bucket=None)
    with pytest.raises(WorkerLostError, match="cannot be started"):
        job.result(timeout=10)
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_workers_that_were_started_early_tell_the_runtime() -> None:
    recorder = building._LateRecorder()
    recorder.record("worker_start", seconds=1.0, worker=0)
    config = config_of("full", "aot_eager", startup="tiered")
    workers: Any = Workers(pool=Pool(WorkerLostError("gone")), recorder=recorder, reserved_bytes=0)  # type: ignore[arg-type]
    with pw.Runtime(Toy(), config, dynamic_dims={"x": 0}, workers=workers) as runtime:
        assert [event.seconds for event in runtime.events if event.kind == "worker_start"] == [1.0]
        recorder.record("worker_start", worker=1)
        assert len([event for event in runtime.events if event.kind == "worker_start"]) == 2
