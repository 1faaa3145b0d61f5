"""The linear fused ops: the table, who is chosen, traces, modules; the kernels' tests in processes of their own."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from piecework.ops.activation import silu_and_mul
from piecework.ops.fused import tracing_with
from piecework.ops.fused_choice import Choice, ChosenOp, choose
from piecework.ops.linear import Linear, linear, silu_and_mul_linear, skinny_linear, triton_silu_and_mul_linear
from piecework.ops.triton.linear_table import (
    MAX_ROWS,
    MAX_SPLIT_BLOCKS,
    LinearTuning,
    pick_tuning,
)
from piecework.phases import Compiler

from .test_triton_kernels import ROOT, run_tests

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton is for Linux only")
LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


# ---- the table


@pytest.mark.parametrize("shape", [*LLAMA, (1, 1), (5, 3000), (70, 100), (1 << 20, 64), (16, 1 << 20)], ids=str)
@pytest.mark.parametrize("num_sms", [4, 132])
def test_every_size_is_one_that_a_kernel_takes(shape: tuple[int, int], num_sms: int) -> None:
    out_features, in_features = shape
    for num_rows, activates in itertools.product(range(1, MAX_ROWS + 1), (False, True)):
        tuning = pick_tuning(num_rows, *shape, num_sms, activates)
        if tuning is None:
            assert activates, "nothing was measured to be better left to torch"
            assert num_rows > 3
            continue
        check(tuning, num_rows, out_features, in_features)
        assert not (activates and tuning.uses_tiles)


def check(tuning: LinearTuning, num_rows: int, out_features: int, in_features: int) -> None:
    for size in (tuning.block_n, tuning.block_k, tuning.num_warps):
        assert size & (size - 1) == 0
    assert tuning.block_k >= 16
    num_blocks, chunk = -(-out_features // tuning.block_n), tuning.chunk(in_features)
    num_splits = -(-tuning.num_blocks_of_sum(in_features) // chunk)
    assert 1 <= num_splits <= tuning.splits
    assert (num_splits - 1) * chunk * tuning.block_k < in_features, "no split has nothing to do"
    assert num_splits == 1 or (tuning.uses_tiles and num_blocks <= MAX_SPLIT_BLOCKS)
    assert tuning.uses_tiles or num_rows <= 3
    assert not tuning.uses_tiles or tuning.block_n >= 16
    elements = tuning.block_n * tuning.block_k
    if tuning.uses_tiles:  # weights and rows that are in flight, in shared memory
        assert 2 * (elements + MAX_ROWS * tuning.block_k) * tuning.num_stages <= 227 * 1024
    else:  # sums of each row, in registers
        assert num_rows * elements <= 128 * 32 * tuning.num_warps


def test_the_sizes_that_were_measured_on_an_h200() -> None:
    """benchmarks/results/gpu_linear.json; the head within 2%."""
    row = LinearTuning(uses_tiles=False, block_n=1, block_k=2048, num_warps=8)
    long_row = LinearTuning(uses_tiles=False, block_n=1, block_k=1024, num_warps=4)
    lone = LinearTuning(uses_tiles=True, block_n=64, block_k=128, num_warps=4, num_stages=6)
    split, many = dataclasses.replace(lone, splits=2), dataclasses.replace(lone, num_stages=4)
    for shape, one, more in zip(LLAMA, (row, row, row, long_row, row), (lone, split, many, split, many), strict=True):
        assert pick_tuning(1, *shape, 132) == one
        assert {pick_tuning(num_rows, *shape, 132) for num_rows in range(2, MAX_ROWS + 1)} == {more}


def test_what_no_kernel_takes() -> None:
    for num_rows, shape in ((0, (8, 8)), (17, (8, 8)), (1, (0, 8)), (1, (8, 0))):
        assert pick_tuning(num_rows, *shape, 132) is None


# ---- who is chosen


@pytest.mark.parametrize("name", ["linear", "silu_and_mul_linear"])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_what_runs_on_cuda(compiler: str, name: str, backend: str) -> None:
    """Triton's `linear` under every compiler; the fused one under one that fuses where it is asked for alone."""

    def runs(device_type: str, dtype: torch.dtype | None = None, capability: tuple[int, int] | None = None) -> str:
        asked = backend if device_type == "cuda" and dtype is not torch.float32 and capability != (7, 5) else "auto"
        more = {"device_type": device_type, "dtype": dtype, "capability": capability, "kernel_backend": asked}
        return choose((), compiler=compiler, **more).runs[name]

    assert runs("cpu") == "native"
    if name == "silu_and_mul_linear" and compiler == "inductor" and backend == "auto":
        assert runs("cuda", torch.bfloat16, (9, 0)) == "native"
        return
    assert runs("cuda") == runs("cuda", torch.bfloat16, (9, 0)) == runs("cuda", torch.float16) == "triton"
    assert runs("cuda", torch.float32) == runs("cuda", torch.bfloat16, (7, 5)) == "native"


