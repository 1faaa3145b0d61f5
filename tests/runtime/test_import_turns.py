"""Imports beside steps: when no step is in its Python, and in the end in any case."""

from __future__ import annotations

import builtins
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import piecework as pw
from piecework.runtime import import_turns
from piecework.runtime.import_turns import StepGate, imports_between_steps
from piecework.runtime.lock_turns import short_turns

from .toy_captures import Affine, config_of, x_of


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Makes modules that can be imported."""
    made: list[str] = []

    def make(source: str) -> str:
        name = f"piecework_made_{len(made)}"
        made.append(name)
        (tmp_path / f"{name}.py").write_text(source)
        return name

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for name in made:
        sys.modules.pop(name, None)


class Importing(threading.Thread):
    """Imports modules one after the other beside steps; `imported` grows."""

    def __init__(self, gate: StepGate, names: list[str]) -> None:
        super().__init__(daemon=True)
        self.gate, self.names = gate, names
        self.imported: list[str] = []
        self.start()

    def run(self) -> None:
        with imports_between_steps(self.gate):
            for name in self.names:
                __import__(name)
                self.imported.append(name)


def test_a_module_waits_for_the_step_that_runs(modules: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_turns, "PATIENCE_S", 60.0)
    before = builtins.__import__
    gate, names = StepGate(), [modules(""), modules("")]
    gate.num_begun += 1
    thread = Importing(gate, names)
    threading.Event().wait(0.05)
    assert thread.imported == []
    other = modules("")
    __import__(other)  # which this thread may
    gate.num_ended += 1
    thread.join(60)
    assert thread.imported == names
    assert builtins.__import__ is before


def test_without_a_pause_imports_go_on(modules: Callable[[str], str]) -> None:
    gate, names = StepGate(), [modules(""), modules("")]
    gate.num_begun += 1
    thread = Importing(gate, names)
    while thread.is_alive():
        gate.num_begun, gate.num_ended = gate.num_begun + 1, gate.num_begun  # the next one at once
        threading.Event().wait(0.001)
    assert thread.imported == names


@pytest.mark.parametrize("num_before", [0, 5])
def test_a_step_that_waits_for_an_import_waits_once(
    modules: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    """A package of a hundred modules must not cost the step a hundred times the patience."""
    waits: list[float] = []
    monkeypatch.setattr(import_turns, "PATIENCE_S" if num_before else "LONG_PATIENCE_S", 0.1)
    monkeypatch.setattr(import_turns, "_LOOK_S", 0.01)
    sleep = time.sleep
    monkeypatch.setattr(import_turns.time, "sleep", lambda s: (waits.append(s), sleep(s)))
    parts = [modules("") for _ in range(20)]
    package = modules("".join(f"import {part}\n" for part in parts))
    gate = StepGate()
    gate.num_ended, gate.num_begun = num_before, num_before + 1
    thread = Importing(gate, [package])
    thread.join(60)
    assert thread.imported == [package]
    assert sum(waits) < 0.3


@pytest.mark.parametrize("is_first", [True, False])
def test_imports_wait_longer_for_a_long_step(
    modules: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """The first one, or one that captures; another one that takes as long does not hold them up."""
    monkeypatch.setattr(import_turns, "PATIENCE_S", 0.001)
    monkeypatch.setattr(import_turns, "LONG_PATIENCE_S", 60.0)
    monkeypatch.setattr(import_turns, "TOTAL_PATIENCE_S", 60.0)
    gate, names = StepGate(), [modules(""), modules("")]
    gate.num_begun, gate.num_ended, gate.is_at_boundary = (1, 0, False) if is_first else (6, 5, True)
    thread = Importing(gate, names)
    threading.Event().wait(0.05)
    assert thread.imported == []
    gate.num_ended, gate.is_at_boundary = gate.num_begun, False
    gate.num_begun += 1
    thread.join(60)
    assert thread.imported == names


def test_whatever_is_put_in_front_meanwhile_goes_on_working(modules: Callable[[str], str]) -> None:
    """By who wraps what it finds, inside of a round and beyond its end, and in the next rounds."""
    real, gate = builtins.__import__, StepGate()
    try:
        with imports_between_steps(gate):
            inner = builtins.__import__
            builtins.__import__ = lambda *arguments, **more: inner(*arguments, **more)
        for _ in range(3):
            with imports_between_steps(gate):
                __import__(modules(""))
            __import__(modules(""))
        builtins.__import__ = real
        with imports_between_steps(gate):
            kept = builtins.__import__
        builtins.__import__ = kept  # who saved it inside has put it back outside
        with imports_between_steps(gate):
            __import__(modules(""))
        __import__(modules(""))
    finally:
        builtins.__import__ = real


def test_rounds_nest() -> None:
    before = builtins.__import__
    with imports_between_steps(StepGate()), imports_between_steps(StepGate()):
        assert builtins.__import__ is not before
    assert builtins.__import__ is before


def test_all_modules_together_wait_for_so_long(modules: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_turns, "PATIENCE_S", 0.05)
    monkeypatch.setattr(import_turns, "TOTAL_PATIENCE_S", 0.1)
    gate, names = StepGate(), [modules("") for _ in range(60)]
    started = time.monotonic()
    thread = Importing(gate, names)
    while thread.is_alive():
        gate.num_begun, gate.num_ended = gate.num_begun + 1, gate.num_begun
        threading.Event().wait(0.0005)
    assert thread.imported == names
    assert time.monotonic() - started < 60 * 0.05 / 2


def test_the_child_of_a_fork_has_none_of_it() -> None:
    before, interval = builtins.__import__, sys.getswitchinterval()
    with imports_between_steps(StepGate()), short_turns(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks in a process of several threads
        child = os.fork()
        if not child:
            is_clean = builtins.__import__ is before and sys.getswitchinterval() == interval
            with short_turns():
                pass
            os._exit(0 if is_clean else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (builtins.__import__, sys.getswitchinterval()) == (before, interval)


def test_a_runtime_says_when_a_step_runs() -> None:
    seen: list[bool] = []

    class Watching(Affine):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(runtime._tiering.gate.is_busy)  # type: ignore[union-attr]
            if len(seen) > 1:
                raise RuntimeError("no")
            result: torch.Tensor = super().forward(x)
            return result

    config = config_of("disabled", "eager", startup="tiered", compile_workers=0)
    with pw.Runtime(Watching(), config, dynamic_dims={"x": 0}) as runtime:
        gate = runtime._tiering.gate  # type: ignore[union-attr]
        runtime.run("decode", {"x": x_of(4, 0)})
        assert not gate.is_busy
        with pytest.raises(RuntimeError, match="no"):
            runtime.run("decode", {"x": x_of(4, 0)})
        assert (seen, gate.is_busy, gate.num_begun) == ([True, True], False, 2)


def test_a_runtime_says_when_a_step_is_long() -> None:
    """The first one, and a boundary that captures; not what runs between, nor the replays."""
    seen: list[bool] = []

    class Watching(Affine):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(runtime._tiering.gate.is_long)  # type: ignore[union-attr]
            result: torch.Tensor = super().forward(x)
            return result

    config = config_of("full", "eager", startup="tiered", compile_workers=0)
    with pw.Runtime(Watching(), config, dynamic_dims={"x": 0}) as runtime:
        for seed in range(3):
            runtime.run("decode", {"x": x_of(4, seed)})
        assert runtime.counters["captures"] == 1
        assert runtime.counters["replays"] >= 1
        assert len(seen) >= 2
        assert all(seen)
        assert not runtime._tiering.gate.is_long  # type: ignore[union-attr]


def test_threads_come_and_go_in_any_order(modules: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_turns, "PATIENCE_S", 60.0)
    before = builtins.__import__
    first, second = StepGate(), StepGate()
    first.num_begun = second.num_begun = 1
    one, two = Importing(first, [modules("")]), Importing(second, [modules("")])
    threading.Event().wait(0.02)
    first.num_ended = 1
    one.join(60)
    assert (len(one.imported), two.imported) == (1, [])
    assert builtins.__import__ is not before
    second.num_ended = 1
    two.join(60)
    assert len(two.imported) == 1
    assert builtins.__import__ is before


def test_what_is_imported_already_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_turns, "PATIENCE_S", 60.0)
    gate = StepGate()
    gate.num_begun = 1
    thread = Importing(gate, ["json", "piecework.runtime.import_turns"])
    thread.join(30)
    assert len(thread.imported) == 2


@pytest.mark.parametrize(
    ("name", "package", "level", "full"),
    [
        ("a.b", "x.y", 0, "a.b"),
        ("a", "x.y", 1, "x.y.a"),
        ("", "x.y", 1, "x.y"),
        ("a.b", "x.y.z", 2, "x.y.a.b"),
        ("", "x.y.z", 3, "x"),
        ("a", "", 0, "a"),
    ],
)
def test_the_module_that_a_statement_names(name: str, package: str, level: int, full: str) -> None:
    assert import_turns._full_name(name, {"__package__": package}, level) == full
