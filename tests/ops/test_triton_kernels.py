"""The Triton kernels without a GPU: their tests under the interpreter, whether they compile for one, who gets them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from piecework.errors import NotAvailableError
from piecework.ops import attention
from piecework.ops.attention import AttentionSpec, choose_implementation

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton is for Linux only")


def run_tests(name: str, *, at_least: int, **environment: str) -> None:
    """Runs a file of tests in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name(name))]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= at_least
    assert "skipped" not in done.stdout


@pytest.mark.slow
def test_the_kernels_under_the_interpreter() -> None:
    run_tests("triton_interpreted.py", at_least=148, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    # Without the last one Triton 3.9 warns that it is not set.
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    run_tests("triton_compiled.py", at_least=15, **environment)


@pytest.mark.slow
@pytest.mark.parametrize("option", [(), ("--tune",)], ids=str)
def test_their_benchmark_runs_under_the_interpreter(option: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_attention.py"), "--device", "cpu", "--json", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([*command, *option], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert {"device", "torch", "triton", "commit", "command", "seconds"} <= result.keys()
    if option:
        for kind in ("row", "tile"):
            [best, *_] = result["tuned"][kind]
            assert best["lost"] >= 1
            assert best["tuning"].keys() == result["plain"].keys()
    else:
        assert [row["new"] for row in result["rows"]] == [20, 1]
        for row in result["rows"]:
            assert row["ways"]["triton"]["relative_error"] < 1e-5
            assert row["ways"]["flashinfer"] == {"passed_over": "runs on cuda, not on cpu"}
            assert row["us"] > row["store_us"] > 0
            assert row["speed_to_sdpa"] > 0


def test_a_kernel_on_the_cpu_needs_the_interpreter() -> None:
    code = (
        "import torch; from piecework.ops.triton.kv_store import store; x = torch.zeros(1, 1, 8); "
        "store(x, x, x[None], x[None], torch.zeros(1, dtype=torch.int64))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True
    )
    assert "NotAvailableError: triton kernels: expected tensors on a GPU, got cpu; move them there, or" in done.stderr


def test_triton_is_imported_by_its_first_use_alone() -> None:
    code = (
        "import sys, piecework.ops.attention as a, torch; "
        "s = dict(dtype=torch.float32, cache_dtype=torch.float32, num_heads=4, num_kv_heads=2, head_size=8); "
        "a.choose_implementation(a.AttentionSpec(device_type='cpu', block_size=4, is_static=True, **s)); "
        "import piecework.ops.triton; assert 'triton' not in sys.modules; "
        "print(a.choose_implementation(a.AttentionSpec(device_type='cuda', block_size=4, is_static=True, **s)).name); "
        "assert 'triton' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "triton\n", done.stderr


# ---- who is chosen


def spec(**changes: Any) -> AttentionSpec:
    plain = AttentionSpec(
        device_type="cuda",
        dtype=torch.bfloat16,
        cache_dtype=torch.bfloat16,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        block_size=4,
    )
    return dataclasses.replace(plain, **changes)


FLOAT64 = {"dtype": torch.float64, "cache_dtype": torch.float64}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"is_static": True}, "triton"),
        ({"is_decode": True}, "triton"),
        ({}, "triton"),
        ({"is_decode": True, **FLOAT64}, "torch_native"),
        ({"is_static": True, **FLOAT64}, "torch_static"),
        ({"is_static": True, "head_size": 1024}, "torch_static"),
        ({"device_type": "cpu"}, "torch_native"),
        ({"device_type": "cpu", "is_decode": True}, "torch_native"),
        ({"device_type": "cpu", "is_static": True}, "torch_static"),
    ],
)
def test_who_is_chosen(changes: dict[str, Any], name: str) -> None:
    choice = choose_implementation(spec(**changes))
    assert choice.name == name
    [row] = [row for row in attention.IMPLEMENTATIONS if row.name == name]
    assert row.captures == (name != "torch_native")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu"}, "runs on cuda, not on cpu"),
        ({"is_decode": True, **FLOAT64}, "computes float32, bfloat16 and float16, not torch.float64"),
        ({"is_static": True, "head_size": 1024}, "holds heads of at most 512 elements, not 1024"),
    ],
)
def test_why_triton_is_passed_over(changes: dict[str, Any], reason: str) -> None:
    assert ("triton", reason) in choose_implementation(spec(**changes)).passed_over


def test_a_cache_of_another_dtype_is_refused_by_all() -> None:
    with pytest.raises(NotAvailableError, match="triton: needs the cache in the dtype of q, torch.bfloat16"):
        choose_implementation(spec(is_static=True, cache_dtype=torch.float8_e4m3fn))


def test_without_triton_the_reason_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    attention._choose.cache_clear()
    choice = choose_implementation(spec(is_static=True))
    attention._choose.cache_clear()
    assert choice.name == "torch_static"
    assert choice.passed_over[0] == ("triton", "not installed: pip install triton")
