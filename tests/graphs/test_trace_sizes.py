"""For which sizes a trace holds: intervals, dims of one name and of several, and what no interval describes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from piecework.errors import DynamicDimError, GuardError, InputError
from piecework.graphs.audit import Interval

from .toys import (
    Fn,
    assert_equals_model,
    assert_same,
    make_program,
    plain,
    run,
    run_eager,
    trace_model,
    x_of,
)

TWO = {"x": {0: "tokens"}, "y": {0: "rows"}}


@pytest.mark.parametrize("sample", [0, 1, 2, 7])
def test_one_trace_holds_for_every_size_whatever_the_sample(sample):
    program = assert_equals_model(Fn(plain), x_of(sample), also=[x_of(n) for n in (0, 1, 2, 3, 1000)])
    assert program.graph.traced.mode == "unbacked"
    assert program.interval == Interval(0, None)


def branch(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] > 8 else x - 1


@pytest.mark.parametrize(("size", "interval"), [(1, (2, 8)), (4, (2, 8)), (8, (2, 8)), (9, (9, None)), (16, (9, None))])
def test_a_branch_on_the_size_narrows_the_interval(size, interval):
    """The hazard: traced at 16 and run at 4, the program takes the wrong branch without a word."""
    traced = trace_model(Fn(branch), x_of(size))
    assert traced.mode == "backed"
    assert traced.interval == Interval(*interval)
    assert "x.shape[0] > 8" in str(traced.unbacked_failure) or "u0 > 8" in str(traced.unbacked_failure)


@pytest.mark.parametrize("size", [4, 16])
def test_the_branch_is_right_on_its_whole_interval(size):
    program = make_program(Fn(branch), x_of(size))
    sizes = [n for n in (2, 3, 7, 8, 9, 10, 100) if n in program.interval]
    assert len(sizes) >= 3
    for n in sizes:
        assert_same(run(program, x_of(n)), run_eager(Fn(branch), x_of(n)))


def two_branches(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 2 if x.shape[0] > 8 else x - 1
    return x + 1 if x.shape[0] < 20 else x * 5


def test_conditions_are_intersected():
    assert trace_model(Fn(two_branches), x_of(10)).interval == Interval(9, 19)


def checked(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch._check(x.shape[0] <= 100)
    torch._check(x.shape[0] >= 3)
    return x * 2


def test_torch_check_bounds_the_interval():
    traced = trace_model(Fn(checked), x_of(10))
    assert traced.interval == Interval(3, 100)
    assert traced.mode == "unbacked"
    targets = [node.target for node in traced.graph_module.graph.nodes]
    assert torch.ops.aten._assert_scalar.default not in targets, "the interval is checked instead"


def table(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x + m.positions[: x.shape[0]]


def test_a_table_of_positions_bounds_the_interval():
    model = Fn(table, positions=torch.randn(16, 4))
    program = assert_equals_model(model, x_of(3), also=[x_of(0), x_of(1), x_of(16)])
    assert program.interval == Interval(0, 16)


def every_eighth(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] % 8 == 0 else x


def exactly_seven(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] == 7 else x


def in_pages(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] // 4 > 2 else x


def either_end(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] < 4 or x.shape[0] > 20 else x


@pytest.mark.parametrize("size", [8, 16, 9])
def test_sizes_that_are_no_interval_are_refused_with_the_line(size):
    with pytest.raises(GuardError, match=r"test_trace_sizes\.py.*") as caught:
        trace_model(Fn(every_eighth), x_of(size))
    assert "no interval" in str(caught.value)
    assert "every_eighth" in str(caught.value) or "% 8" in str(caught.value)


def test_one_size_is_refused_and_its_neighbours_are_an_interval():
    with pytest.raises(DynamicDimError, match=r"x\.size\(\)\[0\] as dynamic.*constant \(7\)"):
        trace_model(Fn(exactly_seven), x_of(7))
    assert trace_model(Fn(exactly_seven), x_of(3)).interval == Interval(2, 6)
    assert trace_model(Fn(exactly_seven), x_of(9)).interval == Interval(8, None)


def test_floor_division_is_solved():
    assert trace_model(Fn(in_pages), x_of(3)).interval == Interval(2, 11)
    above = trace_model(Fn(in_pages), x_of(40)).interval
    assert above.low == 12
    assert above.high is None or above.high >= 65535


@pytest.mark.parametrize(("size", "interval"), [(3, (2, 3)), (10, (4, 20)), (30, (21, None))])
def test_only_the_side_of_the_sample_counts(size, interval):
    assert trace_model(Fn(either_end), x_of(size)).interval == Interval(*interval)


def fixed_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x + m.weight


def test_a_dim_that_did_not_stay_dynamic_is_named():
    with pytest.raises(DynamicDimError, match=r"dim 0 \('tokens'\) of input 'x' .*only for 5"):
        trace_model(Fn(fixed_buffer, weight=torch.randn(5, 4)), x_of(5))


def test_a_dim_that_is_a_multiple_of_another_is_named():
    def tied(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._check(y.shape[0] == 2 * x.shape[0])
        return x * 2

    with pytest.raises((DynamicDimError, GuardError), match=r"rows"):
        trace_model(Fn(tied), {**x_of(3), "y": torch.zeros(6)}, TWO)


def by_rows(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return x * 2, y + 1, x.sum(0) + y.sum(0)


def test_two_dims_of_different_names():
    inputs = {**x_of(3), "y": torch.randn(5, 4)}
    also = [{**x_of(a), "y": torch.randn(b, 4)} for a, b in ((1, 1), (0, 3), (7, 7), (2, 0))]
    program = assert_equals_model(Fn(by_rows), inputs, TWO, also=also)
    assert set(program.graph.traced.symbols) == {"tokens", "rows"}
    assert len(set(program.graph.traced.symbols.values())) == 2


def test_two_dims_of_different_names_and_equal_samples_stay_apart():
    program = make_program(Fn(by_rows), {**x_of(4), "y": torch.randn(4, 4)}, TWO)
    inputs = {**x_of(2), "y": torch.randn(9, 4)}
    assert_same(run(program, inputs, TWO), run_eager(Fn(by_rows), inputs))


def added(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def test_dims_that_the_model_ties_must_have_one_name():
    """The hazard: the trace holds only where the two are equal, and nothing would check that."""
    inputs = {**x_of(4), "y": torch.randn(4, 4)}
    with pytest.raises(DynamicDimError, match="declared apart from 'tokens'.*give them one name"):
        trace_model(Fn(added), inputs, TWO)


def test_one_name_on_two_inputs():
    dims = {"x": {0: "tokens"}, "y": {0: "tokens"}}
    inputs = {**x_of(4), "y": torch.randn(4, 4)}
    also = [{**x_of(n), "y": torch.randn(n, 4)} for n in (0, 1, 2, 9)]
    program = assert_equals_model(Fn(added), inputs, dims, also=also)
    assert program.graph.traced.mode == "unbacked"
    assert program.interval == Interval(0, None)
    with pytest.raises(InputError, match="dims of one name must be one size"):
        run(program, {**x_of(4), "y": torch.randn(1, 4)}, dims)


def test_one_name_on_two_dims_of_one_input():
    dims = {"x": {0: "tokens", 1: "tokens"}}
    also = [{"x": torch.randn(n, n)} for n in (0, 1, 5)]
    assert_equals_model(Fn(lambda m, x: x @ x.t()), {"x": torch.randn(3, 3)}, dims, also=also)


def decides_on_rows(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x * 2 if x.shape[0] > 8 else x * 3
    return x + 100 * y if y.shape[0] == 1 else x + y.sum(0)


@pytest.mark.parametrize("num_rows", [0, 1])
def test_a_backed_program_does_not_hold_for_another_dim_below_two(num_rows):
    """The hazard: torch takes 0 and 1 for constants, so `shape[0] == 1` was False at the trace, without a guard."""
    program = make_program(Fn(decides_on_rows), {**x_of(4), "y": torch.randn(3, 4)}, TWO)
    assert program.graph.traced.mode == "backed"
    assert not program.holds_at({"tokens": 4, "rows": num_rows})
    assert program.holds_at({"tokens": 4, "rows": 2})
    assert not program.holds_at({"tokens": 9, "rows": 2})


def test_a_condition_on_another_dim_narrows_that_dim():
    def restricted(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Looks at y's size alone, so y is no placeholder of the graph."""
        return x * 2 if y.shape[0] > 8 else x * 3

    def bounded(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._check(y.shape[0] <= 8)
        return x * 2

    for function, low in ((restricted, 2), (bounded, 0)):
        traced = trace_model(Fn(function), {**x_of(4), "y": torch.randn(3, 4)}, TWO)
        assert traced.intervals["rows"] == Interval(low, 8)


@pytest.mark.parametrize("used", ["value", "size", "not at all"])
def test_equal_dims_of_one_name_are_no_condition_of_a_backed_trace(used):
    """Two inputs of one name are two symbols when backed; their equality is checked on each call instead."""

    def function(m: Any, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        x = x * 2 if x.shape[0] > 6 else x * 3
        if used == "value":
            return x + p[:, None]
        return x + p.shape[0] if used == "size" else x

    dims = {"x": {0: "tokens"}, "p": {0: "tokens"}}
    for num_tokens, interval in ((3, Interval(2, 6)), (20, Interval(7))):
        inputs = {**x_of(num_tokens), "p": torch.randn(num_tokens)}
        program = make_program(Fn(function), inputs, dims)
        assert program.graph.traced.mode == "backed"
        assert program.interval == interval
        assert_same(run(program, inputs, dims), run_eager(Fn(function), inputs))


def test_two_threads_trace_at_once():
    """torch.compile is not re-entrant across threads: COMPILE_LOCK serialises them, and both are right."""
    models = [Fn(plain), Fn(branch), Fn(table, positions=torch.randn(16, 4)), Fn(in_pages)]
    barrier = threading.Barrier(len(models))
    failures: list[BaseException] = []

    def work(model: torch.nn.Module) -> None:
        try:
            barrier.wait()
            for size in (3, 5):
                assert_equals_model(model, x_of(size), compiler="aot_eager")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
