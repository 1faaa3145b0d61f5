"""The trace against models that try to make it lie: state, structures, modes, and what may not be traced."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from piecework.errors import TraceError
from piecework.graphs.inputs import InputContract

from .toys import (
    CALLS,
    Fn,
    accumulate,
    assert_equals_model,
    assert_same,
    make_program,
    plain,
    run,
    run_eager,
    trace_model,
    x_of,
)

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


def test_samples_with_strides_are_traced_with_them():
    def by_layout(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y.sum() if y.is_contiguous() else x - y.sum()

    wide = torch.randn(3, 5).t()
    assert_equals_model(Fn(by_layout), {**x_of(3), "y": wide})
    assert_equals_model(Fn(by_layout), {**x_of(3), "y": wide.contiguous()})
    assert_equals_model(Fn(by_layout), {**x_of(3), "y": torch.ones(1).expand(7)})
