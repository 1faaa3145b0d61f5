"""Kernels of sglang-kernel and FlashInfer with stand-ins for the packages, which are no part of these tests.

A stand-in has the names and signatures that we call, checks that it gets what the real kernels take, and computes with
torch. The packages themselves run in `tests/gpu/test_implementations.py`, where they are installed.
"""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from piecework.ops import flashinfer, packages, sgl_kernel
from piecework.ops.activation import silu_and_mul
from piecework.ops.fused import KernelSpec, tracing_with
from piecework.ops.fused_choice import choose
from piecework.ops.norm import fused_add_rms_norm, rms_norm
from piecework.ops.rotary import qk_norm_rotary, rotary_embedding

from .implementation_cases import Case, body_of, cases

OPS = (rms_norm, fused_add_rms_norm, silu_and_mul)
PACKAGES = ("sgl_kernel", "flashinfer")
DTYPES = (torch.bfloat16, torch.float16)
EPS = 1e-5


class Kernels:
    """The arithmetic of both stand-ins, and what was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def check(self, name: str, *tensors: torch.Tensor) -> None:
        self.calls.append(name)
        for tensor in tensors:
            assert tensor.dtype in DTYPES
            assert tensor.dtype == tensors[0].dtype
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 16 == 0
            assert tensor.numel() > 0
            assert tensor.shape[-1] % 8 == 0
            assert tensor.dim() == (1 if tensor is tensors[-1] and name != "silu_and_mul" else 2)

    def rms_norm(self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        self.check("rms_norm", out, x, weight)
        wide = x.float()
        out.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float())

    def fused_add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        self.check("fused_add_rms_norm", x, residual, weight)
        wide = x.float() + residual.float()
        residual.copy_(wide)
        x.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float())

    def silu_and_mul(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self.check("silu_and_mul", x, out)
        gate, up = x.float().chunk(2, -1)
        return out.copy_(F.silu(gate) * up)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Both packages, as modules that were made by hand; of sglang-kernel also its operators."""
    kernels = Kernels()
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("rmsnorm(Tensor! output, Tensor input, Tensor weight, float eps, bool enable_pdl) -> ()")
    library.define(
        "fused_add_rmsnorm(Tensor! input, Tensor! residual, Tensor weight, float eps, bool enable_pdl) -> ()"
    )
    library.impl("rmsnorm", lambda out, x, weight, eps, early: kernels.rms_norm(out, x, weight, eps), "CPU")
    library.impl(
        "fused_add_rmsnorm", lambda x, r, weight, eps, early: kernels.fused_add_rms_norm(x, r, weight, eps), "CPU"
    )
    theirs = types.ModuleType("sgl_kernel")
    theirs.utils = types.SimpleNamespace(is_arch_support_pdl=lambda: False)  # type: ignore[attr-defined]
    theirs.silu_and_mul = lambda input, out=None: kernels.silu_and_mul(input, out)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sgl_kernel", theirs)

    package, norm, activation = map(types.ModuleType, ("flashinfer", "flashinfer.norm", "flashinfer.activation"))

    def rmsnorm(input: Any, weight: Any, eps: float = 1e-6, out: Any = None, enable_pdl: bool | None = None) -> Any:
        kernels.rms_norm(out, input, weight, eps)
        return out

    def fused_add_rmsnorm(input: Any, residual: Any, weight: Any, eps: float = 1e-6, enable_pdl: Any = None) -> None:
        kernels.fused_add_rms_norm(input, residual, weight, eps)

    norm.rmsnorm, norm.fused_add_rmsnorm = rmsnorm, fused_add_rmsnorm  # type: ignore[attr-defined]
    activation.silu_and_mul = lambda input, out=None: kernels.silu_and_mul(input, out)  # type: ignore[attr-defined]
    package.norm, package.activation = norm, activation  # type: ignore[attr-defined]
    for module in (package, norm, activation):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield kernels
    library._destroy()


OURS = [case for case in cases() if case.op in OPS]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("case", OURS, ids=str)
def test_it_is_the_reference(case: Case, package: str, stand_ins: Kernels) -> None:
    for dtype in DTYPES:
        case.check(package, dtype)
    sizes = {"size": case.make(torch.float16)[0].shape[-1], "entries": case.make(torch.float16)[0].numel()}
    serves = sizes["size"] % (16 if case.op is silu_and_mul else 8) == 0 and sizes["entries"] > 0
    serves = serves and len(case.make(torch.float16)) < (5 if case.op is fused_add_rms_norm else 4)
    assert stand_ins.calls == [case.op.name] * (2 if serves else 0)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_native_body_does_what_a_package_lacks(package: str, stand_ins: Kernels) -> None:
    x, weight = torch.randn(3, 16).bfloat16(), torch.rand(16).bfloat16()
    for arguments in ((x, weight, EPS, 8), (x.float(), weight.float(), EPS), (x, weight.float(), EPS)):
        assert torch.equal(body_of(rms_norm, package)(*arguments), rms_norm.native(*arguments))
    for arguments in ((x, x, weight, EPS, 8), (x, x.float(), weight, EPS), (x[:, :12], x[:, :12], weight[:12], EPS)):
        got, expected = body_of(fused_add_rms_norm, package)(*arguments), fused_add_rms_norm.native(*arguments)
        assert all(map(torch.equal, got, expected))
    for gate_up in (x.float(), x[:, :8]):
        assert torch.equal(body_of(silu_and_mul, package)(gate_up), silu_and_mul.native(gate_up))
    assert stand_ins.calls == []


