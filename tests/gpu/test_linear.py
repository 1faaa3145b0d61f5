"""The skinny linear's kernels on the device, against float64: launched, launched quickly, captured, on two streams."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from piecework.ops.activation import silu_and_mul
from piecework.ops.linear import skinny_linear, triton_silu_and_mul_linear
from piecework.ops.triton import arrivals
from piecework.ops.triton.linear_plan import multiply

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_only")]

SHAPES = [(6144, 4096), (4096, 14336), (70, 100), (5, 3000), (1, 1), (2048, 4096)]
ROWS = [1, 2, 3, 4, 5, 8, 16, 17]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


def drawn(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def check(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    difference = (got.double() - expected).abs().max()
    assert difference <= TOLERANCE[weight.dtype] * expected.abs().max()


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_every_shape(dtype: torch.dtype, shape: tuple[int, int], num_rows: int) -> None:
    """The first launch is an ordinary one, the others are quick."""
    out_features, in_features = shape
    weight, bias = drawn(dtype, *shape, scale=in_features**-0.5), drawn(dtype, out_features)
    for added in (None, bias, None, bias):
        x = drawn(dtype, num_rows, in_features)
        assert (multiply(x, weight, added) is None) == (num_rows > 16)
        check(skinny_linear(x, weight, added), x, weight, added)
    assert all(not counters.any() for counters in arrivals._ARRIVALS.values())


@pytest.mark.parametrize("num_rows", [1, 3, 4, 20])
def test_silu_and_mul(num_rows: int) -> None:
    gate_up, weight = drawn(torch.bfloat16, num_rows, 2048), drawn(torch.bfloat16, 512, 1024, scale=1 / 32)
    for _ in range(2):
        check(triton_silu_and_mul_linear(gate_up, weight), silu_and_mul.native(gate_up), weight)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8])
def test_a_capture_replays_the_same_bits(num_rows: int) -> None:
    """Splits are added in one order, whoever arrives last; a replay after new rows computes the new product."""
    weight, x = drawn(torch.bfloat16, 4096, 4096, scale=1 / 64), drawn(torch.bfloat16, num_rows, 4096)
    skinny_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = [skinny_linear(x, weight) for _ in range(3)]
    for _ in range(5):
        x.copy_(drawn(torch.bfloat16, num_rows, 4096))
        expected = skinny_linear(x, weight)
        graph.replay()
        assert all(torch.equal(each, expected) for each in out)
        check(out[0], x, weight)


def test_two_streams_at_once() -> None:
    """They do not share the counters of their splits."""
    weights = [drawn(torch.bfloat16, 4096, 4096, scale=1 / 64) for _ in range(2)]
    rows = [drawn(torch.bfloat16, 8, 4096) for _ in range(2)]
    expected = [skinny_linear(*each) for each in zip(rows, weights, strict=True)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(skinny_linear(rows[i], weights[i]))
    torch.cuda.synchronize()
    for i in range(2):
        assert all(torch.equal(each, expected[i]) for each in found[i])
