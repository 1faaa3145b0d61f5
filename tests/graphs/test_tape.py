"""The tape: nothing happens while it records, a replay makes the recorded calls and nothing else."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from piecework.errors import CaptureError
from piecework.graphs.device import Segment
from piecework.graphs.layouts import CallLayout

from .tape_recording import AMBIENTS, DEVICE, record


@pytest.fixture(params=AMBIENTS)
def ambient(request: pytest.FixtureRequest) -> Iterator[str]:
    with AMBIENTS[request.param]():
        yield request.param


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("tape_test", "FRAGMENT")
    yield library
    library._destroy()


def test_outputs_are_poison_until_the_first_replay(ambient: str) -> None:
    x = torch.randn(4)
    types = (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2)
    outputs, segment = record(lambda: [x.to(dtype) for dtype in types])
    assert all(output.to(torch.complex64).isnan().all() for output in outputs)
    (small, byte, mask), others = record(lambda: (x.int(), x.abs().to(torch.uint8), x > 5))
    assert (small == torch.iinfo(torch.int32).min).all()
    assert (byte == 255).all()
    assert mask.all()
    segment.replay(), others.replay()
    assert torch.equal(outputs[2], x.double())
    assert not mask.any()


def test_what_is_only_allocated_is_poison_and_stays_so(ambient: str) -> None:
    empty, segment = record(lambda: torch.empty(3))
    segment.replay()
    assert empty.isnan().all()


def test_nothing_is_executed_while_recording(library: torch.library.Library, ambient: str) -> None:
    ran: list[str] = []
    library.define("bump(Tensor(a!) x) -> ()")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("bump", lambda x: (ran.append("bump"), x.add_(1), None)[-1], "CompositeExplicitAutograd")
    library.impl("twice", lambda x: (ran.append("twice"), x * 2)[-1], "CompositeExplicitAutograd")
    torch.library.register_fake("tape_test::twice", torch.empty_like, lib=library)
    x, cache = torch.ones(3), torch.zeros(3)
    seeds = torch.get_rng_state()

    def model() -> torch.Tensor:
        torch.ops.tape_test.bump(cache)
        cache[1:].copy_(x[1:])
        torch.ops.tape_test.bump.default(cache[:1])
        return torch.ops.tape_test.twice(x) + F.dropout(torch.rand(3), 0.5) * 0

    out, segment = record(model)
    assert not ran
    assert torch.equal(cache, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), seeds)
    assert out.isnan().all()
    segment.replay()
    assert ran == ["bump", "bump", "twice"]
    assert torch.equal(cache, torch.tensor([2.0, 1.0, 1.0]))
    assert torch.equal(out, torch.full((3,), 2.0))


def test_random_operators_draw_anew_at_each_replay() -> None:
    (drawn, kept), segment = record(lambda: (torch.rand(64), F.dropout(torch.ones(64), 0.5)))
    segment.replay()
    first, second = drawn.clone(), kept.clone()
    segment.replay()
    assert not torch.equal(drawn, first)
    assert not torch.equal(kept, second)


def test_views_stay_views_and_addresses_stay(ambient: str) -> None:
    x = torch.zeros(4, 4)
    (view, made, made_view), segment = record(lambda: (x[1:].t(), y := x + 1, y[0]))
    assert view.data_ptr() == x[1:].data_ptr()
    assert made_view.data_ptr() == made.data_ptr()
    address = made.data_ptr()
    segment.replay()
    assert made.data_ptr() == address
    assert torch.equal(made_view, torch.ones(4))


def test_a_replay_runs_no_python_of_the_model() -> None:
    calls: list[int] = []
    x = torch.ones(2)
    _, segment = record(lambda: (calls.append(1), x.add_(1)))
    segment.replay()
    segment.replay()
    assert len(calls) == 1
    assert torch.equal(x, torch.full((2,), 3.0))


def test_memory_of_either_grad_mode_is_written_under_any() -> None:
    with torch.inference_mode():
        made_in_inference = torch.zeros(2)
    normal = torch.zeros(2)
    with torch.inference_mode():
        _, segment = record(lambda: (made_in_inference.add_(1), normal.add_(2)))
    with torch.enable_grad():
        segment.replay()
    assert torch.equal(made_in_inference, torch.ones(2))
    assert torch.equal(normal, torch.full((2,), 2.0))


def test_parameters_with_gradients_are_recorded_under_grad_mode() -> None:
    layer = torch.nn.Linear(3, 3)
    x = torch.randn(2, 3)
    out, segment = record(layer, x)
    assert out.requires_grad
    segment.replay()
    assert torch.equal(out, layer(x))


def test_a_replay_does_not_depend_on_the_modes_around_it() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    half, plain = torch.arange(4), torch.zeros(4)

    def model() -> tuple[torch.Tensor, ...]:
        return F.linear(x, w), half / 3, F.softmax(x @ w, -1), plain + torch.full((4,), 0.1)

    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        cast, under_autocast = record(model)
        cast_eagerly = model()
    with torch.inference_mode():
        outputs, segment = record(model)
        eagerly = model()
    torch.set_default_dtype(torch.float64)
    try:
        under_autocast.replay()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            segment.replay()
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert cast[0].dtype is torch.bfloat16
    assert all(map(torch.equal, outputs, eagerly))
    assert all(map(torch.equal, cast, cast_eagerly))


def test_segments_with_a_break_between_them() -> None:
    x = torch.ones(3)
    with DEVICE.session(DEVICE.open_pool()) as session:
        session.begin()
        a = x + 1
        first = session.end()
        during_the_break = x.tolist()  # what is done between segments is done as ever
        session.begin()
        b = a * 2
        second = session.end()
    assert during_the_break == [1.0, 1.0, 1.0]
    first.replay(), a.add_(1), second.replay()
    assert torch.equal(b, torch.full((3,), 6.0))


def test_a_segment_may_end_and_begin_inside_a_dispatch_mode_of_the_caller() -> None:
    segments: list[Segment] = []

    class Breaking(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.relu.default:
                segments.append(session.end())
                session.begin()
                return torch.empty_like(args[0])
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with DEVICE.session(DEVICE.open_pool()) as session:
        session.begin()
        with Breaking():
            a = F.linear(x, torch.eye(2)) - 3
            b = torch.relu(a)
            c = b + 1
        segments.append(session.end())
    assert torch.ones(2).tolist() == [1.0, 1.0]
    segments[0].replay(), b.copy_(a.relu()), segments[1].replay()
    assert torch.equal(c, torch.ones(2))


@pytest.mark.parametrize("during", ["segment", "break"])
def test_a_body_that_raises_leaves_nothing_behind(during: str) -> None:
    x, pool = torch.zeros(2), DEVICE.open_pool()

    def fails() -> None:
        with DEVICE.session(pool) as session:
            session.begin()
            x.add_(1)
            if during == "break":
                session.end()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    gc.collect()
    assert (x + 1).tolist() == [1.0, 1.0]
    assert (pool.num_captures, pool.num_bytes) == (0, 0)
    out, segment = record(lambda: x + 2, pool=pool)
    segment.replay()
    assert torch.equal(out, torch.full((2,), 2.0))


def test_our_own_mistakes_are_asserted() -> None:
    with DEVICE.session(DEVICE.open_pool()) as session:
        with pytest.raises(AssertionError, match="no segment is open"):
            session.end()
        with pytest.raises(AssertionError, match="no segment is open"):
            session.call(torch.relu, [], CallLayout.observe([], []))
        session.begin()
        with pytest.raises(AssertionError, match="has not ended"):
            session.begin()
        with DEVICE.session(DEVICE.open_pool()) as other:
            with pytest.raises(AssertionError, match="another session"):
                other.begin()
        segment = session.end()
    segment.release()
    segment.release()
    with pytest.raises(AssertionError, match="released"):
        segment.replay()


def test_another_thread_computes_undisturbed() -> None:
    x, seen = torch.ones(3), []
    with DEVICE.session(DEVICE.open_pool()) as session:
        session.begin()
        y = x + 1
        thread = threading.Thread(target=lambda: seen.append((torch.ones(2) * 3).tolist()))
        thread.start()
        thread.join()
        segment = session.end()
    assert seen == [[3.0, 3.0]]
    assert y.isnan().all()
    segment.replay()
    assert torch.equal(y, torch.full((3,), 2.0))


def test_two_threads_capture_and_replay_at_once() -> None:
    wrong: list[Any] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(5, 5, generator=generator)
        for _ in range(10):
            out, segment = record(lambda: F.softmax(x @ x, -1))
            segment.replay()
            if not torch.equal(out, F.softmax(x @ x, -1)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_segment_holds_what_it_reads() -> None:
    def read() -> tuple[Any, Segment]:
        outside = torch.ones(4)
        return record(lambda: outside * torch.full((4,), 3.0) + 1)

    out, segment = read()
    noise = [torch.full((4,), float(i)) for i in range(64)]
    segment.replay()
    assert torch.equal(out, torch.full((4,), 4.0))
    assert len(noise) == 64


def test_an_operator_whose_fake_is_wrong_is_an_error_at_replay(library: torch.library.Library) -> None:
    library.define("half(Tensor x) -> Tensor")
    library.impl("half", lambda x: x[::2].clone(), "CompositeExplicitAutograd")
    torch.library.register_fake("tape_test::half", torch.empty_like, lib=library)
    x = torch.ones(4)
    _, segment = record(lambda: torch.ops.tape_test.half(x))
    with pytest.raises(CaptureError, match=r"float32\[4\] as output 0 of tape_test::half.*float32\[2\]") as caught:
        segment.replay()
    assert caught.value.op == "tape_test::half"


def test_the_rest_of_the_device_does_nothing() -> None:
    with DEVICE.exclusive():
        DEVICE.give_back()
    assert DEVICE.name == "tape"
