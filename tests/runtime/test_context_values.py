"""What a capture would freeze of a context: compared across steps, or refused with a reason."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

import numpy as np
import pytest
import torch

import piecework as pw
from piecework.ops.attention import AttentionContext
from piecework.ops.context import host_field
from piecework.runtime.context_values import moving_tensors, plain_values, problems


class Kind(enum.Enum):
    A = 1


@dataclasses.dataclass
class Inner:
    value: Any = 1


@dataclasses.dataclass
class Step:
    rows: Any = pw.context_field(pad=0, default=None)
    slots: Any = pw.context_field(pad=0, slots={0: "requests"}, default=None)
    fixed: Any = pw.context_field(pad=0, dims={}, default=None)
    both: Any = pw.context_field(pad=0, dims={0: "tokens"}, slots={1: "blocks"}, default=None)
    plain: Any = None
    lens: Any = host_field(default=())


@dataclasses.dataclass
class Cached:
    rows: torch.Tensor = pw.context_field(pad=0)

    @functools.cached_property
    def longest(self) -> int:
        return int(self.rows.max())


@dataclasses.dataclass
class LeavesAnAttribute:
    rows: torch.Tensor = pw.context_field(pad=0)

    def __post_init__(self) -> None:
        self.twice = self.rows * 2


# Comparing.


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("1", 1),
        ((1, 2), [1, 2]),
        ((1,), (True,)),
        ({"a": 1}, {"a": 1.0}),
        (Inner(1), Inner(2)),
        (Inner([1]), Inner([2])),
        (None, 0),
        ({1}, {2}),
        ({1}, frozenset({1})),
        (Kind.A, 1),
        (torch.float16, torch.float32),
    ],
)
def test_what_differs(one, other):
    assert plain_values(Step(plain=one)) != plain_values(Step(plain=other))
    assert plain_values(Step(plain=one)) == plain_values(Step(plain=one))


@pytest.mark.parametrize(
    "make", [lambda: float("nan"), lambda: [1, {"a": (2.0,)}], lambda: Inner({1, 2}), lambda: Kind.A, lambda: len]
)
def test_what_is_equal(make):
    assert plain_values(Step(plain=make())) == plain_values(Step(plain=make()))


def test_a_change_in_place_is_seen():
    values, inner = [1], Inner({"a": 1})
    before = plain_values(Step(plain=(values, inner)))
    values.append(2)
    assert plain_values(Step(plain=(values, inner))) != before
    values.pop()
    assert plain_values(Step(plain=(values, inner))) == before
    inner.value["a"] = 2
    assert plain_values(Step(plain=(values, inner))) != before


def test_tensors_and_host_fields_are_left_out_and_a_missing_tensor_is_not():
    full = plain_values(Step(rows=torch.zeros(1), lens=(1,)))
    assert plain_values(Step(rows=torch.zeros(2), lens=(2,))) == full
    assert plain_values(Step(rows=None)) != full


def test_what_cannot_be_compared_is_never_equal():
    step = Step(plain=np.zeros(2))
    assert plain_values(step) != plain_values(step)


@pytest.mark.parametrize("context", [None, {"a": 1}, Step])
def test_no_dataclass_has_no_values(context):
    assert plain_values(context) == ()


# Refusing.


@pytest.mark.parametrize(
    "context",
    [
        None,
        Step(rows=torch.zeros(2), slots=torch.zeros(1), plain=(1, "a", None, Inner(2.0)), lens=[torch.zeros(1)]),
        AttentionContext.build(query_lens=[1], seq_lens=[1], block_tables=[[0]], block_size=4),
    ],
)
def test_no_problems(context):
    assert problems(context) == []


def test_attention_contexts_differ_in_nothing_that_is_frozen():
    one = AttentionContext.build(query_lens=[1], seq_lens=[1], block_tables=[[0]], block_size=4)
    two = AttentionContext.build(query_lens=[2, 3], seq_lens=[2, 3], block_tables=[[0], [1]], block_size=4)
    assert plain_values(one) == plain_values(two)


@pytest.mark.parametrize(
    ("context", "messages"),
    [
        ({"a": 1}, ["context dict: expected a dataclass whose tensors are made with context_field, got a dict; make"]),
        (Step, ["context type: expected a dataclass whose tensors are made with context_field, got a class; make"]),
        (
            Step(plain=torch.zeros(1)),
            ["context Step.plain: is a tensor, which would be captured at this step's address; make it a field of its"],
        ),
        (Step(plain={"a": [torch.zeros(1)]}), ["context Step.plain: holds tensors in a dict, which would be captured"]),
        (Step(plain=Inner(torch.zeros(1))), ["context Step.plain: holds tensors in a Inner, which would be captured"]),
        (Step(rows=[torch.zeros(1)]), ["context Step.rows: holds tensors in a list, which would be captured"]),
        (
            Step(plain=(1, np.zeros(0))),
            ["context Step.plain: holds a ndarray, of which nobody can tell whether it changed since the"],
        ),
        (Cached(torch.ones(1)), ["context Cached.longest: is a cached_property, which would keep the first step's"]),
        (LeavesAnAttribute(torch.ones(1)), ["context LeavesAnAttribute.twice: is a tensor, which would be captured"]),
        (
            Step(plain=torch.zeros(1), fixed=[torch.zeros(1)]),
            ["context Step.fixed: holds tensors", "context Step.plain: is a tensor"],
        ),
    ],
)
def test_problems(context, messages):
    found = problems(context)
    assert len(found) == len(messages)
    for text, message in zip(found, messages, strict=True):
        assert text.startswith(message)


# What moves where only inputs' sizes make a field static.


def test_moving_tensors():
    tensors = {name: torch.zeros(2, 2) for name in ("slots", "fixed", "both", "plain", "lens")}
    assert moving_tensors(Step(rows=torch.zeros(2), **tensors)) == tensors
    assert moving_tensors(Step(rows=torch.zeros(2), plain=3)) == {}
    nested = [torch.zeros(1), {"a": torch.zeros(2)}]
    moving = moving_tensors(Step(plain=nested))
    assert list(moving) == ["plain[0]", "plain[1]"]
    assert moving["plain[0]"] is nested[0]
    assert moving_tensors(None) == {}
