"""What a call's inputs are checked for, what makes two calls the same program, and how a bucket is padded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecework.errors import InputError
from piecework.graphs.inputs import InputContract, ambient_key

TOKENS = {"x": {0: "tokens"}}


def test_an_int_is_a_tokens_dim():
    assert InputContract({"x": 1}).dynamic_dims == {"x": {1: "tokens"}}


@pytest.mark.parametrize("dims", [-1, True, "0", None, {True: "tokens"}, {-1: "tokens"}, {0: 1}, {"0": "tokens"}, [0]])
def test_a_dim_that_is_none_is_refused_by_name(dims):
    with pytest.raises(InputError, match=r"dynamic_dims\['y'\]: expected .* got"):
        InputContract({"x": 0, "y": dims})


@pytest.mark.parametrize("dims", [{}, {"x": {0: "rows"}}, {"x": {}}])
def test_tokens_must_be_declared(dims):
    with pytest.raises(InputError, match="expected one dim called 'tokens'"):
        InputContract(dims)


@pytest.mark.parametrize("pad", [{"y": 0}, {"x": 0, "z": 1}, {"blocks": 0}])
def test_a_pad_value_needs_a_tokens_dim(pad):
    with pytest.raises(InputError, match="pad: .* no dim called 'tokens'"):
        InputContract({"x": 0, "blocks": {0: "rows"}}, pad)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": 3}, "input 'x': expected a tensor, since dynamic_dims declares"),
        ({"x": [1, 2]}, "input 'x': expected a tensor, since dynamic_dims declares"),
        ({"x": torch.zeros(())}, "input 'x': dynamic_dims declares dim 0"),
        ({"x": torch.zeros(3), "y": torch.zeros(2, 4)}, "input 'y': dim 1 .* is 4, but 'x' dim 0 .* is 3"),
        ({"x": torch.zeros(3), "y": torch.zeros(2)}, "input 'y': dynamic_dims declares dim 1"),
        ({"x": torch.zeros(3), "z": [torch.zeros(3)]}, "input 'z': expected a tensor, None, bool, .* got list"),
        ({"x": None}, "expected at least one of x, y, .* got x"),
        ({}, "expected at least one of x, y, .* got nothing"),
        ({"z": torch.zeros(3)}, "expected at least one of x, y"),
    ],
)
def test_bad_inputs(inputs, message):
    with pytest.raises(InputError, match=message):
        InputContract({"x": 0, "y": {1: "tokens"}}).bind(inputs)


def test_sizes_are_read_by_name():
    contract = InputContract({"x": {0: "tokens", 1: "rows"}, "y": {0: "rows"}})
    bound = contract.bind({"x": torch.zeros(3, 5), "y": torch.zeros(5)})
    assert bound.sizes == {"tokens": 3, "rows": 5}
    assert bound.num_tokens == 3
    assert str(bound.signature) == "x: float32[tokens, rows], y: float32[rows]"


def signature(**inputs: Any) -> Any:
    return InputContract({"x": 0, "p": 0}).bind(inputs).signature


@pytest.mark.parametrize("size", [0, 1, 2, 100])
def test_the_dynamic_size_is_not_in_the_signature(size):
    same = signature(x=torch.zeros(7, 4), flag=True)
    assert signature(x=torch.ones(size, 4), flag=True) == same
    assert hash(signature(x=torch.ones(size, 4), flag=True)) == hash(same)


def test_the_order_of_the_inputs_is_not_in_the_signature():
    x, p = torch.zeros(3, 4), torch.zeros(3)
    assert signature(x=x, p=p, a=1, b=2) == signature(b=2, p=p, a=1, x=x)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({}, {"p": torch.zeros(3)}),
        ({"p": None}, {"p": torch.zeros(3)}),
        ({}, {"p": None}),
        ({"y": torch.zeros(2)}, {"y": torch.zeros(3)}),
        ({"y": torch.zeros(2)}, {"y": torch.zeros(2).double()}),
        ({"y": torch.zeros(2)}, {"y": torch.zeros(2, device="meta")}),
        ({"y": torch.zeros(2, 3)}, {"y": torch.zeros(3, 2).t()}),
        ({"flag": 1}, {"flag": True}),
        ({"flag": 1}, {"flag": 1.0}),
        ({"flag": 0.0}, {"flag": -0.0}),
        ({"flag": "a"}, {"flag": "b"}),
        ({"flag": None}, {"flag": False}),
    ],
)
def test_what_makes_another_program(left, right):
    x = torch.zeros(3, 4)
    assert signature(x=x, **left) != signature(x=x, **right)


def test_nan_is_the_same_constant_each_time():
    x = torch.zeros(3, 4)
    assert signature(x=x, scale=float("nan")) == signature(x=x, scale=float("inf") * 0)


@given(num_tokens=st.integers(0, 6), extra=st.integers(0, 5), value=st.integers(-3, 3))
def test_padding(num_tokens, extra, value):
    contract = InputContract(
        {"x": 0, "square": {0: "tokens", 1: "tokens"}, "rows": {0: "rows", 1: "tokens"}}, {"x": value}
    )
    inputs = {
        "x": torch.ones(num_tokens, 2, dtype=torch.int64),
        "square": torch.ones(num_tokens, num_tokens),
        "rows": torch.ones(3, num_tokens),
        "still": torch.ones(2),
    }
    size = num_tokens + extra
    padded = contract.pad_to_bucket(contract.bind(inputs), size)
    assert {name: list(tensor.shape) for name, tensor in padded.items()} == {
        "x": [size, 2],
        "square": [size, size],
        "rows": [3, size],
        "still": [2],
    }
    for name, tensor in inputs.items():
        assert padded[name].dtype == tensor.dtype
        head = padded[name][tuple(slice(n) for n in tensor.shape)]
        assert torch.equal(head, tensor)
        assert padded[name].sum() == tensor.sum() + (2 * extra * value if name == "x" else 0)
    assert padded["still"] is inputs["still"]


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        (torch.zeros(2, dtype=torch.bool), True),
        (torch.zeros(2), float("nan")),
        (torch.zeros(2, dtype=torch.int32), -1),
        (torch.zeros(2, dtype=torch.bfloat16), 0.5),
    ],
)
def test_the_pad_value_is_in_the_dtype_of_the_input(tensor, value):
    contract = InputContract(TOKENS, {"x": value})
    padded = contract.pad_to_bucket(contract.bind({"x": tensor}), 4)["x"]
    assert padded.dtype == tensor.dtype
    torch.testing.assert_close(padded[2:], torch.full((2,), value, dtype=tensor.dtype), equal_nan=True)


@pytest.mark.parametrize("bucket", [3, 5])
def test_a_slice_of_a_larger_buffer_becomes_contiguous(bucket):
    """Programs are compiled for contiguous inputs: Inductor's would assert, or read the wrong elements."""
    contract = InputContract({"positions": {1: "tokens"}})
    positions = torch.arange(30).view(3, 10)[:, :3]
    padded = contract.pad_to_bucket(contract.bind({"positions": positions}), bucket)["positions"]
    assert padded.is_contiguous()
    assert torch.equal(padded[:, :3], positions)


def test_an_input_that_fits_is_not_copied():
    contract = InputContract(TOKENS)
    x = torch.zeros(4, 2)
    assert contract.pad_to_bucket(contract.bind({"x": x}), 4)["x"] is x


def test_the_key_of_torchs_settings_differs_where_the_state_does() -> None:
    plain = ambient_key("cuda")
    assert plain == ambient_key("cuda")
    seen = {plain}
    for device_type in ("cpu", "cuda"):
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype) if device_type == "cpu" else _autocast_cuda(dtype):
                seen.add(ambient_key("cuda"))
    torch.set_default_dtype(torch.float64)
    try:
        seen.add(ambient_key("cuda"))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        seen.add(ambient_key("cuda"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(seen) == 7
    assert ambient_key("cuda") == plain


@contextlib.contextmanager
def _autocast_cuda(dtype: torch.dtype) -> Iterator[None]:
    """Without a GPU `torch.autocast` switches itself off; the setting is there all the same."""
    known = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", known)
