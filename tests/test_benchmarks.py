"""The benchmarks run on a CPU and report what they measured; the baseline computes what ours computes."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import piecework as pw

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
    assert module.main(["--device", "cpu", "--json", str(file), *options]) == code
    result = json.loads(file.read_text())
    assert result.keys() >= CONDITIONS
    assert result["command"].startswith(f"python benchmarks/{module.__name__}.py --device cpu")
    return result


def tiny(load: Load, num_layers: int = 2) -> Any:
    torch.manual_seed(0)
    return load("llama").Llama("cpu", torch.float32, num_layers=num_layers, shape="tiny", num_blocks=12)


def test_the_baseline_computes_our_logits_from_the_same_tensors(load: Load) -> None:
    llama, plain_model = tiny(load), load("plain_model")
    prompt, prompt_context = llama.step([48], [48], seed=3)
    tokens, context = llama.decode_step(3, 48, seed=4)
    with pw.Runtime(
        load("llama").WithHead(llama.decoder),
        pw.GraphConfig(prefill={"backend": "disabled"}, decode={"backend": "disabled"}),
        dynamic_dims={"input_ids": 0, "positions": 0},
    ) as runtime:
        plain = plain_model.PlainModel(llama.decoder, batch=3, max_len=48, with_head=True)
        plain.fill_caches(llama.decoder, context.block_table)
        ours = runtime.run("decode", tokens, context=context)
        with torch.inference_mode():
            theirs = plain(tokens["input_ids"][:, None], tokens["positions"][:1])[:, 0]
            torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
            plain.layers[0].v_cache.mul_(2)
            assert not torch.allclose(plain(tokens["input_ids"][:, None], tokens["positions"][:1])[:, 0], ours)

        single = plain_model.PlainModel(llama.decoder, batch=1, max_len=48, with_head=True)
        ours = runtime.run("prefill", prompt, context=prompt_context)
        with torch.inference_mode():
            theirs = single(prompt["input_ids"][None], prompt["positions"])[0]
            torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
            cached = llama.decoder.layers[1].self_attn.k_cache[prompt_context.block_table[0].long()].flatten(0, 1)
            torch.testing.assert_close(single.layers[1].k_cache[0], cached.transpose(0, 1), rtol=1e-4, atol=1e-5)
            with pytest.raises(ValueError, match="expected 1 or 48 tokens"):
                single(prompt["input_ids"][None, :7], prompt["positions"][:7])
    assert plain.layers[1].qkv is llama.decoder.layers[1].self_attn.qkv_proj.weight
    assert plain.embed is llama.decoder.embed_tokens.weight


def test_steps_have_blocks_of_their_own_and_caches_may_be_shared(load: Load) -> None:
    llama = tiny(load, num_layers=4)
    _, context = llama.decode_step(3, 50)
    blocks = context.block_table.flatten().tolist()
    assert len(set(blocks)) == len(blocks) == 12
    llama.allocate_caches(5, num_distinct=2)
    caches = [layer.self_attn.k_cache for layer in llama.decoder.layers]
    assert caches[0] is caches[2]
    assert caches[1] is caches[3]
    assert caches[0] is not caches[1]
    assert all(cache.shape[0] == 5 and cache.std() > 0.5 for cache in caches)
    assert llama.kv_bytes_per_token == 4 * 2 * 2 * 16 * 4
    # The table, and a layer's qkv (4 + 2 * 2 heads), o, gate_up, down and two norms, and the last norm.
    a_layer = 64 * (128 + 64 + 256 + 128 + 2)
    assert llama.weight_bytes == 4 * (256 * 64 + 4 * a_layer + 64)


def test_decode_measures_every_way_against_the_floor(load: Load, tmp_path: Path) -> None:
    file = tmp_path / "results" / "decode.json"
    result = measured(load("bench_decode"), file, "--layers", "2", "--rows", "2x32,2x64")
    short, long = result["rows"]
    assert {"layers", "dtype", "with_logits", "weight_bytes", "copy_bytes_per_s", "rounds"} <= result.keys()
    assert list(short["ways"]) == [
        "plain eager",
        "plain torch.compile",
        "uncaptured eager",
        "uncaptured general",
        "full, aot_eager",
        "tc_piecewise, aot_eager",
        "full, eager",
        "breakable, eager",
    ]
    for name, way in short["ways"].items():
        assert way["step_ms_min"] <= way["step_ms"] <= way["step_ms_max"]
        assert way["wall_ms"] > 0
        assert way["steps"] >= 9
        assert name == "plain eager" or way["relative_error"] < 1e-5
        assert way.get("replayed", False) == (name.partition(",")[0] in ("full", "tc_piecewise", "breakable"))
    assert short["kv_bytes"] == 2 * 32 * 2 * 2 * 2 * 16 * 4
    seconds = (result["weight_bytes"] + short["kv_bytes"]) / result["copy_bytes_per_s"]
    assert math.isclose(short["floor_ms"], seconds * 1e3)
    compiled_ms = short["ways"]["plain torch.compile"]["step_ms"]
    for way in short["ways"].values():
        assert math.isclose(way["to_floor"], way["step_ms"] / short["floor_ms"])
        assert math.isclose(way["to_compiled"], way["step_ms"] / compiled_ms)
    [alone] = long["ways"].values()
    assert math.isclose(alone["to_floor"], alone["step_ms"] / long["floor_ms"])
    assert "to_compiled" not in alone
    assert list(long["ways"]) == ["full, aot_eager"]
    assert long["ways"]["full, aot_eager"]["replayed"]
    assert long["distinct_caches"] == 1


def test_decode_says_what_failed_and_what_has_no_time(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, file = load("bench_decode"), tmp_path / "decode.json"
    rows = ("--layers", "1", "--rows", "2x16,1x64")
    result = measured(bench, file, *rows, "--max-seconds", "0", code=1)
    assert [row["error"] for row in result["rows"]] == ["not begun: no time left"] * 2
    assert "2x16 : not begun: no time left" in capsys.readouterr().out

    make = bench.Bench.runtime

    def broken(self: Any, backend: str, compiler: str) -> Any:
        if (backend, compiler) == ("breakable", "eager"):
            raise KeyError("broken")
        # One that captures nothing is not to pass for a replay.
        return make(self, "disabled" if (backend, compiler) == ("full", "eager") else backend, compiler)

    monkeypatch.setattr(bench.Bench, "runtime", broken)
    [row] = measured(bench, file, "--layers", "1", "--rows", "2x16", code=1)["rows"]
    assert row["ways"]["breakable, eager"] == {"error": "KeyError: 'broken'"}
    assert row["ways"]["full, eager"]["error"].startswith("no replay")
    assert "error" not in row["ways"]["tc_piecewise, aot_eager"]
    assert "2x16 breakable, eager: KeyError: 'broken'" in capsys.readouterr().out


def test_prefill_measures_every_way_at_each_size(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, file = load("bench_prefill"), tmp_path / "prefill.json"
    result = measured(bench, file, "--layers", "1")
    assert [row["tokens"] for row in result["rows"]] == [16, 32]
    assert not result["with_logits"]
    for row in result["rows"]:
        assert list(row["ways"]) == ["plain eager", "uncaptured eager", "tc_piecewise, aot_eager", "breakable, eager"]
        eager_ms = row["ways"]["plain eager"]["step_ms"]
        for name, way in row["ways"].items():
            assert math.isclose(way["speed_of_plain_eager"], eager_ms / way["step_ms"])
            assert math.isclose(way["tokens_per_s"], row["tokens"] / way["step_ms"] * 1e3)
            assert name == "plain eager" or way["relative_error"] < 1e-5
            assert way.get("replayed", False) == (name not in ("plain eager", "uncaptured eager"))
    assert "tc_piecewise, aot_eager, ms" in capsys.readouterr().out

    def broken(plain: Any, steps: Any) -> Any:
        raise KeyError("broken")

    monkeypatch.setattr(bench, "plain_call", broken)
    rows = measured(bench, file, "--layers", "1", code=1)["rows"]
    assert rows[0]["ways"]["plain eager"] == {"error": "KeyError: 'broken'"}
    assert "step_ms" in rows[0]["ways"]["breakable, eager"]
    assert "speed_of_plain_eager" not in rows[0]["ways"]["breakable, eager"]
    rows = measured(bench, file, "--layers", "1", "--max-seconds", "0", code=1)["rows"]
    assert [row["error"] for row in rows] == ["not begun: no time left"] * 2


def test_dispatch_takes_a_step_apart(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, file = load("bench_dispatch"), tmp_path / "dispatch.json"
    spies = ("--spy", "whole=piecework.runtime.runtime:Runtime.run", "--spy", "gone=piecework.runtime.runtime:gone")
    result = measured(bench, file, "--layers", "2", "--profile", *spies)
    assert result["capture_device"] == "null"
    compiled, full, piecewise, breakable = result["ways"]
    assert (compiled["segments"], compiled["split_calls"]) == (1, 0)
    assert (full["segments"], full["split_calls"]) == (1, 0)
    assert (piecewise["segments"], piecewise["split_calls"]) == (3, 2)
    assert (breakable["segments"], breakable["split_calls"]) == (3, 2)
    for way in result["ways"]:
        assert way["total_us"] > way["beyond_replay_us"] > 0
        assert way["beyond_replay_us"] >= way["beyond_replay_us_min"] > 0
        assert way["total_us"] > way["replay_us"] > 0
        assert way["segments_us"] > 0
        assert way["parts_us"]["whole"] > 0
        assert "gone" not in way["parts_us"]
        shares = [entry["share"] for entry in way["profile"]]
        assert shares == sorted(shares, reverse=True)
        assert 0.3 < sum(shares) <= 1.001
        assert any(entry["function"].startswith(("runtime/", "graphs/")) for entry in way["profile"])
        assert all(entry["calls_a_step"] > 0 for entry in way["profile"])
    assert "runtime/" in capsys.readouterr().out

    def broken(self: Any, runtime: Any) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(bench.Bench, "warm_up", broken)
    result = measured(bench, file, "--layers", "1", code=1)
    assert [way["error"] for way in result["ways"]] == ["KeyError: 'broken'"] * 4
    result = measured(bench, file, "--layers", "1", "--max-seconds", "0", code=1)
    assert [way["error"] for way in result["ways"]] == ["not begun: no time left"] * 4


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        ("bench_decode", ("--rows", "1x"), "--rows: expected an integer of 1 or more, got ''"),
        ("bench_decode", ("--rows", "128"), "--rows: expected requests x tokens with commas, such as .*, got '128'"),
        ("bench_decode", ("--layers", "0"), "--layers: expected an integer of 1 or more, got '0'"),
        ("bench_prefill", ("--layers", "-2"), "--layers: expected an integer of 1 or more, got '-2'"),
        ("bench_capture", ("--layers", "two"), "--layers: expected an integer of 1 or more, got 'two'"),
        ("bench_dispatch", ("--layers", "0"), "--layers: expected an integer of 1 or more, got '0'"),
        ("bench_dispatch", ("--spy", "fill"), "--spy: expected NAME=MODULE:FUNCTION, got 'fill'"),
    ],
)
def test_an_option_that_is_wrong_is_refused_at_once(
    load: Load, capsys: pytest.CaptureFixture[str], script: str, options: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit):
        load(script).main(["--device", "cpu", *options])
    assert re.search(said, capsys.readouterr().err)


def test_a_way_that_computes_something_else_is_an_error(load: Load) -> None:
    report = load("report")
    x = torch.ones(4)
    way: dict[str, Any] = {}
    report.compare(way, x * 1.05, x)
    assert way["relative_error"] == pytest.approx(0.05, rel=1e-3)
    for wrong in (x * 1.3, x * float("nan")):
        assert report.attempt(way, lambda wrong=wrong: report.compare(way, wrong, x)) is None
        assert way.pop("error").startswith("ValueError: differs from plain eager by")


def test_ways_run_in_turn_and_one_that_fails_is_left_out(load: Load) -> None:
    clock, order = load("timing").Clock(torch.device("cpu")), []

    def call(name: str, i: int) -> None:
        order.append(name)
        if name == "bad" and len(order) > 4:
            raise KeyError("broken")

    rows: dict[str, dict[str, Any]] = {"bad": {}, "good": {}, "not called": {}}
    calls = {name: lambda i, name=name: call(name, i) for name in ("bad", "good")}
    clock.in_turn(calls, rows, rounds=2, target_ms=0)
    assert rows["bad"] == {"error": "KeyError: 'broken'"}
    assert rows["good"].keys() >= {"step_ms", "wall_ms", "steps"}
    assert rows["not called"] == {}
    assert order.count("good") > 2 * 6


def test_results_are_whole_and_the_inductor_cache_is_of_this_run(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = load("report")
    report.write_json(None, {})
    report.write_json(tmp_path / "a" / "b.json", {"x": 1})
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.json"]
    for before in ("/somewhere", None):
        if before is None:
            monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        else:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
        with report.inductor_cache():
            folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
            assert folder.is_dir()
        assert not folder.exists()
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


def is_gone(pid: int) -> bool:
    """Whether a process has ended; nobody may have waited for it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_gpu_run_stops_what_takes_too_long_and_what_that_started(load: Load, tmp_path: Path) -> None:
    gpu_run = load("gpu_run")
    log, child = tmp_path / "log", tmp_path / "child"
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    assert gpu_run.run([sys.executable, "-c", script], log, timeout_s=3) == -9
    assert log.read_text().endswith("stopped after 3 s\n")
    for _ in range(100):
        if is_gone(int(child.read_text())):
            break
        time.sleep(0.05)
    else:
        pytest.fail("the process that it started still runs")
    assert gpu_run.run([sys.executable, "-c", "raise SystemExit(3)"], log, timeout_s=30) == 3


