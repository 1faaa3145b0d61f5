"""Copies that share a kernel: which do, and that all of them are made as one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from piecework.graphs.copies import copy_all

from .tape_recording import record


class Counting(TorchDispatchMode):
    """Notes the copies that are made: a number for each kernel that several share, 1 for those of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._foreach_copy_.default:
            self.kernels.append(len(args[0]))
        elif func is torch.ops.aten.copy_.default:
            self.kernels.append(1)
        return func(*args, **(kwargs or {}))


def kernels_of(*pairs: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    """Makes the copies, which must do what copies one by one do."""
    expected = [source.clone() for _, source in pairs]
    with Counting() as counting:
        copy_all(pairs)
    for (to, _), values in zip(pairs, expected, strict=True):
        assert torch.equal(to, values.to(to.dtype))
    return counting.kernels


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def empty_like(source: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)


def test_dense_copies_share_a_kernel_for_each_dtype() -> None:
    q, k, half = randn(3, 4), randn(3, 2), randn(3, 4, dtype=torch.bfloat16)
    other_half, turned = randn(5, dtype=torch.bfloat16), randn(4, 3).t()
    pairs = [(empty_like(source), source) for source in (q, half, k, other_half, turned)]
    assert kernels_of(*pairs) == [3, 2]


def test_what_does_not_lie_alike_is_copied_by_itself() -> None:
    qkv, small = randn(3, 12), randn(3, 2)
    view = qkv[:, 8:]
    contiguous = torch.empty(3, 4)
    turned = randn(4, 3).t()
    other_dtype = randn(3, 4, dtype=torch.float64)
    spread = randn(3, 1).expand(3, 4)
    large = torch.zeros((1 << 18) + 1)
    pairs = [
        (contiguous, view),
        (torch.empty(3, 4), turned),
        (torch.empty(3, 4), other_dtype),
        (torch.empty(3, 4), spread),
        (empty_like(large), large),
        (empty_like(small), small),
    ]
    assert kernels_of(*pairs) == [1] * len(pairs), "nor does the only one that could share"
    assert kernels_of(*pairs, (torch.empty(3), randn(3))) == [2] + [1] * (len(pairs) - 1)


def test_strides_of_dims_of_one_do_not_count() -> None:
    qkv = randn(1, 12)
    q, k = qkv[:, :8], qkv[:, 8:]
    assert kernels_of((torch.empty(1, 8), q), (torch.empty(1, 4), k)) == [2]


def test_a_dtype_without_a_kernel_of_torch_is_copied_by_itself() -> None:
    a, b = torch.ones(3, dtype=torch.uint16), torch.ones(4, dtype=torch.uint16)
    with Counting() as counting:
        copy_all([(torch.empty_like(a), a), (torch.empty_like(b), b)])
    assert counting.kernels == [1, 1]


def test_copies_that_depend_on_each_other_stay_in_order() -> None:
    a, b, c = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])
    with Counting() as counting:
        copy_all([(b, a), (c, b)])
    assert (b.item(), c.item(), counting.kernels) == (1, 1, [1, 1])
    memory = torch.zeros(4)
    with Counting() as counting:
        copy_all([(memory[:3], torch.ones(3)), (memory[1:], torch.full((3,), 2.0))])
    assert (memory.tolist(), counting.kernels) == ([1, 2, 2, 2], [1, 1])


def test_nothing_is_copied_for_nothing() -> None:
    assert kernels_of() == []
    assert kernels_of((torch.empty(3, 0), randn(3, 0)), (torch.empty(0), randn(0)), (torch.empty(2), randn(2))) == [1]


@pytest.mark.parametrize("with_split", [False, True])
def test_the_tape_records_them(with_split: bool) -> None:
    x = torch.zeros(2, 6)
    tos = [torch.empty(2, 6), torch.empty(2, 3), torch.empty(2, 2), torch.empty(6)]

    def body() -> None:
        y = x + 1
        sources = [y, x[:, :3] * 2, y[:, :2], x[0] - 1]
        copy_all(zip(tos, sources, strict=True) if with_split else zip(tos[:2], sources[:2], strict=True))

    before = [to.clone() for to in tos]
    _, segment = record(body)
    assert all(torch.equal(to.nan_to_num(), old.nan_to_num()) for to, old in zip(tos, before, strict=True))
    for value in (3.0, -2.0):
        x.fill_(value)
        segment.replay()
        assert tos[0].unique().tolist() == [value + 1]
        assert tos[1].unique().tolist() == [value * 2]
        if with_split:
            assert (tos[2].unique().tolist(), tos[3].unique().tolist()) == ([value + 1], [value - 1])


@given(st.data())
def test_any_copies_are_those_of_a_loop(data: st.DataObject) -> None:
    """Over views of a few memories, overlapping or not."""
    memories = [torch.arange(24.0).add(100 * i) for i in range(3)]
    views = st.builds(
        lambda i, start, rows, turned: (i, start, rows, turned),
        st.integers(0, 2),
        st.integers(0, 12),
        st.sampled_from((1, 2, 3)),
        st.booleans(),
    )
    chosen = data.draw(st.lists(st.tuples(views, views), max_size=5))

    def view(of: list[torch.Tensor], which: tuple[int, int, int, bool], rows: int) -> torch.Tensor:
        i, start, _, turned = which
        part = of[i][start : start + 4 * rows]
        return part.view(4, rows).t() if turned else part.view(rows, 4)

    one_by_one = [memory.clone() for memory in memories]
    for to, source in chosen:
        # Within a pair, torch refuses memory that overlaps.
        view(one_by_one, to, to[2]).copy_(view(one_by_one, source, to[2]).clone())
    pairs = [(view(memories, to, to[2]), view(memories, source, to[2])) for to, source in chosen if to[0] != source[0]]
    if len(pairs) == len(chosen):
        copy_all(pairs)
        assert all(map(torch.equal, memories, one_by_one))
