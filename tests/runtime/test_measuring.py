"""What programs take of their device: the least of calls in turn."""

from __future__ import annotations

from typing import Any

import pytest

from piecework.runtime import measuring
from piecework.runtime.measuring import ROUNDS, least_seconds


def test_the_least_of_calls_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    times = iter([5.0, 9.0] + [3.0, 8.0] + [4.0, 7.0] + [6.0, 9.0] * (ROUNDS - 3))

    def measured(call: Any) -> float:
        call()
        return next(times)

    monkeypatch.setattr(measuring, "_cpu_seconds", measured)
    assert least_seconds([lambda: order.append("a"), lambda: order.append("b")], on_gpu=False) == [3.0, 7.0]
    warm = ["a", "a", "b", "b"]
    assert order == warm + ["a", "b"] * ROUNDS


def test_a_slower_call_takes_longer() -> None:
    quick, slow = least_seconds([lambda: sum(range(10)), lambda: sum(range(200_000))], on_gpu=False)
    assert 0 < quick < slow / 10


def test_on_a_gpu_python_launches_while_the_stream_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hold is longer than the launches took, so that no gap of theirs is between the events."""
    log: list[Any] = []

    class Stream:
        def synchronize(self) -> None:
            log.append("wait")

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            log.append("event")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Any) -> float:
            return 4.0

    monkeypatch.setattr(measuring.torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(measuring.torch.cuda, "Event", Event)
    monkeypatch.setattr(measuring.torch.cuda, "_sleep", lambda cycles: log.append(cycles))
    monkeypatch.setattr(measuring, "_cpu_seconds", lambda call: 0.02)
    assert measuring._gpu_seconds(lambda: log.append("call")) == 0.004
    assert log == ["wait", "wait", pytest.approx(0.041 * 2e9), "event", "call", "event", "wait"]
    monkeypatch.setattr(measuring, "_cpu_seconds", lambda call: 20.0)
    log.clear()
    measuring._gpu_seconds(lambda: None)
    assert log[2] == pytest.approx(0.5 * 2e9), "a stream is not held for ever"
