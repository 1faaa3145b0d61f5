"""The trace against models that try to make it lie: sizes, state, structures, modes, and what may not be traced."""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from piecework.errors import DynamicDimError, GuardError, InputError, PieceworkError, TraceError
from piecework.graphs.audit import Interval
from piecework.graphs.inputs import InputContract
from piecework.ops.context import get_context, use_context

from .toys import (
    CALLS,
    Fn,
    accumulate,
    assert_equals_model,
    assert_same,
    double,
    make_program,
    run,
    run_eager,
    trace_model,
)

TWO = {"x": {0: "tokens"}, "y": {0: "rows"}}


def x_of(num_tokens: int, *, seed: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(num_tokens, 4, generator=torch.Generator().manual_seed(seed))}


def plain(m: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    double(x + 1, out)
    return out.relu() * 3


# Sizes.


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
    with pytest.raises(GuardError, match=r"test_trace\.py.*") as caught:
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


# Python state.


def test_setting_an_attribute_is_refused_and_the_model_left_as_it_was():
    def sets(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.calls += 1
        m.last = x * 2
        m.buffer = m.buffer + 1
        return x

    model = Fn(sets, buffer=torch.zeros(4))
    model.calls = 3
    buffer, before = model.buffer, set(model.__dict__)
    with pytest.raises(TraceError, match="forward sets .*calls.*a compiled program would not"):
        trace_model(model, x_of(3))
    assert model.calls == 3
    assert model.buffer is buffer
    assert set(model.__dict__) == before


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_filling_a_container_is_refused_and_the_model_left_as_it_was(kind):
    def fills(m: Any, x: torch.Tensor) -> torch.Tensor:
        if kind == "list":
            m.log.append(x * 2)
        else:
            m.log["last"] = x * 2
        return x * 3

    model = Fn(fills)
    model.log = ["before"] if kind == "list" else {"before": 1}
    log = model.log
    with pytest.raises(TraceError, match="forward sets log"):
        trace_model(model, x_of(3))
    assert model.log is log
    assert model.log == (["before"] if kind == "list" else {"before": 1})


def test_a_submodule_that_counts_its_calls_is_named():
    class Counting(nn.Module):
        num_calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num_calls += 1
            return x * 2

    model = Fn(lambda m, x: m.inner(x))
    model.inner = nn.Sequential(nn.Identity(), Counting())
    with pytest.raises(TraceError, match="inner.1.num_calls"):
        trace_model(model, x_of(2))
    assert "num_calls" not in model.inner[1].__dict__


def test_a_python_attribute_is_frozen_and_listed():
    model = Fn(lambda m, x: x * m.factor if m.mode == "scaled" else x)
    model.factor, model.mode = 3, "scaled"
    traced = trace_model(model, x_of(3))
    assert any("factor" in line and line.endswith("= 3") for line in traced.frozen)
    assert any("mode" in line and line.endswith("= 'scaled'") for line in traced.frozen)
    assert not any("piecework" in line for line in traced.frozen)


def test_a_model_without_state_freezes_nothing():
    def stateless(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x + m.weight

    assert [line for line in trace_model(Fn(stateless, weight=torch.ones(4)), x_of(3)).frozen if "weight" in line] == []


GLOBAL = torch.full((4,), 2.0)


def test_a_tensor_from_elsewhere_is_frozen_and_listed():
    model = Fn(lambda m, x: x + GLOBAL)
    program = assert_equals_model(model, x_of(3))
    assert "a tensor [4] that is no attribute of the model" in program.graph.traced.frozen


def optional(m: Any, x: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
    return x * scale if bias is None else x * scale + bias


@pytest.mark.parametrize(
    "extra", [{}, {"bias": None}, {"bias": torch.ones(4)}, {"scale": 2.5}, {"scale": 3, "bias": torch.ones(4)}]
)
def test_optional_inputs_present_and_absent(extra):
    assert_equals_model(Fn(optional), {**x_of(3), **extra}, also=[{**x_of(1), **extra}, {**x_of(0), **extra}])


def test_guards_see_what_changed():
    from torch._dynamo.exc import RecompileError

    model = Fn(lambda m, x: x * m.factor)
    model.factor = 3
    traced = trace_model(model, x_of(3), evaluate_guards=True)
    assert traced.guards is not None
    contract = InputContract({"x": 0})
    for n in (3, 0, 1, 100):
        traced.guards.check(contract.bind(x_of(n)), traced.mode)
    model.factor = 4
    with pytest.raises(RecompileError):
        traced.guards.check(contract.bind(x_of(3)), traced.mode)
    model.factor = 3
    traced.guards.check(contract.bind(x_of(3)), traced.mode)


# What the model returns.


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    extra: Any = None


def returns_model_output(m: Any, x: torch.Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x + 1, x))


RETURNS = {
    "tuple": lambda m, x: (x * 2, x + 1),
    "list": lambda m, x: [x * 2, [x + 1]],
    "dict": lambda m, x: {"a": x * 2, "b": {"c": x + 1}},
    "ordered dict": lambda m, x: collections.OrderedDict(a=x * 2, b=x + 1),
    "named tuple": lambda m, x: Pair(x * 2, (x,)),
    "dataclass": lambda m, x: Result(hidden=x * 2, extra=[x + 1]),
    "torch's own named tuple": lambda m, x: torch.max(x, 1),
    "one tensor twice": lambda m, x: [x_ := x * 2, x_, (x_,)],
    "constants": lambda m, x: (x * 2, None, 1, True, 2.5, "text"),
    "sizes": lambda m, x: (x * 2, x.shape[0], x.shape[0] * 2 + 1, -x.shape[0], x.shape[1]),
    "nothing": lambda m, x: accumulate(x, m.weight),
    "an input": lambda m, x: (x, x * 2),
    "only an input": lambda m, x: x,
    "a buffer": lambda m, x: (m.weight, x * 2, m.weight),
    "a view of an input": lambda m, x: (x.view(-1), x[:, 1]),
    "a scalar tensor": lambda m, x: (x * 2).sum(),
    "a transformers ModelOutput": returns_model_output,
}


@pytest.mark.parametrize("kind", RETURNS)
def test_what_a_model_may_return(kind):
    model = Fn(RETURNS[kind], weight=torch.ones(4))
    sizes = (1, 5) if kind.startswith("torch's") else (0, 1, 5)
    assert_equals_model(model, x_of(3), compiler="aot_eager", also=[x_of(n) for n in sizes])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: (x * 2, x.dtype), "output '1' is a dtype"),
        (lambda m, x: {"size": x.shape, "y": x * 2}, "output 'size' is a Size"),
        (lambda m, x: (x * 2, x.shape[0] / 2), "output '1' is a float that is computed from a size"),
        (lambda m, x: (x * 2, GLOBAL), "output '1' is a tensor that is neither computed"),
        (lambda m, x: (x * 2, x.T), "output '1' is a tensor that is neither computed"),
        (lambda m, x: (x * 2, {1}), "output '1' is a set"),
    ],
)
def test_what_a_model_may_not_return(function, message):
    with pytest.raises(TraceError, match=message):
        trace_model(Fn(function), x_of(3))


