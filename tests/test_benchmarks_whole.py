"""benchmarks/bench_whole.py runs, on the tape, and reports what it measured."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
OPTIONS = ("--device", "cpu", "--layers", "1", "--mode", "default")
"""The mode that tries nothing out: seconds."""
WAYS = [
    "plain eager",
    "full, aot_eager",
    "tc_piecewise, aot_eager",
    "plain torch.compile, captured",
    "full, whole",
]


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("bench_whole")


def run(bench: ModuleType, file: Path, *options: str, code: int = 0) -> dict[str, Any]:
    assert bench.main([*OPTIONS, *options, "--json", str(file)]) == code
    result: dict[str, Any] = json.loads(file.read_text())
    return result


@pytest.mark.slow
def test_every_way_is_measured_on_the_tape(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    emptied: list[bool] = []

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        """In place of empty caches, in which C++ compiles for another half a minute."""
        emptied.append(True)
        yield

    monkeypatch.setattr(bench, "own_caches", noted)
    result = run(bench, tmp_path / "results" / "whole.json", "--rows", "2x16,1x32")
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before
    assert len(emptied) == 2  # for the wholes of the first row
    first, second = result["rows"]
    assert (first["shares_caches"], second["shares_caches"]) == (False, True)
    for row in result["rows"]:
        assert list(row["ways"]) == WAYS
        plain_ms = row["ways"]["plain torch.compile, captured"]["step_ms"]
        for name, way in row["ways"].items():
            assert "error" not in way
            assert way["to_plain"] == way["step_ms"] / plain_ms
            assert name == "plain eager" or (way["relative_error"] < 1e-5 and way["compile_s"] > 0)
            assert way.get("replayed", False) == (name.partition(",")[0] in ("full", "tc_piecewise"))
            assert "peak_bytes" not in way  # of CUDA's allocator
        ours = row["ways"]["full, whole"]
        assert ours["program"] == ("whole" if ours["whole"]["taken"] else "general")
        assert ours["whole"]["replaces"] == "general"
        assert ours["whole"]["taken"] == (ours["whole"]["whole_ms"] <= 0.99 * ours["whole"]["ordinary_ms"])
    # The trace and the general program are of the first row; a whole forward is of its own bucket.
    compiles = [row["ways"]["full, whole"]["compiles"].keys() for row in result["rows"]]
    assert compiles == [{"trace", "compile_general", "compile_whole"}, {"compile_whole"}]
    assert not second["ways"]["full, aot_eager"]["compiles"]
    printed = capsys.readouterr().out
    assert printed.count("full, whole: whole ") == 2
    assert "ms on padding: " in printed


def test_a_way_that_fails_or_has_no_time_is_a_row(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "whole.json"
    [row] = run(bench, file, "--rows", "1x16", "--max-seconds", "0", code=1)["rows"]
    assert row["ways"] == {name: {"error": "not begun: no time left"} for name in WAYS}

    def broken(self: object, *arguments: Any) -> None:
        raise KeyError("broken")

    make = bench.Bench.runtime
    monkeypatch.setattr(bench.Bench, "compiled_call", broken)
    # A runtime that compiles nothing whole is not to pass for one that does.
    monkeypatch.setattr(bench.Bench, "runtime", lambda self, backend, is_whole: make(self, backend, False))
    [row] = run(bench, file, "--rows", "1x16", code=1)["rows"]
    assert row["ways"]["plain torch.compile, captured"] == {"error": "KeyError: 'broken'"}
    assert row["ways"]["full, whole"]["error"].startswith("ValueError: no whole forward was compiled")
    assert "to_plain" not in row["ways"]["full, aot_eager"]
    printed = capsys.readouterr().out
    assert "1x16 plain torch.compile, captured: KeyError: 'broken'" in printed


def test_caches_of_a_ways_own_are_empty_and_taken_back(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    with bench.own_caches():
        inside = [Path(os.environ[name]) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
        assert inside[0].parent.is_dir()
        assert not any(path.exists() and list(path.iterdir()) for path in inside)
    assert not inside[0].parent.exists()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere"
    assert "TRITON_CACHE_DIR" not in os.environ


def test_a_mode_that_makes_graphs_of_its_own_is_refused(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu", "--mode", "max-autotune"])
    assert "--mode" in capsys.readouterr().err
