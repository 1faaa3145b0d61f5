"""Buffers at fixed addresses: who shares memory, what happens when one is too small, and what lies in the tail."""

from __future__ import annotations

import pytest
import torch

from piecework.errors import InputError
from piecework.graphs.buffers import Buffers, StaticInputs, fill_padded, padded_shape
from piecework.graphs.inputs import InputContract
from piecework.graphs.layouts import TensorLayout

CPU = torch.device("cpu")


def layout(*shape: int, dtype: torch.dtype = torch.float32) -> TensorLayout:
    return TensorLayout.contiguous(shape, dtype, CPU)


def test_buckets_share_one_memory_that_is_sized_for_the_largest():
    buffers = Buffers(16)
    small = buffers.tensor("out", layout(4, 3), 4)
    assert buffers.num_bytes == 16 * 3 * 4
    large = buffers.tensor("out", layout(16, 3), 16)
    turned = buffers.tensor("out", TensorLayout.of(torch.empty(3, 8).t()), 8)
    other = buffers.tensor("out", layout(16, dtype=torch.float64), 16)
    assert small.data_ptr() == large.data_ptr() == turned.data_ptr() == other.data_ptr()
    assert turned.stride() == (1, 8)
    assert buffers.num_bytes == 16 * 3 * 4
    assert buffers.tensor("other", layout(4, 3), 4).data_ptr() != small.data_ptr()


def test_the_same_arguments_give_the_same_object():
    buffers = Buffers(8)
    tensor = buffers.tensor("x", layout(4), 4)
    assert buffers.tensor("x", layout(4), 4) is tensor
    assert buffers.find("x", layout(4)) is tensor
    assert buffers.find("x", layout(5)) is None
    assert buffers.find("y", layout(4)) is None


@pytest.mark.parametrize("shapes", [((4, 4), (8, 8)), ((4, 3), (4, 5), (4, 40)), ((0,), (3,)), ((4, 0), (4, 1))])
def test_what_was_made_of_a_buffer_stays_when_it_is_replaced(shapes):
    """A capture was made with it; and one forward may take tensors of several sizes through one buffer."""
    buffers = Buffers(8)
    tensors = [buffers.tensor("mask", layout(*shape), shape[0] or 4) for shape in shapes]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for shape, tensor, address in zip(shapes, tensors, addresses, strict=True):
        assert buffers.find("mask", layout(*shape)) is tensor
        assert buffers.tensor("mask", layout(*shape), shape[0] or 4) is tensor
        assert tensor.data_ptr() == address
        assert tensor.shape == shape
    assert buffers.num_bytes >= max(tensor.nbytes for tensor in tensors)


def test_all_buffers_of_a_name_are_at_most_four_times_the_largest_tensor():
    """Each is at least twice the one before: the last one may be twice too large, and the others add up to it."""
    buffers = Buffers(8)
    for size in range(1, 200):
        buffers.tensor("y", layout(size), 8)
        assert buffers.num_bytes <= 4 * size * 4


def test_replaced_tensors_are_let_go_on_request():
    buffers = Buffers(8, keeps_replaced=False)
    small, other = buffers.tensor("y", layout(3), 8), buffers.tensor("z", layout(3), 8)
    buffers.tensor("y", layout(5), 8)
    assert buffers.find("y", layout(3)) is None
    assert buffers.find("z", layout(3)) is other
    assert buffers.tensor("y", layout(3), 8).data_ptr() != small.data_ptr()
    assert buffers.num_bytes == 3 * 4 + 6 * 4


def test_buffers_are_normal_tensors_also_when_made_in_inference_mode():
    """A write counts a version, which is how an eager forward shows that it wrote an input."""
    with torch.inference_mode():
        tensor = Buffers(8).tensor("x", layout(4), 4)
        before = tensor._version
        tensor.add_(1)
    assert not tensor.is_inference()
    assert tensor._version > before


def static_inputs(poison: bool = False) -> tuple[StaticInputs, InputContract]:
    contract = InputContract({"x": {0: "tokens"}, "mask": {0: "tokens", 1: "tokens"}, "y": {1: "rows"}}, {"x": -1})
    return StaticInputs(contract, Buffers(8), poison_padding=poison), contract


def inputs_of(num_tokens: int, num_rows: int = 3) -> dict[str, torch.Tensor]:
    return {
        "x": torch.arange(num_tokens) + 1,
        "mask": torch.ones(num_tokens, num_tokens),
        "y": torch.full((2, num_rows), 2.0),
        "scale": torch.ones(3, 2).t(),
    }


def test_inputs_are_copied_in_and_their_tails_defined():
    static, contract = static_inputs()
    for num_tokens, bucket in ((8, 8), (3, 4), (5, 8), (4, 4), (0, 4), (1, 4)):
        inputs = inputs_of(num_tokens)
        filled = static.fill(contract.bind(inputs), bucket)
        mask = torch.zeros(bucket, bucket)
        mask[:num_tokens, :num_tokens] = 1
        assert filled["x"].tolist() == [*range(1, num_tokens + 1), *[-1] * (bucket - num_tokens)]
        assert torch.equal(filled["mask"], mask)
        assert torch.equal(filled["y"], inputs["y"])
        assert torch.equal(filled["scale"], inputs["scale"])
        assert filled["scale"].stride() == (1, 2)
        assert all(filled[name].data_ptr() != tensor.data_ptr() for name, tensor in inputs.items() if tensor.numel())


def test_inputs_stay_where_they_were_while_other_sizes_come():
    """Of a mask, whose memory grows with the square of the tokens, and of a dim that no bucket bounds."""
    static, contract = static_inputs()
    first = static.fill(contract.bind(inputs_of(4, 3)), 4)
    addresses = {name: tensor.data_ptr() for name, tensor in first.items()}
    for num_tokens, num_rows, bucket in ((8, 3, 8), (4, 50, 4), (2, 700, 4)):
        static.fill(contract.bind(inputs_of(num_tokens, num_rows)), bucket)
    again = static.fill(contract.bind(inputs_of(3, 3)), 4)
    assert all(again[name] is tensor for name, tensor in first.items())
    assert {name: tensor.data_ptr() for name, tensor in again.items()} == addresses


def test_inputs_that_are_captured_where_they_are_are_not_copied():
    static, contract = static_inputs()
    static.by_address.add("scale")
    inputs = inputs_of(3)
    assert static.fill(contract.bind(inputs), 4)["scale"] is inputs["scale"]


def test_poisoned_tails_are_nan_where_that_exists():
    static, contract = static_inputs(poison=True)
    filled = static.fill(contract.bind(inputs_of(3)), 4)
    assert filled["x"].tolist() == [1, 2, 3, -1]
    assert filled["mask"].isnan().sum() == 16 - 9
    assert not filled["y"].isnan().any()


def test_a_pad_value_that_the_dtype_cannot_hold_is_refused():
    contract = InputContract({"x": 0}, {"x": 0.5})
    static = StaticInputs(contract, Buffers(8))
    with pytest.raises(InputError, match=r"pad\['x'\]: expected a value that torch.int64 can hold"):
        static.fill(contract.bind({"x": torch.arange(3)}), 4)


def test_fill_padded_along_several_dims():
    static = torch.full((3, 4, 2), 7.0)
    assert fill_padded(static, torch.ones(2, 3, 2), -1.0) is static
    expected = torch.full((3, 4, 2), -1.0)
    expected[:2, :3] = 1
    assert torch.equal(static, expected)
    assert padded_shape(torch.empty(2, 3, 2), {0: "tokens", 1: "rows", 2: "tokens"}, 8) == (8, 3, 8)
