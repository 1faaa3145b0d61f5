"""Rotary embedding: a complex float64 reference, every dtype, partial heads, traces, errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from piecework.errors import InputError
from piecework.ops.fused_choice import choose
from piecework.ops.norm import rms_norm
from piecework.ops.rotary import qk_norm_rotary, rotary_embedding

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def inputs(
    num_tokens: int,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 8,
    rotary_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    half = (head_size if rotary_size is None else rotary_size) // 2
    angles = 100 * torch.rand(num_tokens, half, dtype=torch.float64)
    q = torch.randn(num_tokens, num_heads, head_size).to(dtype)
    k = torch.randn(num_tokens, num_kv_heads, head_size).to(dtype)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """A pair of entries as a complex number, turned by multiplication."""
    half = cos.shape[1]
    turned = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    turned = turned * torch.complex(cos.double(), sin.double())[:, None, :]
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :].double()), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_size", "rotary_size"),
    [
        (3, 4, 2, 8, 8),
        (1, 1, 1, 2, 2),
        (7, 5, 1, 6, 6),
        (0, 2, 2, 4, 4),
        (5, 3, 3, 10, 4),
        (2, 2, 1, 7, 6),
        (33, 8, 2, 128, 64),
    ],
)
def test_rotation(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_size: int, rotary_size: int, dtype: torch.dtype
) -> None:
    q, k, cos, sin = inputs(num_tokens, num_heads, num_kv_heads, head_size, rotary_size, dtype)
    for got, x in zip(rotary_embedding(q, k, cos, sin), (q, k), strict=True):
        assert got.dtype == dtype
        assert got.is_contiguous()
        precision = torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), reference(x, cos, sin), rtol=4 * precision, atol=8 * precision)
        assert torch.equal(got[..., rotary_size:], x[..., rotary_size:])


def test_scores_depend_on_the_distance_alone() -> None:
    inv_freq = 1 / 10000 ** (torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    q, k = torch.randn(1, 1, 16).double().expand(20, 1, 16), torch.randn(1, 1, 16).double().expand(20, 1, 16)
    angles = torch.arange(20, dtype=torch.float64)[:, None] * inv_freq
    q, k = rotary_embedding(q, k, angles.cos(), angles.sin())
    scores = (q[:, 0] @ k[:, 0].T).contiguous()
    for distance in (0, 1, 7):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_angle_zero_changes_nothing() -> None:
    q, k, cos, sin = inputs(3)
    got_q, got_k = rotary_embedding(q, k, torch.ones_like(cos), torch.zeros_like(sin))
    assert torch.equal(got_q, q)
    assert torch.equal(got_k, k)


def test_wide_tables_give_the_heads_dtype_and_are_computed_wide() -> None:
    q, k, cos, sin = inputs(16, dtype=torch.bfloat16)
    wide_cos, wide_sin = torch.rand_like(cos, dtype=torch.float32), torch.rand_like(sin, dtype=torch.float32)
    got, _ = rotary_embedding(q, k, wide_cos, wide_sin)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rotary_embedding(q.float(), k.float(), wide_cos, wide_sin)[0].bfloat16())


def test_views_of_one_projection_are_left_alone() -> None:
    rows = torch.randn(5, 8, 6)
    before = rows.clone()
    q, k, _ = rows.split([4, 2, 2], dim=1)
    _, _, cos, sin = inputs(5, head_size=6)
    got = rotary_embedding(q, k, cos, sin)
    assert torch.equal(rows, before)
    for one, other in zip(got, rotary_embedding(q.clone(), k.clone(), cos, sin), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_size", [6, 4])
def test_compiled_equals_eager_for_any_number_of_tokens(dtype: torch.dtype, rotary_size: int) -> None:
    def model(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for tensor in tensors[1:]:
            torch._check(tensor.shape[0] == tensors[0].shape[0])
        return rotary_embedding(*tensors)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.inference_mode():
        for num_tokens in (8, 1, 3, 0):
            tensors = inputs(num_tokens, head_size=6, rotary_size=rotary_size, dtype=dtype)
            for tensor in tensors:
                torch._dynamo.decorators.mark_unbacked(tensor, 0)
            for got, expected in zip(compiled(*tensors), rotary_embedding(*tensors), strict=True):
                assert torch.equal(got, expected)


Q, K, C = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8), torch.zeros(3, 4)


@pytest.mark.parametrize(
    "tensors",
    [
        (Q[0], K, C, C),
        (Q, K[0], C, C),
        (Q[:2], K, C, C),
        (Q, K[..., :6], C, C),
        (Q, K, C[None], C[None]),
        (Q, K, C, C[:, :2]),
        (Q, K, C[:2], C[:2]),
        (Q, K, torch.zeros(3, 5), torch.zeros(3, 5)),
        (Q, K, torch.zeros(3, 8), torch.zeros(3, 8)),
    ],
)
def test_shapes_that_do_not_fit(tensors: Inputs) -> None:
    with pytest.raises(InputError) as caught:
        rotary_embedding(*tensors)
    text = str(caught.value)
    assert text.startswith("rotary_embedding: expected ")
    got = [str(list(tensor.shape)) for tensor in tensors]
    assert "got q {}, k {}, cos {} and sin {}; ".format(*got) in text


def test_norms_of_heads_before_the_rotation() -> None:
    q, k, cos, sin = inputs(5, head_size=10, rotary_size=6, dtype=torch.bfloat16)
    q_weight, k_weight = torch.rand(10).bfloat16(), torch.rand(10).bfloat16()
    expected = rotary_embedding(rms_norm(q, q_weight, 1e-5), rms_norm(k, k_weight, 1e-5), cos, sin)
    for one, other in zip(qk_norm_rotary(q, k, q_weight, k_weight, cos, sin, 1e-5), expected, strict=True):
        assert torch.equal(one, other)


def test_norms_of_heads_that_do_not_fit() -> None:
    with pytest.raises(InputError, match="qk_norm_rotary: expected q and k"):
        qk_norm_rotary(Q[0], K, C[0], C[0], C, C, 1e-5)
    with pytest.raises(InputError, match="rms_norm: expected x"):
        qk_norm_rotary(Q, K, torch.ones(7), torch.ones(8), C, C, 1e-5)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["rotary_embedding", "qk_norm_rotary"])
def test_on_cuda_tritons_kernel_under_every_compiler(compiler: str, name: str) -> None:
    """What was measured on an H200."""
    for dtype in (None, *DTYPES):
        assert choose((), compiler=compiler, device_type="cuda", dtype=dtype).runs[name] == "triton"
    assert choose((), compiler=compiler, device_type="cpu").runs[name] == "native"
    assert choose(("none",), compiler=compiler, device_type="cuda").runs[name] == "native"
