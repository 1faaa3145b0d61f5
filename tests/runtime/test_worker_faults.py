"""What can happen to a compile worker, its pool and its server, and that it costs one job."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piecework.errors import ArtifactError, NoArtifactError, WorkerLostError
from piecework.graphs.artifact import load_piece
from piecework.graphs.portable import PortableProgram
from piecework.phases import Compiler
from piecework.runtime import worker_manager
from piecework.runtime.events import Counters, Recorder
from piecework.runtime.worker_manager import WorkerView
from piecework.runtime.workers import WorkerPool

from ..graphs.artifact_models import portable_of
from ..graphs.portable_models import CASES, ONE, Case, x_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

LIMIT_S = 240.0
INDUCTOR = Compiler.INDUCTOR


def wait_until(condition: Callable[[], Any], what: str = "it") -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.02)


def a_pool(recorder: Recorder | None = None, **options: Any) -> WorkerPool:
    recorder = recorder or Recorder(Counters(), progress=False)
    return WorkerPool(1, device=torch.device("cpu"), recorder=recorder, **{"timeout_s": LIMIT_S, **options})


def details(recorder: Recorder, kind: str) -> list[Any]:
    return [event.detail for event in recorder.events if event.kind == kind]


def is_there(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody waits for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processes_of(session: int) -> list[int]:
    """Those that run in a worker's session: its supervisor's number."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            fields = (each / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and int(fields[3]) == session:
            found.append(int(each.name))
    return found


def supervisor_of(pool: WorkerPool) -> int:
    assert pool._manager is not None
    worker = pool._manager._places[0].worker
    assert worker is not None
    return worker._process.pid


def worker_of(pool: WorkerPool, *states: str) -> WorkerView:
    """The pool's only worker, once it is in one of the states."""
    found: list[WorkerView] = []

    def look() -> bool:
        found[:] = [worker for worker in pool.workers if worker.state in states]
        return bool(found)

    wait_until(look, f"a worker that is {' or '.join(states)}")
    return found[0]


def works(pool: WorkerPool) -> bool:
    """Whether a job, one that fails at once for its own reasons, comes back."""
    job = pool.compile(b"no program", "0" * 64, compiler=INDUCTOR, bucket=None)
    return isinstance(job.exception(LIMIT_S), NoArtifactError)


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder(Counters(), progress=False)


@pytest.fixture(scope="module")
def pool(recorder: Recorder) -> Iterator[WorkerPool]:
    """A pool of one worker, which was started by a thread that has ended: the kernel must not take it for the server's
    end."""
    pool = a_pool(recorder)
    thread = threading.Thread(target=pool.start)
    thread.start()
    thread.join()
    assert works(pool)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def program() -> PortableProgram:
    return portable_of(CASES["two dims"])


