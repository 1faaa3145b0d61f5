"""Counters, events and progress, apart from a runtime."""

from __future__ import annotations

import io
import logging
import sys
import threading

import pytest

from piecework.phases import Phase
from piecework.runtime import progress
from piecework.runtime.events import COUNTERS, Counters, Recorder, Scope
from piecework.runtime.progress import Progress


def test_as_dict_has_every_counter_of_the_contract():
    promised = {
        "traces", "regions_reused", "pieces", "distinct_pieces", "opaque_regions", "compiles_general",
        "compiles_specialized", "compiles_whole", "captures", "replays", "promotions", "evictions", "cache_hits",
        "cache_misses", "fallbacks", "in_step_seconds",
    }  # fmt: skip
    counters = Counters().as_dict()
    assert promised <= set(counters)
    assert counters["fallbacks"] == {}
    assert all(counters[name] == 0 for name in COUNTERS)


def test_counts_from_many_threads_are_all_there():
    counters = Counters()
    scope = Scope(phase=Phase.DECODE, bucket=8)

    def count():
        for _ in range(1000):
            counters.add("steps", scope=scope)
            counters.add_fallback("why")

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters["steps"] == 8000
    assert counters["fallbacks"] == {"why": 8000}
    assert counters.by_phase_and_bucket() == {("decode", 8): {"steps": 8000}}


def test_only_time_that_a_step_waited_for_is_in_step_time():
    recorder = Recorder(Counters())
    recorder.record("trace", seconds=2.0)
    recorder.within(Scope(phase=Phase.DECODE, bucket=4, in_step=True)).record("compile_general", seconds=3.0)
    assert recorder.counters["in_step_seconds"] == 3.0
    assert [(event.kind, event.scope.in_step) for event in recorder.events] == [
        ("trace", False),
        ("compile_general", True),
    ]


def test_each_fallback_counts_and_the_first_of_a_reason_is_logged(caplog):
    recorder = Recorder(Counters())
    with caplog.at_level(logging.WARNING, logger="piecework"):
        for _ in range(3):
            recorder.fallback("above the ladder", size=9)
    assert recorder.counters["fallbacks"] == {"above the ladder": 3}
    assert [record.getMessage() for record in caplog.records] == ["above the ladder (size: 9)"]
    assert len(recorder.events) == 1


def stderr_of(monkeypatch, show_after_s=0.01, terminal=False):
    """Called in the test's body: pytest puts its own stderr back after the fixtures."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "SHOW_AFTER_S", show_after_s)
    return stream


def test_slow_work_without_a_terminal_is_two_plain_lines(monkeypatch):
    stderr = stderr_of(monkeypatch)
    with Progress("compiling", total=3) as advance:
        _wait_for(lambda: stderr.getvalue())
        advance()
    lines = stderr.getvalue().splitlines()
    assert lines[0] == "piecework: compiling (3 parts) ..."
    assert lines[1].startswith("piecework: compiling: done in ")
    assert len(lines) == 2


def test_fast_work_shows_nothing(monkeypatch):
    stderr = stderr_of(monkeypatch, show_after_s=60.0)
    with Progress("compiling") as advance:
        advance()
    assert stderr.getvalue() == ""


def test_slow_work_that_fails_still_ends_its_display(monkeypatch):
    stderr = stderr_of(monkeypatch)

    def broken():
        with Progress("compiling"):
            _wait_for(lambda: stderr.getvalue())
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        broken()
    assert stderr.getvalue().count("\n") == 2


def test_slow_work_on_a_terminal_is_a_bar_with_its_parts(monkeypatch):
    stderr = stderr_of(monkeypatch, terminal=True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with Progress("compiling bucket 8", total=2) as advance:
        advance()
        _wait_for(lambda: "1/2" in stderr.getvalue())
    assert "compiling bucket 8" in stderr.getvalue()


def _wait_for(condition):
    done = threading.Event()
    for _ in range(1000):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("waited ten seconds in vain")
