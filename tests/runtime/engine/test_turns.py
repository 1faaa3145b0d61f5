"""The lock that threads get in turn."""

from __future__ import annotations

import threading
import time

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
