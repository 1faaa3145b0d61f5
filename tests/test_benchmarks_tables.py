"""scripts/benchmark_tables.py makes the README's tables of the results that are there."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONDITIONS = {"device": "NVIDIA X", "driver": "1", "torch": "2", "triton": "3", "commit": "abc"}
ABOUT = {"layers": 2, "dtype": "bfloat16", **CONDITIONS}


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_tables", ROOT / "scripts" / "benchmark_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def marked(name: str, content: str = "") -> str:
    return f"<!-- benchmarks:begin {name} -->\n{content}<!-- benchmarks:end {name} -->"


def write(folder: Path, name: str, result: dict[str, Any]) -> None:
    (folder / f"gpu_{name}.json").write_text(json.dumps(result))


def test_the_readme_has_the_tables_of_the_results(tables: ModuleType) -> None:
    assert tables.main(["--check"]) == 0, "run python scripts/benchmark_tables.py"
    readme = (ROOT / "README.md").read_text()
    assert {name for name in tables.TABLES if f"<!-- benchmarks:begin {name} -->" in readme} == set(tables.TABLES)


def test_a_table_is_made_once_and_checked(
    tables: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{marked('prefill', 'an old table')}\nbetween\n{marked('decode')}\nafter\n")
    ways = {
        "plain eager": {"step_ms": 20.0, "speed_of_plain_eager": 1.0, "tokens_per_s": 3200.0},
        "breakable, eager": {"step_ms": 16.0, "speed_of_plain_eager": 1.25, "tokens_per_s": 4000.0},
        "eager": {"error": "KeyError: 'x'"},
    }
    rows = [{"tokens": 4096, "ways": {}, "error": "not begun"}, {"tokens": 64, "ways": ways}]
    write(tmp_path, "prefill", {**ABOUT, "rows": rows})
    options = ["--readme", str(readme), "--results", str(tmp_path)]
    assert tables.main([*options, "--check"]) == 1
    assert "README.md: expected the tables" in capsys.readouterr().err
    assert "an old table" in readme.read_text()
    assert tables.main(options) == 0
    written = readme.read_text()
    assert tables.main([*options, "--check"]) == 0
    assert tables.main(options) == 0
    assert readme.read_text() == written
    first, second = (
        "| 64 | 20.00 (1.00 x) | 16.00 (1.25 x) | failed | 4,000 |",
        "| 4,096 | not run | not run | not run |",
    )
    assert written.index(first) < written.index(second)
    assert "NVIDIA X, driver 1, torch 2, triton 3, commit abc; `python benchmarks/gpu_run.py --only prefill`" in written
    assert "Not measured yet; `python benchmarks/gpu_run.py --only decode` does." in written
    assert written.startswith("before\n")
    assert "\nbetween\n" in written
    assert written.endswith("after\n")


def test_decode_shows_multiples_of_the_floor(tables: ModuleType, tmp_path: Path) -> None:
    ways = {
        "plain torch.compile": {"step_ms": 6.0, "cudagraph_skips": 1},
        "full, inductor": {"step_ms": 4.5},
        "general": {"step_ms": 9.0, "error": "CUDA error"},
    }
    rows = [
        {"batch": 32, "context": 32768, "floor_ms": 30.0, "ways": {"full, inductor": {"step_ms": 36.0}}},
        {"batch": 1, "context": 128, "floor_ms": 3.0, "ways": ways},
    ]
    rows[0]["distinct_caches"] = 18
    write(tmp_path, "decode", {**ABOUT, "weight_bytes": 15e9, "copy_bytes_per_s": 4.2e12, "rows": rows})
    text = tables.rendered("decode", tmp_path)
    assert "| requests x tokens | floor | full, inductor | plain torch.compile | general |" in text
    assert "| 1 x 128 | 3.00 | 4.50 (1.50 x) | 6.00 (2.00 x) | failed |" in text
    assert "| 32 x 32,768 | 30.00 | 36.00 (1.20 x) | not run | not run |" in text
    assert "15.0 GB of weights and the KV cache, at the 4.20 TB/s" in text
    assert "In rows of 32,768 tokens layers share 18 caches." in text
    assert "torch.compile made no CUDA graph at 1 x 128." in text
    assert text.count("A step of full, inductor takes, of the time of plain torch.compile, 0.75 x at 1 x 128.") == 1


def test_whole_shows_steps_first_steps_and_verdicts(tables: ModuleType, tmp_path: Path) -> None:
    said = {"whole_ms": 4.5, "ordinary_ms": 4.75, "replaces": "general", "taken": True}
    ways = {
        "plain eager": {"step_ms": 20.0, "to_plain": 4.0},
        "plain torch.compile, captured": {"step_ms": 5.0, "to_plain": 1.0, "compile_s": 63.04, "peak_bytes": 9 << 20},
        "full, whole": {"step_ms": 4.6, "to_plain": 0.92, "compile_s": 71.5, "peak_bytes": 2 << 30, "whole": said},
        "full, inductor": {"error": "CUDA error"},
    }
    late = {"full, whole": {"error": "not begun: no time left"}, "full, inductor": {"step_ms": 5.5, "compile_s": 0.25}}
    slower = {**said, "whole_ms": 5.0, "taken": False}
    rows = [
        {"batch": 32, "context": 128, "ways": late},
        {"batch": 1, "context": 128, "ways": ways},
        {"batch": 8, "context": 128, "ways": {"full, whole": {"step_ms": 4.7, "whole": slower}}},
    ]
    write(tmp_path, "whole", {**ABOUT, "mode": "max-autotune-no-cudagraphs", "rows": rows})
    text = tables.rendered("whole", tmp_path)
    for line in (
        "| requests x tokens | full, whole | full, inductor | plain eager | plain torch.compile, captured |",
        "| 1 x 128 | 4.60 (0.92 x) | failed | 20.00 (4.00 x) | 5.00 (1.00 x) |",
        "| 32 x 128 | not run | 5.50 | not run | not run |",
        "| 1 x 128 | 71.5 s, 2,048 MiB | - | - | 63.0 s, 9 MiB |",
        "| 32 x 128 | - | 0.2 s | - | - |",
    ):
        assert f"{line}\n" in text, line
    assert "both wholes in mode max-autotune-no-cudagraphs. 2 layers, bfloat16." in text
    assert (
        "On padding the runtime measured a whole forward of 4.50 ms against 4.75 ms of the general program at 1 x 128 "
        "(taken); 5.00 ms against 4.75 ms of the general program at 8 x 128 (left out)."
    ) in text
    assert text.index("| 1 x 128 | 4.60") < text.index("| 8 x 128 |") < text.index("| 32 x 128 | not run")


def test_capture_and_dispatch_show_what_failed(tables: ModuleType, tmp_path: Path) -> None:
    way = {
        "backend": "full",
        "compiler": "eager",
        "capture_ms_median": 54.8,
        "segments": 1,
        "pool_bytes_random": 50 << 20,
        "step_ms": {"1": 9.59, "64": 14.6},
    }
    failed = {"backend": "full", "compiler": "inductor", "error": "no"}
    late = {"backend": "breakable", "compiler": "eager", "error": "not begun: no time left"}
    ways = [way, {**way, "pool_bytes_arrival": 62 << 20}, failed, late]
    write(tmp_path, "capture", {**ABOUT, "seq_len": 512, "uncaptured_step_ms": {"1": 38.3, "64": 39.2}, "ways": ways})
    text = tables.rendered("capture", tmp_path)
    assert "| uncaptured, eager |  |  |  |  | 38.3 ms | 39.2 ms |" in text
    assert "| `full`, `eager` | 55 ms | 1 | 50 MiB | not run | 9.6 ms | 14.6 ms |" in text
    assert "| `full`, `eager` | 55 ms | 1 | 50 MiB | 62 MiB | 9.6 ms | 14.6 ms |" in text
    assert "| `full`, `inductor` | no |  |  |  |  |  |" in text
    assert "Not begun in this run, for want of time: breakable eager." in text

    columns = ("total_us", "replay_us", "segments_us", "split_calls_us", "beyond_replay_us")
    times: dict[str, Any] = dict(zip(columns, (90.4, 40.0, 39.0, 0.2, 50.4), strict=True))
    times["parts_us"] = {"read layout": 4.56, "fill": 3.8}
    ways = [{"backend": "full", "compiler": "eager", **times}, {"backend": "x", "compiler": "y", "error": "no"}]
    write(tmp_path, "dispatch", {**ABOUT, "requests": 8, "ways": ways})
    text = tables.rendered("dispatch", tmp_path)
    assert "| `full`, `eager` | 90 | 40 | 39 | 0 | 50 |" in text
    assert "| `x`, `y` | no |  |  |  |  |" in text
    assert text.count("`full`, `eager`: read layout 4.6, fill 3.8.") == 1


def test_straddle_has_a_row_a_program_and_says_what_failed(tables: ModuleType, tmp_path: Path) -> None:
    ways = {
        "no promotion": {"differ": 0, "share": 0.0, "first_difference_median": None},
        "general": {"differ": 7, "share": 0.875, "first_difference_median": 21},
        "general, emulated casts": {"error": "CUDA error"},
    }
    steps = {"eager": {"step_ms": 6.254}, "general": {"step_ms": 4.852}}
    sizes = {"requests": 8, "batch": 4, "new_tokens": 32, "promoted_after": 16}
    write(tmp_path, "straddle", {**ABOUT, **sizes, "ways": ways, "steps": steps, "casts_cost": -0.006})
    text = tables.rendered("straddle", tmp_path)
    for line in (
        "| no promotion | 0 of 8 (0.0%) | - | - |",
        "| general | 7 of 8 (87.5%) | token 21 | 4.85 ms |",
        "| general, emulated casts | CUDA error | - | - |",
    ):
        assert line in text
    assert "A step of eager takes 6.25 ms. Emulated casts cost -0.6% of a step." in text
    assert "Greedy requests of 32 tokens, 4 at a time, promoted after 16 from" in text


def test_startup_has_a_column_a_policy_and_says_what_failed(tables: ModuleType, tmp_path: Path) -> None:
    ours = {
        "ready_s": 0.123,
        "first_token_s": 0.9,
        "settled_s": 21.5,
        "buckets_met": "12 of 12",
        "worst_step_ms": 1234.5,
        "num_delayed": 1,
        "captured_by_second": "8 of 8",
        "beside_p50": 1.014,
        "steady_to_eager_worst": 1.004,
        "steady_ms": {"decode 1": 4.56},
        "causes": {"trace": {"nobody": 4.04}, "capture": {"a step": 0.1, "before ready": 0.26}},
    }
    policies = {"tiered": ours, "lazy": {"error": "exit code 1: KeyError: 'x'"}}
    sizes = {"decode": [1, 2], "prefill": [64], "meet_s": 10.0, "cap_s": 60.0}
    write(tmp_path, "startup", {**ABOUT, **sizes, "policies": policies})
    text = tables.rendered("startup", tmp_path)
    for line in (
        "|  | tiered | lazy |",
        "| ready | 0.12 s | - |",
        "| longest step | 1,234 ms | - |",
        "| decode buckets captured by their second step | 8 of 8 | - |",
        "| replays while workers compile, p50 | 1.01 x | - |",
        "| replays while workers compile, p99 | - | - |",
        "| steady step, decode 1 | 4.56 ms | - |",
        "tiered: trace 4.0 s (nobody waited); capture 0.1 s (a step waited), 0.3 s (before ready).",
        "lazy: nothing recorded. Failed: exit code 1: KeyError: 'x'.",
    ):
        assert text.count(f"{line}\n") == 1, line
    assert "decode buckets 1, 2, prefill buckets 64, all met in the first 10 s of steps; none after second 60." in text


def test_ops_have_a_row_an_op_and_size_and_say_who_was_passed_over(tables: ModuleType, tmp_path: Path) -> None:
    missing = {"passed_over": "not installed: pip install sglang-kernel"}
    ways = {
        "native, eager": {"us": 21.04, "share_of_copy": 0.004},
        "triton": {"us": 1.96, "share_of_copy": 0.0449},
        "sgl_kernel": missing,
    }
    rows = [
        {"op": "silu_and_mul", "tokens": 32, "ways": {"native, eager": {"error": "CUDA error"}, "sgl_kernel": missing}},
        {"op": "rms_norm", "tokens": 1, "ways": ways},
        {"op": "silu_and_mul", "tokens": 1, "ways": {"native, eager": {}}},
        {"op": "rms_norm", "tokens": 4096, "ways": {}, "error": "not begun: no time left"},
    ]
    sizes = {"copy_bytes_per_s": 4.2e12, "sizes": {"hidden": 4096}}
    write(tmp_path, "ops", {**ABOUT, **sizes, "rows": rows})
    text = tables.rendered("ops", tmp_path)
    lines = (
        "| op | tokens | native, eager | sgl_kernel | triton |",
        "| silu_and_mul | 1 | not run | - | - |",
        "| silu_and_mul | 32 | failed | - | - |",
        "| rms_norm | 1 | 21.0 (0%) | - | 2.0 (4%) |",
        "| rms_norm | 4096 | - | - | - |",
    )
    places = [text.index(f"{line}\n") for line in lines]
    assert places == sorted(places)
    assert "the share of a copy's 4.20 TB/s at which it moves its arguments and results; bfloat16, hidden 4,096" in text
    assert text.count("not installed: pip install sglang-kernel") == 2
    assert "Passed over: sgl_kernel for silu_and_mul: not installed: pip install sglang-kernel; sgl_kernel for" in text


def test_floor_shows_steps_and_what_they_consist_of(tables: ModuleType, tmp_path: Path) -> None:
    found = {
        "gaps_us": 91.6,
        "groups": {"linears": {"us": 3601.4, "count": 129}, "attention": {"us": 100.6, "count": 32}},
    }
    plain = {"gaps_us": 40.0, "groups": {"linears": {"us": 4000.0, "count": 129}, "other": {"us": 7.0, "count": 3}}}
    ways = {
        "full, inductor, auto": {"step_ms": 3.9, "timeline": found},
        "plain, reduce-overhead": {"step_ms": 4.5, "timeline": plain},
        "plain, max-autotune captured": {"error": "not begun: no time left"},
    }
    rows = [
        {"batch": 32, "context": 128, "floor_ms": 3.6, "ways": {"full, inductor, auto": {"step_ms": 5.4}}},
        {"batch": 1, "context": 128, "floor_ms": 3.0, "ways": ways},
    ]
    write(tmp_path, "floor", {**ABOUT, "weight_bytes": 15e9, "copy_bytes_per_s": 4.2e12, "rows": rows})
    text = tables.rendered("floor", tmp_path)
    for line in (
        "| requests x tokens | floor | full, inductor, auto | plain, reduce-overhead | plain, max-autotune captured |",
        "| 1 x 128 | 3.00 | 3.90 (1.30 x) | 4.50 (1.50 x) | not run |",
        "| 32 x 128 | 3.60 | 5.40 (1.50 x) | not run | not run |",
        "| one step | linears | attention | other | gaps |",
        "| 1 x 128, full, inductor, auto | 3601 | 101 | 0 | 92 |",
        "| 1 x 128, plain, reduce-overhead | 4000 | 0 | 7 | 40 |",
    ):
        assert f"{line}\n" in text, line
    assert "15.0 GB of weights and the KV cache, at the 4.20 TB/s" in text
    write(tmp_path, "floor", {**ABOUT, "weight_bytes": 15e9, "copy_bytes_per_s": 4.2e12, "rows": rows[:1]})
    assert "one step" not in tables.rendered("floor", tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<!-- benchmarks:begin decode -->", "expected a marker benchmarks:end decode, got the end of the file"),
        ("<!-- benchmarks:end decode -->", "expected a marker benchmarks: with begin and one of capture, decode"),
        (marked("speed"), "got begin speed"),
        (marked("decode").replace("end decode", "end prefill"), "expected a marker benchmarks: with end decode"),
    ],
)
def test_a_marker_that_does_not_fit_is_an_error(
    tables: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, expected: str
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)
    assert tables.main(["--readme", str(readme), "--results", str(tmp_path)]) == 1
    assert expected in capsys.readouterr().err
    assert readme.read_text() == text


@pytest.mark.parametrize("content", ['{"rows": []}', "not JSON", "[]"])
def test_a_result_of_something_else_is_an_error(tables: ModuleType, tmp_path: Path, content: str) -> None:
    (tmp_path / "gpu_decode.json").write_text(content)
    with pytest.raises(ValueError, match="expected a result of decode"):
        tables.rendered("decode", tmp_path)
