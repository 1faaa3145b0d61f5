"""Static tensors hold the same after a prepared fill, which leaves tails that are known, as after one from scratch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from piecework.graphs.buffers import Buffers, StaticInputs, fill_padded
from piecework.graphs.inputs import BoundInputs, InputContract
from piecework.graphs.layouts import TensorLayout
from piecework.graphs.prepared_fill import PreparedFill, Target
from piecework.graphs.tails import Tail, corner, repeat_last, tail_kind, tail_views

BUCKETS = (2, 4, 8)
DIMS = {"x": {0: "tokens"}, "wide": {0: "tokens"}, "turned": {1: "tokens"}, "mixed": {0: "tokens", 1: "others"}}
PAD = {"x": 7, "turned": -1, "mixed": 0.5}


def inputs_of(num_tokens: int, others: int, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randint(100, 200, (num_tokens,), generator=draw),
        "wide": torch.rand(num_tokens, 2 * 3, generator=draw)[:, ::2],  # not contiguous
        "turned": torch.randint(100, 200, (3, num_tokens), generator=draw),
        "mixed": torch.rand(num_tokens, others, generator=draw) + 1,
        "fixed": torch.rand(2, 2, generator=draw).t(),
    }


def bound_of(contract: InputContract, inputs: dict[str, torch.Tensor]) -> BoundInputs:
    return contract.bind(inputs)


STEPS = st.lists(
    st.tuples(
        st.integers(0, 8),
        st.sampled_from(BUCKETS),
        st.integers(0, 3),
        st.sampled_from(["prepared", "prepared", "prepared", "scratch", "spoiled"]),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_random_sequences_leave_what_filling_everything_leaves(steps: Any) -> None:
    contract = InputContract(DIMS, PAD)
    buffers = Buffers(max(BUCKETS))
    static = StaticInputs(contract, buffers)
    plans: dict[Any, tuple[PreparedFill, dict[str, torch.Tensor]]] = {}
    for seed, (num_tokens, bucket, others, way) in enumerate(steps):
        num_tokens = min(num_tokens, bucket)
        inputs = inputs_of(num_tokens, others, seed)
        key = (num_tokens, bucket, others)
        if way == "spoiled":  # somebody else writes, and says so
            for _, filled in plans.values():
                for tensor in filled.values():
                    tensor.fill_(99)
            buffers.forget_tails()
        if way == "scratch" or key not in plans:
            filled = static.fill(bound_of(contract, inputs), bucket)
            plans[key] = PreparedFill(static.targets(inputs, filled)), filled
        else:
            fill, filled = plans[key]
            with torch.inference_mode():
                fill.run(list(inputs.values()))
        expected = StaticInputs(contract, Buffers(max(BUCKETS))).fill(bound_of(contract, inputs), bucket)
        for name, tensor in expected.items():
            assert torch.equal(filled[name], tensor), name


class Kernels(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_one_copy_for_tensors_that_lie_alike_and_no_tail_twice() -> None:
    contract = InputContract({"a": 0, "b": 0, "c": 0, "d": 0})
    static = StaticInputs(contract, Buffers(8))
    make = lambda n: {  # noqa: E731
        "a": torch.arange(n),
        "b": torch.arange(n),
        "c": torch.arange(n, dtype=torch.int32),
        "d": torch.arange(2 * n)[::2],
    }
    fills = {}
    for n in (3, 2):
        fills[n] = PreparedFill(static.targets(make(n), static.fill(bound_of(contract, make(n)), 4)))
    two, three = list(make(2).values()), list(make(3).values())
    with torch.inference_mode(), Kernels() as kernels:
        fills[2].run(two)
    assert kernels.names == ["_foreach_copy_", "copy_", "copy_"]  # the int64, the int32, the strided one
    kernels.names.clear()
    with torch.inference_mode(), kernels:
        fills[3].run(three)
        fills[2].run(two)
    assert kernels.names.count("fill_") == 4  # once, for the rows that the step between has reached


def test_dtypes_without_the_kernel_are_copied_one_by_one() -> None:
    tensors = [torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.complex64)]
    statics = [torch.full((4,), 9, dtype=torch.complex64) for _ in tensors]
    targets = [Target(source=t, static=s, value=0, tail=Tail()) for t, s in zip(tensors, statics, strict=True)]
    fill = PreparedFill(targets)
    with torch.inference_mode(), Kernels() as kernels:
        fill.run(tensors)
    assert "_foreach_copy_" not in kernels.names
    assert all(static.tolist() == [1, 1, 1, 0] for static in statics)


def test_a_lone_row_of_a_wider_table_lies_alike() -> None:
    """Strides of dims of size 1 say nothing: a batch of one keeps its one kernel."""
    tensors = [torch.ones(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)]
    statics = [torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)]
    targets = [Target(source=t, static=s, value=0, tail=Tail()) for t, s in zip(tensors, statics, strict=True)]
    with torch.inference_mode(), Kernels() as kernels:
        PreparedFill(targets).run(tensors)
    assert kernels.names.count("_foreach_copy_") == 1
    assert "copy_" not in kernels.names
    assert statics[0].tolist() == [[1, 1, 0, 0]]


def test_a_larger_bucket_that_was_filled_before_is_still_known_behind_a_smaller_one() -> None:
    tail, kind = Tail(), (torch.int64, (), "0")
    assert not tail.holds(kind, (3,), 4)
    tail.written(kind, (3,), 8)
    tail.written(kind, (2,), 4)
    assert tail.holds(kind, (2,), 8)
    assert tail.holds(kind, (5,), 8)
    assert not tail.holds(kind, (1,), 4)
    assert not tail.holds((torch.int64, (), "0.0"), (2,), 4)
    assert not tail.holds((torch.int32, (), "0"), (2,), 4)
    tail.written(kind, (7,), 8)
    tail.written(kind, (2,), 4)
    assert tail.holds(kind, (2,), 4)
    assert not tail.holds(kind, (2,), 8)  # rows 4 to 6 are of the step before
    tail.forget()
    assert not tail.holds(kind, (2,), 4)


def test_what_depends_on_the_values_is_never_known() -> None:
    assert tail_kind(torch.zeros(4), "last") is None
    assert tail_kind(torch.zeros(()), 0) is None
    assert tail_kind(torch.zeros(4, 2), 1) != tail_kind(torch.zeros(4, 2), True)
    assert not Tail().holds(None, (1,), 1)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 2), (4, 4), (4, 0)])
def test_tails_and_corner_cover_a_tensor_once(shape: tuple[int, ...]) -> None:
    static = torch.zeros((4,) * len(shape))
    for view in tail_views(static, shape):
        view.add_(1)
    corner(static, shape).add_(1)
    assert torch.equal(static, torch.ones_like(static))


def test_the_last_element_is_repeated_along_each_dim() -> None:
    static, tensor = torch.zeros(3, 4), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    target = Target(source=tensor, static=static, value="last", tail=Tail())
    fill = PreparedFill([target])
    for factor in (1, 10):
        fill.run([tensor * factor])
        assert static.tolist() == [[v * factor for v in row] for row in [[1, 2, 2, 2], [3, 4, 4, 4], [3, 4, 4, 4]]]
    assert repeat_last(static, (3, 4)) == []


def test_a_buffer_that_grew_starts_with_nothing_known() -> None:
    buffers = Buffers(4, keeps_replaced=False)
    contract = InputContract({"x": 0})
    static = StaticInputs(contract, buffers)
    small = static.fill(bound_of(contract, {"x": torch.arange(2)}), 4)["x"]
    assert buffers.tail(small).holds(tail_kind(small, 0), (2,), 4)
    large = static.fill(bound_of(contract, {"x": torch.arange(9)}), 9)["x"]
    assert not buffers.tail(large).holds(tail_kind(large, 0), (2,), 9)
    assert torch.equal(fill_padded(torch.empty(3), torch.ones(2), 5.0), torch.tensor([1.0, 1.0, 5.0]))


def test_memory_that_is_allocated_where_other_memory_was_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.empty(64, dtype=torch.uint8).untyped_storage()
    monkeypatch.setattr("piecework.graphs.buffers._allocate", lambda num_bytes, device: memory)
    buffers = Buffers(4)
    static = StaticInputs(InputContract({"x": 0, "y": 0}), buffers)
    first = static.fill(static._contract.bind({"x": torch.arange(2)}), 4)["x"]
    assert buffers.tail(first).holds(tail_kind(first, 0), (2,), 4)
    buffers.tensor("y", TensorLayout.of(first), 4)
    assert not buffers.tail(first).holds(tail_kind(first, 0), (2,), 4)


class Alone(torch.Tensor):
    """Knows how to be copied, and nothing of lists."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._foreach_copy_:
            raise NotImplementedError
        return super().__torch_function__(func, types, args, kwargs)


def test_tensors_of_other_classes_are_copied_one_by_one() -> None:
    buffers = Buffers(4)
    statics = [buffers.tensor(name, TensorLayout.contiguous((4,), torch.float32, "cpu"), 4) for name in "abc"]
    sources = [torch.rand(3), torch.nn.Parameter(torch.rand(3)), torch.rand(3).as_subclass(Alone)]
    targets = [
        Target(source=source, static=static, value=2, tail=Tail())
        for source, static in zip(sources, statics, strict=True)
    ]
    fill = PreparedFill(targets)
    assert [len(destinations) for destinations, _ in fill._groups] == [2]
    with torch.no_grad():
        fill.run(sources)
    for source, static in zip(sources, statics, strict=True):
        assert static.tolist() == [*source.tolist(), 2]
