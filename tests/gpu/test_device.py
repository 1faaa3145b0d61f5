"""The CUDA device by itself: what a capture leaves behind, above all one that failed."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import pytest
import torch

from piecework.errors import CaptureError
from piecework.graphs import cuda
from piecework.graphs.cuda import CudaDevice, CudaSegment, CudaSession
from piecework.graphs.cuda_pool import CudaPool

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_only")]

MIB = 1 << 20


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice("cuda")


def doubled(device: CudaDevice, pool: CudaPool, num_floats: int = 1024) -> tuple[torch.Tensor, torch.Tensor, object]:
    """A capture of `out = (x + 1) * 2`, whose intermediate lies in the pool."""
    x, out = torch.zeros(num_floats, device="cuda"), torch.zeros(num_floats, device="cuda")
    with device.session(pool) as session:
        session.begin()
        out.copy_((x + 1) * 2)
        segment = session.end()
    return x, out, segment


def check(x: torch.Tensor, out: torch.Tensor, segment: object, value: float) -> None:
    x.fill_(value)
    segment.replay()
    assert torch.equal(out, (x + 1) * 2)


def test_nothing_happens_before_the_replay(device: CudaDevice) -> None:
    x, out, segment = doubled(device, device.open_pool())
    torch.cuda.synchronize()
    assert not out.any()
    for value in (3.0, 5.0):
        check(x, out, segment, value)
    segment.release()
    with pytest.raises(CaptureError, match="was released"):
        segment.replay()


def test_a_replay_waits_for_the_work_before_the_capture_and_before_it(device: CudaDevice) -> None:
    pool, big = device.open_pool(), torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        big = torch.tanh(big @ big)
    total = torch.zeros((), device="cuda")
    with device.session(pool) as session:
        session.begin()
        total.copy_(big.sum())
        segment = session.end()
    with device.exclusive():
        segment.replay()
    assert torch.equal(total, big.sum())


def test_steps_on_different_streams_come_one_after_the_other(device: CudaDevice) -> None:
    x = torch.zeros(1 << 24, device="cuda")
    own = [torch.cuda.Stream() for _ in range(3)]
    streams = [own[0], torch.cuda.ExternalStream(own[1].cuda_stream), own[2]]
    assert streams[1].stream_id == streams[1].cuda_stream, "StepOrder tells them apart by that"
    assert own[0].stream_id != own[0].cuda_stream
    torch.cuda.synchronize()
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]), device.exclusive():
            x.mul_(2).add_(1).remainder_(1_000_003)
    torch.cuda.synchronize()
    expected = 0
    for _ in range(30):
        expected = (expected * 2 + 1) % 1_000_003
    assert x.unique().tolist() == [float(expected)]


def refused(device: CudaDevice, pool: CudaPool, work: Callable[[torch.Tensor], object]) -> CaptureError:
    """The error of a capture that does `work` between two kernels."""
    x = torch.ones(1024, device="cuda")

    def capture() -> None:
        with device.session(pool) as session:
            session.begin()
            work(x * 2)
            session.end()

    with pytest.raises(CaptureError) as caught:
        capture()
    return caught.value


SYNCHRONISING = {
    "item": lambda y: y.sum().item(),
    "cpu": lambda y: y.cpu(),
    "nonzero": lambda y: y.nonzero(),
    "tolist": lambda y: y.tolist(),
    "synchronize": lambda y: torch.cuda.synchronize(),
    "branch": lambda y: 1 if y.sum() > 0 else 0,
    "from the host": lambda y: y + torch.ones(1024).to("cuda"),
}


@pytest.mark.parametrize("what", SYNCHRONISING)
def test_a_failed_capture_names_the_line_and_leaves_nothing_behind(device: CudaDevice, what: str) -> None:
    pool = device.open_pool()
    x, out, segment = doubled(device, pool)
    held = pool.num_bytes
    error = refused(device, pool, SYNCHRONISING[what])
    assert error.line is not None
    assert error.line.startswith(__file__)
    assert error.line in str(error)
    if what in ("item", "cpu", "nonzero", "tolist", "synchronize"):
        assert error.op == what
    assert not cuda._UNENDED
    del error
    # Ordinary work, random numbers, pinned memory, earlier captures and later ones in the same pool.
    assert torch.rand(8, device="cuda").sum() > 0
    assert torch.ones(8).pin_memory().to("cuda", non_blocking=True).sum() == 8
    check(x, out, segment, 7.0)
    later = doubled(device, pool)
    check(*later, 9.0)
    assert later[2]._handle == segment._handle
    check(x, out, segment, 8.0)
    gc.collect()
    assert pool.num_bytes <= held + 4 * MIB


def test_python_that_raises_in_a_capture_raises_and_the_next_is_fine(device: CudaDevice) -> None:
    pool = device.open_pool()

    def capture(error: type[BaseException]) -> None:
        with device.session(pool) as session:
            session.begin()
            torch.ones(8, device="cuda")
            raise error

    for error in (KeyError, ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            capture(error)
    assert not torch.cuda.is_current_stream_capturing()
    with device.session(pool) as session:
        session.begin()  # and never ended
    check(*doubled(device, pool), 4.0)
    assert gc.isenabled()


def test_a_fork_that_nobody_joined_fails_and_the_next_is_fine(device: CudaDevice) -> None:
    pool, side, x = device.open_pool(), torch.cuda.Stream(), torch.ones(8, device="cuda")

    def fork(y: torch.Tensor) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add(y[:8])

    assert "gave this one up" in str(refused(device, pool, fork))
    with torch.cuda.stream(side):
        assert x.sum().item() == 8
    check(*doubled(device, pool), 4.0)


def stream_beside(session: CudaSession) -> torch.cuda.Stream:
    """A stream that is neither the session's nor one that it forked: torch hands out the same 32 again and again."""
    taken = {session._stream.stream_id, *session._forked}
    return next(s for s in (torch.cuda.Stream() for _ in range(64)) if s.stream_id not in taken)


