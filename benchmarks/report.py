"""What every benchmark says beside its numbers: where they were measured, what went wrong, and how long it may take."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import platform
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

NOT_BEGUN = "not begun: no time left"
MAX_RELATIVE_ERROR = 0.25
"""A way farther from plain eager is wrong: after 32 layers in bf16 both are 1e-3 to 5e-2 off, something else by 1.4."""


class Deadline:
    """The seconds that a benchmark has."""

    def __init__(self, max_seconds: float) -> None:
        self._started = time.monotonic()
        self._max_seconds = max_seconds

    @property
    def passed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._started

    def has(self, seconds: float = 0.0) -> bool:
        """Whether more than so many seconds are left."""
        return self._max_seconds - self.passed > seconds


def attempt(row: dict[str, Any], call: Callable[[], Any]) -> Any:
    """What `call` returns; an error becomes the row's `error`, for the other rows are worth having, and None."""
    try:
        return call()
    except Exception as error:
        traceback.print_exc()
        row["error"] = in_words(error)
        return None


def compare(way: dict[str, Any], computed: torch.Tensor, expected: torch.Tensor) -> None:
    """Writes the relative norm of the difference. Raises: ValueError if a way computes something else."""
    difference = (computed.double() - expected.double()).norm() / expected.double().norm()
    way["relative_error"] = difference.item()
    if not way["relative_error"] <= MAX_RELATIVE_ERROR:
        raise ValueError(f"differs from plain eager by {way['relative_error']:.2g} of their norm")


def errors_of(row: dict[str, Any]) -> list[str]:
    """What went wrong in a row."""
    return [each["error"] for each in (row, *row["ways"].values()) if "error" in each]


def in_words(error: Exception) -> str:
    """An error in one line."""
    return next(iter(f"{type(error).__name__}: {error}".splitlines()))[:300]


def conditions(device: str) -> dict[str, Any]:
    """Where and with what it was measured."""
    commit = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    triton = importlib.util.find_spec("triton")
    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or "cpu",
        "driver": said_by(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__ if triton is not None else "none",
        "commit": said_by(commit),
    }


def said_by(command: Sequence[str]) -> str:
    """The first line that a command prints, or `unknown`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return next(iter(done.stdout.split("\n")), "").strip() or "unknown"


def in_short(result: dict[str, Any]) -> str:
    """Device, versions and seconds of a result, for the last line of a table."""
    return (
        f"{result['device']}, driver {result['driver']}, torch {result['torch']}, triton {result['triton']}, commit "
        f"{result['commit']}, {result['seconds']:.0f} s"
    )


@contextlib.contextmanager
def inductor_cache() -> Iterator[None]:
    """One empty cache of Inductor for a run, so that its ways compile what they share once."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="piecework-bench-", ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            if before is not None:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def count(text: str) -> int:
    """An option that is a number of things. Raises: argparse.ArgumentTypeError: it is none, or less than 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of 1 or more, got {text!r}")
    return int(text)


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Writes a result, if somewhere; again after each row, so that what stops a run leaves what there is."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(result, indent=2) + "\n")
    unfinished.replace(path)