def test_a_model_that_computes_nothing():
    with pytest.raises(TraceError, match="computes nothing from its inputs"):
        trace_model(Fn(lambda m, x: 3), x_of(3))


def test_an_output_that_cannot_be_cut_is_refused():
    with pytest.raises(TraceError, match=r"output '0' has a dim of size u0 \+ .*whole number of rows"):
        make_program(Fn(lambda m, x: (torch.cat([x, x[:1]]),)), x_of(3))


# What the trace must not do.


def test_nothing_of_the_model_runs_during_trace_and_compile():
    CALLS.clear()
    model = Fn(plain)
    for compiler in ("eager", "aot_eager"):
        program = make_program(model, x_of(3), compiler=compiler)
        make_program(model, x_of(3), compiler=compiler, bucket=4)
        assert CALLS["double"] == 0
    run(program, x_of(3))
    assert CALLS["double"] == 1


def test_buffers_are_not_written_during_trace_and_compile():
    def writes(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.count.add_(1)
        accumulate(x, m.cache)
        return x + m.cache

    model = Fn(writes, count=torch.zeros(1), cache=torch.zeros(4))
    program = make_program(model, x_of(3), compiler="aot_eager")
    assert model.count.item() == 0
    assert not model.cache.any()
    run(program, x_of(3))
    assert model.count.item() == 1


@pytest.mark.parametrize("mode", ["inference_mode", "no_grad", "normal"])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_cache_made_in_any_mode(mode, compiler):
    def store(m: Any, x: torch.Tensor) -> torch.Tensor:
        accumulate(x, m.cache)
        m.cache.mul_(2)
        return x + m.cache

    context = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad, "normal": torch.enable_grad}[mode]
    with context():
        model = Fn(store, cache=torch.zeros(4))
        reference = Fn(store, cache=torch.zeros(4))
    assert model.cache.is_inference() == (mode == "inference_mode")
    program = make_program(model, x_of(3), compiler=compiler)
    for n in (3, 1):
        assert_same(run(program, x_of(n)), run_eager(reference, x_of(n)))
    assert_same(model.cache, reference.cache)