def test_gpu_run_reports_parts_that_fail_and_a_sanitizer_that_is_not_there(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_run = load("gpu_run")
    monkeypatch.setattr(gpu_run, "find_sanitizer", lambda: None)
    (tmp_path / "gpu_gone.json").write_text("{}")
    os.utime(tmp_path / "gpu_gone.json", (0, 0))  # of an earlier run
    parts = {"gone": gpu_run.benchmark("bench_gone", timeout_s=30), "memcheck": gpu_run.memcheck}
    monkeypatch.setattr(gpu_run, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["gpu_run.py", "--out", str(tmp_path), "--logs", str(tmp_path / "logs")])
    assert gpu_run.main() == 1
    printed = capsys.readouterr().out
    assert "FAILED: exit code 2, wrote nothing" in printed
    assert "skipped: no compute-sanitizer on PATH" in printed
    monkeypatch.setattr(sys, "argv", ["gpu_run.py", "--only", "memcheck,nothing"])
    with pytest.raises(SystemExit):
        gpu_run.main()
    assert "expected some of gone, memcheck, got nothing" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "exit_code", "passes"), [("0 errors", 0, True), ("2 errors", 9, False)])
def test_gpu_run_believes_the_sanitizer(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, exit_code: int, passes: bool
) -> None:
    gpu_run = load("gpu_run")
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(f'#!/bin/sh\necho "========= ERROR SUMMARY: {text}"\nexit {exit_code}\n')
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gpu_run.find_sanitizer() == str(sanitizer)
    said = gpu_run.memcheck(tmp_path, tmp_path)
    assert said.startswith("ERROR SUMMARY: 0 errors" if passes else "FAILED: ERROR SUMMARY: 2 errors")
    assert json.loads((tmp_path / "gpu_memcheck.json").read_text())["exit_code"] == exit_code


def test_every_part_of_gpu_run_is_in_its_docstring_and_has_a_script(load: Load) -> None:
    gpu_run = load("gpu_run")
    for part in gpu_run.PARTS:
        assert part in gpu_run.__doc__.partition("--only tests,memcheck]")[2], part
