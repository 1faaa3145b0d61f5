"""Every known surprise of capture and replay that a user can meet, and what is done about it.

Those of tracing and padding are in test_footguns_tracing.py. On the tape; tests/gpu has what only CUDA can show.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw

WIDTH = 6  # no bucket, so that shapes tell rows from columns
EAGER = ("full", "breakable")
ALL = ("full", "breakable", "tc_piecewise")


@dataclasses.dataclass(frozen=True)
class Step:
    """What the toys' split ops read."""

    gain: torch.Tensor = pw.context_field(pad=0)
    power: float = 1.0


class Log:
    """What ran on the host, for bodies and forwards that have to tell."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.raises: BaseException | None = None


LOG = Log()


@pw.split_op(mutates_args=("out",), name="piecework_replay::scaled", capturable=True)
def scaled(x: torch.Tensor, out: torch.Tensor) -> None:
    """out = x times each token's gain, to a power that only Python knows."""
    LOG.events.append("body")
    if LOG.raises is not None:
        raise LOG.raises
    step = pw.get_context(Step)
    out.copy_(x * step.gain[:, None] ** step.power)


class Model(nn.Module):
    """A module whose forward is a function of (module, x)."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: torch.Tensor, **more: Any) -> Any:
        return self.function(self, x, **more)


def applied(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    scaled(x, out)
    return out


def runtime_of(model: nn.Module, backend: str, compiler: str = "eager", **options: Any) -> pw.Runtime:
    given = {key: options.pop(key) for key in ("startup", "debug_captures", "max_captures") if key in options}
    phase = pw.PhaseConfig(backend=backend, compiler=compiler, buckets=(2, 4, 8))
    config = pw.GraphConfig(prefill=phase, decode=phase, capture_device="tape", **given)
    options.setdefault("dynamic_dims", {"x": 0})
    return pw.Runtime(model, config, **options)


def x_of(num_tokens: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.linspace(-1, 2 + seed, num_tokens * WIDTH).reshape(num_tokens, WIDTH)


def gains(num_tokens: int = 3, gain: float = 2.0) -> Step:
    return Step(torch.full((num_tokens,), gain))


def was_replayed(runtime: pw.Runtime) -> bool:
    return bool(runtime.counters["replays"])


# The model's Python.


@pytest.mark.parametrize("backend", EAGER)
def test_the_models_python_runs_twice_at_first_appearance_and_never_at_a_replay(backend: str) -> None:
    """Once for the step, once for the capture. What a forward does on the host besides, it does then only."""
    calls: list[int] = []

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape[0])
        return x * 2

    runtime = runtime_of(Model(function), backend)
    for _ in range(4):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of()}), x_of() * 2)
    assert calls == [4, 4]


@pytest.mark.parametrize("backend", EAGER)
def test_a_python_attribute_is_frozen_and_the_debug_mode_notices(backend: str) -> None:
    function = lambda m, x: x * m.factor  # noqa: E731
    model = Model(function, factor=2.0)
    frozen, watched = runtime_of(model, backend), runtime_of(model, backend, debug_captures=True)
    for runtime in (frozen, watched):
        runtime.run("decode", {"x": x_of()})
    model.factor = 5.0
    torch.testing.assert_close(frozen.run("decode", {"x": x_of()}), x_of() * 2)
    torch.testing.assert_close(watched.run("decode", {"x": x_of()}), x_of() * 5)
    assert any("attribute of a module that is no tensor" in reason for reason in watched.counters["fallbacks"])


@pytest.mark.parametrize("backend", EAGER)
def test_a_tensor_made_of_a_python_number_is_frozen_with_it(backend: str) -> None:
    model = Model(lambda m, x: x + torch.full((1,), m.number), number=1.0)
    runtime = runtime_of(model, backend)
    runtime.run("decode", {"x": x_of()})
    model.number = 7.0
    torch.testing.assert_close(runtime.run("decode", {"x": x_of()}), x_of() + 1)


def test_a_constant_input_is_part_of_what_is_captured() -> None:
    runtime = runtime_of(Model(lambda m, x, gain: x * gain), "full")
    for gain in (2, 3, 2, 3, 2.0):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(), "gain": gain}), x_of() * gain)
    assert runtime.counters["captures"] == 3
    assert runtime.counters["replays"] == 2


def test_an_optional_input_that_comes_and_goes() -> None:
    runtime = runtime_of(
        Model(lambda m, x, bias=None: x if bias is None else x + bias), "full", dynamic_dims={"x": 0, "bias": 0}
    )
    for bias in (None, x_of(seed=3), None, x_of(seed=4)):
        inputs = {"x": x_of(), "bias": bias}
        torch.testing.assert_close(runtime.run("decode", inputs), x_of() if bias is None else x_of() + bias)
    assert runtime.counters["captures"] == 2
    assert runtime.counters["replays"] == 2


def test_module_hooks_run_at_first_appearance_only() -> None:
    model, seen = Model(lambda m, x: x * 2), []
    model.register_forward_hook(lambda *_: seen.append(1))
    runtime = runtime_of(model, "full")
    for _ in range(3):
        runtime.run("decode", {"x": x_of()})
    assert len(seen) == 2


def test_train_and_eval_after_the_capture() -> None:
    """`training` is an attribute like any other: frozen, and seen by the debug mode."""
    model = Model(lambda m, x: x * (2 if m.training else 3)).eval()
    runtime = runtime_of(model, "full", debug_captures=True)
    torch.testing.assert_close(runtime.run("decode", {"x": x_of()}), x_of() * 3)
    model.train()
    torch.testing.assert_close(runtime.run("decode", {"x": x_of()}), x_of() * 2)


# Weights.


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("how", ["in place", "load_state_dict", "rebound", "data", "double"])
def test_new_weights(backend: str, how: str) -> None:
    """In place they are simply there; anything else moves them, and the capture is made anew."""
    model = Model(lambda m, x: x * m.table.to(x.dtype), table=torch.ones(WIDTH))
    runtime = runtime_of(model, backend)
    runtime.run("decode", {"x": x_of()})
    if how == "in place":
        model.table.mul_(3)
    elif how == "load_state_dict":
        model.load_state_dict({"table": torch.full((WIDTH,), 3.0)})
    elif how == "rebound":
        model.table = torch.full((WIDTH,), 3.0)
    elif how == "data":
        model.table.data = torch.full((WIDTH,), 3.0)
    else:
        model.table.mul_(3)
        model.double()
    if how == "double" and backend == "tc_piecewise":
        # Another dtype is no replacement for what was traced.
        with pytest.raises(pw.InputError, match="table"):
            runtime.run("decode", {"x": x_of()})
        return
    torch.testing.assert_close(runtime.run("decode", {"x": x_of()}), x_of() * 3)
    assert was_replayed(runtime) == (how in ("in place", "load_state_dict"))


def test_a_forward_that_caches_a_tensor_on_its_module() -> None:
    """A replay would leave the attribute with scratch of the capture: so it is not captured."""

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.last = x * 2
        return x + 1

    model = Model(function, last=None)
    runtime = runtime_of(model, "full")
    for seed in range(3):
        runtime.run("decode", {"x": x_of(seed=seed)})
        torch.testing.assert_close(model.last[:3], x_of(seed=seed) * 2)  # of the first step, with its padded row
    assert any("sets last" in reason for reason in runtime.counters["fallbacks"])


# Inputs and outputs.


@pytest.mark.parametrize("backend", ALL)
def test_the_output_of_a_step_as_the_input_of_the_next(backend: str) -> None:
    """It lies in the buffer that the next step overwrites, but inputs are copied before anything runs."""
    runtime = runtime_of(Model(lambda m, x: x * 2), backend)
    x = x_of()
    for power in range(1, 6):
        x = runtime.run("decode", {"x": x})
        torch.testing.assert_close(x, x_of() * 2**power)


@pytest.mark.parametrize("backend", ALL)
def test_an_input_that_is_changed_after_the_step(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x: x * 2), backend)
    x = x_of()
    runtime.run("decode", {"x": x})
    kept = runtime.run("decode", {"x": x})
    x.zero_()
    torch.testing.assert_close(kept, x_of() * 2)


@pytest.mark.parametrize("backend", ALL)
def test_a_forward_that_returns_its_input(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x: (x, x * 2)), backend)
    for seed in range(3):
        same, twice = runtime.run("decode", {"x": x_of(seed=seed)})
        torch.testing.assert_close(same, x_of(seed=seed))
        torch.testing.assert_close(twice, x_of(seed=seed) * 2)


@pytest.mark.parametrize("backend", ALL)
def test_an_input_that_was_expanded_or_transposed(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x, y: x * y.sum(0)), backend)
    for _ in range(3):
        y = torch.ones(1, WIDTH).expand(5, WIDTH)
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(), "y": y}), x_of() * 5)
        y = x_of(5).t().contiguous().t()
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(), "y": y}), x_of() * y.sum(0))
    assert was_replayed(runtime)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_replay_in_any_grad_mode(backend: str, mode: Any) -> None:
    runtime = runtime_of(Model(lambda m, x: applied(x) + m.table, table=torch.ones(WIDTH)), backend)
    runtime.run("decode", {"x": x_of()}, gains())
    with mode():
        result = runtime.run("decode", {"x": x_of()}, gains())
    torch.testing.assert_close(result, x_of() * 2 + 1)
    assert not result.requires_grad


def test_autocast_at_a_replay_is_another_entry() -> None:
    runtime = runtime_of(Model(lambda m, x: x @ m.table, table=torch.ones(WIDTH, WIDTH)), "full")
    assert runtime.run("decode", {"x": x_of()}).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert runtime.run("decode", {"x": x_of()}).dtype == torch.bfloat16
        assert runtime.run("decode", {"x": x_of()}).dtype == torch.bfloat16
    assert runtime.run("decode", {"x": x_of()}).dtype == torch.float32
    assert runtime.counters["captures"] == runtime.counters["replays"] == 2


# Chance.


@pytest.mark.parametrize("backend", ALL)
def test_random_numbers_are_drawn_anew_at_each_replay(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x: x * 0 + torch.rand_like(x)), backend)
    drawn = [runtime.run("decode", {"x": x_of()}, copy=True) for _ in range(4)]
    assert was_replayed(runtime)
    assert len({tuple(each.flatten().tolist()) for each in drawn}) == 4


# The context.


@pytest.mark.parametrize("backend", ALL)
def test_what_a_split_op_reads_is_this_steps(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x: applied(x)), backend)
    for gain in (2.0, 3.0, 0.5):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of()}, gains(gain=gain)), x_of() * gain)
    assert was_replayed(runtime)


@pytest.mark.parametrize("backend", ALL)
def test_a_plain_value_of_the_context_that_changes(backend: str) -> None:
    """Captured whole it is frozen, so another one drops the capture; between segments it is read each time."""
    runtime = runtime_of(Model(lambda m, x: applied(x)), backend)
    gain = torch.full((3,), 2.0)
    for power in (1.0, 2.0, 3.0):
        result = runtime.run("decode", {"x": x_of()}, Step(gain, power))
        torch.testing.assert_close(result, x_of() * 2**power)
    assert runtime.counters["captures"] == (3 if backend == "full" else 1)


@pytest.mark.parametrize("backend", EAGER)
def test_a_forward_that_reads_a_tensor_of_the_context_outside_of_split_ops(backend: str) -> None:
    """A declared field has a fixed place; a segment that reads one without would read the first step's for ever."""

    @dataclasses.dataclass
    class Undeclared:
        gain: torch.Tensor

    runtime = runtime_of(Model(lambda m, x: x * pw.get_context(Step).gain[:, None]), backend)
    for gain in (2.0, 3.0):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(4)}, gains(4, gain)), x_of(4) * gain)
    assert was_replayed(runtime)
    runtime = runtime_of(Model(lambda m, x: x * pw.get_context(Undeclared).gain[:, None]), backend)
    for gain in (2.0, 3.0, 4.0):
        context = Undeclared(torch.full((4,), gain))
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(4)}, context), x_of(4) * gain)
    assert not was_replayed(runtime)
    assert any("Undeclared.gain" in reason for reason in runtime.counters["fallbacks"])


