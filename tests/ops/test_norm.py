"""RMSNorm and fused add + RMSNorm: float64 references, every dtype, odd sizes, traces, errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from piecework.errors import InputError
from piecework.ops.fused_choice import choose
from piecework.ops.norm import RMSNorm, fused_add_rms_norm, rms_norm

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 7, 64, 4097]
EPS = 1e-5


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def reference(x: torch.Tensor, weight: torch.Tensor, variance_size: int | None = None) -> torch.Tensor:
    """Row by row in float64, as the formula is written."""
    rows = []
    for row in x.double().reshape(-1, x.shape[-1]):
        part = row[:variance_size] if variance_size is not None else row
        mean_square = math.fsum((part * part).tolist()) / len(part)
        rows.append(row / math.sqrt(mean_square + EPS) * weight.double())
    return torch.stack(rows).reshape(x.shape)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, by norm, in units of the dtype's precision."""
    assert got.shape == expected.shape
    relative = torch.linalg.vector_norm(got.double() - expected) / torch.linalg.vector_norm(expected)
    return relative.item() / torch.finfo(got.dtype).eps


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), (1 + torch.rand(shape[-1])).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, _, weight = inputs((3, size), dtype)
    got = rms_norm(x, weight, EPS)
    assert got.dtype == dtype
    # Two roundings of the result: that of the normed x and that of the product.
    assert error(got, reference(x, weight)) < (4 if dtype.itemsize >= 4 else 1.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_fused_add_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, residual, weight = inputs((3, size), dtype)
    before = x.clone(), residual.clone()
    normed, total = fused_add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, EPS))
    assert error(normed, reference(total, weight)) < (4 if dtype.itemsize >= 4 else 1.5)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    assert total.untyped_storage().data_ptr() not in {x.data_ptr(), residual.data_ptr(), normed.data_ptr()}


def torch_kernel(op: Any) -> Callable[..., Any]:
    [kernel] = [kernel for kernel in op.kernels if kernel.name == "torch"]
    body: Callable[..., Any] = kernel.body
    return body


@pytest.mark.parametrize("variance_size", [None, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 4097])
def test_torch_as_the_kernel(size: int, dtype: torch.dtype, variance_size: int | None) -> None:
    x, residual, weight = inputs((3, size), dtype)
    normed, total = torch_kernel(fused_add_rms_norm)(x, residual, weight, EPS, variance_size)
    assert torch.equal(total, x + residual)
    assert normed.dtype == dtype
    assert torch.equal(normed, torch_kernel(rms_norm)(total, weight, EPS, variance_size))
    assert error(normed, reference(total, weight, variance_size)) < (4 if dtype.itemsize >= 4 else 1.5)


@pytest.mark.parametrize(("dtype", "other"), [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)])
def test_torch_as_the_kernel_has_the_native_bodys_dtype_where_dtypes_differ(
    dtype: torch.dtype, other: torch.dtype
) -> None:
    x, residual, weight = inputs((3, 16), dtype)
    for arguments in ((x, weight.to(other)), (x.to(other), weight)):
        got, expected = torch_kernel(rms_norm)(*arguments, EPS), rms_norm(*arguments, EPS)
        assert got.dtype == expected.dtype == torch.float32
        assert torch.equal(got, expected)
    for triple in ((x, residual, weight.to(other)), (x, residual.to(other), weight)):
        for got, expected in zip(
            torch_kernel(fused_add_rms_norm)(*triple, EPS), fused_add_rms_norm(*triple, EPS), strict=True
        ):
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)


def test_torch_as_the_kernel_says_what_the_native_body_says() -> None:
    x, weight = torch.ones(2, 3), torch.ones(4)
    with pytest.raises(InputError, match=r"rms_norm: expected x \[..., size\] and weight \[size\]"):
        torch_kernel(rms_norm)(x, weight, EPS)
    with pytest.raises(InputError, match="expected x and residual of one shape"):
        torch_kernel(fused_add_rms_norm)(x, x[:1], weight[:3], EPS)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm"])
def test_on_cuda_tritons_norms_under_every_compiler(compiler: str, name: str) -> None:
    """What was measured on an H200. Where they cannot serve, torch's own where nobody fuses."""

    def runs(device_type: str, **more: Any) -> str:
        return choose((), compiler=compiler, device_type=device_type, **more).runs[name]

    assert runs("cuda") == "triton"
    for dtype in DTYPES:
        assert runs("cuda", dtype=dtype, capability=(9, 0), captured=True) == "triton"
    # The packages' serve 16 bits alone, and Triton would have to compile.
    assert runs("cuda", dtype=torch.float64, at_once=True) == ("native" if compiler == "inductor" else "torch")
    assert runs("cpu") == runs("cpu", dtype=torch.bfloat16) == "native"


