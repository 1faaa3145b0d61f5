"""What can be shown of the CUDA device without one: who is called when a capture ends, fails or is given up.

A fake stands in for torch's graph and for the driver; tests/gpu has the rest.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from typing import Any, ClassVar

import pytest
import torch

from piecework.errors import CaptureError, NotAvailableError
from piecework.graphs import cuda
from piecework.graphs.capture import Capture
from piecework.graphs.cuda import CudaDevice, CudaSession, gc_paused
from piecework.graphs.cuda_driver import CaptureState
from piecework.graphs.cuda_pool import CudaPool
from piecework.graphs.device import Launchable

NONE, ACTIVE, INVALIDATED = CaptureState


class World:
    """One stream's capture, as CUDA and as torch see it."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        self.state = NONE
        self.num_nodes = 0
        self.torch_records_into: tuple[int, int] | None = None
        self.released: list[tuple[int, int]] = []

    # The driver.

    def capture(self, stream: int) -> tuple[CaptureState, int]:
        return self.state, self.num_nodes

    def end_capture(self, stream: int) -> None:
        self.state, self.num_nodes = NONE, 0

    def begin_capture(self, stream: int) -> bool:
        self.state = ACTIVE
        return True


WORLD = World()


class Graph:
    """torch.cuda.CUDAGraph, with the order of things in torch 2.11's CUDAGraph.cpp."""

    def __init__(self) -> None:
        self.handle: tuple[int, int] = (0, 0)
        self.has_ended = False
        self.num_replays = 0

    def capture_begin(self, *, pool: tuple[int, int], capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        if WORLD.torch_records_into == pool:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        WORLD.torch_records_into = self.handle = pool
        WORLD.state, WORLD.num_nodes = ACTIVE, 0

    def capture_end(self) -> None:
        state, num_nodes = WORLD.state, WORLD.num_nodes
        WORLD.end_capture(0)
        if state is not ACTIVE:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nmore text")
        assert num_nodes, "torch would warn of an empty graph"
        WORLD.torch_records_into = None
        self.has_ended = True

    def replay(self) -> None:
        assert self.has_ended
        self.num_replays += 1

    def reset(self) -> None:
        if self.has_ended:
            WORLD.released.append(self.handle)
        self.has_ended = False


class Scratch:
    def zero_(self) -> None:
        WORLD.num_nodes += 1


class Stream:
    """A stream that notes for whom it waited."""

    device_index = 0
    offset: ClassVar[int] = 0
    """Of its address; none: somebody else made the stream."""

    def __init__(self, number: int) -> None:
        self.stream_id, self.cuda_stream = number, number + self.offset
        self.waited: list[int] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.stream_id)

    def wait_event(self, event: Event) -> None:
        event.log.append(f"{self.stream_id} waited")


class Fake:
    """What a test steers."""

    def __init__(self) -> None:
        self.stream = Stream(7)
        self.current = self.stream
        self.is_capturing = True
        self.pool = CudaPool(torch.device("cuda", 0))
        self.num_emptied = 0

    def empty_cache(self) -> None:
        self.num_emptied += 1

    def use_stream(self, number: int) -> None:
        self.current = Stream(number)

    def session(self) -> CudaSession:
        return CudaSession(self.pool, self.stream, Scratch())

    def record(self, session: CudaSession) -> cuda.CudaSegment:
        session.begin()
        WORLD.num_nodes += 3
        return session.end()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    WORLD.begin_anew()
    fake = Fake()
    numbers = itertools.count(1)
    for name, value in {
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (0, next(numbers)),
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda index=None: fake.current,
        "is_current_stream_capturing": lambda: fake.is_capturing,
        "empty_cache": fake.empty_cache,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentStream", lambda index: (fake.current.stream_id, index, 1), raising=False
    )
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: fake.current.cuda_stream, raising=False)
    monkeypatch.setattr(cuda, "load_driver", lambda: WORLD)
    monkeypatch.setattr(cuda, "_UNENDED", [])
    return fake


