"""The skinny linear's Triton kernels under Triton's interpreter, on the CPU, against float64.

Not collected by its name: `test_linear.py` runs it in a process of its own, since Triton decides when it is imported
whether it interprets. By hand: `TRITON_INTERPRET=1 pytest tests/ops/skinny_linear_interpreted.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from piecework.ops.activation import silu_and_mul
from piecework.ops.deferred import defer_compiles
from piecework.ops.linear import linear, silu_and_mul_linear, skinny_linear, triton_silu_and_mul_linear
from piecework.ops.triton import arrivals, linear_plan
from piecework.ops.triton.linear_plan import multiply
from piecework.ops.triton.linear_table import LinearTuning, pick_tuning

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Of the largest difference, relative to the largest entry. The interpreter does not round to nearest."""
DTYPES = list(TOLERANCE)
ROWS = [1, 2, 3, 4, 5, 8, 16]
SHAPES = {
    "even": (128, 256),
    "odd": (70, 100),
    "one output": (1, 515),
    "one element": (33, 1),
    "longer than a block": (3, 4133),
    "split": (40, 3000),
    "split evenly": (64, 2048),
}
"""Name -> out_features, in_features."""
LOOP = LinearTuning(uses_tiles=False, block_n=4, block_k=32, num_warps=4, unroll=2)
TILES = LinearTuning(uses_tiles=True, block_n=16, block_k=16, num_warps=4)
SPLIT = LinearTuning(uses_tiles=True, block_n=16, block_k=16, num_warps=4, splits=3)


@pytest.fixture(autouse=True)
def arrivals_are_zero() -> Iterator[None]:
    yield
    assert all(not counters.any() for counters in arrivals._ARRIVALS.values())


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def weight_of(out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)


def check(
    got: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1
) -> None:
    """`scale`: of the tolerance."""
    assert got is not None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.shape == expected.shape
    assert got.dtype == weight.dtype
    assert got.is_contiguous()
    difference = (got.double() - expected).abs().max()
    assert difference <= scale * TOLERANCE[weight.dtype] * expected.abs().max()


def test_this_is_the_interpreter() -> None:
    for kernel in (linear_plan.multiply_rows, linear_plan.multiply_tiles):
        assert not isinstance(kernel, triton.runtime.JITFunction)


# ---- what comes out


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_shape(dtype: torch.dtype, shape: str, num_rows: int, with_bias: bool) -> None:
    out_features, in_features = SHAPES[shape]
    x, weight = drawn(dtype, num_rows, in_features), weight_of(out_features, in_features, dtype)
    bias = drawn(dtype, out_features) if with_bias else None
    tuning = pick_tuning(num_rows, out_features, in_features, linear_plan._CPU_SMS)
    assert tuning is not None
    assert tuning.uses_tiles == (num_rows > 1)
    assert (tuning.splits > 1) == (num_rows > 1 and in_features >= 1024)
    check(multiply(x, weight, bias), x, weight, bias)
    assert torch.equal(skinny_linear(x, weight, bias), multiply(x, weight, bias))


