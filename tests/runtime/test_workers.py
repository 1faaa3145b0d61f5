"""Compile workers: what they make is what this process would have made, and how jobs flow through a pool."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest
import torch

from piecework import errors
from piecework.errors import CompileError, NoArtifactError, TraceError, WorkerLostError
from piecework.graphs.artifact import load_piece
from piecework.graphs.compilers import CompilerOptions
from piecework.graphs.inputs import InputContract
from piecework.graphs.outputs import OutputContract
from piecework.graphs.portable import PortableProgram
from piecework.graphs.recorder import NullRecorder
from piecework.graphs.stitched import PiecewiseGraph
from piecework.graphs.whole import whole_graph
from piecework.ops.attention_context import AttentionContext
from piecework.ops.context import use_context
from piecework.ops.fused_choice import choose
from piecework.phases import Compiler
from piecework.runtime import workers
from piecework.runtime.compile_worker import NICENESS
from piecework.runtime.events import Counters, Recorder
from piecework.runtime.model_factory import ModelFactory
from piecework.runtime.trace_request import TraceRequest
from piecework.runtime.worker_job import Job, error_of
from piecework.runtime.worker_protocol import FrameReader, ProtocolError, encode_frame, read_frame
from piecework.runtime.workers import WorkerPool

from ..graphs.artifact_models import portable_of
from ..graphs.portable_models import CASES, made, results
from ..graphs.toys import assert_same, run_eager, trace_model

LIMIT_S = 240.0
"""For what takes seconds; two busy cores may take ten times as long."""
INDUCTOR = Compiler.INDUCTOR
CASE = CASES["layers"]


def wait_until(condition: Callable[[], Any], what: str = "it") -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.02)


def a_recorder() -> Recorder:
    return Recorder(Counters(), progress=False)


def events_of(recorder: Recorder, kind: str) -> list[Any]:
    return [event.detail for event in recorder.events if event.kind == kind]


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return a_recorder()


@pytest.fixture(scope="module")
def pool(recorder: Recorder) -> Iterator[WorkerPool]:
    """One worker for the tests that do not hurt it."""
    pool = WorkerPool(1, device=torch.device("cpu"), recorder=recorder, timeout_s=LIMIT_S, emulate_precision_casts=True)
    started = time.monotonic()
    pool.start()
    assert time.monotonic() - started < 5, "nothing is waited for"
    assert pool.gpu_bytes == 0
    yield pool
    pool.close()
    assert pool.num_alive == 0


@pytest.fixture(scope="module")
def program() -> bytes:
    return portable_of(CASE).to_bytes()


def lost_job(pool: WorkerPool) -> Future[Path]:
    """A job that takes no time: the program is none."""
    return pool.compile(b"no program", "0" * 64, compiler=INDUCTOR, bucket=None)


def test_workers_compile_a_program(pool: WorkerPool, recorder: Recorder, program: bytes) -> None:
    """General and specialised, loaded and run here: nothing is compiled in this process."""
    model, reference = made(CASE), made(CASE)
    graph = PortableProgram.from_bytes(program).bind(model)
    compiled: dict[Any, Any] = {}
    jobs = {
        (fingerprint, bucket): pool.compile(program, fingerprint, compiler=INDUCTOR, bucket=bucket)
        for fingerprint in graph.distinct_pieces()
        for bucket in (None, 4)
    }
    options = CompilerOptions(emulate_precision_casts=True)
    for (fingerprint, bucket), job in jobs.items():
        built = graph.built(graph.distinct_pieces()[fingerprint][0])
        built = built if bucket is None else built.specialized(bucket)
        compiled[built.fingerprint, INDUCTOR] = load_piece(job.result(LIMIT_S), built, INDUCTOR, options=options)
    general = graph.compile_general(INDUCTOR, compiled, NullRecorder())
    special = graph.compile_specialized(4, INDUCTOR, compiled, NullRecorder())
    assert graph.num_compiles == 0
    for program_of_size, size in ((general, 3), (special, 4), (general, 50)):
        assert_same(results(program_of_size, CASE, size), run_eager(reference, CASE.inputs(size)))
    done = events_of(recorder, "worker_job")
    assert [(each["job"], each["worker"], each["fingerprint"], each["bucket"]) for each in done] == [
        ("compile", 0, fingerprint, bucket) for fingerprint, bucket in jobs
    ]
    (started,) = events_of(recorder, "worker_start")
    (worker,) = pool.workers
    assert (started["worker"], started["pid"], started["gpu_bytes"]) == (0, worker.pid, 0)
    assert worker.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, worker.pid) >= min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)


def test_failures_that_are_the_jobs_own(pool: WorkerPool, program: bytes) -> None:
    with pytest.raises(NoArtifactError, match="it cannot build the piece: portable: expected a program"):
        lost_job(pool).result(LIMIT_S)
    with pytest.raises(NoArtifactError, match="expected one of the fingerprints") as caught:
        pool.compile(program, "unknown", compiler=INDUCTOR, bucket=None).result(LIMIT_S)
    assert "in a compile worker:\nTraceback" in str(caught.value.__cause__)
    fingerprint = PortableProgram.from_bytes(program).fingerprints[0]
    with pytest.raises(NoArtifactError, match="got eager, whose pieces are not saved"):
        pool.compile(program, fingerprint, compiler=Compiler.EAGER, bucket=None).result(LIMIT_S)
    aliasing = portable_of(CASES["aliasing"])
    with pytest.raises(NoArtifactError, match="inputs of the piece share memory"):
        pool.compile(aliasing.to_bytes(), aliasing.fingerprints[0], compiler=INDUCTOR, bucket=4).result(LIMIT_S)
    assert pool.num_alive == 1


def test_an_operator_that_the_worker_cannot_import(
    pool: WorkerPool, program: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_defining_modules", lambda: iter(["no_such_module", "json"]))
    with pytest.raises(NoArtifactError, match=r"it could not import no_such_module \(ModuleNotFoundError"):
        pool.compile(program, "unknown", compiler=INDUCTOR, bucket=None).result(LIMIT_S)


def test_modules_that_define_operators_are_told() -> None:
    names = [*workers._defining_modules()]
    assert {"tests.graphs.toys", "piecework.ops.attention"} <= {*names}
    assert not [name for name in names if name.startswith(("torch", "__main__"))]


class _Attends(torch.nn.Module):
    """Calls Piecework's own split op."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(4, 16, 1, 8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.unflatten(-1, (1, 8))
        out = torch.empty_like(y)
        torch.ops.piecework.paged_attention(y, y, y, self.k_cache, self.v_cache, out, 0.5)
        return out.flatten(1) + 1


