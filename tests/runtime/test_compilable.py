"""`@compilable`: when a call runs through the instance's Runtime, and what may be done with such modules."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch

import piecework as pw

CONFIG = pw.GraphConfig(
    prefill=pw.PhaseConfig(backend="disabled", compiler="aot_eager", buckets=(4, 8)),
    decode=pw.PhaseConfig(backend="disabled", compiler="aot_eager", buckets=(2,)),
)


@pw.compilable(dynamic_dims={"x": 0}, config=CONFIG)
class Scaled(torch.nn.Module):
    """At the top of the module, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, gain: float = 1.0, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.relu(self.linear(x)) * gain
        return y if bias is None else y + bias


class Shifted(Scaled):
    def forward(
        self, x: torch.Tensor, gain: float = 1.0, bias: torch.Tensor | None = None, shift: float = 1.0
    ) -> torch.Tensor:
        return super().forward(x, gain, bias) + shift


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner in self.inner:
            x = inner(x)
        return x


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 3)


def steps(module: Any) -> int:
    return module.runtime.counters["steps"]


def lin(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def decorate(forward: Any = None, base: type = torch.nn.Module, **arguments: Any) -> type:
    body = {"forward": forward} if forward is not None else {}
    return pw.compilable(**{"dynamic_dims": {"x": 0}, "config": CONFIG} | arguments)(type("Mine", (base,), body))


def check(module: Any, x: torch.Tensor, **kwargs: Any) -> None:
    """A call under inference runs one step of the Runtime and equals the plain forward."""
    with torch.inference_mode():
        expected = module.forward(x, **kwargs)
        with module.runtime.counters.expect(steps=1):
            torch.testing.assert_close(module(x, **kwargs), expected)


# ---- when the Runtime runs


def test_calls_under_inference_share_one_trace_at_every_size() -> None:
    module = Scaled().eval()
    for num_tokens in (3, 1, 4, 8, 20):
        check(module, torch.randn(num_tokens, 3))
    counters = module.runtime.counters.as_dict()
    assert (counters["traces"], counters["compiles_general"], counters["steps"]) == (1, 1, 5)
    assert isinstance(module, Scaled)
    assert isinstance(module.runtime, pw.Runtime)
    assert module.runtime.model is module
    assert "prefill  4" in str(module.runtime.explain())


def test_under_no_grad_the_outputs_can_be_used_in_autograd_later(x) -> None:
    module, head = Scaled().eval(), torch.nn.Linear(3, 1)
    with torch.no_grad():
        hidden = module(x)
    assert steps(module) == 1
    assert not hidden.is_inference()
    head(hidden).sum().backward()
    with torch.inference_mode():
        assert module(x).is_inference()


def test_training_and_grad_run_the_plain_forward_and_only_a_forgotten_no_grad_is_counted(x) -> None:
    module = Scaled()
    with torch.no_grad():
        module.train()(x)
    module(x).sum().backward()
    assert module.linear.weight.grad is not None
    assert "_piecework_runtime" not in vars(module)
    module.eval()
    module(x).sum().backward()
    module(x)
    assert module.runtime.counters["fallbacks"] == {"grad is enabled: the plain forward": 2}
    module(x)
    assert module.runtime.counters["fallbacks"] == {"grad is enabled: the plain forward": 3}
    assert steps(module) == 0


def test_positional_arguments_are_bound_and_defaults_count_as_left_out(x) -> None:
    module = Scaled().eval()
    with torch.inference_mode():
        one = [module(x), module(x, 1.0), module(x=x, gain=1.0, bias=None)]
        two = [module(x, 2.0, torch.ones(3)), module(bias=torch.ones(3), gain=2.0, x=x)]
        torch.testing.assert_close(two[0], module.forward(x, 2.0, torch.ones(3)))
    assert all(torch.equal(one[0], other) for other in one)
    assert torch.equal(*two)
    assert module.runtime.counters["traces"] == 2
    with torch.inference_mode(), pytest.raises(TypeError, match="unexpected keyword argument 'gian'"):
        module(x, gian=2.0)


@pytest.mark.parametrize(
    ("phase", "expected"), [("decode", ["decode", "decode"]), (lambda i: ("prefill", "decode")[len(i["x"]) == 1], None)]
)
def test_the_phase_is_a_name_or_chosen_from_the_inputs(phase: Any, expected: list[str] | None) -> None:
    @pw.compilable(dynamic_dims={"x": 0}, config=CONFIG, phase=phase)
    class Module(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    module = Module(3, 3).eval()
    for num_tokens in (1, 4):
        check(module, torch.randn(num_tokens, 3))
    assert [str(e.phase) for e in module.runtime.entries] == (expected or ["decode", "prefill"])


def test_the_context_is_the_one_in_use(kit) -> None:
    toy = decorate(base=kit.Toy, dynamic_dims=kit.dynamic_dims)(1).eval()
    inputs, context = kit.inputs(3), kit.context(3)
    expected = kit.reference(toy, inputs, context)
    with torch.inference_mode(), pw.use_context(context):
        torch.testing.assert_close(toy(**inputs), expected)
    assert kit.calls.contexts[-1].tolist() == [0, 1, 2, -1]
    with torch.inference_mode(), pytest.raises(pw.ContextError, match="ToyContext and got no context"):
        toy(**inputs)


def test_pad_and_output_dims_reach_the_runtime() -> None:
    @pw.compilable(dynamic_dims={"x": {1: "tokens"}}, config=CONFIG, pad={"x": 7}, output_dims={"0": 1, "1": None})
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, x.sum(1)

    with torch.no_grad():
        first, second = Module().eval()(torch.ones(1, 3))
    assert first.tolist() == [[2, 2, 2]]
    assert second.tolist() == [3 + 7]  # not cut, and so it shows the pad value


def test_eager_startup_takes_the_first_call_for_its_example(x) -> None:
    config = pw.GraphConfig(prefill=CONFIG.prefill, decode=CONFIG.decode, startup="eager")
    module = decorate(lin, config=config)().eval()
    module(x)  # with grad: needs no Runtime, and so none is made
    with torch.inference_mode():
        module(x)
        with module.runtime.counters.expect(traces=0, entries=0):
            module(torch.randn(8, 3))


# ---- subclasses and nesting


def test_a_subclass_runs_its_own_forward_whole(x) -> None:
    module = Shifted().eval()
    check(module, x, shift=2.0)
    assert steps(module) == 1  # super().forward ran inside, not as a step of its own
    assert module.runtime.counters["traces"] == 1
    with torch.inference_mode():
        torch.testing.assert_close(module(x, 2.0), Scaled.forward(module, x, 2.0) + 1)


def test_a_subclass_may_be_decorated_again_and_call_through_super(x) -> None:
    @pw.compilable(dynamic_dims={"x": 0}, config=CONFIG, phase="decode")
    class Again(Scaled):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) + 1

    module = Again().eval()
    with torch.inference_mode():
        torch.testing.assert_close(module(x), module.forward(x) + 1)
    assert [str(e.phase) for e in module.runtime.entries] == ["decode"]
    assert steps(module) == 1
    torch.testing.assert_close(module(x), module.forward(x) + 1)
    scaled = Scaled().eval()
    check(scaled, x)
    assert [str(e.phase) for e in scaled.runtime.entries] == ["prefill"]


def test_a_subclass_whose_forward_lost_the_input_says_so(x) -> None:
    class Lost(Scaled):
        def forward(self, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.linear(y)

    module = Lost().eval()
    with torch.inference_mode(), pytest.raises(pw.InputError, match="parameters of Lost.forward, which are y; got 'x'"):
        module(x)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_compilable_module_inside_another_runs_as_a_part_of_it(x, compiler: str) -> None:
    config = pw.GraphConfig(prefill=pw.PhaseConfig(backend="disabled", compiler=compiler, buckets=(4,)))
    outer = decorate(base=Outer, config=config)().eval()
    with torch.inference_mode():
        expected = outer.inner[1].forward(outer.inner[0].forward(x))
        torch.testing.assert_close(outer(x), expected)
    assert [steps(inner) for inner in outer.inner] == [0, 0]
    assert steps(outer) == 1


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_inside_an_engines_runtime_it_is_a_part_as_well(x, compiler: str) -> None:
    config = pw.GraphConfig(prefill=pw.PhaseConfig(backend="disabled", compiler=compiler, buckets=(4,)))
    model = Outer().eval()
    runtime = pw.Runtime(model, config, dynamic_dims={"x": 0})
    with torch.inference_mode():
        expected = model.inner[1].forward(model.inner[0].forward(x))
    torch.testing.assert_close(runtime.run("prefill", {"x": x}), expected)
    assert [steps(inner) for inner in model.inner] == [0, 0]


def test_inside_a_plain_module_it_runs_by_itself(x) -> None:
    model = Outer().eval()
    with torch.inference_mode():
        expected = model.inner[1].forward(model.inner[0].forward(x))
        torch.testing.assert_close(model(x), expected)
    assert [steps(inner) for inner in model.inner] == [1, 1]


def test_under_torch_compile_the_plain_forward_is_traced(x) -> None:
    module = Scaled().eval()
    with torch.inference_mode():
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), module.forward(x))
    assert steps(module) == 0