@given(
    num_rows=st.integers(1, 16),
    out_features=st.integers(1, 70),
    in_features=st.integers(1, 150),
    tuning=st.sampled_from([LOOP, TILES, SPLIT]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_small_blocks(num_rows: int, out_features: int, in_features: int, tuning: LinearTuning, seed: int) -> None:
    torch.manual_seed(seed)
    num_rows = num_rows if tuning.uses_tiles else 1 + num_rows % 3
    x, weight = drawn(torch.float16, num_rows, in_features), weight_of(out_features, in_features, torch.float16)
    bias = drawn(torch.float16, out_features)
    got = multiply(x, weight, bias, tuning=tuning)
    # Of sums of few terms the largest entry may be small beside what was added up.
    expected = F.linear(x.double(), weight.double(), bias.double())
    magnitude = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    assert got is not None
    assert ((got.double() - expected).abs() <= 2e-3 * magnitude).all()


def test_splits_are_added_in_one_order() -> None:
    """Whoever arrives last adds all parts from memory, the first split's first, and leaves the counters at zero."""
    x, weight = drawn(torch.bfloat16, 5, 100), weight_of(30, 100, torch.bfloat16)
    usual = multiply(x, weight, None, tuning=SPLIT)
    check(usual, x, weight)
    plan = linear_plan._plan_of(linear_plan._kind(x), linear_plan._kind(weight), None, False, SPLIT)
    assert plan is not None
    assert plan.grid == (2, 3, 1)
    parts = torch.full((plan.num_parts,), float("nan"))
    for num_arrived in (0, 1):
        # The second time as if the last split had arrived first, whose part is in memory: the second one adds up.
        out, counters = torch.empty(5, 30, dtype=torch.bfloat16), torch.full((2,), num_arrived, dtype=torch.int32)
        parts.view(3, -1)[: 3 - num_arrived].fill_(float("nan"))
        linear_plan._call(plan, x, weight, None, out, (parts, counters)).launch()
        assert torch.equal(out, usual)  # type: ignore[arg-type]
        assert counters.tolist() == [num_arrived] * 2


@pytest.mark.parametrize("num_rows", [1, 2, 3, 6])
def test_rows_that_are_not_contiguous(num_rows: int) -> None:
    weight = weight_of(20, 48, torch.float16)
    wide = drawn(torch.float16, num_rows, 3, 50)
    for x in (wide[:, 1, :48], wide[:, 2, 1:49], wide[:, :1, 2:]):
        assert multiply(x, weight, None) is not None
        check(skinny_linear(x, weight), x, weight)


def test_leading_dims() -> None:
    weight, bias = weight_of(20, 48, torch.float16), drawn(torch.float16, 20)
    for shape in ((48,), (1, 48), (2, 3, 48), (1, 5, 1, 48), (2, 2, 2, 2, 48)):
        x = drawn(torch.float16, *shape)
        check(multiply(x, weight, bias), x, weight, bias)
    one_row = drawn(torch.float16, 1, 48).expand(3, 48)
    check(multiply(one_row, weight, bias), one_row, weight, bias)


# ---- who does it


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (drawn(torch.float16, 17, 32), drawn(torch.float16, 8, 32), None),
        (drawn(torch.float16, 0, 32), drawn(torch.float16, 8, 32), None),
        (drawn(torch.float32, 2, 32), drawn(torch.float32, 8, 32), None),
        (drawn(torch.float16, 2, 32), drawn(torch.float16, 32, 8).T, None),
        (drawn(torch.float16, 2, 32), drawn(torch.float16, 8, 64)[:, ::2], None),
        (drawn(torch.float16, 2, 32), drawn(torch.float16, 8, 40)[:, :32], None),
        (drawn(torch.float16, 32, 2).T, drawn(torch.float16, 8, 32), None),
        (drawn(torch.float16, 2, 3, 32).transpose(0, 1), drawn(torch.float16, 8, 32), None),
        (drawn(torch.float16, 2, 32), drawn(torch.float16, 0, 32), None),
        (drawn(torch.float16, 2, 0), drawn(torch.float16, 8, 0), drawn(torch.float16, 8)),
        (drawn(torch.float16, 2, 32), drawn(torch.float16, 8, 32), drawn(torch.float16, 16)[::2]),
    ],
    ids=[
        "many rows", "no rows", "float32", "weights of columns", "weights with gaps", "sliced weights", "x of columns",
        "rows in another order", "no outputs", "no terms", "a bias with gaps",
    ],
)  # fmt: skip
def test_what_is_left_to_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    assert multiply(x, weight, bias) is None
    assert torch.equal(skinny_linear(x, weight, bias), F.linear(x, weight, bias))


def test_what_torch_refuses_is_refused_by_torch() -> None:
    x, weight = drawn(torch.float16, 2, 32), drawn(torch.float16, 8, 32)
    for others in (
        (weight[:, :30].contiguous(), None),
        (weight.float(), None),
        (weight, drawn(torch.float16, 7)),
        (weight, drawn(torch.float32, 8)),
        (drawn(torch.float16, 2, 2, 32), None),
    ):
        with pytest.raises(RuntimeError):
            skinny_linear(x, *others)