def test_a_worker_compiles_a_whole_forward_around_attention(pool: WorkerPool) -> None:
    """It has not traced the model: what defines the split op is imported for the job."""
    dims = {"x": {0: "tokens"}}
    inputs = {"x": torch.ones(4, 8)}
    model = _Attends()
    graph = PiecewiseGraph.from_trace(trace_model(model, inputs, dims), InputContract(dims))
    whole = whole_graph(graph, 4)
    signature = InputContract(dims).bind(inputs).signature
    content = PortableProgram.from_graph(whole, signature).to_bytes()
    built = whole.built(whole.split.pieces[0])
    job = pool.compile(content, built.fingerprint, compiler=INDUCTOR, bucket=None, mode="default")
    options = CompilerOptions(emulate_precision_casts=True, mode="default")
    compiled = load_piece(job.result(LIMIT_S), built, INDUCTOR, options=options)
    program = whole.compile_general(INDUCTOR, {(built.fingerprint, INDUCTOR): compiled}, NullRecorder())
    assert whole.num_compiles == 0
    context = AttentionContext.build(
        query_lens=[4], seq_lens=[4], block_tables=[[0]], block_size=16, device=torch.device("cpu")
    )
    with torch.inference_mode(), use_context(context):
        result = program({"x": torch.randn(4, 8)}, {"tokens": 4})
        assert result.shape == (4, 8)
    assert model.k_cache[0, :4].any()


def test_a_worker_traces(pool: WorkerPool) -> None:
    """What it says of a factory that fails is said here."""
    contract = InputContract({"input": {0: "tokens"}})
    bound = contract.bind({"input": torch.ones(4, 3)})
    fused = choose((), compiler=Compiler.EAGER, device_type="cpu")
    request = TraceRequest.of(bound.signature, contract, OutputContract(), bound.sizes, fused)
    factory = ModelFactory(target="torch.nn:Linear", arguments={"in_features": 3, "out_features": 3})
    content = pool.trace(factory, request).result(LIMIT_S)
    graph = PortableProgram.from_bytes(content).bind(torch.nn.Linear(3, 3))
    assert len(graph.split.pieces) == 1
    wrong = ModelFactory(target="torch.nn:Linear", arguments={"in_features": 4, "out_features": 3})
    with pytest.raises(TraceError):
        pool.trace(wrong, request).result(LIMIT_S)


def test_jobs_that_wait_are_done_in_order_or_cancelled(pool: WorkerPool, recorder: Recorder) -> None:
    """The first callback holds the pool's thread, so that the others wait."""
    held, release, order = threading.Event(), threading.Event(), []

    def hold(job: Any) -> None:
        held.set()
        assert release.wait(LIMIT_S)

    first = lost_job(pool)
    first.add_done_callback(hold)
    assert held.wait(LIMIT_S)
    waiting = [lost_job(pool) for _ in range(3)]

    def noting(i: int) -> Callable[[Any], None]:
        return lambda job: order.append((i, job.cancelled()))

    for i, job in enumerate(waiting):
        job.add_done_callback(noting(i))
    assert waiting[1].cancel()
    num_before = len(events_of(recorder, "worker_job"))
    release.set()
    for job in (waiting[0], waiting[2]):
        assert isinstance(job.exception(LIMIT_S), NoArtifactError)
    assert waiting[1].cancelled()
    wait_until(lambda: order == [(1, True), (0, False), (2, False)], "every callback")
    wait_until(lambda: len(events_of(recorder, "worker_job")) == num_before + 2)


