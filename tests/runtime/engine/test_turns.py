"""The lock that threads get in turn."""

from __future__ import annotations

import sys
import threading
import time
from _thread import RLock
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest

from piecework.runtime.engine.turns import Turns


def test_a_thread_that_loops_lets_the_others_in() -> None:
    turns, stop, count = Turns(), threading.Event(), 0

    def loop() -> None:
        nonlocal count
        while not stop.is_set():
            with turns:
                time.sleep(0.001)
                count += 1

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        waited = []
        for _ in range(50):
            before = count
            while count == before:  # the other thread holds it again, or is about to
                time.sleep(0.0001)
            before = count
            with turns:
                waited.append(count - before)
    finally:
        stop.set()
        thread.join()
    # It is held once or twice by the other one: before this thread asks, and while it waits.
    assert max(waited) <= 2, waited


def test_only_one_at_a_time_also_after_an_error() -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError):
        with turns:
            raise ZeroDivisionError
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            with turns:
                inside += 1
                most = max(most, inside)
                time.sleep(0.0001)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


class Interrupted(Turns):  # type: ignore[misc]
    """An interrupt comes as soon as the lock is taken."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        super().acquire(blocking, timeout)
        raise KeyboardInterrupt


def is_free(turns: Turns) -> bool:
    """Asked by another thread, since its own thread would be let in again."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(lambda: RLock.acquire(turns, timeout=0) and not turns.release()).result()


def test_an_interrupt_while_it_is_taken_leaves_it_free() -> None:
    turns = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        with turns:
            pytest.fail("it was taken")
    assert is_free(turns)
    assert not turns._next.locked()


def test_an_interrupt_while_it_is_left_comes_after_it_is_free() -> None:
    # Python looks for interrupts where a Python function begins; one that has to release the lock must not be there.
    turns = Turns()

    def interrupt(frame: FrameType, event: str, arg: object) -> None:
        raise KeyboardInterrupt

    before = sys.gettrace()
    try:
        with turns:
            assert not is_free(turns)
            sys.settrace(interrupt)
    finally:
        sys.settrace(before)
    assert is_free(turns)
