"""How tensors and the outputs of calls lay in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecework.graphs.layouts import CallLayout, TensorLayout

CPU = torch.device("cpu")


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of any kind: permuted, sliced, expanded, of no elements."""
    tensor = torch.empty(draw(st.lists(st.integers(0, 4), max_size=3)))
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(("permute", "slice", "step", "expand", "select")))
        dim = draw(st.integers(0, max(tensor.dim() - 1, 0)))
        if kind == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        elif kind == "expand":
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *tensor.shape)
        elif tensor.dim() and tensor.shape[dim]:
            start = draw(st.integers(0, tensor.shape[dim] - 1))
            if kind == "slice":
                tensor = tensor.narrow(dim, start, draw(st.integers(0, tensor.shape[dim] - start)))
            elif kind == "step":
                tensor = tensor[(slice(None),) * dim + (slice(start, None, 2),)]
            else:
                tensor = tensor.select(dim, start)
    return tensor


@given(views())
def test_a_layout_over_memory_of_its_size_is_the_tensor_again(tensor):
    layout = TensorLayout.of(tensor)
    memory = torch.empty(layout.num_bytes, dtype=torch.uint8).untyped_storage()
    again = layout.over(memory)
    assert (again.shape, again.stride(), again.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert TensorLayout.of(again) == layout
    assert memory.nbytes() == layout.num_bytes  # it was not resized


@given(views())
def test_a_dense_layout_has_no_gaps_and_a_copy_fits(tensor):
    dense = TensorLayout.of(tensor).dense()
    assert dense.num_bytes == tensor.numel() * tensor.itemsize
    assert dense.shape == tuple(tensor.shape)
    assert dense.dense() == dense
    memory = torch.empty(dense.num_bytes, dtype=torch.uint8).untyped_storage()
    copied = dense.over(memory).copy_(tensor)
    assert torch.equal(copied.nan_to_num(), tensor.nan_to_num())


def test_strides_of_a_dense_layout():
    def dense(tensor: torch.Tensor) -> tuple[int, ...]:
        return TensorLayout.of(tensor).dense().stride

    base = torch.empty(2, 3, 4)
    assert dense(base) == (12, 4, 1)
    assert dense(base.permute(2, 0, 1)) == (1, 12, 4)
    assert dense(base[1:]) == (12, 4, 1)
    assert dense(base[:, :2]) == (8, 4, 1)
    assert dense(base[..., :1].expand(-1, -1, 4)) == (12, 4, 1)
    assert str(TensorLayout.of(base.to(torch.int8))) == "int8[2, 3, 4]"


def test_outputs_of_a_call_are_built_as_they_were_observed():
    source, other = torch.empty(4, 4), torch.empty(6)
    fresh = torch.empty(3, 8)
    outputs = [
        source[1:, :2],  # lies in an argument
        fresh[:, 2:6],  # two views of one new memory
        fresh.t(),
        7,
        None,
        torch.empty(2),
        other,
        torch.empty(0, 5),
    ]
    layout = CallLayout.observe([source, 3, other], outputs)
    assert layout.memories == (0, -1, -1, None, None, -2, 2, -3)
    assert layout.new_bytes == (96, 8, 0)

    new_source, new_other = torch.empty(4, 4), torch.empty(6)
    allocated: list[torch.UntypedStorage] = []

    def allocate(num_bytes: int, device: torch.device) -> torch.UntypedStorage:
        allocated.append(torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage())
        return allocated[-1]

    built = layout.build([new_source, 3, new_other], allocate)
    assert [memory.nbytes() for memory in allocated] == [96, 8, 0]
    assert built[0].data_ptr() == new_source[1:].data_ptr()
    assert built[1].data_ptr() == allocated[0].data_ptr() + 2 * 4
    assert built[2].data_ptr() == allocated[0].data_ptr()
    assert built[3:5] == [7, None]
    assert built[6].data_ptr() == new_other.data_ptr()
    for got, expected in zip(built, outputs, strict=True):
        if isinstance(expected, torch.Tensor):
            assert TensorLayout.of(got) == TensorLayout.of(expected)


@pytest.mark.parametrize("is_empty", [False, True])
def test_arguments_that_share_memory_and_empty_ones(is_empty):
    base = torch.empty(0 if is_empty else 4, 2)
    layout = CallLayout.observe([base[:2], base[2:]], [base])
    # Of arguments in one memory the first; nothing is known of where an empty tensor lies.
    assert layout.memories == ((-1,) if is_empty else (0,))
