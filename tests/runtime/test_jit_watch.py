"""What compiled after ready: Triton through its listeners, Inductor through torch's own timers."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.utils as dynamo_utils

from piecework.runtime import jit_watch
from piecework.runtime.events import Counters, Recorder, Scope
from piecework.runtime.jit_watch import JitWatch, kernel_signature

INDUCTOR, AUTOTUNE = jit_watch._INDUCTOR, jit_watch._AUTOTUNE[0]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(Counters(), progress=False)


@pytest.fixture
def watch(recorder: Recorder) -> Iterator[JitWatch]:
    watch = JitWatch(recorder)
    yield watch
    watch.stop()


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Torch's timers, empty; looked at only when the test says so."""
    timers: dict[str, list[float]] = {}
    monkeypatch.setattr(dynamo_utils, "compilation_time_metrics", timers)
    monkeypatch.setattr(dynamo_utils, "get_compilation_metrics", list)
    monkeypatch.setattr(jit_watch, "LOOK_EVERY_S", 3600.0)
    return timers


def jits(recorder: Recorder) -> list[tuple[str, str, str]]:
    events = [event.detail for event in recorder.events if event.kind == "jit"]
    return [(detail["what"], detail["name"], detail["signature"]) for detail in events]


def piece(recorder: Recorder, kind: str = "compile_general", bucket: int | None = 8, **detail: Any) -> None:
    recorder.within(Scope(phase="decode", bucket=bucket, in_step=True)).record(
        kind, **{"compiler": "inductor", **detail}
    )


# ---- Triton


class Table:
    """A place of Triton's for one listener."""

    listener: Any = None


@pytest.fixture
def knobs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    knobs = SimpleNamespace(compilation=Table(), autotuning=Table())
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    return knobs


def compiled(listener: Any, name: str = "add_kernel", cache_hit: bool = False, **signature: str) -> None:
    """Calls a listener as triton.compiler.compile does."""
    signature = signature or {"x": "*bf16", "n": "i32", "BLOCK": "constexpr"}
    fn = SimpleNamespace(__name__=name, arg_names=list(signature))
    src = SimpleNamespace(name=name, fn=fn, signature=signature, constants={(2,): 128})
    times = SimpleNamespace(total=250_000)
    listener(src=src, metadata={"num_warps": 4}, metadata_group={}, times=times, cache_hit=cache_hit)


SIGNATURE = "x: *bf16, n: i32, BLOCK=128; num_warps=4"


