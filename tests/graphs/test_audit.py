"""Intervals: their algebra, and how conditions on a size become one."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piecework.errors import DynamicDimError, GuardError
from piecework.graphs.audit import ANY_SIZE, Condition, Interval, solve

N, ROWS = sympy.Symbol("s0", integer=True), sympy.Symbol("s1", integer=True)
intervals = st.builds(Interval, st.integers(0, 20), st.none() | st.integers(0, 30))


@given(intervals, intervals, st.integers(0, 40))
def test_intersection(a, b, size):
    assert (size in (a & b)) == (size in a and size in b)
    assert (a & b) == (b & a)
    assert (a & ANY_SIZE) == a


def test_text():
    assert str(Interval(2, 8)) == "[2, 8]"
    assert str(ANY_SIZE) == "[0, inf)"


def solved(*conditions: sympy.Basic, traced_at: int = 10, dim: str = "tokens") -> Interval:
    symbols = {"tokens": {N}, "rows": {ROWS}}
    listed = [Condition(condition, "model.py:7") for condition in conditions]
    found = solve(listed, ShapeEnv(), symbols, {"tokens": traced_at, "rows": 3})
    assert all(interval == ANY_SIZE for name, interval in found.items() if name != dim)
    return found[dim]


RELATIONS = [sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge, sympy.Ne]
linear = st.tuples(
    st.sampled_from(RELATIONS), st.integers(-4, 4).filter(bool), st.integers(-50, 50), st.integers(-50, 50)
)


@given(st.lists(linear, min_size=1, max_size=3), st.integers(0, 40))
def test_linear_conditions_are_solved_exactly(conditions, traced_at):
    exprs = [kind(slope * N + offset, right) for kind, slope, offset, right in conditions]
    if not all(bool(expr.subs(N, traced_at)) for expr in exprs):
        return  # a trace only has conditions that held
    holds = [all(bool(expr.subs(N, n)) for expr in exprs) for n in range(120)]
    try:
        interval = solved(*exprs, traced_at=traced_at)
    except DynamicDimError:
        # Sound, and complete but for a single size.
        assert not (traced_at > 0 and holds[traced_at - 1]) or not holds[traced_at + 1]
        return
    assert traced_at in interval
    for n in range(120):
        assert n not in interval or holds[n], f"unsound at {n}"
    low, high = traced_at, traced_at
    while low > 0 and holds[low - 1]:
        low -= 1
    while high < 119 and holds[high + 1]:
        high += 1
    assert interval.low == low
    assert (119 if interval.high is None else min(interval.high, 119)) == high


@pytest.mark.parametrize(
    ("condition", "traced_at", "interval"),
    [
        (sympy.And(N > 3, N < 9), 5, Interval(4, 8)),
        (sympy.Not(N > 8, evaluate=False), 5, Interval(0, 8)),
        (sympy.floor(N / 4) > 2, 12, Interval(12, 65535)),
        (sympy.Max(N, 8) <= 8, 3, Interval(0, 8)),
        (N * N < 100, 3, Interval(0, 9)),
        (sympy.true, 3, ANY_SIZE),
    ],
)
def test_other_conditions(condition, traced_at, interval):
    found = solved(condition, traced_at=traced_at)
    assert found.low == interval.low
    assert found.high == interval.high or (interval.high or 0) >= 65535


@pytest.mark.parametrize(
    "condition", [sympy.Eq(sympy.Mod(N, 8), 0), sympy.Or(N < 4, N > 15), sympy.Ne(sympy.Mod(N, 2), 1)]
)
def test_what_is_no_interval_is_refused_with_its_place(condition):
    with pytest.raises(GuardError, match="model.py:7.*no interval"):
        solved(condition, traced_at=16)


def test_one_size_is_no_dynamic_dim():
    with pytest.raises(DynamicDimError, match=r"only for size 7 .*model.py:7"):
        solved(sympy.Eq(N, 7), traced_at=7)


@pytest.mark.parametrize("condition", [N < ROWS, sympy.Eq(N, 2 * ROWS)])
def test_dims_may_not_be_related(condition):
    with pytest.raises(GuardError, match="model.py:7.*rows and tokens that no interval of one dim describes"):
        solved(condition)


@pytest.mark.parametrize(
    ("condition", "interval"),
    [
        (ROWS < 8, Interval(0, 7)),
        (ROWS >= 2, Interval(2)),
        (ROWS >= 0, ANY_SIZE),
        (ROWS > -5, ANY_SIZE),
        (sympy.Ne(ROWS, -1), ANY_SIZE),
    ],
)
def test_each_dim_has_its_own_interval(condition, interval):
    assert solved(condition, dim="rows") == interval


def test_another_dim_that_is_no_interval_is_refused_too():
    with pytest.raises(GuardError, match="size of rows .*model.py:7.*no interval"):
        solved(sympy.Eq(sympy.Mod(ROWS, 2), 1), dim="rows")
