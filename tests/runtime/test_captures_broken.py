"""Captures through the public API: what a hostile user finds."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw

W = 4
ALL = ("full", "breakable", "tc_piecewise")
EAGER = ("full", "breakable")


class Model(nn.Module):
    def __init__(self, function: Any, **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: torch.Tensor, **more: Any) -> Any:
        return self.function(self, x, **more)


def runtime_of(model: nn.Module, backend: str, compiler: str = "eager", *, buckets: Any = (2, 4, 8), **options: Any):
    names = ("startup", "debug_captures", "max_captures", "cuda_graph_memory_budget", "evaluate_guards")
    given = {key: options.pop(key) for key in names if key in options}
    phase = pw.PhaseConfig(backend=backend, compiler=compiler, buckets=buckets, specialize=options.pop("specialize", ()))
    config = pw.GraphConfig(prefill=phase, decode=phase, capture_device="tape", **given)
    options.setdefault("dynamic_dims", {"x": 0})
    return pw.Runtime(model, config, **options)


def x_of(n: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, W, generator=torch.Generator().manual_seed(seed * 100 + n))


@dataclasses.dataclass(frozen=True)
class Ctx:
    gain: torch.Tensor = pw.context_field(pad=0)
    power: float = 1.0


@pw.split_op(mutates_args=("out",), name="piecework_broken::scaled", capturable=True)
def scaled(x: torch.Tensor, out: torch.Tensor) -> None:
    step = pw.get_context(Ctx)
    out.copy_(x * step.gain[:, None] ** step.power)


@pw.split_op(mutates_args=("cache",), name="piecework_broken::store", capturable=True)
def store(x: torch.Tensor, cache: torch.Tensor) -> None:
    step = pw.get_context(Ctx)
    if step.power == 0.0:
        return
    cache[: x.shape[0]] += x * step.gain[:, None]


# H2
@pytest.mark.parametrize("backend", EAGER)
def test_an_input_that_only_a_larger_bucket_writes(backend: str) -> None:
    def function(m, x, log):
        if x.shape[0] > 4:
            log.add_(1)
        return x + log

    runtime = runtime_of(Model(function), backend)
    log, theirs = torch.zeros(W), torch.zeros(W)
    for seed, n in enumerate((4, 8, 4, 8, 4)):
        log.fill_(seed); theirs.fill_(seed)
        x = x_of(n, seed)
        expected = function(None, x, theirs)
        torch.testing.assert_close(runtime.run("decode", {"x": x, "log": log}), expected)
        torch.testing.assert_close(log, theirs)


# H4
@pytest.mark.parametrize("backend", EAGER)
def test_inputs_that_are_one_tensor_and_written(backend: str) -> None:
    def function(m, x, y):
        x.mul_(2)
        return x + y

    runtime = runtime_of(Model(function), backend, dynamic_dims={"x": 0, "y": 0})
    for seed in range(3):
        x, theirs = x_of(4, seed), x_of(4, seed)
        expected = function(None, theirs, theirs)
        try:
            got = runtime.run("decode", {"x": x, "y": x})
        except pw.InputError:
            continue
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(x, theirs)


# H22
@pytest.mark.parametrize("backend", ALL)
def test_inputs_that_require_grad(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x, y: x * y), backend)
    first = weakref.ref(x_of())
    alive = []
    for seed in range(6):
        x = x_of(3, seed).requires_grad_() * 1
        y = torch.ones(W, requires_grad=True) * 2
        alive.append(weakref.ref(x))
        got = runtime.run("decode", {"x": x, "y": y})
        torch.testing.assert_close(got, x.detach() * 2)
        assert not got.requires_grad
    del x, y
    gc.collect()
    table = next(iter(runtime._captures._tables.values()))
    for t in table.buffers._tensors.values():
        assert t.grad_fn is None, t.grad_fn


# H8
@pytest.mark.parametrize("backend", EAGER)
def test_an_output_that_is_a_size(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x: (x * 2, x.shape)), backend)
    try:
        for n in (3, 3, 4):
            assert runtime.run("decode", {"x": x_of(n)})[1] == (n, W)
    except pw.InputError as e:
        assert "output '1'" in str(e)


class Box:
    def __init__(self, t):
        self.t = t


@pytest.mark.parametrize("backend", EAGER)
def test_an_output_that_is_an_object_with_a_tensor(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x: (x * 2, Box(x + 1))), backend)
    try:
        for seed in range(3):
            got = runtime.run("decode", {"x": x_of(4, seed)})
            torch.testing.assert_close(got[1].t, x_of(4, seed) + 1)
    except pw.InputError as e:
        assert "output '1'" in str(e)


# H14
@pytest.mark.parametrize("backend", EAGER)
def test_a_plain_value_of_the_context_read_outside_split_ops(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x: x * pw.get_context(Ctx).power), backend)
    for power in (1.0, 2.0, 3.0, 3.0):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of()}, Ctx(torch.ones(3), power)), x_of() * power)


# H15
@dataclasses.dataclass
class A:
    power: float = 1.0

    def factor(self):
        return 2


@dataclasses.dataclass
class B(A):
    def factor(self):
        return 3


@pytest.mark.parametrize("backend", EAGER)
def test_a_context_of_another_class(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x: x * pw.get_context(A).factor()), backend)
    for kind in (A, B, A, B):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of()}, kind()), x_of() * kind().factor())


@pytest.mark.parametrize("backend", EAGER)
def test_no_context_after_one(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x: x * pw.get_context(A).factor()), backend)
    runtime.run("decode", {"x": x_of()}, A())
    with pytest.raises(pw.ContextError):
        runtime.run("decode", {"x": x_of()})


# H32
@pytest.mark.parametrize("backend", ALL)
def test_many_constants(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x, gain: x * gain), backend)
    for i in range(40):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(), "gain": float(i)}), x_of() * i)
    assert runtime.counters["captures"] < 20
    assert len(runtime._captures._tables) < 20


# H35
@pytest.mark.parametrize("backend", ALL)
def test_warm_up_after_a_step(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x: x * 2), backend)
    runtime.run("decode", {"x": x_of()})
    runtime.warm_up()
    runtime.warm_up()
    assert runtime.counters["captures"] == 6


# H40
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("backend", ["full", "tc_piecewise"])
def test_evaluate_guards(backend: str, compiler: str) -> None:
    def function(m, x):
        out = torch.empty_like(x)
        scaled(x * 2, out)
        return out + 1

    runtime = runtime_of(Model(function), backend, compiler, evaluate_guards=True)
    for seed in range(4):
        g = torch.full((3,), 2.0 + seed)
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(3, seed)}, Ctx(g)), x_of(3, seed) * 2 * g[:, None] + 1)
    assert runtime.counters["captures"] == 1, runtime.counters["fallbacks"]
    assert runtime.counters["replays"] == 3
    assert not runtime.counters["fallbacks"]


@pw.split_op(mutates_args=("out",), name="piecework_broken::plain")
def notcap(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_evaluate_guards_still_refuses(compiler: str) -> None:
    def function(m, x):
        out = torch.empty_like(x)
        notcap(x * 2, out)
        return out + 1

    runtime = runtime_of(Model(function), "full", compiler, evaluate_guards=True)
    for seed in range(3):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(3, seed)}), x_of(3, seed) * 4 + 1)
    assert runtime.counters["captures"] == 0


# H48
@pytest.mark.parametrize("backend", EAGER)
def test_a_capture_that_fails_leaves_no_attribute_behind(backend: str) -> None:
    def function(m, x):
        y = x + (m.prev if m.prev is not None else 0)
        m.prev = y
        if y.sum().item() > 1e9:
            return x
        return y

    model, other = Model(function, prev=None), Model(function, prev=None)
    runtime = runtime_of(model, backend)
    for seed in range(3):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(4, seed)}), other(x_of(4, seed)))


@pytest.mark.parametrize("backend", EAGER)
def test_a_capture_that_fails_leaves_no_list_behind(backend: str) -> None:
    def function(m, x):
        m.kept.append(x * 2)
        if x.sum().item() > 1e9:
            return x
        return x * len(m.kept)

    model, other = Model(function, kept=[]), Model(function, kept=[])
    runtime = runtime_of(model, backend)
    for seed in range(3):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(4, seed)}), other(x_of(4, seed)))
    assert not any(t.isnan().any() for t in model.kept)


# H65
@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("how", ["data", "slice"])
def test_same_address_other_layout(backend: str, how: str) -> None:
    t = torch.arange(W * W * 1.0).reshape(W, W)
    model = Model(lambda m, x: x @ m.table[:, :4].sum(0, keepdim=True).expand(4, 4), table=t)
    if how == "data":
        model.function = lambda m, x: x @ m.table
    runtime = runtime_of(model, backend)
    runtime.run("decode", {"x": x_of()})
    if how == "data":
        model.table.data = model.table.data.t()
    else:
        model.table = model.table[:2]
    try:
        got = runtime.run("decode", {"x": x_of()})
    except pw.InputError:
        assert backend == "tc_piecewise"
        return
    torch.testing.assert_close(got, model(x_of()))


# H83
@pytest.mark.parametrize("backend", ALL)
def test_a_cache_input_that_the_first_run_did_not_write(backend: str) -> None:
    def function(m, x, cache):
        store(x, cache)
        return x + 1

    runtime = runtime_of(Model(function), backend)
    cache, theirs = torch.zeros(8, W), torch.zeros(8, W)
    for power in (0.0, 1.0, 1.0, 1.0):
        ctx = Ctx(torch.ones(4), power)
        runtime.run("decode", {"x": x_of(4), "cache": cache}, ctx)
        with torch.inference_mode(), pw.use_context(ctx):
            function(None, x_of(4), theirs)
        torch.testing.assert_close(cache, theirs)


# H1
@pytest.mark.parametrize("backend", ALL)
def test_close_during_a_step(backend: str) -> None:
    entered, go = threading.Event(), threading.Event()

    def function(m, x):
        entered.set()
        go.wait(10)
        return x * 2

    runtime = runtime_of(Model(function), "full")
    result = []
    def work():
        try:
            result.append(runtime.run("decode", {"x": x_of()}, copy=True))
        except BaseException as e:
            result.append(e)
    t = threading.Thread(target=work); t.start()
    entered.wait(10)
    closer = threading.Thread(target=runtime.close); closer.start()
    go.set()
    t.join(10); closer.join(10)
    assert not t.is_alive() and not closer.is_alive()
    assert isinstance(result[0], (torch.Tensor, pw.RuntimeClosedError)), result
    caps = runtime._captures
    gc.collect()
    assert caps.pool_bytes == 0 and caps.buffer_bytes == 0


def test_close_between_pick_and_capture(monkeypatch) -> None:
    runtime = runtime_of(Model(lambda m, x: x * 2), "full")
    original = runtime._pick
    def picked(*a):
        r = original(*a)
        runtime.close()
        return r
    runtime._pick = picked
    with contextlib.suppress(pw.RuntimeClosedError):
        runtime.run("decode", {"x": x_of()})
    gc.collect()
    assert runtime._captures.pool_bytes == 0 and runtime._captures.buffer_bytes == 0
    runtime.compact()


# H72
@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_garbage_without_close(backend: str, compiler: str) -> None:
    if backend == "breakable" and compiler != "eager":
        return
    runtime = runtime_of(Model(lambda m, x: x * 2), backend, compiler)
    for _ in range(3):
        runtime.run("decode", {"x": x_of()})
    ref = weakref.ref(runtime._captures)
    model = weakref.ref(runtime.model)
    pool = runtime._captures._pool
    del runtime
    gc.collect()
    assert ref() is None
    assert pool.num_captures == 0
    assert model() is None
