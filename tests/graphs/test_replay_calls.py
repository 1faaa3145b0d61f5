"""What a replay does in Python: nothing but to launch its segments and to make its split calls, each in its way."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from piecework.errors import CaptureError, ContextError, RegistrationError
from piecework.graphs.capture import Capture
from piecework.graphs.device import Launchable, Segment
from piecework.graphs.split_calls import SplitCall, memory_address
from piecework.ops import registry
from piecework.ops.context import get_context, use_context
from piecework.ops.split_op import split_op

from .staging_checks import CHANGES, RESULT, captured, fickle, layers_of, model_of, padded, runtime_of, two_results

LOG: list[str] = []
"""What ran, in order."""


@pytest.fixture(autouse=True)
def _fresh_log() -> Iterator[None]:
    LOG.clear()
    yield
    LOG.clear()


class FakeSegment:
    """A segment that notes its launches."""

    def __init__(self, name: str, *, is_empty: bool = False) -> None:
        self.name, self.is_empty, self.is_released = name, is_empty, False

    def launcher(self) -> Callable[[], None] | None:
        assert not self.is_released
        return None if self.is_empty else functools.partial(LOG.append, self.name)

    def replay(self) -> None:
        raise AssertionError("it looks everything up again")

    def release(self) -> None:
        self.is_released = True


def prepare_traced(x: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    LOG.append("prepare")

    def call() -> None:
        LOG.append(get_context(str))
        torch.mul(x, 2, out=out)

    return call


@split_op(mutates_args=("out",), name="piecework_replay::traced", prepare=prepare_traced)
def traced(x: torch.Tensor, out: torch.Tensor) -> None:
    """out = 2 x."""
    LOG.append("body")
    get_context(str)
    torch.mul(x, 2, out=out)


@split_op(mutates_args=("out",), name="piecework_replay::raising")
def raising(x: torch.Tensor, out: torch.Tensor) -> None:
    """An operator that fails, without `prepare`."""
    raise ZeroDivisionError("in the body")


def capture_of(*names: str, op: OpOverload = traced) -> tuple[Capture, torch.Tensor]:
    """Segments with these names, and a split call between each two of them."""
    x, out = torch.ones(3), torch.zeros(3)
    steps: list[Segment | SplitCall] = [FakeSegment(names[0])]
    for name in names[1:]:
        steps += [SplitCall(op, (x, out), {}, ()), FakeSegment(name)]
    return Capture(steps, [out], tracked={memory_address(x), memory_address(out)}), out


def replay(capture: Capture, context: object = "context") -> list[str]:
    """What one replay did."""
    LOG.clear()
    with torch.inference_mode(), use_context(context):
        capture.replay()
    return list(LOG)


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[OpOverload]:
    """The calls of operators from Python."""
    calls: list[OpOverload] = []
    original = OpOverload.__call__

    def counted(self: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(OpOverload, "__call__", counted)
    return calls


def test_no_operators_and_calls_that_are_prepared_once(dispatched: list[OpOverload]) -> None:
    capture, out = capture_of("a", "b", "c")
    assert isinstance(capture.steps[0], Launchable)
    assert replay(capture, "first") == ["prepare", "prepare", "a", "first", "b", "first", "c"]
    assert replay(capture, "second") == ["a", "second", "b", "second", "c"]
    assert out.tolist() == [2, 2, 2]
    assert not dispatched


def test_a_replay_of_many_layers_runs_no_more_python_than_its_calls() -> None:
    """Counted by the interpreter: every Python function that is entered."""
    num_calls = 32
    capture, _ = capture_of(*map(str, range(num_calls + 1)))
    replay(capture)
    entered: list[str] = []

    def tracer(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)

    with torch.inference_mode(), use_context("context"):
        sys.setprofile(tracer)
        try:
            capture.replay()
        finally:
            sys.setprofile(None)
    per_call = [name for name in entered if name in ("call", "get_context")]
    assert len(per_call) == 2 * num_calls
    assert len(entered) - len(per_call) < 10, entered


def test_nothing_is_prepared_for_memory_that_may_move_unseen() -> None:
    """A tensor in a global: whose data is elsewhere at the next replay is looked up by the operator's body."""
    capture, out = capture_of("a", "b")
    capture = Capture(capture.steps, capture.outputs, tracked={memory_address(out)})
    assert replay(capture) == ["a", "body", "b"]
    capture.steps[1].args[0].data = torch.full((3,), 5.0)
    assert replay(capture) == ["a", "body", "b"]
    assert out.tolist() == [10, 10, 10]