# Things that go wrong in the middle.


@pytest.mark.parametrize("backend", ALL)
def test_a_split_op_that_raises_at_a_replay(backend: str) -> None:
    """The step raises; the capture is as good as before."""
    runtime = runtime_of(Model(lambda m, x: applied(x)), backend)
    runtime.run("decode", {"x": x_of()}, gains())
    LOG.raises = ValueError("no more blocks")
    try:
        with pytest.raises(ValueError, match="no more blocks"):
            runtime.run("decode", {"x": x_of()}, gains())
    finally:
        LOG.raises = None
    torch.testing.assert_close(runtime.run("decode", {"x": x_of(seed=1)}, gains()), x_of(seed=1) * 2)
    assert runtime.counters["captures"] == 1


@pytest.mark.parametrize("backend", EAGER)
def test_an_interrupt_while_capturing(backend: str) -> None:
    """It gets through, nothing half made is published, and the next step starts over."""
    calls: list[int] = []

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return x * 2

    runtime = runtime_of(Model(function), backend)
    with pytest.raises(KeyboardInterrupt):
        runtime.run("decode", {"x": x_of()})
    for seed in range(3):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(seed=seed)}), x_of(seed=seed) * 2)
    assert runtime.counters["captures"] == 1
    assert runtime.counters["replays"] == 2


