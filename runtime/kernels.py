"""Kernels that a library would compile inside a step: compiled in a thread instead, while steps do without."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Hashable, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .events import Recorder
from .lock_turns import short_turns

_THREADS = 2


class KernelQueue:
    """Compiles each kernel once, in the order in which steps asked. Thread-safe; steps wait for nothing here.

    It begins when the first step has ended, whose caller waits for nothing else.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        on_change: Callable[[], None],
        foreseen: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Args as those of `Background`."""
        self._recorder = recorder
        self._on_change = on_change
        self._foreseen = foreseen
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._known: set[Hashable] = set()
        self._pending: set[Hashable] = set()
        """Keys of what is submitted and not compiled yet."""
        self._num_pending = 0
        self._executor: ThreadPoolExecutor | None = ThreadPoolExecutor(_THREADS, "piecework-kernels")
        self.holds = True
        """Whether what is submitted waits for `begin`."""
        self._held: list[tuple[Hashable, Callable[[], None]]] = []
        self._first: AbstractContextManager[Any] = threading.Lock()
        """The first compile is alone, in which a library does what it does once: two would do it at once, and twice."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being compiled or waits for that."""
        return not self._num_pending or self._executor is None

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until nothing is being compiled or `close` was called, at most so long; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_idle, timeout_s)

    def are_done(self, keys: Set[Hashable]) -> bool:
        """Whether none of these is being compiled or waits for that."""
        return self._executor is None or self._pending.isdisjoint(keys)

    def submit(self, key: Hashable, compile_it: Callable[[], None]) -> None:
        """Has a kernel compiled, if its key is new; returns at once."""
        if key in self._known:
            return
        with self._lock:
            if self._executor is None or key in self._known:
                return
            self._known.add(key)
            self._pending.add(key)
            self._num_pending += 1
            if self.holds:
                self._held.append((key, compile_it))
            else:
                self._executor.submit(self._compile, key, compile_it)

    def begin_held(self) -> None:
        """Compiles what was submitted, and from now on whatever is; nothing changes where nothing was."""
        if self._held:
            self.begin()

    def begin(self) -> None:
        """Compiles what was submitted, and from now on whatever is."""
        with self._lock:
            held, self._held, self.holds = self._held, [], False
            if self._executor is not None:
                for key, compile_it in held:
                    self._executor.submit(self._compile, key, compile_it)

    def import_early(self, module: str) -> None:
        """Imports a module that steps will need, which takes long the first time; does not wait for `begin`."""
        with self._lock:
            if self._executor is not None:
                self._num_pending += 1
                self._executor.submit(self._make, None, lambda: importlib.import_module(module))

    def _compile(self, key: Hashable, compile_it: Callable[[], None]) -> None:
        with self._first:
            self._make(key, compile_it)
            self._first = nullcontext()

    def _make(self, key: Hashable, make_it: Callable[[], object]) -> None:
        started = time.perf_counter()
        detail = {}
        try:
            with self._foreseen(), short_turns():
                make_it()
        except Exception as error:  # the step that needs it will say so
            detail["error"] = f"{type(error).__name__}: {error}"
        finally:
            self._recorder.record("kernel", seconds=time.perf_counter() - started, **detail)
            with self._lock:
                self._num_pending -= 1
                self._pending.discard(key)
                self._changed.notify_all()
            self._on_change()

    def close(self) -> None:
        """Begins nothing more; what is being compiled ends by itself."""
        with self._lock:
            executor, self._executor = self._executor, None
            self._held.clear()
            self._changed.notify_all()
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