# ---- the activation before it


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 16, 17])
@pytest.mark.parametrize("shape", ["even", "odd", "one element", "longer than a block"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul(dtype: torch.dtype, shape: str, num_rows: int) -> None:
    out_features, in_features = SHAPES[shape]
    gate_up, weight = 2 * drawn(dtype, num_rows, 2 * in_features), weight_of(out_features, in_features, dtype)
    assert (multiply(gate_up, weight, None, activates=True) is None) == (num_rows > 3)
    got = triton_silu_and_mul_linear(gate_up, weight)
    gate, up = gate_up.double().chunk(2, -1)
    # The activation is rounded in between, which the reference is not.
    check(got, gate / (1 + torch.exp(-gate)) * up, weight, scale=2)


def test_the_activation_is_rounded_as_torch_rounds() -> None:
    """One output picks one entry of the activation; the interpreter rounds to float16 to nearest, as torch does."""
    gate_up, weight = 3 * drawn(torch.float16, 2, 64), torch.eye(32, dtype=torch.float16)
    got = multiply(gate_up, weight, None, activates=True)
    expected = silu_and_mul.native(gate_up)
    assert got is not None
    assert (got == expected).float().mean() > 0.95  # an exponential may differ in its last bit


def test_an_activation_of_columns_is_torchs() -> None:
    gate_up, weight = drawn(torch.float16, 64, 2).T, drawn(torch.float16, 8, 32)
    assert multiply(gate_up, weight, None, activates=True) is None
    check(triton_silu_and_mul_linear(gate_up, weight), silu_and_mul.native(gate_up), weight, scale=2)


# ---- the operators


@pytest.mark.parametrize("num_rows", [1, 3, 5])
def test_opcheck(num_rows: int) -> None:
    x, weight, bias = drawn(torch.float16, num_rows, 32), drawn(torch.float16, 8, 32), drawn(torch.float16, 8)
    torch.library.opcheck(skinny_linear, (x, weight))
    torch.library.opcheck(skinny_linear, (x[None], weight, bias))
    torch.library.opcheck(triton_silu_and_mul_linear, (torch.cat((x, x), -1), weight))


def test_the_kernels_bodies_are_the_operators() -> None:
    x, weight = drawn(torch.float16, 2, 32), drawn(torch.float16, 8, 32)
    [kernel] = [kernel for kernel in linear.kernels if kernel.name == "triton"]
    assert torch.equal(kernel.body(x, weight), multiply(x, weight, None))
    [kernel] = [kernel for kernel in silu_and_mul_linear.kernels if kernel.name == "triton"]
    gate_up = torch.cat((x, x), -1)
    assert torch.equal(kernel.body(gate_up, weight), multiply(gate_up, weight, None, activates=True))


def test_under_autocast_the_casts_are_autocasts() -> None:
    x, weight = drawn(torch.float32, 2, 32), drawn(torch.float32, 8, 32)
    [kernel] = [kernel for kernel in linear.kernels if kernel.name == "triton"]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(kernel.body(x, weight), F.linear(x, weight))
        assert kernel.body(x, weight).dtype == torch.bfloat16


def test_kernels_of_the_interpreter_are_ready() -> None:
    x, weight = drawn(torch.float16, 2, 32), drawn(torch.float16, 8, 32)
    with defer_compiles(lambda key, compile: pytest.fail("nothing to compile")):
        assert multiply(x, weight, None) is not None


# ---- memory of splits


def test_streams_do_not_share_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_ARRIVALS", {})
    monkeypatch.setattr(arrivals, "_SPARE", {})
    device = torch.device("cpu")
    arrivals.prepare_arrivals(device)
    found = [arrivals.arrivals_of(device, stream) for stream in range(40)]
    assert len({each.data_ptr() for each in found}) == 40
    assert arrivals.arrivals_of(device, 7) is found[7]
    assert all(each.shape == (arrivals.NUM_ARRIVALS,) and not each.any() for each in found)


def test_a_capture_makes_no_arrivals_that_others_rely_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_ARRIVALS", {})
    monkeypatch.setattr(arrivals, "_SPARE", {})
    device = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "_is_capturing", lambda device: True)
        arrivals.prepare_arrivals(device)
        first, second = (arrivals.arrivals_of(device, 3) for _ in range(2))
        assert first is not second
        assert arrivals._ARRIVALS == {}
    arrivals.prepare_arrivals(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "_is_capturing", lambda device: True)
        assert arrivals.arrivals_of(device, 3) is arrivals.arrivals_of(device, 3)