@pytest.mark.parametrize("backend", EAGER)
def test_a_forward_that_raises_while_capturing_only(backend: str) -> None:
    calls: list[int] = []

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of handles")
        return x * 2

    runtime = runtime_of(Model(function), backend)
    for seed in range(4):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(seed=seed)}), x_of(seed=seed) * 2)
    (reason,) = runtime.counters["fallbacks"]
    assert reason == "the capture failed: RuntimeError: out of handles"
    assert len(calls) == 5  # four steps and one attempt: it is not tried again


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x * (1 if x.sum().item() > -1e9 else 2),
    "bool": lambda x: x * (1 if (x.sum() > -1e9) else 2),
    "tolist": lambda x: x * len(x.tolist()) / len(x),
    "numpy": lambda x: x * x.numpy().shape[1] / WIDTH,
    "cpu": lambda x: x.cpu() * 1,
    "nonzero": lambda x: x * (1 + 0 * x.nonzero().shape[0]),
    "a mask": lambda x: x * (1 + 0 * x[x > 100].shape[0]),
    "unique": lambda x: x * (1 + 0 * x.unique().shape[0]),
    "equal": lambda x: x * (1 if torch.equal(x, x) else 2),
    "print": lambda x: x * (1 + 0 * len(str(x))),
}


@pytest.mark.parametrize("backend", EAGER)
@pytest.mark.parametrize("kind", WAITS)
def test_a_forward_that_waits_for_the_device(backend: str, kind: str) -> None:
    """What a GPU would refuse, the tape refuses: a counted fallback that names the line."""
    runtime = runtime_of(Model(lambda m, x: WAITS[kind](x)), backend)
    for seed in range(3):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(seed=seed)}), x_of(seed=seed))
    (reason,) = runtime.counters["fallbacks"]
    assert "test_footguns.py:" in reason
    assert runtime.counters["fallbacks"][reason] == 3