class Slow(nn.Module):
    """Takes seconds to compile, and nobody has before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(150):
            x = torch.sin(x) * (i + 0.625)
        return x


@pytest.fixture(scope="module")
def slow() -> PortableProgram:
    return portable_of(Case(model=Slow, dynamic_dims=ONE, inputs=lambda n: {"x": x_of(n)}))


def test_a_worker_that_is_killed_in_mid_compile(
    pool: WorkerPool, recorder: Recorder, program: PortableProgram, slow: PortableProgram
) -> None:
    fingerprint = slow.fingerprints[0]
    job = pool.compile(slow.to_bytes(), fingerprint, compiler=INDUCTOR, bucket=None)
    worker, supervisor = worker_of(pool, "busy"), supervisor_of(pool)
    assert (worker.kind, worker.fingerprint) == ("compile", fingerprint)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match="was killed by SIGKILL in compile of .*another takes its place"):
        job.result(LIMIT_S)
    assert pool.num_alive == 1, "the new one is there before the caller knows"
    lost = details(recorder, "worker_lost")[-1]
    assert (lost["worker"], lost["job"], lost["fingerprint"]) == (0, "compile", fingerprint)
    assert not processes_of(supervisor), "nor what it had started"
    fingerprint = program.fingerprints[-1]
    again = pool.compile(program.to_bytes(), fingerprint, compiler=INDUCTOR, bucket=None)
    assert load_piece(again.result(LIMIT_S), program.piece(fingerprint), INDUCTOR).intervals
    assert worker_of(pool, "idle").pid != worker.pid


def test_a_worker_that_hangs(pool: WorkerPool, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, so that nothing in it can notice anything."""
    worker, supervisor = worker_of(pool, "idle"), supervisor_of(pool)
    os.kill(worker.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(pool._manager, "_timeout_s", 0.5)
        job = pool.compile(bytes(1 << 20), "0" * 64, compiler=INDUCTOR, bucket=None)  # more than a pipe holds
        with pytest.raises(WorkerLostError, match=r"it was not done after 0\.5 s in compile of"):
            job.result(LIMIT_S)
    assert details(recorder, "worker_lost")[-1]["reason"] == "it was not done after 0.5 s"
    wait_until(lambda: not processes_of(supervisor), "the end of the worker")
    with monkeypatch.context() as patch:
        patch.setattr(pool._manager, "_timeout_s", 0)
        assert works(pool), "0 is no limit"


def test_an_idle_worker_that_dies_is_replaced(pool: WorkerPool, recorder: Recorder) -> None:
    num_lost = len(details(recorder, "worker_lost"))
    os.kill(worker_of(pool, "idle").pid, signal.SIGSEGV)
    wait_until(lambda: len(details(recorder, "worker_lost")) > num_lost, "its loss")
    lost = details(recorder, "worker_lost")[-1]
    assert lost["reason"] == "it was killed by SIGSEGV"
    assert "job" not in lost
    assert works(pool)


def test_a_worker_ends_with_its_supervisor(pool: WorkerPool, recorder: Recorder) -> None:
    worker, supervisor = worker_of(pool, "idle"), supervisor_of(pool)
    num_lost = len(details(recorder, "worker_lost"))
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: not is_there(worker.pid), "the end of the worker")
    wait_until(lambda: len(details(recorder, "worker_lost")) > num_lost, "its loss")
    assert works(pool)


def test_signals_for_the_whole_group_are_the_servers(pool: WorkerPool) -> None:
    """Whoever ends all processes of a container ends the server, and it ends the workers."""
    worker, supervisor = worker_of(pool, "idle"), supervisor_of(pool)
    os.kill(worker.pid, signal.SIGTERM)
    os.kill(supervisor, signal.SIGTERM)
    assert works(pool)
    assert worker_of(pool, "idle").pid == worker.pid
    assert os.getsid(worker.pid) == supervisor, "no Ctrl-C gets there"