# ---- copies, pickles, changes


@pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_a_runtime_of_its_own(x, copier: Any) -> None:
    module = Scaled().eval()
    check(module, x)
    copied = copier(module)
    assert copied.runtime is not module.runtime
    assert copied.runtime.model is copied
    check(copied, x)
    with torch.no_grad():
        if copied.linear is not module.linear:
            copied.linear.weight.zero_()
    check(copied, x)
    check(module, x)
    assert (steps(module), steps(copied)) == (2, 2)


def test_state_dicts_and_saved_modules_know_nothing_of_it(x) -> None:
    module, other = Scaled().eval(), Scaled().eval()
    check(module, x)
    assert list(module.state_dict()) == ["linear.weight", "linear.bias"]
    check(other, x)
    other.load_state_dict(module.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(other(x), module(x))
    assert other.runtime.counters["traces"] == 1
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    check(torch.load(buffer, weights_only=False), x)


def test_another_dtype_starts_anew_and_the_same_does_not(x) -> None:
    parent = torch.nn.Sequential(Scaled()).eval()
    [module] = parent
    check(module, x)
    before = module.runtime
    assert parent.to(torch.float32)[0].runtime is before
    parent.double()
    assert module.runtime is not before
    check(module, x.double())


def test_a_module_that_is_dropped_is_freed(x) -> None:
    module = Scaled().eval()
    check(module, x)
    dropped = weakref.ref(module)
    del module
    gc.collect()
    assert dropped() is None


def test_close_ends_it(x) -> None:
    module = Scaled().eval()
    check(module, x)
    module.runtime.close()
    with torch.inference_mode(), pytest.raises(pw.RuntimeClosedError):
        module(x)


def test_threads_that_meet_at_the_first_call_get_one_runtime(x) -> None:
    module = Scaled().eval()
    barrier, found, wrong = threading.Barrier(4), [], []

    def work() -> None:
        barrier.wait()
        with torch.inference_mode():
            if not torch.allclose(module(x), module.forward(x)):
                wrong.append(1)
        found.append(module.runtime)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(found) == 4
    assert len(set(map(id, found))) == 1
    assert (steps(module), module.runtime.counters["traces"]) == (4, 1)


# ---- what is refused, where the class is written


@pytest.mark.parametrize(
    ("forward", "arguments", "message"),
    [
        (lin, {"dynamic_dims": {"xs": 0}}, "compilable: dynamic_dims: .* Mine.forward, which are x; got 'xs'"),
        (lin, {"pad": {"y": 0}}, "compilable: pad: .* Mine.forward, which are x; got 'y'"),
        (lin, {"dynamic_dims": ["x"]}, "compilable: dynamic_dims: expected a mapping from input names, got list"),
        (lin, {"dynamic_dims": {"x": {0: "rows"}}}, "expected one dim called 'tokens'"),
        (lin, {"output_dims": -1}, "output_dims: expected a dim counted from 0"),
        (lambda self, *xs: xs, {}, r"Mine.forward: .* by their names, got \*xs; spell them out"),
        (lambda self, x, /: x, {}, "Mine.forward: .* got x, /; spell them out"),
    ],
)
def test_what_does_not_fit_forward_is_refused_at_the_decoration(forward: Any, arguments: Any, message: str) -> None:
    with pytest.raises(pw.InputError, match=message):
        decorate(forward, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"phase": "warmup"}, "phase: expected one of prefill, decode or a function .* got 'warmup'"),
        ({"base": dict}, "expected a subclass of torch.nn.Module, got Mine"),
        ({"base": type("Base", (torch.nn.Module,), {"runtime": 1})}, "Mine has an attribute `runtime`"),
    ],
)
def test_what_cannot_be_decorated_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(pw.ConfigError, match=message):
        decorate(lin, **arguments)


def test_decorating_twice_is_refused() -> None:
    with pytest.raises(pw.ConfigError, match="Scaled is compilable already; expected a class that is decorated once"):
        pw.compilable(dynamic_dims={"x": 0})(Scaled)
    with pytest.raises(pw.ConfigError, match="expected a subclass of torch.nn.Module, got a Scaled"):
        pw.compilable(dynamic_dims={"x": 0})(Scaled())


def test_a_forward_with_keywords_takes_any_input(x) -> None:
    module = decorate(lambda self, **inputs: inputs["x"] * inputs.get("gain", 2.0))().eval()
    with torch.inference_mode():
        assert torch.equal(module(x=x), x * 2)
        assert torch.equal(module(x=x, gain=3.0), x * 3)
    assert steps(module) == 2