def test_a_segment_replays_until_it_is_released(fake: Fake) -> None:
    segment = fake.record(fake.session())
    graph = segment._graph
    segment.replay()
    segment.replay()
    assert graph.num_replays == 2
    segment.release()
    segment.release()
    assert WORLD.released == [(0, 1)]
    with pytest.raises(CaptureError, match="was released; capture the bucket again"):
        segment.replay()


def test_the_bare_launch_is_that_of_the_graph(fake: Fake) -> None:
    """With the lock; torch itself refuses a graph that was reset."""
    session = fake.session()
    segment = fake.record(session)
    assert isinstance(segment, Launchable)
    graph, launch = segment._graph, segment.launcher()
    assert launch is not None
    launch()
    assert graph.num_replays == 1
    segment.release()
    with pytest.raises(AssertionError):
        launch()
    with pytest.raises(CaptureError, match="was released; capture the bucket again"):
        segment.launcher()
    session.begin()
    assert session.end().launcher() is None, "nothing was recorded"


def test_a_replay_waits_for_a_capture_in_another_thread(device: CudaDevice, fake: Fake) -> None:
    pool = device.open_pool()
    with device.session(pool) as session:
        capture = Capture([fake.record(session), fake.record(session)], ())
    graphs = [step._graph for step in capture.steps]
    started = threading.Event()

    def replay() -> None:
        started.set()
        capture.replay()

    thread = threading.Thread(target=replay)
    with device.session(pool):
        thread.start()
        assert started.wait(10)
        thread.join(0.05)
        assert [graph.num_replays for graph in graphs] == [0, 0]
    thread.join(10)
    assert [graph.num_replays for graph in graphs] == [1, 1]


def test_a_segment_that_is_dropped_is_released(fake: Fake) -> None:
    segment = fake.record(fake.session())
    del segment
    gc.collect()
    assert WORLD.released == [(0, 1)]


def test_a_segment_in_which_nothing_was_recorded_is_nothing(fake: Fake) -> None:
    session = fake.session()
    session.begin()
    segment = session.end()
    segment.replay()
    segment.release()
    segment.replay()
    assert WORLD.released == [(0, 1)], "its graph holds no reference to the pool"


def test_captures_share_a_pool_until_the_last_is_released(fake: Fake) -> None:
    session = fake.session()
    first, second = fake.record(session), fake.record(session)
    fake.is_capturing = False
    first.release()
    assert fake.num_emptied == 0
    third = fake.record(session)
    assert (second._handle, third._handle) == ((0, 1), (0, 1))
    second.release()
    third.release()
    assert fake.num_emptied == 1, "the memory goes back with the last one"
    assert fake.record(session)._handle == (0, 2), "torch takes no captures into a pool that it gave up"