def test_a_fork_of_the_server_leaves_the_workers_alone(pool: WorkerPool) -> None:
    worker = worker_of(pool, "idle")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks in a process of several threads
        child = os.fork()
    if not child:
        try:
            pool.close()
            job = pool.compile(b"", "", compiler=INDUCTOR, bucket=None)
            os._exit(0 if isinstance(job.exception(5), WorkerLostError) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert works(pool)
    assert worker_of(pool, "idle").pid == worker.pid


@pytest.fixture
def full_disk(pool: WorkerPool) -> Iterator[Path]:
    """The pool's directory, on a file system of a few pages."""
    assert pool._manager is not None
    directory = pool._manager._directory
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(directory)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_a_full_disk(pool: WorkerPool, program: PortableProgram, full_disk: Path) -> None:
    fingerprint = program.fingerprints[-1]
    job = pool.compile(program.to_bytes(), fingerprint, compiler=INDUCTOR, bucket=None)
    with pytest.raises(ArtifactError, match=r"cannot be written \(OSError: .*No space left on device\); make room"):
        job.result(LIMIT_S)
    assert not list(full_disk.iterdir()), "half an artifact is none"
    assert works(pool)


def test_a_directory_that_is_gone(pool: WorkerPool, program: PortableProgram) -> None:
    assert pool._manager is not None
    directory = pool._manager._directory
    moved = directory.rename(directory.with_suffix(".moved"))
    try:
        job = pool.compile(program.to_bytes(), program.fingerprints[-1], compiler=INDUCTOR, bucket=None)
        with pytest.raises(ArtifactError, match="cannot be written") as caught:
            job.result(LIMIT_S)
        assert not isinstance(caught.value, NoArtifactError)
    finally:
        moved.rename(directory)
    assert works(pool)


# The server.

_SERVER = """
import sys, time, torch
from pathlib import Path
from piecework.phases import Compiler
from piecework.runtime.events import Counters, Recorder
from piecework.runtime.workers import WorkerPool
pool = WorkerPool(1, device=torch.device("cpu"), recorder=Recorder(Counters(), progress=False), timeout_s=1000)
pool.compile(Path(sys.argv[1]).read_bytes(), sys.argv[2], compiler=Compiler.INDUCTOR, bucket=None)
while not any(worker.state == "busy" for worker in pool.workers):
    time.sleep(0.01)
print(pool._manager._places[0].worker._process.pid, pool.workers[0].pid, pool._manager._directory, flush=True)
time.sleep(1000)
"""


def test_a_server_that_is_killed_in_mid_compile_and_two_on_one_cache(
    program: PortableProgram, slow: PortableProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stays, and two servers at once can use the caches that it left."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "program").write_bytes(slow.to_bytes())
    command = [sys.executable, "-W", "ignore", "-c", _SERVER, str(tmp_path / "program"), slow.fingerprints[0]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        supervisor, worker, directory = server.stdout.readline().split()
        assert is_there(int(worker))
        assert Path(directory).is_dir()
        server.kill()
    wait_until(lambda: not processes_of(int(supervisor)), "the end of the worker")
    wait_until(lambda: not Path(directory).exists(), "the end of its files")
    fingerprint = program.fingerprints[0]
    pools = [a_pool(), a_pool()]
    try:
        jobs = [p.compile(program.to_bytes(), fingerprint, compiler=INDUCTOR, bucket=None) for p in pools]
        for job in jobs:
            assert load_piece(job.result(LIMIT_S), program.piece(fingerprint), INDUCTOR).intervals
    finally:
        for each in pools:
            each.close()


# Workers that cannot even start.


def executable(tmp_path: Path, text: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo it broke >&2; exit 3", r"it exited with 3; it printed last:\nit broke"),
        ("kill -9 $$", "it was killed by SIGKILL"),
        ("echo a worker that says something else; sleep 1000", r"it said what it should not \(ProtocolError"),
        (None, r"a worker cannot be started \(FileNotFoundError"),
    ],
)
def test_no_worker_can_be_started(
    text: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried a few times; then what waits fails, and what comes later at once."""
    monkeypatch.setattr(worker_manager, "_BACKOFF_S", 0.01)
    path = executable(tmp_path, text) if text is not None else str(tmp_path / "missing")
    monkeypatch.setattr(sys, "executable", path)
    recorder = Recorder(Counters(), progress=False)
    pool = a_pool(recorder)
    try:
        for _ in range(2):
            job = pool.compile(b"", "", compiler=INDUCTOR, bucket=None)
            with pytest.raises(WorkerLostError, match=f"no compile worker can be started: .*{reason}"):
                job.result(LIMIT_S)
        lost = details(recorder, "worker_lost")
        assert len(lost) == (worker_manager.MAX_START_FAILURES if text is not None else 0)
        assert pool.num_alive == 0
    finally:
        pool.close()


def test_a_worker_that_never_gets_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_manager, "START_TIMEOUT_S", 0.1)
    monkeypatch.setattr(worker_manager, "_BACKOFF_S", 0.01)
    monkeypatch.setattr(sys, "executable", executable(tmp_path, "exec sleep 1000"))
    pool = a_pool()
    try:
        with pytest.raises(WorkerLostError, match=r"it was not done after 0\.1 s"):
            pool.compile(b"", "", compiler=INDUCTOR, bucket=None).result(LIMIT_S)
    finally:
        pool.close()


def test_no_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**options: Any) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", fails)
    recorder = Recorder(Counters(), progress=False)
    pool = a_pool(recorder)
    pool.start()
    with pytest.raises(WorkerLostError, match=r"cannot be started \(OSError: .*Read-only file system\); .*\(TMPDIR\)"):
        pool.compile(b"", "", compiler=INDUCTOR, bucket=None).result(0)
    assert len(details(recorder, "worker_lost")) == 1
    pool.close()


def test_the_pools_own_thread_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody must wait for ever, whatever it is."""

    def fails(*arguments: Any) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(worker_manager.WorkerManager, "_fill_places", fails)
    pool = a_pool()
    with pytest.raises(WorkerLostError, match="failed .ZeroDivisionError: a mistake of ours"):
        pool.compile(b"", "", compiler=INDUCTOR, bucket=None).result(LIMIT_S)
    pool.close()