@pytest.mark.parametrize("variance_size", [1, 2, 5, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_variance_of_the_first_entries(dtype: torch.dtype, variance_size: int) -> None:
    x, residual, weight = inputs((4, 7), dtype)
    assert error(rms_norm(x, weight, EPS, variance_size), reference(x, weight, variance_size)) < 4
    normed, total = fused_add_rms_norm(x, residual, weight, EPS, variance_size=variance_size)
    assert error(normed, reference(total, weight, variance_size)) < 4
    changed = x.clone()
    changed[:, variance_size:] = 100  # what lies behind does not count
    kept = rms_norm(changed, weight, EPS, variance_size)[:, :variance_size]
    assert torch.equal(kept, rms_norm(x, weight, EPS, variance_size)[:, :variance_size])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_small_dtype_cannot_square_is_computed_in_float32(dtype: torch.dtype) -> None:
    weight = torch.ones(8, dtype=dtype)
    for scale in (3e4, 1e-4):
        x = torch.full((2, 8), scale, dtype=dtype)
        got = rms_norm(x, weight, 1e-12)
        torch.testing.assert_close(got, torch.ones_like(x), rtol=1e-2, atol=0)


def test_it_is_the_formula_bit_for_bit() -> None:
    """The order of the roundings: x is rounded after the norm and before the weight."""
    x, _, weight = inputs((5, 64), torch.bfloat16)
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(torch.bfloat16)
    assert torch.equal(rms_norm(x, weight, EPS), expected)


@pytest.mark.parametrize("shape", [(0, 6), (6,), (2, 3, 6)])
def test_any_leading_dims(shape: tuple[int, ...]) -> None:
    x, residual, weight = inputs(shape, torch.float32)
    normed, total = fused_add_rms_norm(x, residual, weight, EPS)
    assert normed.shape == total.shape == rms_norm(x, weight, EPS).shape == shape
    flat = rms_norm(x.reshape(-1, 6), weight, EPS).reshape(shape)
    assert torch.equal(rms_norm(x, weight, EPS), flat)


def test_rows_that_are_not_contiguous() -> None:
    wide = torch.randn(4, 20)
    weight = torch.rand(7)
    assert torch.equal(rms_norm(wide[:, 3:10], weight, EPS), rms_norm(wide[:, 3:10].contiguous(), weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variance_size", [None, 5])
def test_compiled_equals_eager_for_any_number_of_rows(dtype: torch.dtype, variance_size: int | None) -> None:
    def model(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        return rms_norm(x, weight, EPS, variance_size), *fused_add_rms_norm(x, residual, weight, EPS, variance_size)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.inference_mode():
        for rows in (8, 1, 3, 0):
            x, residual, weight = inputs((rows, 7), dtype)
            torch._dynamo.decorators.mark_unbacked(x, 0)
            torch._dynamo.decorators.mark_unbacked(residual, 0)
            for got, expected in zip(compiled(x, residual, weight), model(x, residual, weight), strict=True):
                assert torch.equal(got, expected)


def test_the_module() -> None:
    x, residual, weight = inputs((3, 8), torch.float32)
    norm = RMSNorm(8, EPS, variance_size=4)
    assert torch.equal(norm.weight, torch.ones(8))
    norm.load_state_dict({"weight": weight})
    assert torch.equal(norm(x), rms_norm(x, weight, EPS, 4))
    normed, total = norm(x, residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, EPS, 4))
    assert torch.equal(total, x + residual)
    assert repr(norm) == "RMSNorm(8, eps=1e-05, variance_size=4)"
    assert repr(RMSNorm(8, EPS)) == "RMSNorm(8, eps=1e-05)"
    made = RMSNorm(8, EPS, device="meta", dtype=torch.bfloat16).weight
    assert (made.device.type, made.dtype) == ("meta", torch.bfloat16)


def test_gradients_are_those_of_the_formula() -> None:
    x, _, weight = inputs((3, 8), torch.float64)
    x.requires_grad_()
    weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS, 5), (x, weight))


X = torch.zeros(2, 4)
W = torch.zeros(4)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: rms_norm(X, torch.zeros(3), EPS),
            "rms_norm: expected x [..., size] and weight [size], got [2, 4] and [3]; norm over the dim",
        ),
        (lambda: rms_norm(X, torch.zeros(1), EPS), "rms_norm: expected x [..., size] and weight [size]"),
        (lambda: rms_norm(torch.zeros(()), W, EPS), "got [] and [4]"),
        (lambda: rms_norm(X, W, EPS, 0), "rms_norm: variance_size: expected 1 to the size 4 of the last dim, got 0"),
        (lambda: rms_norm(X, W, EPS, 5), "got 5; leave it out to take the variance of all"),
        (
            lambda: fused_add_rms_norm(X, torch.zeros(1, 4), W, EPS),
            "fused_add_rms_norm: expected x and residual of one shape, got [2, 4] and [1, 4]; pass the residual",
        ),
        (lambda: fused_add_rms_norm(X, X, torch.zeros(3), EPS), "fused_add_rms_norm: expected x [..., size]"),
        (lambda: fused_add_rms_norm(X, X, W, EPS, 9), "fused_add_rms_norm: variance_size: expected 1 to the size 4"),
        (lambda: RMSNorm(4, EPS, variance_size=5), "RMSNorm: variance_size: expected 1 to the size 4"),
    ],
)
def test_shapes_that_do_not_fit(call: Any, text: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert text in str(caught.value)
