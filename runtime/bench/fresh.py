"""Runs a worker in a fresh process, with compile caches that are private to one policy; leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from ...errors import PieceworkError
from .traffic import Batch

SPEC, RESULT, CACHES = "spec.json", "result.json", "caches"
"""What a worker's folder holds: its spec, what it writes, and the caches."""
CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
"""Where Inductor, Triton and the CUDA driver are told to keep what they made."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """What a worker runs; plain data, so that it travels as JSON."""

    model_dir: str
    config: dict[str, Any]
    """A GraphConfig in its JSON form, the policy included."""
    dtype: str | None
    device: str | None
    trace: list[dict[str, Any]]
    """The open-loop requests, TimedRequests as plain data, by their arrival."""
    steady: list[Batch]
    """What is sent twice after it, the second time measured as the steady state."""
    steady_new_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    """A step has no more requests and tokens, so that every step has a bucket."""


def run_fresh(spec: WorkerSpec, *, warm: bool = False) -> list[dict[str, Any]]:
    """Runs `worker.measure` on the spec in a process of its own, with empty caches, and returns its result.

    Args:
        warm: whether to run it once more, in another process over the caches that the first one left. Its result is
            then the second.

    Raises:
        PieceworkError: a process failed; its output is then on stderr.
    """
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="piecework-bench-") as folder:
        directory = Path(folder)
        caches = {name: str(directory / CACHES / name.lower()) for name in CACHE_VARIABLES}
        for cache in caches.values():
            Path(cache).mkdir(parents=True)
        (directory / SPEC).write_text(json.dumps(dataclasses.asdict(spec)), encoding="utf-8")
        for _ in range(2 if warm else 1):
            with open(directory / "output.txt", "w+", encoding="utf-8", errors="backslashreplace") as output:
                code = _run_worker(folder, {**os.environ, **caches}, output)
                if code != 0:
                    output.seek(0)
                    sys.stderr.write(output.read())
                    raise PieceworkError(
                        f"bench: the process of policy {spec.config['startup']} ended with exit code {code}; "
                        "its output is above: correct what it says and run again"
                    )
            results.append(json.loads((directory / RESULT).read_text(encoding="utf-8")))
    return results


def _run_worker(folder: str, environment: dict[str, str], output: IO[str]) -> int:
    """Runs the worker to its end. It gets a process group of its own, so that its children end with it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "piecework.runtime.bench.worker", folder],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait()
    finally:
        # The worker itself after an interrupt; always the compile processes that it may have left, which would still
        # write into the folder.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