def test_a_kernel_that_triton_compiles_is_counted_and_logged(
    recorder: Recorder, watch: JitWatch, knobs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    watch.start()
    for _ in range(2):
        compiled(knobs.compilation.listener)
    compiled(knobs.compilation.listener, name="other", x="*fp16")
    assert jits(recorder) == [
        ("triton", "add_kernel", SIGNATURE),
        ("triton", "add_kernel", SIGNATURE),
        ("triton", "other", "x: *fp16, 2=128; num_warps=4"),
    ]
    assert recorder.counters["jit_after_ready"] == 3
    assert {event.seconds for event in recorder.events} == {0.25}
    logged = [record.getMessage() for record in caplog.records if record.name == "piecework"]
    assert logged[0] == f"compiled after ready: triton: add_kernel ({SIGNATURE}), 0.25 s"
    assert len(logged) == 2  # each once
    assert {record.levelno for record in caplog.records if record.name == "piecework"} == {logging.WARNING}


def test_a_kernel_from_the_cache_on_disk_is_seen_and_not_counted(
    recorder: Recorder, watch: JitWatch, knobs: Any
) -> None:
    watch.start()
    compiled(knobs.compilation.listener, cache_hit=True)
    assert recorder.counters["jit_after_ready"] == 0
    assert (watch.seen, jits(recorder)) == ({("triton", "add_kernel", SIGNATURE): 0}, [])


def test_autotuning_is_counted_where_triton_tells(recorder: Recorder, watch: JitWatch, knobs: Any) -> None:
    watch.start()
    for cache_hit in (False, True):
        knobs.autotuning.listener(
            fn=SimpleNamespace(__name__="mm"),
            key=(64, "torch.bfloat16"),
            best_config=None,
            configs_timings={},
            duration=None if cache_hit else 1.5,
            cache_hit=cache_hit,
        )
    assert jits(recorder) == [("autotune", "mm", "(64, 'torch.bfloat16')")]


def test_a_triton_without_autotune_listeners(recorder: Recorder, watch: JitWatch, knobs: Any) -> None:
    """As 3.6 is."""
    del knobs.autotuning
    watch.start()
    compiled(knobs.compilation.listener)
    assert len(jits(recorder)) == 1


def test_who_listened_before_still_hears_and_is_put_back(recorder: Recorder, knobs: Any) -> None:
    heard: list[str] = []

    def before(*, src: Any, **others: Any) -> None:
        heard.append(src.name)

    knobs.compilation.listener = before
    watch = JitWatch(recorder)
    watch.start()
    compiled(knobs.compilation.listener)
    assert (heard, len(jits(recorder))) == (["add_kernel"], 1)
    watch.stop()
    watch.stop()
    assert knobs.compilation.listener is before
    assert knobs.autotuning.listener is None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_two_watches_and_a_stranger_leave_in_any_order(knobs: Any, order: tuple[int, ...]) -> None:
    """A link in the middle falls silent at once, and goes when those above it have gone."""
    recorders = [Recorder(Counters()) for _ in range(3)]
    watches = [JitWatch(each) for each in recorders]
    for each in watches:
        each.start()
    expected = [0, 0, 0]
    gone: set[int] = set()
    for leaving in order:
        compiled(knobs.compilation.listener)
        expected = [count + (i not in gone) for i, count in enumerate(expected)]
        watches[leaving].stop()
        gone.add(leaving)
    assert [each.counters["jit_after_ready"] for each in recorders] == expected
    assert (knobs.compilation.listener, knobs.autotuning.listener) == (None, None)


def test_a_listener_put_on_top_is_left_where_it_is(recorder: Recorder, watch: JitWatch, knobs: Any) -> None:
    watch.start()
    below = knobs.compilation.listener

    def on_top(**arguments: Any) -> None:
        below(**arguments)

    knobs.compilation.listener = on_top
    watch.stop()
    assert knobs.compilation.listener is on_top
    compiled(knobs.compilation.listener)
    assert jits(recorder) == []


def test_triton_that_is_imported_later_is_heard(
    recorder: Recorder, watch: JitWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "triton.knobs", raising=False)
    watch.start()
    knobs = SimpleNamespace()  # in the middle of its import
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    watch.look()
    knobs.compilation, knobs.autotuning = Table(), Table()
    watch.look()
    compiled(knobs.compilation.listener)
    assert len(jits(recorder)) == 1


@needs_triton
def test_the_listeners_are_there_in_the_installed_triton() -> None:
    import triton
    from triton import knobs

    assert hasattr(knobs.compilation, "listener")
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    assert hasattr(getattr(knobs, "autotuning", None), "listener") or version < (3, 8)


REAL = """
import logging, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from piecework.runtime.events import Counters, Recorder
from piecework.runtime.jit_watch import JitWatch

@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)

def build(dtype):
    signature = {"x": dtype, "out": dtype, "n": "i32", "BLOCK": "constexpr"}
    src = ASTSource(fn=double, signature=signature, constexprs={"BLOCK": 64})
    triton.compile(src, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})

recorder = Recorder(Counters())
watch = JitWatch(recorder)
build("*fp32")
watch.start()
build("*fp16")
build("*fp16")  # from the cache on disk
watch.stop()
build("*bf16")
for event in recorder.events:
    print(event.detail["what"], event.detail["name"], event.detail["signature"], event.seconds > 0)
print(watch.seen)
"""


@needs_triton
def test_what_triton_really_compiles(tmp_path: Path) -> None:
    """For a GPU that is not there: nothing is launched."""
    file = tmp_path / "real.py"  # Triton reads a kernel's source
    file.write_text(REAL)
    command = [sys.executable, str(file)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    signature = "x: *fp16, out: *fp16, n: i32, BLOCK=64; num_warps=2"
    assert done.stdout.splitlines() == [
        f"triton double {signature} True",
        str({("triton", "double", signature): 1}),
    ]


def test_signatures_of_other_sources_are_short_and_never_an_error() -> None:
    assert kernel_signature(SimpleNamespace(), {}) == ""
    assert kernel_signature(SimpleNamespace(signature=None, constants={"B": 3}), {"num_warps": 8}) == "B=3; num_warps=8"
    long = SimpleNamespace(signature={f"argument_{i}": "*fp32" for i in range(99)})
    assert len(kernel_signature(long, {"num_warps": 4})) <= 400


# ---- Inductor


def test_what_inductor_compiles_belongs_to_the_program_that_asked(
    recorder: Recorder, watch: JitWatch, timers: dict[str, list[float]], caplog: pytest.LogCaptureFixture
) -> None:
    timers[INDUCTOR] = [9.0]  # before ready
    recorder.record("trace", signature="input_ids: int64[tokens]")
    piece(recorder)
    watch.start()
    timers[INDUCTOR] += [0.5, 1.0]
    for _ in range(3):  # a cache had the third
        piece(recorder)
    watch.look()
    watch.look()
    timers[INDUCTOR].append(2.0)
    piece(recorder, "compile_specialized", bucket=None)
    watch.look()
    inputs = "input_ids: int64[tokens]"
    assert jits(recorder) == [
        ("inductor", "decode 8 general", inputs),
        ("inductor", "decode 8 general", inputs),
        ("inductor", "decode unpadded specialized", inputs),
    ]
    assert [event.seconds for event in recorder.events if event.kind == "jit"] == [0.5, 1.0, 2.0]
    assert recorder.counters["jit_after_ready"] == 3
    assert f"compiled after ready: inductor: decode 8 general ({inputs}), 0.50 s" in caplog.text


def test_programs_that_need_no_inductor_count_nothing(
    recorder: Recorder, watch: JitWatch, timers: dict[str, list[float]]
) -> None:
    """Compiled by a worker, found in a cache, or of another compiler."""
    watch.start()
    piece(recorder)
    piece(recorder, compiler="aot_eager")
    watch.look(last=True)
    assert jits(recorder) == []


def test_a_graph_waits_for_its_program_and_is_counted_at_the_end_anyway(
    recorder: Recorder, watch: JitWatch, timers: dict[str, list[float]]
) -> None:
    """A look in the middle of a compile sees the graph before the event of the program is there."""
    watch.start()
    timers[INDUCTOR] = [0.5]
    watch.look()
    assert jits(recorder) == []
    piece(recorder)
    watch.look()
    timers[INDUCTOR].append(1.0)  # nobody's
    watch.stop()
    assert [name for _, name, _ in jits(recorder)] == ["decode 8 general", "a graph"]


def test_timers_that_somebody_cleared(recorder: Recorder, watch: JitWatch, timers: dict[str, list[float]]) -> None:
    timers[INDUCTOR] = [1.0, 1.0, 1.0]
    watch.start()
    timers.clear()
    watch.look(last=True)
    assert jits(recorder) == []
    timers[INDUCTOR] = [2.0]
    watch.look(last=True)
    assert len(jits(recorder)) == 1


def test_autotuning_of_inductor_is_counted(recorder: Recorder, watch: JitWatch, timers: dict[str, list[float]]) -> None:
    watch.start()
    timers[AUTOTUNE] = [0.25]
    watch.look()
    assert jits(recorder) == [("autotune", "a kernel of Inductor", "")]


def test_what_is_foreseen_is_not_counted(
    recorder: Recorder, watch: JitWatch, timers: dict[str, list[float]], knobs: Any
) -> None:
    watch.start()
    timers[INDUCTOR] = [1.0]
    piece(recorder, bucket=1)
    with watch.foreseen():
        timers[INDUCTOR].append(2.0)
        piece(recorder, bucket=2)
        compiled(knobs.compilation.listener)
        other = threading.Thread(target=compiled, args=(knobs.compilation.listener, "in another thread"))
        other.start()
        other.join()
    timers[INDUCTOR].append(3.0)
    piece(recorder, bucket=4)
    watch.look(last=True)
    assert [name for _, name, _ in jits(recorder)] == ["decode 1 general", "in another thread", "decode 4 general"]


def test_an_unknown_torch_is_no_error(recorder: Recorder, watch: JitWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils")
    watch.start()
    watch.look(last=True)
    assert jits(recorder) == []


def test_a_torch_compile_of_somebody_else(recorder: Recorder, watch: JitWatch) -> None:
    """Really: what Inductor makes of a new graph, and what its cache answers the second time."""

    def halve_in_a_new_way(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 - 0.123456

    watch.start()
    torch.compile(halve_in_a_new_way)(torch.ones(7))
    watch.look(last=True)
    [(what, name, signature)] = jits(recorder)
    assert (what, signature) == ("inductor", "")
    assert name.startswith("torch.compile of halve_in_a_new_way (")
    torch._dynamo.reset()
    torch.compile(halve_in_a_new_way)(torch.ones(7))
    watch.look(last=True)
    assert len(jits(recorder)) == 1


# ---- the thread


def test_it_looks_by_itself_and_ends(
    recorder: Recorder, timers: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit_watch, "LOOK_EVERY_S", 0.01)
    watch = JitWatch(recorder, log_level=logging.DEBUG)
    watch.start()
    [thread] = [thread for thread in threading.enumerate() if thread.name == "piecework-jit-watch"]
    assert thread.daemon
    timers[AUTOTUNE] = [1.0]
    while not jits(recorder):
        assert thread.is_alive()
    watch.stop()
    assert not thread.is_alive()


def test_a_watch_that_nobody_stopped_is_dropped(
    recorder: Recorder, knobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit_watch, "LOOK_EVERY_S", 0.01)
    watch = JitWatch(recorder)
    watch.start()
    [thread] = [thread for thread in threading.enumerate() if thread.name == "piecework-jit-watch"]
    gone = weakref.ref(watch)
    del watch
    thread.join(timeout=60)
    assert not thread.is_alive()
    gc.collect()
    assert gone() is None
    compiled(knobs.compilation.listener)
    assert jits(recorder) == []


def test_a_look_of_another_thread_takes_nothing_of_what_was_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    import piecework.runtime.jit_watch as module

    times: list[float] = []
    monkeypatch.setattr(module, "_torch_timer", lambda key: times if key == module._INDUCTOR else [])
    recorder = Recorder(Counters())
    watch = module.JitWatch(recorder)
    watch.start()
    try:
        with watch.foreseen():
            times.append(6.5)
            looking = threading.Thread(target=watch.look)  # as its own thread does each second
            looking.start()
            looking.join(60)
        times.append(1.0)
    finally:
        watch.stop()
    seen = [event for event in recorder.events if event.kind == "jit"]
    assert [event.seconds for event in seen] == [1.0]
