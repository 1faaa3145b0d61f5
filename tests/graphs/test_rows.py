"""Which outputs have token rows: those computed from the tokens without any are found, whatever the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from piecework.errors import InputError
from piecework.graphs.inputs import InputContract
from piecework.graphs.outputs import OutputContract, OutputDims
from piecework.graphs.rows import check_token_rows, output_rows, reduced_outputs, written_from_tokens

from .toys import Fn, accumulate, applied, halves, trace_model

DIMS = {"x": {0: "tokens"}}
X = {"x": torch.randn(6, 4)}
Body = Callable[[Any, torch.Tensor], Any]


def reduced(body: Body, **tensors: torch.Tensor) -> dict[str, str]:
    contract = InputContract(DIMS)
    traced = trace_model(Fn(body, **tensors), {"x": torch.randn(6, 4)}, DIMS)
    return reduced_outputs(traced, contract, output_rows(traced, contract))


def written_by_a_split_op(m: Any, x: torch.Tensor) -> Any:
    accumulate(applied(x), m.total)
    return x, m.total


def written_in_place(m: Any, x: torch.Tensor) -> Any:
    m.total.add_(x.sum(0))
    return x, m.total


def written_through_a_view(m: Any, x: torch.Tensor) -> Any:
    m.total[:2] = x.sum(0)[2:]
    return x, m.total * 2


def filled(m: Any, x: torch.Tensor) -> Any:
    row = x.new_zeros(4)
    row.copy_(applied(x)[-1])
    return x, row


def read_before_it_is_written(m: Any, x: torch.Tensor) -> Any:
    old = m.total.clone()
    m.total.add_(x.sum(0))
    return x, old


@pytest.mark.parametrize(
    ("body", "found"),
    [
        pytest.param(lambda m, x: (x, x[-1]), {"1": "shape [4]"}, id="last row"),
        pytest.param(lambda m, x: x.mean(0), {"": "shape [4]"}, id="mean, lone"),
        pytest.param(lambda m, x: {"a": {"b": applied(x).sum()}}, {"a.b": "shape []"}, id="behind a split op"),
        pytest.param(lambda m, x: [x, halves(x)[1].amax(0, keepdim=True)], {"1": "shape [1, 4]"}, id="functional op"),
        pytest.param(lambda m, x: (x, m.total * x.shape[0]), {"1": "shape [4]"}, id="of the size alone"),
        pytest.param(lambda m, x: (x, torch.ones_like(x).sum()), {"1": "shape []"}, id="of ones like the rows"),
        pytest.param(lambda m, x: (x, x.T @ x), {"1": "shape [4, 4]"}, id="product over the rows"),
        pytest.param(written_by_a_split_op, {"1": "shape [4]"}, id="buffer that a split op wrote"),
        pytest.param(written_in_place, {"1": "shape [4]"}, id="buffer written in place"),
        pytest.param(written_through_a_view, {"1": "shape [4]"}, id="buffer written through a view"),
        pytest.param(filled, {"1": "shape [4]"}, id="factory filled afterwards"),
        pytest.param(read_before_it_is_written, {}, id="buffer before it was written"),
        pytest.param(lambda m, x: (x + m.total, m.total), {}, id="buffer"),
        pytest.param(lambda m, x: (x, m.total * 2), {}, id="of a buffer"),
        pytest.param(lambda m, x: (x, x.new_ones(8)), {}, id="factory"),
        pytest.param(lambda m, x: (x, torch.full((3,), 2.0)), {}, id="constant tensor"),
        pytest.param(lambda m, x: (x, m.total.outer(m.total) @ x.T, x.shape[0], None, 3), {}, id="rows elsewhere"),
        pytest.param(lambda m, x: x.repeat_interleave(2, 0), {}, id="two rows a token"),
    ],
)
def test_outputs_without_rows_are_found(body: Body, found: dict[str, str]) -> None:
    assert reduced(body, total=torch.ones(4)) == found


def test_sizes_and_numbers_that_come_from_data_are_found() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        found = reduced(lambda m, x: (torch.nonzero(x), x[x > 0], x.sum().long().item()))
    assert list(found) == ["0", "1", "2"]
    assert found["0"].endswith(", 2]")
    assert found["2"] == "a number"


@pytest.mark.parametrize(
    ("output_dims", "refused"),
    [(0, "a"), (1, "a"), ({"b": None}, "a"), ({"a": None}, "b"), ({"a": 0, "b": None}, "a")],
)
def test_what_the_contract_does_not_leave_alone_is_refused(output_dims: OutputDims, refused: str) -> None:
    with pytest.raises(InputError) as caught:
        check_token_rows({"a": "shape [4]", "b": "a number"}, OutputContract(output_dims))
    text = str(caught.value)
    assert text.startswith(f"output {refused!r}: expected a dim that grows with 'tokens'")
    assert f'output_dims={{"{refused}": None}}' in text


@pytest.mark.parametrize("output_dims", [None, {"a": None, "b": None}])
def test_none_leaves_an_output_alone(output_dims: OutputDims) -> None:
    check_token_rows({"a": "shape [4]", "b": "a number"}, OutputContract(output_dims))


def test_a_lone_output_is_left_alone_by_a_plain_none() -> None:
    with pytest.raises(InputError, match=r"output '': .*got shape \[4\].*say output_dims=None if padding"):
        check_token_rows({"": "shape [4]"}, OutputContract(0))


def _written(function: Any) -> tuple[str, ...]:
    contract = InputContract({"x": 0})
    return written_from_tokens(
        trace_model(Fn(function, cache=torch.zeros(8, 4), total=torch.zeros(4)), X, DIMS), contract
    )


def into_a_slice(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.cache[: x.shape[0]].copy_(x)
    return x + 1


def a_sum(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.total.add_(x.sum(0))
    return x + 1


def in_a_split_op(m: Any, x: torch.Tensor) -> torch.Tensor:
    accumulate(x, m.total)
    return x + 1


def a_count(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.total.add_(1)
    return x + m.total


@pytest.mark.parametrize(
    ("function", "names"),
    [(into_a_slice, ("cache",)), (a_sum, ("total",)), (in_a_split_op, ()), (a_count, ())],
)
def test_buffers_that_padded_rows_are_written_into(function: Any, names: tuple[str, ...]) -> None:
    assert _written(function) == names