def test_forked_streams_are_joined_at_each_break_and_forked_again(device: CudaDevice) -> None:
    pool, side = device.open_pool(), torch.cuda.Stream()
    x = torch.ones(1 << 20, device="cuda")
    left, right, both = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    segments = []
    with device.session(pool) as session:
        session.begin()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            session.saw_stream()
            left.copy_(torch.tanh(x) * 3)
        right.copy_(x * 2)
        segments.append(session.end())
        session.begin()
        with torch.cuda.stream(side):
            session.saw_stream()
            left.add_(1)
            segments.append(session.end())  # while the side stream is the current one
            session.begin()
            left.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        both.copy_(left + right)
        with torch.cuda.stream(stream_beside(session)), pytest.raises(CaptureError, match="forked off it, got one on"):
            session.saw_stream()
        segments.append(session.end())
    for value in (1.0, 2.0):
        x.fill_(value)
        for segment in segments:
            segment.replay()
        assert torch.equal(both, torch.tanh(x) * 3 + 1 + 1 + x * 2)


def test_a_segment_with_nothing_in_it_replays_nothing(device: CudaDevice) -> None:
    pool, x = device.open_pool(), torch.ones(8, device="cuda")
    with device.session(pool) as session:
        session.begin()
        x.view(2, 4)
        empty = session.end()
        session.begin()
        x.mul_(2)
        full = session.end()
    empty.replay()
    full.replay()
    assert x.sum() == 16
    empty.release()
    full.replay()
    assert x.sum() == 32


def test_a_pool_counts_its_bytes_and_gives_them_back(device: CudaDevice) -> None:
    pool, other = device.open_pool(), device.open_pool()
    assert (pool.num_bytes, other.num_bytes) == (0, 0)
    large = doubled(device, pool, 16 * MIB)  # 64 MiB for each of its two intermediates
    held = pool.num_bytes
    assert 128 * MIB <= held < 160 * MIB
    small = doubled(device, pool)
    assert pool.num_bytes <= held + 2 * MIB
    assert other.num_bytes == 0
    reserved = torch.cuda.memory_reserved()
    large[2].release()
    del large
    device.give_back()
    assert pool.num_bytes >= held, "not while a capture of it lives"
    small[2].release()
    device.give_back()
    assert pool.num_bytes == 0
    assert torch.cuda.memory_reserved() <= reserved - held
    check(*doubled(device, pool), 6.0)
    assert 0 < pool.num_bytes <= 4 * MIB


def test_capturing_makes_no_workspace_in_the_pool(device: CudaDevice) -> None:
    pool = device.open_pool()
    a, out = torch.randn(64, 64, device="cuda"), torch.zeros(64, 64, device="cuda")
    with device.session(pool) as session:
        session.begin()
        out.copy_(torch.nn.functional.linear(a @ a, a, a[0]))
        segment = session.end()
    segment.replay()
    torch.testing.assert_close(out, torch.nn.functional.linear(a @ a, a, a[0]))
    in_use = torch.cuda.memory_snapshot(segment._handle)
    assert in_use
    assert sum(part["allocated_size"] for part in in_use) == 0