@pytest.mark.parametrize("package", [sgl_kernel, flashinfer], ids=PACKAGES)
def test_opcheck(package: Any, stand_ins: Kernels) -> None:
    x, weight = torch.randn(3, 2, 16).bfloat16(), torch.rand(16).bfloat16()
    for rows in (x, x[:, :1], x.transpose(0, 1), x[:0]):
        torch.library.opcheck(package.rms_norm, (rows, weight, EPS))
        torch.library.opcheck(package.fused_add_rms_norm, (rows, rows.clone(), weight, EPS))
        torch.library.opcheck(package.silu_and_mul, (rows,))
    assert len(stand_ins.calls) > 9


def test_operators_of_one_op_have_one_schema() -> None:
    """A graph may hold any of them; what Triton's takes more of is optional."""
    for op in OPS:
        schemas = [str(getattr(module, op.name)._schema).partition("(")[2] for module in (sgl_kernel, flashinfer)]
        assert schemas[0] == schemas[1]
        ours = str(body_of(op, "triton")._schema).partition("(")[2]  # type: ignore[attr-defined]
        assert ours.replace(", SymInt? variance_size=None", "") == schemas[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_graph_holds_the_operators_by_name(package: str, stand_ins: Kernels) -> None:
    def model(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        normed, total = fused_add_rms_norm(rms_norm(x, weight, EPS), residual, weight, EPS)
        return silu_and_mul(normed), rms_norm(total, weight, EPS, 4)

    choice = choose((), compiler="inductor", device_type="cuda", dtype=torch.bfloat16, kernel_backend=package)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    x, weight = torch.randn(3, 16).bfloat16(), torch.rand(16).bfloat16()
    with tracing_with(choice), torch.inference_mode():
        got = torch.compile(model, backend=backend, fullgraph=True)(x, x.clone(), weight)
    torch._dynamo.reset()
    assert stand_ins.calls == ["rms_norm", "fused_add_rms_norm", "silu_and_mul"]
    for one, other in zip(got, model(x, x, weight), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    [graph] = graphs
    names = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    prefix = "sgl" if package == "sgl_kernel" else package
    assert names >= {f"piecework.{prefix}_{op.name}.default" for op in OPS}


# ---- which are there


def test_the_order_is_that_of_preference() -> None:
    """By the times on an H200, from 1 to 4096 tokens. The packages' fused add writes into its arguments: they copy."""
    assert [kernel.name for kernel in rms_norm.kernels] == ["triton", "sgl_kernel", "flashinfer", "torch"]
    assert [kernel.name for kernel in fused_add_rms_norm.kernels] == ["triton", "torch", "sgl_kernel", "flashinfer"]
    assert [kernel.name for kernel in silu_and_mul.kernels] == ["triton", "sgl_kernel", "flashinfer"]
    assert [kernel.name for kernel in rotary_embedding.kernels] == ["triton"]
    assert [kernel.name for kernel in qk_norm_rotary.kernels] == ["triton"]
    for op in (*OPS, rotary_embedding, qk_norm_rotary):
        assert [kernel.name for kernel in op.kernels if kernel.beats_inductor] == ["triton"]


@pytest.mark.parametrize(
    ("package", "pip"), [("sgl_kernel", "sglang-kernel"), ("flashinfer", "flashinfer-python"), ("triton", "triton")]
)
def test_a_package_that_is_not_there_is_a_reason(package: str, pip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None if name == package else object())
    spec = KernelSpec(device_type="cuda", dtype=torch.bfloat16, capability=(9, 0))
    for op in OPS:
        reasons = {kernel.name: kernel.reject(spec) for kernel in op.kernels}
        assert reasons.pop(package) == f"not installed: pip install {pip}"
        assert set(reasons.values()) == {None}


@pytest.mark.parametrize("package", PACKAGES)
def test_what_packages_do_not_serve(package: str, stand_ins: Kernels) -> None:
    for op in OPS:
        [kernel] = [kernel for kernel in op.kernels if kernel.name == package]
        assert kernel.reject(KernelSpec(device_type="cuda", dtype=torch.bfloat16, capability=(9, 0))) is None
        assert "not float32" in str(kernel.reject(KernelSpec(device_type="cuda", dtype=torch.float32)))
        assert "8.0" in str(kernel.reject(KernelSpec(device_type="cuda", capability=(7, 5))))
        assert "not on cpu" in str(kernel.reject(KernelSpec(device_type="cpu")))


def test_nothing_optional_is_imported_before_it_is_used() -> None:
    code = (
        "import sys; from piecework.ops.fused import fused_ops; from piecework.ops.fused_choice import choose; "
        "fused_ops(); choose((), compiler='eager', device_type='cuda'); "
        "print({'triton', 'flashinfer', 'sgl_kernel'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stdout + done.stderr
