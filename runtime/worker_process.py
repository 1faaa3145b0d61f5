"""One compile worker as its server sees it: the process, its pipes, and what it said."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

from .compile_worker import END_SIGNAL, SIGNALLED
from .worker_job import Job
from .worker_protocol import ASSUMED_GPU_BYTES, Frame, FrameReader

State = Literal["starting", "idle", "sent", "busy"]
"""`sent`: it was given a job; `busy`: it said that it began."""

_MODULE = "piecework.runtime.compile_worker"
_TAIL_BYTES = 1 << 14
_CHUNK_BYTES = 1 << 16
_END_S = 0.05
_REAP_S = 5.0


_MAX_LINE = 300
"""Characters of a line of a worker's output that an error shows."""


class WorkerProcess:
    """A child process. All methods are for one thread, which has to live as long as the child.

    See Note [A worker dies with its server].
    """

    def __init__(self, index: int, start: Mapping[str, Any], directory: Path) -> None:
        """Starts it. Raises: OSError."""
        self.index = index
        self.state: State = "starting"
        self.job: Job | None = None
        self.deadline: float = 0.0
        """On the monotonic clock, when it has to have done what it does; 0 for no limit."""
        self.gpu_bytes = ASSUMED_GPU_BYTES if str(start["device"]).startswith("cuda") else 0
        self.pid: int | None = None
        """Of the worker itself, once it is ready; the process here is its supervisor."""
        self.started = time.monotonic()
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._tail = bytearray()
        argument = json.dumps({**start, "parent": os.getpid(), "directory": str(directory)})
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", _MODULE, argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is the server's to handle; the group is the worker's own
            bufsize=0,
        )
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)

    @property
    def jobs(self) -> int:
        """The file descriptor to write to."""
        return self._pipes[0].fileno()

    @property
    def answers(self) -> int:
        """The file descriptor to read from. Its end is the worker's."""
        return self._pipes[1].fileno()

    @property
    def noise(self) -> int:
        """The file descriptor of what it prints."""
        return self._pipes[2].fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        return process.stdin, process.stdout, process.stderr

    def give(self, job: Job, timeout_s: float) -> None:
        """Queues a job's frame for `send`. `timeout_s`: for the job; 0 for no limit."""
        self.job, self.state = job, "sent"
        job.started = time.monotonic()
        self.deadline = job.started + timeout_s if timeout_s else 0.0
        self._unsent += job.frame

    def send(self) -> None:
        """Writes what the pipe takes now. A worker that is gone shows at the other pipe."""
        try:
            num_written = os.write(self.jobs, memoryview(self._unsent)[:_CHUNK_BYTES])
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
            return
        del self._unsent[:num_written]

    def receive(self) -> Iterator[Frame | None]:
        """What it said since the last call; None at its end. Raises: ProtocolError."""
        data = _read(self.answers)
        if data == b"":
            yield None
        elif data is not None:
            yield from self._reader.feed(data)

    def listen(self) -> bool:
        """Keeps the tail of what it has printed by now; False at the end of that."""
        while data := _read(self.noise):
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
        return data is None

    def tail(self, num_lines: int = 20) -> str:
        """The last lines that it printed."""
        lines = self._tail.decode(errors="replace").splitlines()[-num_lines:]
        return "\n".join(line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]} ..." for line in lines)

    def ask_to_end(self) -> None:
        """Closes its input, which ends it also in mid-compile."""
        with contextlib.suppress(OSError):
            self._pipes[0].close()

    def has_ended(self) -> bool:
        """Whether the process is gone, with all that it had started."""
        return self._process.poll() is not None

    def reap(self) -> str:
        """Kills it and what it had started, and frees what it held here; returns how it ended."""
        was_told = not self._ends_within(_END_S)
        if was_told:
            self._process.send_signal(END_SIGNAL)
            if not self._ends_within(_REAP_S):
                self._process.kill()  # then the kernel kills the worker
                self._ends_within(_REAP_S)
        with contextlib.suppress(OSError):
            self.listen()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        status = self._process.returncode
        if status is None:
            return "cannot be killed"
        return "was killed" if was_told else _in_words(status)

    def _ends_within(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self.has_ended():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return True


def _read(pipe: int) -> bytes | None:
    """What there is to read; None: nothing at the moment."""
    try:
        return os.read(pipe, _CHUNK_BYTES)
    except BlockingIOError:
        return None


def _in_words(status: int) -> str:
    """How a worker ended, from the return code of its supervisor."""
    number = -status if status < 0 else status - SIGNALLED
    if number > 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(number).name}"
    return f"exited with {status}"


def _environment() -> dict[str, str]:
    """The server's, where modules are found as here, and Inductor starts no processes of its own."""
    paths = [path or os.getcwd() for path in sys.path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONSAFEPATH": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