def test_modes_of_the_caller_around_a_replay() -> None:
    """A dispatch mode of the caller's sees what runs, and changes nothing."""
    from torch.utils.flop_counter import FlopCounterMode

    runtime = runtime_of(Model(lambda m, x: x @ m.table, table=torch.eye(WIDTH)), "breakable")
    for seed in range(3):
        with FlopCounterMode(display=False) if seed else contextlib.nullcontext():
            torch.testing.assert_close(runtime.run("decode", {"x": x_of(seed=seed)}), x_of(seed=seed))


def test_a_module_that_the_user_compiled_is_eager_while_the_tape_records() -> None:
    """Under any dispatch mode torch runs a compiled callable eagerly, so the tape records that: right, but not it."""
    inner = torch.compile(lambda x: x * 2 + 1, backend="aot_eager", dynamic=True)
    runtime = runtime_of(Model(lambda m, x: inner(x)), "full")
    for seed in range(3):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(seed=seed)}), x_of(seed=seed) * 2 + 1)
    assert was_replayed(runtime)


def test_results_kept_by_several_threads_need_copies() -> None:
    """Steps of one phase overwrite each other's outputs, whoever runs them."""
    runtime = runtime_of(Model(lambda m, x: x * 2), "full")
    runtime.run("decode", {"x": x_of()})
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for _ in range(20):
                result = runtime.run("decode", {"x": x_of(seed=seed)}, copy=True)
                torch.testing.assert_close(result, x_of(seed=seed) * 2)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