def test_bytes_are_those_of_the_segments_of_all_its_pools(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    held = {(0, 1): 100, (0, 2): 20, (0, 9): 5000}

    def snapshot(handle: tuple[int, int], include_traces: bool) -> list[dict[str, Any]]:
        elsewhere = {"device": 1, "total_size": 7, "segment_pool_id": handle}
        return [elsewhere, *({"device": 0, "total_size": n, "segment_pool_id": h} for h, n in held.items())]

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    session = fake.session()
    assert fake.pool.num_bytes == 0
    first = fake.record(session)
    assert fake.pool.num_bytes == 100
    first.release()
    second = fake.record(session)
    assert fake.pool.num_bytes == 120, "the first pool's memory is not given back yet"
    del held[0, 1]
    assert fake.pool.num_bytes == 20
    second.release()
    assert fake.pool.num_bytes == 20


def test_a_capture_that_cuda_gave_up_is_an_error_and_the_next_is_fine(fake: Fake) -> None:
    session = fake.session()
    session.begin()
    session.op = "aten::nonzero"
    WORLD.state = INVALIDATED
    with pytest.raises(
        CaptureError, match="it gave this one up: CUDA error: operation failed.*capture; look"
    ) as caught:
        session.end()
    assert caught.value.op == "aten::nonzero"
    assert (WORLD.state, WORLD.torch_records_into, WORLD.released) == (NONE, None, [(0, 1)])
    assert fake.record(session)._handle == (0, 2)
    assert not cuda._UNENDED


@pytest.mark.parametrize("state", [ACTIVE, INVALIDATED, NONE])
def test_giving_up_leaves_no_capture_behind(fake: Fake, state: CaptureState) -> None:
    session = fake.session()
    session.begin()
    WORLD.state = state
    assert session.give_up()
    assert not session.give_up()
    assert (WORLD.state, WORLD.torch_records_into, WORLD.released) == (NONE, None, [(0, 1)])
    fake.record(session).replay()


def test_without_a_driver_a_capture_that_failed_costs_its_pool(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "load_driver", lambda: None)
    session = fake.session()
    kept = fake.record(session)
    session.begin()
    WORLD.state = INVALIDATED
    assert session.give_up()
    assert len(cuda._UNENDED) == 1, "the allocator holds its address"
    assert (kept._handle, fake.record(session)._handle) == ((0, 1), (0, 2))


def test_forked_streams_are_joined_and_forked_again(fake: Fake) -> None:
    session, side = fake.session(), Stream(8)
    session.begin()
    session.saw_stream()
    fake.current = side
    session.saw_stream()
    session.saw_stream()
    fake.current = fake.stream
    WORLD.num_nodes = 1
    assert (fake.stream.waited, side.waited) == ([], [])
    session.end()
    assert (fake.stream.waited, side.waited) == ([8], [])
    fake.record(session)
    assert (fake.stream.waited, side.waited) == ([8, 8], [7])


def test_work_on_a_stream_that_was_not_forked_off_is_refused(fake: Fake) -> None:
    session = fake.session()
    fake.current, fake.is_capturing = Stream(8), False
    session.saw_stream()  # nothing is open
    session.begin()
    with pytest.raises(CaptureError, match=r"one that was forked off it, got one on another.*side.wait_stream"):
        session.saw_stream()


def test_no_garbage_is_collected_while_any_thread_captures() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with gc_paused():
            inside.set()
            leave.wait(10)

    assert gc.isenabled()
    thread = threading.Thread(target=other)

    def body() -> None:
        with gc_paused():
            thread.start()
            assert inside.wait(10)
            assert not gc.isenabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert not gc.isenabled(), "the other thread is not done"
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_garbage_that_was_not_collected_before_is_not_collected_after() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_without_a_device_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotAvailableError, match="but the model is on cpu; use capture_device 'tape'"):
        CudaDevice("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotAvailableError, match="but torch sees no CUDA device"):
        CudaDevice()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(NotAvailableError, match=r"one of the 1 CUDA devices, got cuda:1"):
        CudaDevice("cuda:1")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(NotAvailableError, match="got cudaMallocAsync; take backend: out of PYTORCH_CUDA_ALLOC_CONF"):
        CudaDevice("cuda:0")


class Event:
    """Notes what happens to it, in the log that all events share."""

    log: ClassVar[list[str]] = []

    def record(self, stream: Stream) -> None:
        self.log.append(f"recorded on {stream.stream_id}")


class OwnStream:
    """`CaptureStream` without a device."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.scratch = Stream(7), Scratch()

    def warm_up(self) -> None:
        pass


@pytest.fixture
def device(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """A device without a device; the caller's stream is number 1."""
    fake.use_stream(1)
    fake.is_capturing = False
    Event.log.clear()
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_allocator_backend": lambda: "native",
        "device": lambda device: contextlib.nullcontext(),
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda, "CaptureStream", OwnStream)
    monkeypatch.setattr(cuda, "_idle_streams", {})
    return CudaDevice("cuda:0")


def test_a_step_on_another_stream_waits_for_the_one_before(device: CudaDevice, fake: Fake) -> None:
    def step(number: int) -> None:
        fake.use_stream(number)
        with device.exclusive():
            Event.log.append("step")

    for number in (1, 1, 2):
        step(number)
    with pytest.raises(ZeroDivisionError), device.exclusive():
        raise ZeroDivisionError
    assert Event.log == [
        *("step", "recorded on 1"),
        *("step", "recorded on 1"),
        *("2 waited", "step", "recorded on 2"),
        "recorded on 2",
    ]


