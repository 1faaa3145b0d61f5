"""What had to be compiled after ready: each is time that a step may have waited for.

Seen are kernels that Triton compiles in this process (its cache on disk had none), graphs that Inductor compiles in
this process, and kernels that either of them tries out. Not seen: what a worker compiles, Triton's own autotuning
before Triton 3.8, and libraries that compile without telling anybody.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .events import Event, Recorder
from .manifest import JitKey
from .manifest_format import MAX_TEXT

logger = logging.getLogger("piecework")

LOOK_EVERY_S = 1.0
_MAX_LOGGED = 200
"""Different ones that are logged; more of them say that something is wrong with the shapes, which was said by then."""
_INDUCTOR = "GraphLowering.compile_to_fn"
"""Torch's own timer around what Inductor does for a graph that none of its caches has."""
_AUTOTUNE = ("CachingAutotuner.benchmark_all_configs", "CachingAutotuner.coordinate_descent_tuning")
_PROGRAMS = {"compile_general": "general", "compile_specialized": "specialized", "compile_whole": "whole"}


class JitWatch:
    """Counts and logs what compiles in this process between `start` and `stop`, whoever asked for it.

    What Inductor does is seen within about a second; what Triton does, at once.
    """

    def __init__(self, recorder: Recorder, *, log_level: int = logging.WARNING) -> None:
        self._recorder = recorder
        self._log_level = log_level
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._links: list[_Link] = []
        self._thread: threading.Thread | None = None
        self._foreseen = threading.local()
        self._num_foreseen = 0
        """Threads inside `foreseen`."""
        self._num_logged = 0
        self._timers = dict.fromkeys((_INDUCTOR, *_AUTOTUNE), 0)
        self._events_until_s = 0.0
        self._frame: Any = None
        self._unexplained: list[float] = []
        """Seconds of graphs that Inductor compiled; nobody has said yet what they belong to."""
        self.seen: dict[JitKey, int] = {}
        """What compiled, and how often; kernels from Triton's cache on disk too, 0 times."""

    def start(self) -> None:
        """Begins to watch. Once."""
        assert self._thread is None, "a JitWatch starts once"
        for key in self._timers:
            self._timers[key] = len(_torch_timer(key))
        self._events_until_s = max((event.at_s for event in self._recorder.events), default=0.0)
        self._frame = next(iter(reversed(_torch_frames())), None)
        with self._lock:
            self._hook_triton()
        self._thread = threading.Thread(
            target=_look_now_and_then, args=(weakref.ref(self), self._ended), name="piecework-jit-watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Looks a last time, and leaves every hook as it was. Twice is fine."""
        with self._lock:
            self._ended.set()
            links, self._links = self._links, []
        for link in links:
            link.remove()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
            self.look(last=True)

    @contextlib.contextmanager
    def foreseen(self) -> Iterator[None]:
        """What this thread compiles in here was planned, such as a promotion's program: it is not counted."""
        self.look()
        self._foreseen.depth = self._depth() + 1
        with self._lock:
            self._num_foreseen += 1
        try:
            yield
        finally:
            self._foreseen.depth -= 1
            self._skip()
            with self._lock:
                self._num_foreseen -= 1

    def look(self, *, last: bool = False) -> None:
        """Counts what Inductor compiled since the last look. `last`: also what nobody explains yet."""
        found: list[tuple[str, str, str, float]] = []
        with self._lock:
            self._hook_triton()
            if self._num_foreseen and not last:
                return  # torch's timers do not tell whose they are
            self._unexplained += self._new_times(_INDUCTOR)
            tuned = [seconds for key in _AUTOTUNE for seconds in self._new_times(key)]
            # The timer knows of a graph before it is known what it was for.
            for name, signature in self._new_names():
                if self._unexplained:
                    found.append(("inductor", name, signature, self._unexplained.pop(0)))
            if last:
                found += [("inductor", "a graph", "", seconds) for seconds in self._unexplained]
                self._unexplained.clear()
            found += [("autotune", "a kernel of Inductor", "", seconds) for seconds in tuned]
        for each in found:
            self._count(*each)

    def _depth(self) -> int:
        return getattr(self._foreseen, "depth", 0)

    def _skip(self) -> None:
        """Takes what was compiled since the last look for counted."""
        with self._lock:
            for key in self._timers:
                self._new_times(key)
            self._new_names()

    def _new_times(self, key: str) -> list[float]:
        """Seconds that one of torch's timers took since the last look. The caller holds the lock."""
        times = _torch_timer(key)
        known, self._timers[key] = self._timers[key], len(times)
        return times[known if known <= len(times) else 0 :]  # fewer: somebody has cleared them

    def _new_names(self) -> list[tuple[str, str]]:
        """For whom Inductor was asked since the last look: frames of somebody's torch.compile, pieces of a program.

        A cache may have answered; the longest first.
        """
        frames = _torch_frames()
        new = frames[1 + max((i for i, frame in enumerate(frames) if frame is self._frame), default=-1) :]
        self._frame = frames[-1] if frames else None
        named = [
            (f"torch.compile of {frame.co_name} ({frame.co_filename}:{frame.co_firstlineno})", "")
            for frame in new
            if frame.inductor_compile_time_s and frame.co_name is not None  # else a graph of a program's, without one
        ]
        events = self._recorder.events
        # Backwards, for there may be thousands and few are new.
        recent = list(itertools.takewhile(lambda event: event.at_s > self._events_until_s, reversed(events)))
        self._events_until_s = max((event.at_s for event in recent), default=self._events_until_s)
        pieces = [e for e in recent if e.kind in _PROGRAMS and e.detail.get("compiler") == "inductor"]
        if pieces:
            signature = next((str(e.detail.get("signature", "")) for e in reversed(events) if e.kind == "trace"), "")
            pieces.sort(key=lambda event: -event.seconds)
            named += [(program_name(event), signature) for event in pieces]
        return named

    def _count(self, what: str, name: str, signature: str, seconds: float, times: int = 1) -> None:
        """`times`: 0 for what a cache had."""
        key: JitKey = (what, name[:MAX_TEXT], signature[:MAX_TEXT])
        with self._lock:
            self.seen[key] = self.seen.get(key, 0) + times
            is_first = self.seen[key] == 1 == times and self._num_logged < _MAX_LOGGED
            self._num_logged += is_first
        if times:
            self._recorder.record("jit", seconds=seconds, what=what, name=key[1], signature=key[2])
        if is_first:
            shapes = f" ({key[2]})" if signature else ""
            logger.log(self._log_level, "compiled after ready: %s: %s%s, %.2f s", what, key[1], shapes, seconds)

    def _hook_triton(self) -> None:
        """Once Triton is there: on a CPU nobody may ever import it."""
        knobs = sys.modules.get("triton.knobs")
        if knobs is None or not hasattr(knobs, "compilation") or self._links or self._ended.is_set():
            return
        # A bound method would keep this object alive in a table of the process.
        me = weakref.ref(self)

        def compiled(*, src: Any, metadata: Any, times: Any, cache_hit: bool, **others: Any) -> None:
            if (watch := me()) is not None and not watch._depth():
                seconds = 0.0 if cache_hit else _triton_seconds(times)
                signature = kernel_signature(src, metadata)
                watch._count("triton", str(src.name), signature, seconds, int(not cache_hit))

        def tuned(*, fn: Any, key: Any, duration: float | None, cache_hit: bool, **others: Any) -> None:
            if (watch := me()) is not None and not watch._depth():
                name = str(getattr(fn, "__name__", fn))
                watch._count("autotune", name, _short(str(key)), duration or 0.0, int(not cache_hit))

        for table, callback in ((knobs.compilation, compiled), (getattr(knobs, "autotuning", None), tuned)):
            if hasattr(table, "listener"):
                self._links.append(_Link(table, callback))


class _Link:
    """One of several callbacks in a place of Triton's that holds one: calls who was there before too."""

    def __init__(self, table: Any, callback: Callable[..., None]) -> None:
        self._table = table
        self._callback: Callable[..., None] | None = callback
        self._before = table.listener
        table.listener = self

    def __call__(self, **arguments: Any) -> None:
        try:
            if self._callback is not None:
                self._callback(**arguments)
        finally:
            if self._before is not None:
                self._before(**arguments)

    def remove(self) -> None:
        """Leaves the chain; a link that others were put on top of only falls silent, until they leave too."""
        self._callback = None
        while isinstance(self._table.listener, _Link) and self._table.listener._callback is None:
            self._table.listener = self._table.listener._before


def program_name(event: Event) -> str:
    """The name of the program that a compile event was for, such as `decode 8 general`."""
    phase, bucket = event.scope.phase, event.scope.bucket
    where = "unpadded" if bucket is None else bucket
    return f"{phase or 'both phases'} {where} {_PROGRAMS[event.kind]}"


def kernel_signature(src: Any, metadata: Mapping[str, Any]) -> str:
    """Dtypes and constants of a Triton kernel, as `x: *bf16, n: i32, BLOCK=128; num_warps=4`."""
    names = list(getattr(getattr(src, "fn", None), "arg_names", ()))
    signature = getattr(src, "signature", None)
    parts = []
    if isinstance(signature, Mapping):
        parts = [f"{name}: {dtype}" for name, dtype in signature.items() if dtype != "constexpr"]
    for path, value in sorted(getattr(src, "constants", {}).items(), key=lambda item: str(item[0])):
        index = path[0] if isinstance(path, tuple) and len(path) == 1 else path
        name = names[index] if isinstance(index, int) and index < len(names) else str(index)
        parts.append(f"{name}={value!r}")
    warps = f"num_warps={metadata['num_warps']}" if "num_warps" in metadata else ""
    return "; ".join(filter(None, (_short(", ".join(parts)), warps)))


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT - 20 else f"{text[: MAX_TEXT - 23]}..."


def _triton_seconds(times: Any) -> float:
    """Triton counts microseconds."""
    return float(getattr(times, "total", 0) or 0) / 1e6


def _torch_timer(key: str) -> list[float]:
    """Seconds that torch's timer took, each time. Nobody compiled before Dynamo is there."""
    utils = sys.modules.get("torch._dynamo.utils")
    times: list[float] = getattr(utils, "compilation_time_metrics", {}).get(key, [])
    return times


def _torch_frames() -> list[Any]:
    """The newest frames that Dynamo compiled in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    frames = getattr(utils, "get_compilation_metrics", None)
    return list(frames()) if frames is not None else []


def _look_now_and_then(watch: weakref.ReferenceType[JitWatch], ended: threading.Event) -> None:
    """The thread: holds no runtime alive."""
    while not ended.wait(LOOK_EVERY_S):
        alive = watch()
        if alive is None:
            return
        alive.look()
        del alive
