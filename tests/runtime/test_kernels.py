"""Kernels that compile beside the steps: once each, in no step, and a capture waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import piecework as pw
from piecework.ops.deferred import deferring
from piecework.runtime.events import Counters, Recorder
from piecework.runtime.kernels import KernelQueue

from .toy_captures import config_of, x_of

LIMIT_S = 60.0


class Kernel:
    """What an operator launches, and does without as long as it is not compiled."""

    def __init__(self) -> None:
        self.compiled = self.failed = False
        self.go, self.go_ahead = threading.Event(), threading.Event()
        self.go_ahead.set()
        self.native, self.launched, self.waited = 0, 0, 0
        self.threads: set[str] = set()

    def compile(self) -> None:
        self.threads.add(threading.current_thread().name)
        assert self.go.wait(LIMIT_S)
        if self.failed:
            raise RuntimeError("no compiler")
        self.compiled = True

    def compile_ahead(self) -> None:
        assert self.go_ahead.wait(LIMIT_S)


KERNEL = Kernel()


@pw.split_op(mutates_args=("out",), name="piecework_kernels::scaled", capturable=True)
def scaled(x: torch.Tensor, out: torch.Tensor) -> None:
    """Twice x."""
    submit = deferring()
    if not KERNEL.compiled and submit is not None:
        submit("scaled", KERNEL.compile)
        submit("of other sizes", KERNEL.compile_ahead, ahead=True)
        KERNEL.native += 1
    elif not KERNEL.compiled:
        KERNEL.waited += 1
        KERNEL.compiled = True
    else:
        KERNEL.launched += 1
    out.copy_(x * 2)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        out = torch.empty_like(y)
        scaled(y, out)
        return out


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    made = Kernel()
    monkeypatch.setitem(globals(), "KERNEL", made)
    yield made
    made.go.set()
    made.go_ahead.set()


def run(runtime: Any, seed: int) -> None:
    with torch.inference_mode():
        expected = 2 * runtime.model.linear(x_of(4, seed))
    torch.testing.assert_close(runtime.run("decode", {"x": x_of(4, seed)}), expected)


@pytest.mark.parametrize(
    ("backend", "compiler"), [("full", "eager"), ("breakable", "eager"), ("tc_piecewise", "eager")]
)
def test_a_step_does_without_and_a_capture_waits(kernel: Kernel, backend: str, compiler: str) -> None:
    config = config_of(backend, compiler, startup="tiered", compile_workers=0)
    with pw.Runtime(Model(), config, dynamic_dims={"x": 0}) as runtime:
        for seed in range(5):
            run(runtime, seed)
        assert kernel.native > 0
        assert (kernel.waited, kernel.launched) == (0, 0)
        assert runtime.counters["captures"] == 0
        assert not runtime.settled
        kernel.go.set()
        until = time.monotonic() + LIMIT_S
        while not runtime.settled and time.monotonic() < until:
            run(runtime, 1)
            threading.Event().wait(0.001)
        assert runtime.settled
        assert runtime.counters["captures"] >= 1
        assert kernel.waited == 0
        assert all(name.startswith("piecework-kernels") for name in kernel.threads)
        assert len([event for event in runtime.events if event.kind == "kernel"]) == 2
        assert runtime.counters["jit_after_ready"] == 0
        native = kernel.native
        run(runtime, 1)
        assert kernel.native == native


def test_a_capture_waits_for_its_own_kernels_only(kernel: Kernel) -> None:
    """What is compiled for sizes that have not come yet holds nothing up."""
    kernel.go_ahead.clear()
    kernel.go.set()
    config = config_of("full", "eager", startup="tiered", compile_workers=0)
    with pw.Runtime(Model(), config, dynamic_dims={"x": 0}) as runtime:
        until = time.monotonic() + LIMIT_S
        while not runtime.counters["captures"] and time.monotonic() < until:
            run(runtime, 1)
            threading.Event().wait(0.001)
        assert runtime.counters["captures"] == 1
        assert not runtime.settled
        assert kernel.waited == 0
        kernel.go_ahead.set()
        assert runtime.wait_settled(LIMIT_S)


def test_wait_settled_waits_for_kernels(kernel: Kernel) -> None:
    config = config_of("full", "eager", startup="tiered", compile_workers=0)
    with pw.Runtime(Model(), config, dynamic_dims={"x": 0}) as runtime:
        run(runtime, 0)
        assert not runtime.wait_settled(0.05)
        threading.Timer(0.2, kernel.go.set).start()
        assert runtime.wait_settled(LIMIT_S)
        assert runtime.counters["captures"] == 1


def test_a_capture_that_finds_a_kernel_missing_is_tried_again(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.go.set()
    tries: list[int] = []
    from piecework.graphs import full

    capture = full.capture

    def not_ready(*arguments: Any) -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise pw.KernelNotReadyError("scaled is being compiled")
        return capture(*arguments)

    monkeypatch.setattr(full, "capture", not_ready)
    config = config_of("full", "eager", startup="tiered", compile_workers=0)
    with pw.Runtime(Model(), config, dynamic_dims={"x": 0}) as runtime:
        until = time.monotonic() + LIMIT_S
        run(runtime, 0)
        while not runtime.settled and time.monotonic() < until:
            run(runtime, 1)
            threading.Event().wait(0.005)
        assert len(tries) == 3
        assert runtime.counters["captures"] == 1
        assert runtime.counters["fallbacks"] == {}


def test_under_lazy_a_step_waits(kernel: Kernel) -> None:
    with pw.Runtime(Model(), config_of("full", "eager"), dynamic_dims={"x": 0}) as runtime:
        run(runtime, 0)
    assert (kernel.native, kernel.waited) == (0, 1)


def test_the_queue_compiles_each_once_and_survives_failures() -> None:
    recorder = Recorder(Counters())
    changed, order = threading.Semaphore(0), []
    queue = KernelQueue(recorder, on_change=changed.release)

    def failing() -> None:
        raise ValueError("no")

    for _ in range(3):
        queue.submit("a", lambda: order.append("a"))
        queue.submit("b", failing)
    queue.import_early("json")
    queue.import_early("no.such.module")
    for _ in range(2):
        assert changed.acquire(timeout=LIMIT_S)
    assert not changed.acquire(timeout=0.05), "kernels wait for the end of the first step"
    assert (order, queue.is_idle, queue.holds) == ([], False, True)
    queue.begin()
    assert not queue.holds
    for _ in range(2):
        assert changed.acquire(timeout=LIMIT_S)
    assert queue.is_idle
    assert order == ["a"]
    errors = sorted(event.detail.get("error", "") for event in recorder.events if event.kind == "kernel")
    assert errors[:2] == ["", ""]
    assert errors[2].startswith("ModuleNotFoundError")
    assert errors[3] == "ValueError: no"
    queue.close()
    queue.close()
    queue.submit("c", lambda: order.append("c"))
    queue.begin()
    assert order == ["a"]
    assert queue.is_idle


def test_who_waits_for_the_queue_ends_with_it() -> None:
    queue = KernelQueue(Recorder(Counters()), on_change=lambda: None)
    assert queue.wait_idle(LIMIT_S)
    queue.submit("a", lambda: None)
    assert not queue.wait_idle(0.01), "it is held"
    ended: list[bool] = []
    waiting = threading.Thread(target=lambda: ended.append(queue.wait_idle(LIMIT_S)))
    waiting.start()
    queue.begin()
    waiting.join(LIMIT_S)
    assert ended == [True]
    other = KernelQueue(Recorder(Counters()), on_change=lambda: None)
    other.submit("never", lambda: None)
    waiting = threading.Thread(target=lambda: ended.append(other.wait_idle(LIMIT_S)))
    waiting.start()
    other.close()
    waiting.join(LIMIT_S / 2)
    assert ended == [True, True]
    assert other.is_idle, "who waits for everything to settle would wait for ever"
    queue.close()


def test_a_boundary_without_kernels_leaves_the_first_step_alone() -> None:
    """A server may promote before it has traffic, or its first request may be refused."""
    config = config_of("full", "eager", startup="tiered", compile_workers=0)
    with pw.Runtime(Model(), config, dynamic_dims={"x": 0}) as runtime:
        runtime.promote()
        with pytest.raises(pw.InputError):
            runtime.run("decode", {"y": x_of(4, 0)})
        assert runtime._tiering.kernels.holds  # type: ignore[union-attr]
        run(runtime, 0)
        assert not runtime._tiering.kernels.holds  # type: ignore[union-attr]


def test_the_first_compile_is_alone_and_others_are_not() -> None:
    """The first does what a library does once; two threads would both do it."""
    queue = KernelQueue(Recorder(Counters()), on_change=lambda: None)
    running, most = [], []
    lock, go, done = threading.Lock(), threading.Event(), threading.Semaphore(0)
    both = threading.Barrier(2)

    def first() -> None:
        running.append("first")
        assert go.wait(LIMIT_S)
        most.append(len(running))
        running.remove("first")
        done.release()

    def other() -> None:
        with lock:
            running.append("other")
        both.wait(LIMIT_S)  # both of them are inside
        done.release()

    for name, job in (("first", first), ("second", other), ("third", other)):
        queue.submit(name, job)
    queue.begin()
    threading.Event().wait(0.05)
    go.set()
    for _ in range(3):
        assert done.acquire(timeout=LIMIT_S)
    assert most == [1]
    queue.close()


def test_kernels_begin_when_the_first_step_has_ended(kernel: Kernel) -> None:
    kernel.go.set()
    config = config_of("full", "eager", startup="tiered", compile_workers=0)
    seen: list[bool] = []

    class Watching(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            threading.Event().wait(0.05)
            seen.append(KERNEL.compiled)
            return y

    with pw.Runtime(Watching(), config, dynamic_dims={"x": 0}) as runtime:
        run(runtime, 0)
        assert seen[0] is False
        assert runtime.wait_settled(LIMIT_S)
        assert kernel.compiled


def test_kernels_begin_after_a_step_that_fails(kernel: Kernel) -> None:
    kernel.go.set()

    class Failing(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise RuntimeError("no")

    config = config_of("full", "eager", startup="tiered", compile_workers=0)
    with pw.Runtime(Failing(), config, dynamic_dims={"x": 0}) as runtime:
        with pytest.raises(RuntimeError, match="no"):
            runtime.run("decode", {"x": x_of(4, 0)})
        for _ in range(1000):
            if kernel.compiled:
                break
            threading.Event().wait(0.01)
        assert kernel.compiled
