"""The interpreter's switch interval while threads work beside steps."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from piecework.runtime.lock_turns import SWITCH_INTERVAL_S, short_turns


@pytest.fixture(autouse=True)
def interval() -> Iterator[float]:
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before + 5e-7)


def short() -> bool:
    return abs(sys.getswitchinterval() - SWITCH_INTERVAL_S) < 2e-6


def test_the_last_thread_puts_it_back(interval: float) -> None:
    inside, go = threading.Barrier(2), threading.Event()

    def work() -> None:
        with short_turns():
            inside.wait(60)
            assert go.wait(60)

    thread = threading.Thread(target=work)
    with short_turns():
        thread.start()
        inside.wait(60)
        with short_turns():
            assert short()
    assert short(), "the other thread is not done"
    go.set()
    thread.join(60)
    assert sys.getswitchinterval() == interval


def test_it_is_put_back_after_an_error(interval: float) -> None:
    with pytest.raises(ValueError, match="no"), short_turns():
        raise ValueError("no")
    assert sys.getswitchinterval() == interval


def test_one_that_somebody_sets_meanwhile_stands() -> None:
    with short_turns():
        sys.setswitchinterval(0.002)
    assert sys.getswitchinterval() == pytest.approx(0.002)


def test_it_does_not_drift() -> None:
    sys.setswitchinterval(0.000733)
    before = sys.getswitchinterval()
    for _ in range(20):
        with short_turns():
            assert short()
    assert sys.getswitchinterval() == before


def test_a_shorter_one_stands() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S / 4)
    before = sys.getswitchinterval()
    with short_turns():
        assert sys.getswitchinterval() == before
    assert sys.getswitchinterval() == before


def test_a_thread_that_gives_the_lock_up_gets_it_back_sooner() -> None:
    """Beside a thread that runs Python, as operators of a step are; the shares are far apart on any machine."""
    is_over = threading.Event()
    entered = threading.Event()

    def busy(is_short: bool) -> None:
        def count() -> None:
            entered.set()
            while not is_over.is_set():
                sum(range(50))

        if is_short:
            with short_turns():
                count()
        else:
            count()

    def seconds(is_short: bool) -> float:
        is_over.clear()
        entered.clear()
        thread = threading.Thread(target=busy, args=(is_short,))
        thread.start()
        assert entered.wait(60)
        started = time.perf_counter()
        for _ in range(40):
            time.sleep(1e-5)  # gives it up
        took = time.perf_counter() - started
        is_over.set()
        thread.join(60)
        return took

    sys.setswitchinterval(0.02)
    assert seconds(True) < seconds(False) / 2