# ---- what it computes here, on the CPU, where no kernel runs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0, 12), (1, 12), (12,), (2, 3, 12), (17, 12)])
def test_it_is_torchs_linear(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(shape).to(dtype), torch.randn(7, 12).to(dtype), torch.randn(7).to(dtype)
    for op in (linear, skinny_linear):
        assert torch.equal(op(x, weight), F.linear(x, weight))
        assert torch.equal(op(x, weight, bias), F.linear(x, weight, bias))
    gate_up = torch.cat((x, x.flip(-1)), -1)
    expected = F.linear(silu_and_mul(gate_up), weight)
    assert torch.equal(silu_and_mul_linear(gate_up, weight), expected)
    assert torch.equal(triton_silu_and_mul_linear(gate_up, weight), expected)


def test_opcheck() -> None:
    x, weight, bias = torch.randn(3, 4, 12), torch.randn(7, 12), torch.randn(7)
    for each in (x, x[0, 0], x[:0], x.transpose(0, 1), torch.randn(12, 5).T):
        torch.library.opcheck(skinny_linear, (each, weight))
        torch.library.opcheck(skinny_linear, (each, weight, bias))
    torch.library.opcheck(triton_silu_and_mul_linear, (torch.randn(3, 24), weight))


def test_shapes_that_do_not_fit_are_refused_by_a_trace_too() -> None:
    x, weight = torch.ones(2, 5), torch.ones(3, 4)
    with pytest.raises(RuntimeError):
        skinny_linear(x, weight)
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(RuntimeError, match=r"expected x \[..., in_featur"):
        skinny_linear(mode.from_tensor(x), mode.from_tensor(weight))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Linear(8, 12), Linear(6, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.up(x)
        return silu_and_mul_linear(gate_up, self.down.weight) + self.down(silu_and_mul(gate_up))


@pytest.mark.parametrize("runs", ["native", "triton"])
def test_a_trace_names_the_operators(runs: str) -> None:
    model = Model().requires_grad_(False)
    targets: list[Any] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        targets.extend(node.target for node in graph.graph.nodes)
        return graph

    ops = [ChosenOp(name=n, runs=runs, reason="", by_default=True) for n in ("linear", "silu_and_mul_linear")]
    choice = Choice(compiler=Compiler.EAGER, device_type="cuda", ops=tuple(ops))
    with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for num_rows in (5, 1, 0, 20):
            x = torch.randn(num_rows, 8)
            torch._dynamo.decorators.mark_unbacked(x, 0)
            with tracing_with(choice):
                assert torch.equal(compiled(x), model(x))
    called = [targets.count(skinny_linear), targets.count(triton_silu_and_mul_linear)]
    assert called == ([2, 1] if runs == "triton" else [0, 0])


def test_the_module_is_torchs_but_for_its_forward() -> None:
    ours, theirs = Linear(8, 12), nn.Linear(8, 12)
    assert isinstance(ours, nn.Linear)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 8)
    assert torch.equal(ours(x), theirs(x))
    assert Linear(8, 12, bias=False, device="meta").weight.device.type == "meta"


# ---- the kernels


def test_without_triton_torchs_own_serves() -> None:
    code = (
        "import sys, torch; sys.modules['triton'] = None; from piecework.ops import packages; "
        "packages.importlib.util.find_spec = lambda name: None; from piecework.ops.linear import skinny_linear; "
        "x, w = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(3, 4, dtype=torch.bfloat16); "
        "assert skinny_linear(x, w).tolist() == [[4.0] * 3] * 2"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@LINUX
@pytest.mark.slow
def test_the_kernels_under_the_interpreter() -> None:
    run_tests("skinny_linear_interpreted.py", at_least=270, TRITON_INTERPRET="1")


@LINUX
@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    # Without the last one Triton 3.9 warns that it is not set.
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    run_tests("skinny_linear_compiled.py", at_least=50, **environment)


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("option", [(), ("--tune",)], ids=str)
def test_their_benchmark_runs_under_the_interpreter(option: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "linear.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_linear.py"), "--device", "cpu", "--json", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([*command, *option], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert {"device", "torch", "triton", "commit", "command", "seconds", "copy_bytes_per_s"} <= result.keys()
    assert [row["num_rows"] for row in result["rows"]] == [1, 2, 3, 4, 8, 16]
    for row in result["rows"]:
        assert row["ways"]["torch"]["us"] > 0
        assert row["ways"]["triton"]["us"] > 0
        assert row["ways"]["triton"]["relative_error"] < 2e-2
        assert ("best" in row) == bool(option)