def test_a_clock_that_jumps_disturbs_nothing(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter(range(0, 10**12, 10**9))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))
    assert isinstance(lost_job(pool).exception(LIMIT_S), NoArtifactError)
    assert pool.num_alive == 1


def test_settings_that_compilers_bake_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert workers._settings() == {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "num_threads": torch.get_num_threads(),
    }

    def refuses() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuses)
    assert workers._settings()["float32_matmul_precision"] is None


def test_a_closed_pool_takes_no_jobs() -> None:
    recorder = a_recorder()
    pool = WorkerPool(1, device=torch.device("cpu"), recorder=recorder, timeout_s=LIMIT_S)
    pool.close()
    with pytest.raises(WorkerLostError, match="workers: the pool is closed"):
        lost_job(pool).result(LIMIT_S)
    assert pool.workers == ()
    pool.start()
    assert pool.num_alive == 0


def test_closing_cancels_what_waits_and_fails_what_is_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the workers are still starting, twice, and from one of its own callbacks."""
    recorder = a_recorder()
    pool = WorkerPool(2, device=torch.device("cpu"), recorder=recorder, timeout_s=LIMIT_S)
    jobs = [lost_job(pool) for _ in range(3)]
    wait_until(lambda: pool.num_alive == 2)
    jobs[0].add_done_callback(lambda job: pool.close())
    manager = pool._manager
    assert manager is not None
    pool.close()
    pool.close()
    for job in jobs:
        with pytest.raises((CancelledError, NoArtifactError, WorkerLostError)):
            job.result(0)
    assert not manager._directory.exists()
    assert not manager._thread.is_alive()
    with pytest.raises(WorkerLostError, match="the pool is closed"):
        lost_job(pool).result(0)


def test_an_unclosed_pool_ends_with_the_interpreter() -> None:
    """Without a word, and without a process that stays."""
    code = (
        "import torch\n"
        "from piecework.runtime.events import Counters, Recorder\n"
        "from piecework.runtime.workers import WorkerPool\n"
        "pool = WorkerPool(1, device=torch.device('cpu'), recorder=Recorder(Counters()), timeout_s=100)\n"
        "pool.start()\n"
        "while not pool.num_alive: pass\n"
        "print(pool._manager._places[0].worker._process.pid, pool._manager._directory)\n"
    )
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pid, directory = done.stdout.split()
    assert not Path(directory).exists()
    assert not Path(f"/proc/{pid}").exists()


# The protocol.


def test_frames_survive_any_cut() -> None:
    frames = [({"kind": "a", "text": "ä\n"}, b""), ({"kind": "b"}, bytes(range(256)))]
    data = b"".join(encode_frame(*frame) for frame in frames)
    for size in (1, 7, 13, len(data)):
        reader = FrameReader()
        assert [f for i in range(0, len(data), size) for f in reader.feed(data[i : i + size])] == frames
    pipe = io.BytesIO(data)
    assert [read_frame(pipe), read_frame(pipe), read_frame(pipe)] == [*frames, None]
    for cut in range(1, len(encode_frame(*frames[0]))):
        assert read_frame(io.BytesIO(data[:cut])) is None


@pytest.mark.parametrize("data", [b"Traceback (most recent", b"\x02\0\0\0" + bytes(8) + b"{]", encode_frame([1])])
def test_what_is_no_frame(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="expected a"):
        [*FrameReader().feed(data)]
    with pytest.raises(ProtocolError, match="expected a"):
        read_frame(io.BytesIO(data))


@pytest.mark.parametrize("name", [n for n, e in vars(errors).items() if isinstance(e, type)])
def test_each_error_of_ours_arrives_as_what_it_is(name: str) -> None:
    job = Job(number=0, kind="compile", frame=b"", future=Future(), detail={})
    error = error_of(job, {"error": name, "message": "why", "traceback": "where"})
    assert type(error) is getattr(errors, name)
    assert str(error) == "why"
    assert "where" in str(error.__cause__)


def test_an_error_of_another_version_is_one_of_ours() -> None:
    for kind, expected in (("compile", CompileError), ("trace", TraceError)):
        job = Job(number=0, kind=kind, frame=b"", future=Future(), detail={})
        for name in ("BrandNewError", "annotations"):
            assert type(error_of(job, {"error": name, "message": "", "traceback": ""})) is expected