def test_the_end_of_a_step_on_a_stream_of_torch_is_marked_when_another_stream_comes(
    device: CudaDevice, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, "offset", 1000)
    for number in (1, 1, 2, 2, 1):
        fake.use_stream(number)
        with device.exclusive():
            Event.log.append("step")
    assert Event.log == [
        *("step", "step", "recorded on 1", "2 waited"),
        *("step", "step", "recorded on 2", "1 waited", "step"),
    ]


def test_steps_nest_and_leave_the_callers_device_current(
    device: CudaDevice, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Guard:
        """torch.cuda.device: what it was entered with changes when it is left."""

        current = 3

        def __init__(self, device: torch.device) -> None:
            self.idx: int | None = device.index

        def __enter__(self) -> None:
            self.before, Guard.current = Guard.current, self.idx

        def __exit__(self, *error: object) -> None:
            self.idx, Guard.current = Guard.current, self.before

    monkeypatch.setattr(torch.cuda, "device", Guard)
    own = CudaDevice("cuda:0")
    for _ in range(2):
        with own.exclusive():
            assert Guard.current == 0
            fake.use_stream(2)
            with own.exclusive():
                assert Guard.current == 0
                Guard.current = 1  # by the model
            Event.log.append("inner")
            fake.use_stream(1)
        assert Guard.current == 3
    ends = ("recorded on 2", "inner", "recorded on 1")
    assert Event.log == [*ends, "2 waited", *ends]


def test_one_step_at_a_time(device: CudaDevice) -> None:
    inside, order = threading.Event(), []

    def other() -> None:
        inside.set()
        with device.exclusive():
            order.append("other")

    thread = threading.Thread(target=other)
    with device.exclusive():
        thread.start()
        assert inside.wait(10)
        thread.join(0.05)
        order.append("first")
    thread.join(10)
    assert order == ["first", "other"]


def test_a_capture_follows_the_callers_work_and_precedes_what_comes(device: CudaDevice, fake: Fake) -> None:
    with device.session(device.open_pool()) as session:
        assert not gc.isenabled()
        assert session._stream.waited == [1]
        fake.record(session)
    assert gc.isenabled()
    assert fake.current.waited == [7]


def test_what_torch_refuses_in_a_capture_is_a_capture_error(device: CudaDevice, fake: Fake) -> None:
    pool, x = device.open_pool(), torch.ones(3)

    def capture(is_open: bool = True) -> None:
        with device.session(pool) as session:
            if is_open:
                session.begin()
                WORLD.state = INVALIDATED
            x.reshape(-7)

    with pytest.raises(CaptureError, match="only launches kernels, but .*cannot be recorded: .*split op") as caught:
        capture()
    assert caught.value.line is not None
    assert caught.value.line.startswith(__file__)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="shape"):
        capture(is_open=False)
    with device.session(pool) as session:
        fake.record(session).replay()


def test_the_models_own_errors_come_through(device: CudaDevice, fake: Fake) -> None:
    pool = device.open_pool()

    def capture() -> None:
        with device.session(pool) as session:
            session.begin()
            raise KeyError("model")

    with pytest.raises(KeyError, match="model"):
        capture()
    assert (WORLD.state, WORLD.torch_records_into) == (NONE, None)
    with device.session(pool) as session:
        session.begin()  # and never ended
    assert (WORLD.state, WORLD.torch_records_into) == (NONE, None)


def test_a_capture_inside_a_capture_is_refused(device: CudaDevice, fake: Fake) -> None:
    fake.is_capturing = True
    with pytest.raises(CaptureError, match="a stream that is not being captured, got one that is"):
        device.session(device.open_pool()).__enter__()


def test_a_device_that_is_gone_leaves_its_stream_to_the_next(device: CudaDevice) -> None:
    def stream_of(own: CudaDevice) -> object:
        with own.session(own.open_pool()) as session:
            return session._stream

    first = stream_of(device)
    other = CudaDevice("cuda:0")
    assert stream_of(other) is not first, "the first one is in use"
    second = stream_of(other)
    del other
    gc.collect()
    assert stream_of(CudaDevice("cuda:0")) is second