def test_split_ops_may_wait_for_another_threads_replay() -> None:
    """No lock of the process is held around their bodies."""
    barrier = threading.Barrier(2)

    @split_op(mutates_args=("out",), name="piecework_replay::meeting")
    def meeting(x: torch.Tensor, out: torch.Tensor) -> None:
        barrier.wait(10)
        out.copy_(x)

    errors: list[BaseException] = []

    def run(capture: Capture) -> None:
        try:
            with torch.inference_mode(), use_context("context"):
                capture.replay()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(capture_of("a", "b", op=meeting)[0],)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors


def test_an_empty_segment_is_left_out() -> None:
    capture, _ = capture_of("a", "b")
    steps = [FakeSegment("nothing", is_empty=True), *capture.steps]
    capture = Capture(steps, capture.outputs, tracked=capture.tracked)
    assert replay(capture) == ["prepare", "a", "context", "b"]


class Watching(TorchDispatchMode):
    """Notes split ops."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is traced:
            LOG.append("seen")
        return func(*args, **(kwargs or {}))


def test_where_operators_are_watched_they_are_called_as_operators() -> None:
    capture, _ = capture_of("a", "b")
    replay(capture)
    with Watching():
        assert replay(capture) == ["a", "seen", "body", "b"]
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        assert replay(capture) == ["a", "body", "b"]
    assert "piecework_replay::traced" in {event.key for event in profiled.key_averages()}
    with use_context("context"):
        LOG.clear()
        capture.replay()
    assert LOG == ["a", "body", "b"], "gradients may be recorded"
    assert replay(capture) == ["a", "context", "b"]


def test_what_a_body_or_a_prepared_call_raises_comes_through() -> None:
    capture, _ = capture_of("a", "b", op=raising)
    with pytest.raises(ZeroDivisionError, match="in the body"):
        replay(capture)
    assert LOG == ["a"]
    capture, _ = capture_of("a", "b")
    with pytest.raises(ContextError, match="asked for this step's str and got no context"):
        replay(capture, None)
    assert LOG == ["prepare", "a"]
    assert replay(capture) == ["a", "context", "b"], "as ever afterwards"


def test_what_prepare_raises_comes_before_anything_ran() -> None:
    def refuses(x: torch.Tensor, out: torch.Tensor) -> Any:
        raise KeyError("not these")

    def body(x: torch.Tensor, out: torch.Tensor) -> None: ...

    op = split_op(mutates_args=("out",), name="piecework_replay::refusing", prepare=refuses)(body)
    capture, _ = capture_of("a", "b", op=op)
    for _ in range(2):
        with pytest.raises(
            RegistrationError, match=r"piecework_replay::refusing: prepare: .* raised KeyError: 'not these'"
        ) as caught:
            replay(capture)
        assert isinstance(caught.value.__cause__, KeyError)
        assert not LOG


def test_a_released_capture_is_refused_and_holds_nothing() -> None:
    capture, out = capture_of("a", "b")
    segments = [step for step in capture.steps if isinstance(step, FakeSegment)]
    replay(capture)
    memory = weakref.ref(out)
    del out
    capture.release()
    capture.release()
    gc.collect()
    assert memory() is None
    assert all(segment.is_released for segment in segments)
    with pytest.raises(CaptureError, match="was released; capture the bucket again"):
        replay(capture)
    assert not LOG


@pytest.mark.parametrize("backend", ["tc_piecewise", "breakable"])
def test_on_the_tape_too_bodies_are_called_directly(backend: str, dispatched: list[OpOverload]) -> None:
    capture = captured(layers_of(4), backend)
    with torch.inference_mode():
        capture.replay()
        dispatched.clear()
        capture.replay()
    assert capture.num_split_calls == 4
    assert not [op for op in dispatched if op.namespace.startswith("piecework")]


@pytest.mark.parametrize("change", CHANGES)
def test_results_of_prepared_calls_are_checked(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(x: torch.Tensor) -> Callable[[], Any]:
        def call() -> Any:
            results = [x + 1, x.new_ones(2)]
            for changed in RESULT:
                results = changed(results)
            return results

        return call

    monkeypatch.setitem(registry.REGISTRY.prepares, fickle, prepare)
    function, message = CHANGES[change]
    model = model_of(two_results)
    runtime = runtime_of(model, "tc_piecewise")
    inputs = {"x": padded(3, 0)}
    expected = runtime.run("decode", inputs, copy=True)
    with runtime.counters.expect(replays=1, steps=1):
        assert all(map(torch.equal, runtime.run("decode", inputs), expected))
    RESULT.append(function)
    try:
        with pytest.raises(CaptureError, match="split op piecework_stage::fickle: " + message):
            runtime.run("decode", inputs)
    finally:
        RESULT.clear()
