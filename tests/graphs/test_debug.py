"""The witness of mutations: a declared argument that is never written is reported, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.optests.generate_tests import OpCheckError

from piecework.graphs.debug import MutationWitness
from piecework.ops.split_op import split_op

from .toys import Fn, accumulate, applied, assert_same, make_program, run, run_eager


@split_op(mutates_args=("out", "scratch"), name="piecework_toys::over_declared")
def over_declared(x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
    """Says that it writes into scratch, and does not."""
    out.copy_(x + scratch)


@split_op(mutates_args=("out",), name="piecework_toys::hidden_write")
def hidden_write(x: torch.Tensor, out: torch.Tensor, cache: torch.Tensor) -> None:
    """Writes into cache, and does not say so."""
    cache += 1
    out.copy_(x)


@split_op(mutates_args=(), name="piecework_toys::returns_view", fake=lambda x: torch.empty_like(x))
def returns_view(x: torch.Tensor) -> torch.Tensor:
    """Returns its input, which the schema says it does not."""
    return x.view_as(x)


@split_op(mutates_args=(), name="piecework_toys::wrong_strides", fake=lambda x: torch.empty_like(x))
def wrong_strides(x: torch.Tensor) -> torch.Tensor:
    """Its fake says another layout than the body makes."""
    return torch.empty(x.shape[::-1]).t().copy_(x)


X = {"x": torch.randn(3, 4)}


def overdone(m: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    over_declared(x + 1, out, m.scratch)
    accumulate(out, m.cache)
    return applied(out)


def test_an_argument_that_is_never_written():
    model = Fn(overdone, scratch=torch.ones(4), cache=torch.zeros(4))
    reference = Fn(overdone, scratch=torch.ones(4), cache=torch.zeros(4))
    program, witness = make_program(model, X), MutationWitness()
    assert witness.never_written() == {}
    program.watched(witness.watch)
    assert_same(run(program, X), run_eager(reference, X))
    assert witness.never_written() == {"piecework_toys::over_declared": ("scratch",)}
    assert_same(model.cache, reference.cache)


def test_one_write_in_many_calls_is_enough():
    witness = MutationWitness()
    watched = witness.watch(torch.ops.piecework_toys.double.default)
    zero = torch.zeros(3)
    watched(zero, zero.clone())
    assert witness.never_written() == {"piecework_toys::double": ("out",)}
    watched(torch.ones(3), out=torch.zeros(3))
    assert witness.never_written() == {}


@pytest.mark.parametrize(
    "out",
    [torch.full((3,), float("nan")), torch.zeros(4, 3).t()[:3, 0], torch.zeros(3, dtype=torch.bool), torch.tensor([])],
)
def test_any_tensor_can_be_watched(out):
    witness = MutationWitness()
    watched = witness.watch(torch.ops.piecework_toys.double.default)
    watched(out, out)
    watched(out.clone(), out)
    witness.never_written()


def test_nan_written_over_nan_is_no_change():
    witness = MutationWitness()
    watched = witness.watch(torch.ops.piecework_toys.double.default)
    nan = torch.full((3,), float("nan"))
    watched(nan.clone(), nan)
    assert witness.never_written() == {"piecework_toys::double": ("out",)}


def test_opcheck_finds_a_hidden_write():
    with pytest.raises(OpCheckError, match="mutated"):
        torch.library.opcheck(hidden_write, (torch.ones(3), torch.zeros(3), torch.zeros(3)))


def test_opcheck_finds_a_result_that_is_an_input():
    with pytest.raises(OpCheckError, match="alias|view"):
        torch.library.opcheck(returns_view, (torch.ones(3),))


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11's opcheck compares no strides")
def test_opcheck_finds_wrong_strides():
    with pytest.raises(OpCheckError, match="[Ss]tride"):
        torch.library.opcheck(wrong_strides, (torch.ones(3, 4),))


def test_opcheck_does_not_find_an_over_declared_write():
    """Which is why there is a witness."""
    torch.library.opcheck(over_declared, (torch.ones(3), torch.zeros(3), torch.ones(3)))
