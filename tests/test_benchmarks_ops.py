"""The benchmarks of single ops, of the whole step against the floor, and of measured bytes run on a CPU and report."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from piecework.ops.traffic import fused_bytes, unfused_bytes

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
CONDITIONS = {"device", "driver", "cpus", "python", "torch", "triton", "commit", "command", "seconds"}

Load = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    """Imports a file of benchmarks/, as running it would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module


def measured(module: ModuleType, file: Path, *options: str, code: int = 0) -> dict[str, Any]:
    assert module.main([*options, "--json", str(file)]) == code
    result: dict[str, Any] = json.loads(file.read_text())
    assert result.keys() >= CONDITIONS
    assert result["command"].startswith(f"python benchmarks/{module.__name__}.py")
    return result


# ---- ops


def test_each_op_has_a_row_a_size_and_a_way_an_implementation(load: Load, tmp_path: Path) -> None:
    bench = load("bench_ops")
    result = measured(bench, tmp_path / "ops.json", "--device", "cpu")
    assert {row["op"] for row in result["rows"]} == {op.name for op in bench.OPS}
    for row in result["rows"]:
        assert "error" not in row
        [op] = [op for op in bench.OPS if op.name == row["op"]]
        natives = ["native, eager", "native, aot_eager"]
        assert list(row["ways"]) == [*natives, *(kernel.name for kernel in op.kernels)]
        for name in natives:
            way = row["ways"][name]
            assert way["relative_error"] <= 1e-6
            assert 0 < way["us_min"] <= way["us"] <= way["us_max"]
            assert math.isclose(way["share_of_copy"], row["bytes"] / way["us"] * 1e6 / result["copy_bytes_per_s"])
        for kernel in op.kernels:
            assert row["ways"][kernel.name] == {"passed_over": "runs on cuda, not on cpu"}
    tokens = {row["op"]: row["bytes"] for row in result["rows"] if row["tokens"] == 3}
    assert tokens["fused_add_rms_norm"] == fused_bytes(3, 64, torch.float32)
    assert tokens["silu_and_mul"] == 3 * 3 * 96 * 4
    assert tokens["rotary_embedding"] == 3 * (2 * (4 + 2) * 16 + 16) * 4


def test_inputs_are_never_zeros_and_never_the_same(load: Load) -> None:
    bench = load("bench_ops")
    for op in bench.OPS:
        first, second = (bench.arguments_of(op, 3, bench.TINY, torch.float32, torch.device("cpu")) for _ in range(2))
        assert first[0].abs().min() > 0
        assert not torch.equal(first[0], second[0])


