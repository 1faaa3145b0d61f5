"""Every implementation of every fused op that is installed, on the device: one reference, captures, long tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piecework.ops.fused import NATIVE, KernelSpec
from piecework.ops.norm import fused_add_rms_norm, rms_norm

from ..ops.implementation_cases import EPS, Case, body_of, cases

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_only")]
RUNS = [
    pytest.param(case, dtype, runs, id=f"{case}-{str(dtype)[6:]}-{runs}")
    for case in cases()
    for dtype in case.dtypes
    for runs in (NATIVE, *(kernel.name for kernel in case.op.kernels))
]
CAPTURED = [
    pytest.param(case, kernel.name, id=f"{case}-{kernel.name}")
    for case in {case.op.name: case for case in reversed(cases())}.values()  # the first case of each op
    for kernel in case.op.kernels
    if kernel.captures
]


def skip_unless_it_serves(case: Case, runs: str, dtype: torch.dtype) -> None:
    for kernel in case.op.kernels:
        if kernel.name == runs:
            spec = KernelSpec(device_type="cuda", dtype=dtype, capability=torch.cuda.get_device_capability())
            if (reason := kernel.reject(spec)) is not None:
                pytest.skip(f"{runs}: {reason}")


@pytest.mark.parametrize(("case", "dtype", "runs"), RUNS)
def test_it_is_the_reference(case: Case, dtype: torch.dtype, runs: str) -> None:
    skip_unless_it_serves(case, runs, dtype)
    for _ in range(2):  # the second launch is a quick one, where there are such
        case.check(runs, dtype, "cuda")


@pytest.mark.parametrize(("case", "runs"), CAPTURED)
def test_a_capture_does_it_again_with_what_is_there_then(case: Case, runs: str) -> None:
    dtype = torch.bfloat16 if torch.bfloat16 in case.dtypes else case.dtypes[0]
    skip_unless_it_serves(case, runs, dtype)
    first, second = (on_device(case.make(dtype)) for _ in range(2))
    body = body_of(case.op, runs)
    with torch.inference_mode():
        expected = [tensor.clone() for tensor in tensors_of(body(*second))]
        body(*first)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = tensors_of(body(*first))
        for one, other in zip(first, second, strict=True):
            if isinstance(one, torch.Tensor):
                one.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def on_device(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments)


def tensors_of(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_tensors_of_more_entries_than_an_int32_counts() -> None:
    num_rows, size = (1 << 31) // 4096 + 3, 4096
    if torch.cuda.mem_get_info()[0] < 5 * 2 * num_rows * size:
        pytest.skip("too little memory")
    x, weight = torch.zeros(num_rows, size, dtype=torch.bfloat16, device="cuda"), torch.ones(size).bfloat16().cuda()
    x[-2:] = torch.randn(2, size).bfloat16()
    expected = rms_norm.native(x[-2:], weight, EPS)
    torch.testing.assert_close(body_of(rms_norm, "triton")(x, weight, EPS)[-2:], expected, rtol=1e-2, atol=1e-2)
    normed, total = body_of(fused_add_rms_norm, "triton")(x, x, weight, EPS)
    torch.testing.assert_close(total[-2:], 2 * x[-2:], rtol=0, atol=0)
    torch.testing.assert_close(normed[-2:], expected, rtol=1e-2, atol=1e-2)
