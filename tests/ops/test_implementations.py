"""Every implementation of every fused op against one float64 reference; Triton's in a process with its interpreter.

The cases are in `implementation_cases.py`, and those of `tests/gpu/test_implementations.py` are the same.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from piecework.ops.fused import NATIVE, fused_ops

from .implementation_cases import DTYPES, INTERPRETED, Case, cases, implementations

ROOT = Path(__file__).resolve().parents[2]
RUNS = [
    pytest.param(case, dtype, runs, id=f"{case}-{str(dtype)[6:]}-{runs}")
    for case in cases()
    for dtype in DTYPES
    if dtype in case.dtypes
    for runs in implementations(case, dtype, "cpu")
    if not INTERPRETED or runs == "triton"  # the others are what they are in the other process
]
for_triton = pytest.mark.skipif(INTERPRETED or not sys.platform.startswith("linux"), reason="Triton is for Linux only")


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize(("case", "dtype", "runs"), RUNS)
def test_it_is_the_reference(case: Case, dtype: torch.dtype, runs: str) -> None:
    case.check(runs, dtype)


def test_every_fused_op_has_cases() -> None:
    ours = {op.name for op in fused_ops() if op.__module__.startswith("piecework.")}
    assert {case.op.name for case in cases()} == ours


def test_each_dtype_has_an_implementation_in_every_case() -> None:
    for case in cases():
        assert case.dtypes
        assert set(case.dtypes) <= set(DTYPES)
        assert implementations(case, case.dtypes[0], "cpu")[0] == NATIVE


def test_the_check_finds_what_is_wrong() -> None:
    [case] = [case for case in cases() if str(case) == "rms_norm-sliced"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(case.op, "native", lambda x, weight, eps: x * weight * 0.9)
        with pytest.raises(AssertionError, match="of the largest entry"):
            case.check(NATIVE, torch.float32)
        patch.setattr(case.op, "native", lambda x, weight, eps: torch.full_like(x, float("nan")))
        with pytest.raises(AssertionError, match="of the largest entry"):
            case.check(NATIVE, torch.float32)
        patch.setattr(case.op, "native", lambda x, weight, eps: x.zero_())
        with pytest.raises(AssertionError, match="an argument was written into"):
            case.check(NATIVE, torch.float32)


def run_tests(name: str, *options: str, at_least: int, **environment: str) -> None:
    """Runs a file of tests in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name(name))]
    environment = {**os.environ, **environment}
    done = subprocess.run([*command, *options], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= at_least
    assert "skipped" not in done.stdout


@pytest.mark.slow
@for_triton
def test_those_of_triton_under_the_interpreter() -> None:
    run_tests("test_implementations.py", "-k", "test_it_is_the_reference", at_least=228, TRITON_INTERPRET="1")


@pytest.mark.slow
@for_triton
def test_the_kernels_of_triton_beyond_their_numbers() -> None:
    run_tests("fused_interpreted.py", at_least=130, TRITON_INTERPRET="1")


@pytest.mark.slow
@for_triton
def test_the_kernels_of_triton_compile_for_a_gpu(tmp_path: Path) -> None:
    # Without the last one Triton 3.9 warns that it is not set.
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    run_tests("fused_compiled.py", at_least=10, **environment)