def test_an_op_that_fails_or_is_wrong_or_late_says_so(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = load("bench_ops")
    file, options = tmp_path / "ops.json", ("--device", "cpu", "--ops", "silu_and_mul")
    result = measured(bench, file, *options, "--max-seconds", "0", code=1)
    assert [row["error"] for row in result["rows"]] == ["not begun: no time left"] * 2
    [kernel] = [kernel for kernel in bench.silu_and_mul.kernels if kernel.name == "triton"]
    wrong = {"device_types": ("cpu",), "available": None, "body": lambda gate_up: gate_up.chunk(2, -1)[0] + 1}
    own = dataclasses.replace(kernel, **wrong)
    monkeypatch.setitem(bench.silu_and_mul._kernels, "triton", own)
    result = measured(bench, file, *options, code=1)
    for row in result["rows"]:
        assert "ValueError: differs from float64 by" in row["ways"]["triton"]["error"]
        assert "us" not in row["ways"]["triton"]
        assert row["ways"]["native, eager"]["us"] > 0
    printed = capsys.readouterr().out
    assert "silu_and_mul, triton: ValueError: differs from float64 by" in printed
    assert re.search(r"error against float64 .*\nsilu_and_mul 1 +\d\.\de-\d\d", printed)
    with pytest.raises(SystemExit):
        bench.main(["--ops", "silu"])
    assert "--ops: expected some of rms_norm, fused_add_rms_norm" in capsys.readouterr().err


# ---- floor


def test_floor_measures_every_way_of_a_step_with_sampling(load: Load, tmp_path: Path) -> None:
    bench = load("bench_floor")
    rows = ("--rows", "2x32,1x16", "--layers", "1")
    result = measured(bench, tmp_path / "floor.json", "--device", "cpu", *rows)
    ours = [f"full, aot_eager, {way}" for way in ("auto", "auto, late check", "native")]
    for row in result["rows"]:
        assert "error" not in row
        assert list(row["ways"]) == [*ours, "plain, reduce-overhead", "plain, max-autotune captured"]
        seconds = (result["weight_bytes"] + row["kv_bytes"]) / result["copy_bytes_per_s"]
        assert math.isclose(row["floor_ms"], seconds * 1e3)
        best = min(way["step_ms"] for name, way in row["ways"].items() if name not in ours)
        for name, way in row["ways"].items():
            assert way["relative_error"] < 1e-5
            assert math.isclose(way["to_floor"], way["step_ms"] / row["floor_ms"])
            assert ("to_plain" in way) == way.get("replayed", False) == (name in ours)
            assert "timeline" not in way  # of a GPU
        assert math.isclose(row["ways"][ours[0]]["to_plain"], row["ways"][ours[0]]["step_ms"] / best)
        assert set(row["ways"][ours[-1]]["ops"].values()) == {"native"}


def test_a_step_ends_with_the_tokens_that_plain_pytorch_takes(load: Load) -> None:
    bench_module = load("bench_floor")
    with bench_module.Bench("cpu", 1, ((2, 16),)) as bench:
        steps = [bench.llama.decode_step(2, 16, seed=seed) for seed in range(2)]
        plain = bench_module.PlainModel(bench.llama.decoder, batch=2, max_len=16, with_head=True)
        plain.fill_caches(bench.llama.decoder, steps[0][1].block_table)
        expected = bench_module.eager_call(plain, steps)(0).argmax(-1).tolist()
        ours, _ = bench.our_way({}, "auto", steps)
        theirs, _ = bench.plain_way(bench.reduced(plain), steps)
        for _ in range(3):  # runs, then replays
            assert [token for token, logprobs in ours(0) if logprobs is None] == expected
        assert theirs(0) == expected


def test_floor_says_what_has_no_time(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--device", "cpu", "--layers", "1", "--rows", "1x16", "--max-seconds", "0")
    [row] = measured(load("bench_floor"), tmp_path / "floor.json", *options, code=1)["rows"]
    assert {way["error"] for way in row["ways"].values()} == {"not begun: no time left"}
    assert "1x16 plain, reduce-overhead: not begun: no time left" in capsys.readouterr().out


def test_floor_prints_a_timeline_by_group(load: Load) -> None:
    groups = {"linears": {"us": 3500.4, "count": 5}}
    kernels = [{"name": "mystery", "us": 7.0, "count": 2, "group": "other"}]
    found = {"step_us": 4000.0, "wait_us": 99.6, "gaps_us": 12.0, "groups": groups, "kernels": kernels}
    way = {"step_ms": 4.0, "to_floor": 1.25, "timeline": found}
    row = {"batch": 1, "context": 128, "floor_ms": 3.2, "ways": {"ours": way}}
    about = dict.fromkeys(CONDITIONS, "x") | {"seconds": 1.0, "layers": 1, "dtype": "bfloat16"}
    text = load("bench_floor").table({"rows": [row], "weight_bytes": 15e9, "copy_bytes_per_s": 4e12, **about})
    assert "1x128 ours, us: linears 3500, gaps 12, wait 100" in text
    assert "2 x mystery" in text


# ---- timeline


def events_of(load: Load, *events: tuple[str, float, float]) -> list[Any]:
    return [load("timeline").Event(name=name, start_us=start, end_us=end) for name, start, end in events]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "linears"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "linears"),
        ("multiply_rows", "linears"),
        ("triton_tem_fused_mm_7", "linears"),
        ("attend_rows", "attention"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<128>", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<1, 2>", "attention"),
        ("void flashinfer::PrefillWithKVCacheKernel<flashinfer::CollectiveMainloop<128>>", "attention"),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<8>", "attention"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8, __nv_bfloat16>", "norm"),
        ("void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16>", "activation"),
        ("rotate_and_store", "store"),
        ("store_rows", "store"),
        ("triton_poi_fused_mul_silu_3", "activation"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", "norm"),
        ("void at::native::reduce_kernel<at::native::ArgMaxOps>", "sampling"),
        ("draw_rows", "sampling"),
        ("Memcpy DtoH (Device -> Pageable)", "copies"),
        ("triton_poi_fused_cos_sin_0", "other"),
    ],
)
def test_kernels_are_grouped_by_name(load: Load, name: str, group: str) -> None:
    assert load("timeline").group_of(name) == group


