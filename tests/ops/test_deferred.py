"""The scope in which compiles are not waited for; paged attention's kernels in it, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Hashable
from typing import Any

import pytest

from piecework.errors import CaptureError, KernelNotReadyError
from piecework.ops.deferred import awaited, defer_compiles, deferring

from .test_triton_kernels import run_tests


class Submitted:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.keys: list[Hashable] = []

    def __call__(self, key: Hashable, compile: Callable[[], None]) -> None:
        self.keys.append(key)


def nothing() -> None:
    pass


def test_outside_of_a_scope_compiles_are_waited_for() -> None:
    assert deferring() is None
    with defer_compiles(Submitted()):
        assert deferring() is not None
    assert deferring() is None
    with pytest.raises(ZeroDivisionError), defer_compiles(Submitted()):
        1 / 0  # noqa: B018
    assert deferring() is None


def test_a_scope_submits_a_key_once() -> None:
    outer, inner = Submitted(), Submitted()
    for _ in range(2):
        with defer_compiles(outer):
            submit = deferring()
            assert submit is not None
            for key in ("a", ("b", 1), "a", ("b", 1)):
                submit(key, nothing)
            with defer_compiles(inner):
                again = deferring()
                assert again is not None
                again("a", nothing)
            assert deferring() is submit
    assert outer.keys == ["a", ("b", 1)] * 2
    assert inner.keys == ["a"] * 2


def test_what_calls_did_without_is_known() -> None:
    """And what is only to be expected does not count."""
    assert awaited() == frozenset()
    with defer_compiles(Submitted()):
        submit = deferring()
        assert submit is not None
        submit("ahead", nothing, ahead=True)
        assert awaited() == frozenset()
        submit("a", nothing)
        with defer_compiles(Submitted()):
            assert awaited() == frozenset()
        submit("ahead", nothing)
        assert awaited() == {"a", "ahead"}
    assert awaited() == frozenset()


def test_a_key_that_was_not_taken_may_come_again() -> None:
    def submit(key: Hashable, compile: Callable[[], None]) -> None:
        taken.append(key)
        if len(taken) == 1:
            raise MemoryError

    taken: list[Any] = []
    with defer_compiles(submit):
        mine = deferring()
        assert mine is not None
        with pytest.raises(MemoryError):
            mine("a", nothing)
        mine("a", nothing)
        mine("a", nothing)
    assert taken == ["a", "a"]


def test_a_scope_is_of_its_thread() -> None:
    seen: list[Any] = []
    with defer_compiles(Submitted()):
        thread = threading.Thread(target=lambda: seen.append(deferring()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_kernel_that_is_not_ready_is_a_capture_to_try_again() -> None:
    assert issubclass(KernelNotReadyError, CaptureError)
    error = KernelNotReadyError("paged_attention: not yet")
    assert (error.op, error.line) == (None, None)


def test_no_triton_is_imported_for_a_scope() -> None:
    code = "import sys, piecework.ops.deferred; assert not {'triton', 'torch'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton is for Linux only")
def test_paged_attention_does_not_wait_for_its_kernels() -> None:
    run_tests("triton_deferred.py", at_least=18, TRITON_INTERPRET="1")
