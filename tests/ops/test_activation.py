"""SiLU-and-mul: float64 references, every dtype, odd sizes, traces, errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from piecework.errors import InputError
from piecework.ops.activation import silu_and_mul
from piecework.ops.fused_choice import choose

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 2), (1, 14), (2, 3, 10), (5, 5462), (8,), (0, 4)])
def test_silu_and_mul(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate_up = (4 * torch.randn(shape)).to(dtype)
    got = silu_and_mul(gate_up)
    d = shape[-1] // 2
    gate, up = gate_up[..., :d].double(), gate_up[..., d:].double()
    expected = gate / (1 + torch.exp(-gate)) * up
    assert got.dtype == dtype
    assert got.shape == expected.shape == (*shape[:-1], d)
    # Two roundings: that of silu(gate) and that of the product.
    torch.testing.assert_close(got.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)


def test_the_gate_comes_first() -> None:
    assert silu_and_mul(torch.tensor([[0.0, 5.0]])).item() == 0
    assert silu_and_mul(torch.tensor([[100.0, 5.0]])).item() == 500


def test_extremes_are_no_nan() -> None:
    got = silu_and_mul(torch.tensor([[-1e30, 1e30, 2.0, 2.0]]))
    assert got.tolist() == [[0.0, pytest.approx(2e30)]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_equals_eager_for_any_number_of_rows(dtype: torch.dtype) -> None:
    compiled = torch.compile(lambda x: silu_and_mul(x), backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.inference_mode():
        for rows in (8, 1, 3, 0):
            gate_up = torch.randn(rows, 14).to(dtype)
            torch._dynamo.decorators.mark_unbacked(gate_up, 0)
            assert torch.equal(compiled(gate_up), silu_and_mul(gate_up))


@pytest.mark.parametrize("shape", [(2, 5), (1,), ()])
def test_an_odd_last_dim(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError) as caught:
        silu_and_mul(torch.zeros(shape))
    assert str(caught.value) == (
        f"silu_and_mul: expected [..., 2 * d], gate and up behind each other, got {list(shape)}; "
        f"concatenate the two along the last dim"
    )


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["silu_and_mul"])
def test_on_cuda_tritons_kernel_under_every_compiler(compiler: str, name: str) -> None:
    """What was measured on an H200."""
    for dtype in (None, *DTYPES):
        assert choose((), compiler=compiler, device_type="cuda", dtype=dtype).runs[name] == "triton"
    assert choose((), compiler=compiler, device_type="cpu").runs[name] == "native"
    assert choose(("none",), compiler=compiler, device_type="cuda").runs[name] == "native"