def test_a_timeline_is_of_the_last_step(load: Load) -> None:
    events = events_of(
        load,
        ("attend_rows", 0, 50),
        ("Memcpy DtoH (Device -> Pageable)", 50, 60),
        ("Memcpy HtoD", 100, 102),
        ("multiply_rows", 110, 150),
        ("attend_rows", 150, 160),
        ("multiply_rows", 155, 175),  # beside the one before
        ("Memcpy DtoH (Device -> Pageable)", 180, 183),
        ("Memcpy DtoH (Device -> Pageable)", 184, 185),
    )
    found = load("timeline").timeline_of(reversed(events))
    assert (found["step_us"], found["wait_us"], found["gaps_us"]) == (125, 40, 14)
    assert found["groups"] == {
        "linears": {"us": 60, "count": 2},
        "attention": {"us": 10, "count": 1},
        "copies": {"us": 6, "count": 3},
    }
    assert found["kernels"][0] == {"name": "multiply_rows", "us": 60, "count": 2, "group": "linears"}


def test_a_timeline_needs_two_steps(load: Load) -> None:
    with pytest.raises(ValueError, match="expected two steps that end with a copy to the host, got 1 among 2"):
        load("timeline").timeline_of(events_of(load, ("attend_rows", 0, 5), ("Memcpy DtoH", 5, 6)))


# ---- measured bytes

PRINTED = """==PROF== Connected to process 7
a line of the program
==PROF== Disconnected
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","norm_rows","dram__bytes_read.sum","byte","30,720"
"0","7","norm_rows","dram__bytes_write.sum","byte","1,024"
"1","7","other","dram__bytes_read.sum","byte","256"
"1","7","other","dram__bytes_write.sum","byte","0"
"""


def test_without_a_gpu_the_model_stands_alone_and_the_result_says_why(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ncu = load("ncu_traffic")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = measured(ncu, tmp_path / "ncu.json", "--tokens", "1,8")
    assert result["unavailable"] == "no CUDA device"
    for row in result["rows"]:
        sizes = (row["tokens"], 4096, torch.bfloat16)
        assert row["model_bytes"] == {"fused": fused_bytes(*sizes), "unfused": unfused_bytes(*sizes)}
        assert row["ways"] == {}
    assert "not measured: no CUDA device" in capsys.readouterr().out


def with_ncu(ncu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """As on a machine with a GPU, where ncu is this shell script."""
    program = tmp_path / "ncu"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ncu, "conditions", lambda device: dict.fromkeys(CONDITIONS, "x"))
    monkeypatch.setattr(ncu, "find_ncu", lambda: str(program))
    monkeypatch.setattr(ncu, "ways", lambda: [ncu.UNFUSED, "triton"])


def test_the_bytes_of_all_kernels_are_beside_the_models(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ncu = load("ncu_traffic")
    (tmp_path / "printed").write_text(PRINTED)
    with_ncu(ncu, monkeypatch, tmp_path, f'echo "$@" >> {tmp_path}/calls; cat {tmp_path}/printed')
    result = measured(ncu, tmp_path / "ncu.json", "--tokens", "1")
    [row] = result["rows"]
    assert row["ways"]["triton"] == {
        "read_bytes": 30976,
        "written_bytes": 1024,
        "moved_bytes": 32000,
        "kernels": ["norm_rows", "other"],
    }
    assert "unavailable" not in result
    calls = (tmp_path / "calls").read_text().splitlines()
    for name, call in zip(row["ways"], calls, strict=True):
        assert f"--only {name} --tokens 1 --hidden 4096" in call
    assert "--metrics dram__bytes_read.sum,dram__bytes_write.sum" in calls[0]
    assert "0.78 x  2" in capsys.readouterr().out


def test_no_right_to_the_counters_is_said_and_no_failure(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ncu = load("ncu_traffic")
    with_ncu(ncu, monkeypatch, tmp_path, 'echo "==ERROR== ERR_NVGPUCTRPERM - no permission"; exit 1')
    result = measured(ncu, tmp_path / "ncu.json", "--tokens", "1,8")
    assert result["unavailable"] == "no right to use the GPU's counters (ERR_NVGPUCTRPERM)"


def test_what_ncu_does_not_print_is_an_error(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ncu = load("ncu_traffic")
    with_ncu(ncu, monkeypatch, tmp_path, 'echo "==ERROR== it broke" >&2; exit 1')
    [row] = measured(ncu, tmp_path / "ncu.json", "--tokens", "1", code=1)["rows"]
    for way in row["ways"].values():
        assert way["error"].startswith("ValueError: ncu printed no dram__bytes_read.sum and dram__bytes_write.sum; its")
        assert "it broke" in way["error"]


def test_without_ncu_the_reason_says_where_it_was_looked_for(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    ncu = load("ncu_traffic")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "no ncu on PATH" in ncu.unavailable(None)
    assert ncu.unavailable("/usr/bin/ncu") is None
