"""The attention benchmark measures Triton beside FlashInfer; here torch does the work of both, behind stand-ins.

That it runs with our Triton kernels is for tests/ops/test_triton_kernels.py, which has their interpreter.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from piecework.ops import attention_rows, attention_table, flashinfer_kernels, torch_native, torch_static

from .ops import fake_flashinfer

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"

Measure = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("bench_attention")


@pytest.fixture(autouse=True)
def stand_ins(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlashInfer is the stand-in, on the CPU in float32; what the Triton kernels do is done by torch."""

    def ours(layers: Any, tuning: Any = None) -> Any:
        forward, context = torch_static.paged_attention, layers.fresh_context()
        return [functools.partial(forward, *each, layers.shape.scale, 0, context) for each in layers.tensors()]

    def stores(layers: Any) -> Any:
        slots = layers.context.slot_mapping
        return [functools.partial(torch_native.store, *each[1:5], slots) for each in layers.tensors()]

    monkeypatch.setattr(bench.Layers, "ours", ours)
    monkeypatch.setattr(bench.Layers, "stores", stores)
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer.module())
    monkeypatch.setattr(attention_rows, "FLASHINFER_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(attention_rows, "FLASHINFER_DTYPES", (torch.float32,))
    monkeypatch.setattr(attention_rows, "FLASHINFER_HEAD_SIZES", (16,))
    monkeypatch.setattr(flashinfer_kernels, "_BUILT", set())
    attention_table.choose.cache_clear()
    yield
    attention_table.choose.cache_clear()


@pytest.fixture
def measure(bench: ModuleType, tmp_path: Path) -> Measure:
    def run(*options: str, code: int = 0) -> dict[str, Any]:
        file = tmp_path / "attention.json"
        assert bench.main(["--device", "cpu", "--json", str(file), *options]) == code
        result: dict[str, Any] = json.loads(file.read_text())
        assert result.keys() >= {"device", "torch", "triton", "commit", "command", "seconds", "flashinfer"}
        return result

    return run


def test_both_are_timed_and_compared_and_the_faster_is_named(
    measure: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    result = measure()
    assert result["flashinfer"]["build_s"].keys() == {"decode", "prefill"}
    assert all(seconds > 0 for seconds in result["flashinfer"]["build_s"].values())
    assert [row["new"] for row in result["rows"]] == [20, 1]
    for row in result["rows"]:
        triton, flashinfer = row["ways"]["triton"], row["ways"]["flashinfer"]
        for way in (triton, flashinfer):
            assert way["relative_error"] < 1e-5
            assert 0 < way["us_min"] <= way["us"] <= way["us_max"]
        assert row["new"] > 1 or flashinfer["plan_us"] > 0  # a prompt's is a difference of two times
        assert row["us"] == triton["us"]
        assert math.isclose(row["flashinfer_to_triton"], flashinfer["us"] / triton["us"])
        assert row["faster"] == ("triton" if flashinfer["us"] >= triton["us"] else "flashinfer")
        assert row["store_us"] > 0
        assert row["sdpa_us"] > 0
    printed = capsys.readouterr().out
    assert "Triton FlashInfer  ratio     faster   plan" in printed
    assert f"{result['rows'][0]['flashinfer_to_triton']:.2f}" in printed


def test_nothing_is_planned_while_it_is_timed(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    in_turn = bench.time_in_turn

    def watched(*arguments: Any) -> None:
        fake_flashinfer.CALLS.clear()
        in_turn(*arguments)
        planned.append(len([call for call in fake_flashinfer.CALLS if "plan" in call]))
        assert len(fake_flashinfer.CALLS) > 4

    monkeypatch.setattr(bench, "time_in_turn", watched)
    device = torch.device("cpu")
    for shape in bench.shapes_of(device, [], []):
        assert "us" in bench.measure(shape, device, 1e9, {"build_s": {}})["ways"]["flashinfer"]
    assert planned == [0, 0]


def test_a_missing_package_is_a_way_that_says_so(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention_rows, "missing", lambda package, pip: f"not installed: pip install {pip}")
    result = measure()
    reason = {"passed_over": "not installed: pip install flashinfer-python"}
    assert result["flashinfer"] == reason
    for row in result["rows"]:
        assert row["ways"]["flashinfer"] == reason
        assert row["us"] > 0
        assert "faster" not in row
    assert "FlashInfer: passed_over not installed: pip install flashinfer-python" in capsys.readouterr().out


def test_a_build_that_fails_is_tried_once_and_triton_is_measured(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[None] = []

    def plan(self: Any, *arguments: Any, **options: Any) -> None:
        tries.append(None)
        raise RuntimeError("Ninja build failed.")

    monkeypatch.setattr(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, "plan", plan)
    result = measure(code=1)
    assert result["flashinfer"]["error"] == "RuntimeError: Ninja build failed."
    assert result["flashinfer"]["build_s"]["prefill"] is None
    assert len(tries) == 1
    for row in result["rows"]:
        assert row["ways"]["flashinfer"] == {"passed_over": "it was not built: RuntimeError: Ninja build failed."}
        assert row["us"] > 0


def test_a_way_that_computes_something_else_is_not_timed(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attend = fake_flashinfer._Wrapper._attend
    monkeypatch.setattr(fake_flashinfer._Wrapper, "_attend", lambda *arguments: 1.1 * attend(*arguments))
    for row in measure(code=1)["rows"]:
        assert row["ways"]["flashinfer"]["error"].startswith("ValueError: differs from float64 by 0.1")
        assert "us" not in row["ways"]["flashinfer"]
        assert row["us"] > 0
        assert "faster" not in row
    assert "flashinfer: ValueError: differs from float64 by 0.1" in capsys.readouterr().out


def test_rows_without_time_say_so(measure: Measure, capsys: pytest.CaptureFixture[str]) -> None:
    result = measure("--max-seconds", "0", code=1)
    assert [row["error"] for row in result["rows"]] == ["not begun: no time left"] * 2
    assert result["flashinfer"]["build_s"].keys() == {"decode", "prefill"}
    assert "2 x 1 + 39" in capsys.readouterr().out


def test_the_reference_sees_cached_tokens_and_requests_of_a_large_cache_are_sampled(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers_module = sys.modules["attention_layers"]
    shape = bench.Shape(num_reqs=3, new=5, cached=18, num_heads=4, num_kv_heads=2, head_size=16)
    layers = bench.Layers(shape, torch.device("cpu"), 1)
    [call, *_] = layers.ours()
    call()
    monkeypatch.setattr(layers_module, "REFERENCE_ROWS", 2)
    assert layers.error(call, layers.reference()) < 1e-5
    monkeypatch.setattr(layers_module, "MAX_CHECKED_BYTES", shape.kv_bytes // 2)
    assert layers.reference().shape == (2, 5, 4, 16)
    assert layers.error(call, layers.reference()) < 1e-5
    before = layers.reference()
    layers.caches[0][1][int(layers.context.block_table[2, 0])] += 1
    assert layers.error(call, layers.reference()) < 1e-5
    assert torch.equal(layers.reference()[0], before[0])
    assert layers.error(call, before) > 1e-2