def test_workspaces_that_torch_gave_up_are_still_the_captures(device: CudaDevice) -> None:
    """As torch.compile(mode="reduce-overhead") does it, wherever it records: see Note [cuBLAS workspaces]."""
    a = torch.randn(1, 14336, device="cuda", dtype=torch.bfloat16)  # split over K, with sums in the workspace
    b = torch.randn(4096, 14336, device="cuda", dtype=torch.bfloat16)
    out = torch.zeros(1, 4096, device="cuda", dtype=torch.bfloat16)

    def capture() -> CudaSegment:
        with device.session(pool) as session:
            session.begin()
            out.copy_(torch.nn.functional.linear(a, b))
            return session.end()

    def check(segment: CudaSegment) -> None:
        a.normal_()
        segment.replay()
        torch.testing.assert_close(out, torch.nn.functional.linear(a, b))

    pool = device.open_pool()
    segments = [capture()]
    for _ in range(3):
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        others = [torch.full((1 << 22,), 7.0, device="cuda") for _ in range(8)]  # who would get their memory
        for segment in segments:
            check(segment)
        assert all(bool((other == 7).all()) for other in others)
        segments.append(capture())
    in_use = torch.cuda.memory_snapshot(segments[0]._handle)
    assert sum(part["allocated_size"] for part in in_use) == 0, "made outside of the captures, each time"


def test_a_side_thread_neither_disturbs_nor_is_disturbed(device: CudaDevice) -> None:
    stop = threading.Event()
    errors: list[BaseException] = []
    rounds: list[int] = []

    def other() -> None:
        try:
            stream = torch.cuda.Stream()
            while not stop.is_set():
                for number, on in enumerate((stream, torch.cuda.default_stream())):
                    with torch.cuda.stream(on):
                        x = torch.empty((1 + len(rounds) % 29) << 18, device="cuda").fill_(number)
                        y = torch.full((1 << 22,), number, device="cuda")
                        assert bool((x == number).all())
                        assert bool((y == number).all())
                        del x, y
                rounds.append(1)
        except BaseException as error:
            errors.append(error)

    def broken() -> None:
        with device.session(pool) as session:
            session.begin()
            captures[-1][0].sum().item()

    pool, captures = device.open_pool(), []
    thread = threading.Thread(target=other)
    thread.start()
    try:
        give_up_at = time.monotonic() + 20
        number = 0
        while (number < 60 or len(rounds) < 30) and time.monotonic() < give_up_at and not errors:
            captures.append(doubled(device, pool, 1 << (10 + number % 12)))
            if number % 5 == 0:
                with pytest.raises(CaptureError):
                    broken()
            if len(captures) > 20:
                captures.pop(0)[2].release()
                torch.cuda.empty_cache()
            number += 1
        for number, capture in enumerate(captures):
            check(*capture, float(number))
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert len(rounds) >= 30


def test_random_numbers_are_drawn_anew_at_each_replay(device: CudaDevice) -> None:
    out = torch.zeros(1024, device="cuda")
    with device.session(device.open_pool()) as session:
        session.begin()
        out.copy_(torch.rand(1024, device="cuda"))
        segment = session.end()
    segment.replay()
    first = out.clone()
    segment.replay()
    assert not torch.equal(first, out)


def test_inside_another_capture_the_error_says_so(device: CudaDevice) -> None:
    graph, x = torch.cuda.CUDAGraph(), torch.ones(8, device="cuda")
    with torch.cuda.graph(graph):
        x.mul_(2)
        with pytest.raises(CaptureError, match="a stream that is not being captured, got one that is"):
            with device.session(device.open_pool()):
                pass


def test_streams_and_workspaces_are_handed_on() -> None:
    gc.collect()
    device = CudaDevice()
    doubled(device, device.open_pool())
    del device
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    for _ in range(4):
        device = CudaDevice()
        doubled(device, device.open_pool())
        del device
        gc.collect()
    assert torch.cuda.memory_allocated() <= allocated + MIB


@pytest.mark.multi_gpu
def test_the_second_device_while_the_first_is_current() -> None:
    device = CudaDevice("cuda:1")
    pool = device.open_pool()
    x, out = torch.zeros(1024, device="cuda:1"), torch.zeros(1024, device="cuda:1")
    with device.exclusive(), device.session(pool) as session:
        session.begin()
        out.copy_(x * 2 + 1)
        segment = session.end()
    assert torch.cuda.current_device() == 0
    x.fill_(4)
    with device.exclusive():
        segment.replay()
    assert out.sum().item() == 1024 * 9
    assert pool.num_bytes > 0