def test_dynamo_switched_off_is_an_error_and_no_silent_eager_run():
    ran = []
    model = Fn(lambda m, x: ran.append(1) or x * 2)
    with torch._dynamo.config.patch(disable=True), pytest.raises(TraceError, match="Dynamo is switched off"):
        trace_model(model, x_of(3))
    assert not ran


def test_a_dispatch_mode_around_the_trace_is_an_error_and_no_silent_eager_run():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model = Fn(plain)
    CALLS.clear()
    with Passing(), pytest.raises(TraceError, match="would run the model instead of tracing it"):
        trace_model(model, x_of(3))
    assert CALLS["double"] == 0


def test_a_stance_that_forces_eager_is_an_error_and_no_silent_eager_run():
    CALLS.clear()
    with torch.compiler.set_stance("force_eager"), pytest.raises(TraceError, match="would run the model"):
        trace_model(Fn(plain), x_of(3))
    assert CALLS["double"] == 0


def test_recompile_limits_do_not_mean_eager():
    """Dynamo's limit is 8 a code object, and all of these share one forward."""
    for i in range(12):
        model = Fn(plain)
        model.number = i
        assert_equals_model(model, x_of(3))


def test_a_graph_break_names_the_line_and_what_to_do():
    def breaks(m: Any, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x * 2

    with pytest.raises(TraceError) as caught:
        trace_model(Fn(breaks), x_of(3))
    text = str(caught.value)
    for part in ("x: float32[tokens, 4]", "remove the graph break", "split op", "test_trace.py", "graph_break()"):
        assert part in text
    assert type(caught.value) is TraceError


def test_a_value_that_depends_on_data_is_refused():
    def on_data(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x

    with pytest.raises(TraceError, match="on_data|x.sum"):
        trace_model(Fn(on_data), x_of(3))


@dataclasses.dataclass
class Step:
    factor: int = 3


@pytest.mark.parametrize("with_context", [True, False])
def test_reading_the_context_on_the_traced_path_is_an_error(with_context):
    """The hazard: Dynamo cannot trace ContextVar.get, and a frozen value would be worse."""

    def reads(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x * get_context(Step).factor

    with use_context(Step() if with_context else None), pytest.raises(TraceError, match="ContextVar"):
        trace_model(Fn(reads), x_of(3))


def test_an_error_of_the_model_is_a_trace_error_with_its_text():
    def raises(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ m.weight

    with pytest.raises(PieceworkError, match="raises|mat|shapes"):
        trace_model(Fn(raises, weight=torch.zeros(9, 9)), x_of(3))


def test_a_failed_trace_leaves_nothing_behind():
    with pytest.raises(TraceError):
        trace_model(Fn(lambda m, x: x * m.nothing), x_of(3))
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    assert_equals_model(Fn(plain), x_of(3))


def test_samples_with_strides_are_traced_with_them():
    def by_layout(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y.sum() if y.is_contiguous() else x - y.sum()

    wide = torch.randn(3, 5).t()
    assert_equals_model(Fn(by_layout), {**x_of(3), "y": wide})
    assert_equals_model(Fn(by_layout), {**x_of(3), "y": wide.contiguous()})
    assert_equals_model(Fn(by_layout), {**x_of(3), "y": torch.ones(1).expand(7)})


# Threads.


def test_two_threads_trace_at_once():
    """torch.compile is not re-entrant across threads: COMPILE_LOCK serialises them, and both are right."""
    models = [Fn(plain), Fn(branch), Fn(table, positions=torch.randn(16, 4)), Fn(optional)]
    barrier = threading.Barrier(len(models))
    failures: list[BaseException] = []

    def work(model: nn.Module) -> None:
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
