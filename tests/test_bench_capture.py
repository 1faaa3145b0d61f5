"""benchmarks/bench_capture.py runs, on the tape, and reports what it measured."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("bench_capture")


def test_every_way_is_measured_on_the_tape(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results" / "capture.json"
    assert bench.main(["--device", "cpu", "--layers", "2", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    full, piecewise = result["ways"]
    assert [full["backend"], piecewise["backend"]] == ["full", "tc_piecewise"]
    # One segment for each piece: before each attention, and after the last.
    assert (full["segments"], piecewise["segments"]) == (1, 3)
    for way in (full, piecewise):
        assert way["buckets"] == len(way["entry_bytes"]) == 4
        assert way["pool_ratio"] >= 1
        assert set(way["step_ms"]) == {"1", "4"}
    assert result["command"].endswith(f"bench_capture.py --device cpu --layers 2 --json {file}")
    printed = capsys.readouterr().out
    assert "full, eager" in printed
    assert "tc_piecewise, aot_eager" in printed


def test_a_way_that_fails_or_has_no_time_is_a_row(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "WAYS", (("full", "eager"), ("breakable", "eager")))

    def broken(self: object, runtime: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(bench.Bench, "way", broken)
    assert bench.main(["--device", "cpu", "--layers", "1"]) == 1
    assert "full, eager              KeyError: 'broken'" in capsys.readouterr().out
    assert bench.main(["--device", "cpu", "--layers", "1", "--max-seconds", "0"]) == 1
    assert "not begun: no time left" in capsys.readouterr().out
