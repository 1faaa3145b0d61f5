"""The lock that threads get in turn."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


def test_an_interrupt_leaves_it_free() -> None:
    # Whatever runs Python code between the two ends of a `with` can be interrupted before each of its lines.
    turns, interrupted, places = Turns(), 0, itertools.count()
    code = {function.__code__ for function in vars(Turns).values() if hasattr(function, "__code__")}

    for place in places:
        seen = itertools.count()

        def interrupt(frame: Any, event: str, arg: object, place: int = place, seen: Any = seen) -> Any:
            if frame.f_code in code and event in ("call", "line") and next(seen) == place:
                raise KeyboardInterrupt
            return interrupt if frame.f_code in code else None

        before = sys.gettrace()
        try:
            sys.settrace(interrupt)
            with turns:
                pass
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(before)
        # Another thread: the lock would let this one in again.
        with ThreadPoolExecutor(1) as other:
            assert other.submit(turns.acquire, timeout=0).result(), f"held after an interrupt at place {place}"
            other.submit(turns.release).result()
        if next(seen) <= place:
            break
    assert interrupted >= 4
