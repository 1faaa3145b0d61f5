"""What a run remembers, and what the next one makes of it before its first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import piecework as pw

from .toy_captures import Slots, Toy, config_of, plain, step, x_of


def runtime_of(file: Path, backend: str = "full", compiler: str = "aot_eager", **options: Any) -> Any:
    options = {"startup": "tiered", "compile_workers": 0, "manifest": str(file), **options}
    return pw.Runtime(
        Toy(),
        config_of(backend, compiler, **options),
        dynamic_dims={"x": 0},
        example_inputs={"x": x_of(2)},
        example_context=Slots(torch.empty(0, dtype=torch.int64)),
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The manifest of a run in which bucket 8 came often, 2 once, 4 never, and once 9 tokens."""
    path = tmp_path / "manifest.json"
    with runtime_of(path) as runtime:
        for seed in range(6):
            step(runtime, 7, seed)
        step(runtime, 2)
        step(runtime, 9)
        assert runtime.wait_settled(120)
    return path


def buckets(runtime: Any) -> list[tuple[int | None, str, bool]]:
    entries = runtime.explain().as_dict()["entries"]
    return [(e["bucket"], e["program"], e["captured"]) for e in entries if e["phase"] == "decode"]


def test_what_is_remembered(file: Path) -> None:
    decode = json.loads(file.read_text())["phases"]["decode"]
    assert {bucket: record["steps"] for bucket, record in decode["buckets"].items()} == {"8": 6, "2": 1}
    assert decode["buckets"]["8"]["captured"]
    assert decode["buckets"]["8"]["program"] == "general"
    assert decode["missed"] == {"9": 1}


def test_the_next_run_begins_with_what_will_come(file: Path) -> None:
    with runtime_of(file) as runtime:
        # Nothing of it was waited for.
        assert [bucket for bucket, _, _ in buckets(runtime)] == [2, 8]
        assert runtime.counters["captures"] == 0
        opened = [e.scope.bucket for e in runtime.events if e.kind == "entry" and str(e.scope.phase) == "decode"]
        assert opened == [8, 2]


@pytest.mark.parametrize(("backend", "compiler"), [("full", "aot_eager"), ("full", "eager"), ("tc_piecewise", "eager")])
def test_a_large_budget_is_like_eager(file: Path, backend: str, compiler: str) -> None:
    own = file.with_name("own.json")
    with runtime_of(own, backend, compiler) as runtime:
        for seed in range(3):
            step(runtime, 7, seed)
    with runtime_of(own, backend, compiler, startup_budget=120) as runtime:
        program = "eager" if (backend, compiler) == ("full", "eager") else "general"
        assert buckets(runtime) == [(8, program, True)]
        ready = next(event.at_s for event in runtime.events if event.kind == "ready")
        assert all(event.at_s <= ready for event in runtime.events if event.kind in ("capture", "promote", "trace"))
        reference = Toy()
        with runtime.counters.expect(captures=0, replays=1):
            torch.testing.assert_close(step(runtime, 7), plain(reference, 7))
        assert runtime.counters["startup_budget_hits"] == 0
        assert runtime.counters["in_step_seconds"] == 0


def test_a_budget_that_is_too_small_is_kept_and_counted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from piecework.runtime.building import WorkerBuilder

    go = threading.Event()
    precompile = WorkerBuilder.precompile

    def held(builder: WorkerBuilder, *arguments: Any) -> None:
        assert go.wait(120)
        precompile(builder, *arguments)

    monkeypatch.setattr(WorkerBuilder, "precompile", held)
    try:
        with runtime_of(file, startup_budget=0.5) as runtime:
            assert runtime.ready
            assert not runtime.settled
            assert runtime.counters["startup_budget_hits"] == 1
            assert {program for _, program, _ in buckets(runtime)} == {"eager"}
            with runtime.counters.expect(replays=1):  # the eager forwards had time
                step(runtime, 7)
            go.set()
            assert runtime.wait_settled(120)
            assert (8, "general", True) in buckets(runtime)
    finally:
        go.set()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}', '{"format": 1, "phases": {"decode": 3}}'])
def test_a_file_that_is_none_is_ignored_with_the_reason(tmp_path: Path, content: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(content)
    with runtime_of(path) as runtime:
        assert [text for text in runtime.counters["warnings"] if "manifest" in text]
        step(runtime, 4)
    assert json.loads(path.read_text())["phases"]["decode"]["buckets"]["4"]["steps"] == 1
    assert (tmp_path / "manifest.json.bad").read_text() == content


def test_of_another_model_nothing_is_taken(file: Path) -> None:
    config = config_of("full", "aot_eager", startup="tiered", compile_workers=0, manifest=str(file))
    with pw.Runtime(
        torch.nn.Linear(8, 8), config, dynamic_dims={"input": 0}, example_inputs={"input": x_of(2)}
    ) as runtime:
        assert [text for text in runtime.counters["warnings"] if "manifest" in text]
        # No bucket is known to come: the program for all sizes is.
        assert [entry.bucket for entry in runtime.entries if str(entry.phase) == "decode"] == [None]


def test_a_path_that_cannot_be_written_costs_no_step(tmp_path: Path) -> None:
    with runtime_of(tmp_path / "nowhere" / "manifest.json") as runtime:
        assert [text for text in runtime.counters["warnings"] if "manifest" in text]
        step(runtime, 4)
    with pytest.raises(pw.ConfigError, match="manifest: expected the path of a file, got the directory"):
        runtime_of(tmp_path)


def test_a_compile_after_ready_is_seen_and_a_promotion_is_not(tmp_path: Path) -> None:
    with runtime_of(tmp_path / "manifest.json") as runtime:
        step(runtime, 4)
        assert runtime.wait_settled(120)
        assert runtime.counters["jit_after_ready"] == 0
        data = runtime.manifest_data()
        assert data["phases"]["decode"]["buckets"]["4"]["steps"] == 1


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "without example_inputs"),
        ({"example_inputs": {"x": x_of(2)}}, "without an example_context"),
    ],
)
def test_a_budget_that_can_do_little_says_so(file: Path, more: dict[str, Any], text: str) -> None:
    options = {"startup": "tiered", "compile_workers": 0, "manifest": str(file), "startup_budget": 60}
    with pw.Runtime(Toy(), config_of("full", "aot_eager", **options), dynamic_dims={"x": 0}, **more) as runtime:
        assert [warning for warning in runtime.counters["warnings"] if text in warning]
        assert runtime.counters["captures"] == 0
