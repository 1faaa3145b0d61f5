"""What it takes to capture one of the staging models, and to compare it with the uncaptured one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw
from piecework.errors import CaptureError
from piecework.graphs import breakable, piecewise
from piecework.graphs.buffers import Buffers, StaticInputs
from piecework.graphs.capture import Capture, Work
from piecework.graphs.inputs import InputContract
from piecework.graphs.split_calls import SplitCall
from piecework.graphs.tape import TapeDevice
from piecework.ops.fused_choice import choose
from piecework.ops.split_op import split_op
from piecework.phases import Compiler
from piecework.runtime.programs import EagerProgram

from .staging_models import CONSTANT, WIDTH, attend
from .test_fuzz import assert_exactly
from .toys import CALLS, TOKENS_FIRST, Fn, make_program

BUCKETS = (4, 8)
SIZES = (3, 8, 4, 0, 3, 7, 4, 1)


def model_of(function: Callable[..., Any]) -> Fn:
    return Fn(
        function,
        cache=torch.ones(WIDTH),
        row=torch.arange(float(WIDTH)),
        table=torch.linspace(0, 1, 8 * WIDTH).reshape(8, WIDTH),
    )


def runtime_of(
    model: nn.Module, backend: str, compiler: str = "eager", programs: Sequence[pw.PortableProgram] = (), **more: Any
) -> pw.Runtime:
    specialize = more.pop("specialize", ())
    phase = {"backend": backend, "compiler": compiler, "buckets": BUCKETS, "specialize": specialize}
    config = pw.GraphConfig(prefill=phase, decode=phase, capture_device="tape", **more)
    return pw.Runtime(model, config, dynamic_dims=TOKENS_FIRST, output_dims=None, programs=programs)


def padded(num_tokens: int, seed: int) -> torch.Tensor:
    """A step's `x`, followed by zeros up to its bucket."""
    size = next(bucket for bucket in BUCKETS if bucket >= num_tokens)
    x = torch.zeros(size, WIDTH)
    x[:num_tokens] = torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x


def exported(function: Callable[..., Any], backend: str, compiler: str) -> Sequence[pw.PortableProgram]:
    """The model's programs, as another process would get them."""
    runtime = runtime_of(model_of(function), backend, compiler)
    runtime.run("decode", {"x": padded(4, 0)})
    return runtime.export()


def check(function: Callable[..., Any], backend: str, compiler: str, **options: Any) -> None:
    """Steps of mixed sizes, captured and replayed, are bit for bit the model's forward; so are inputs and buffers.

    Each step runs as many bodies as the forward: none of them while it is captured.
    """
    model, reference = model_of(function), model_of(function)
    runtime = runtime_of(model, backend, compiler, **options)
    before = CONSTANT.clone()
    states: list[Any] = []
    for constant_of in ("runtime", "model"):
        CONSTANT.copy_(before)
        for seed, num_tokens in enumerate(SIZES):
            x = padded(num_tokens, seed)
            CALLS.clear()
            if constant_of == "runtime":
                own = x[:num_tokens].clone()
                states += [runtime.run("decode", {"x": own}, copy=True), own]
                states += [copy.deepcopy([*model.buffers(), CONSTANT]), copy.deepcopy(CALLS)]
                continue
            with torch.inference_mode():
                outputs = reference(x)
            for expected in (outputs, x[:num_tokens], [*reference.buffers(), CONSTANT]):
                assert_exactly(states.pop(0), expected)
            assert states.pop(0) == CALLS
    CONSTANT.copy_(before)
    assert not runtime.counters["fallbacks"]
    assert (runtime.counters["captures"], runtime.counters["replays"]) == (2, len(SIZES) - 2)


def captured(function: Callable[..., Any], backend: str, buffers: Buffers | None = None) -> Capture:
    """A capture of 4 tokens, made without a runtime; no body runs while it is made."""
    num_tokens = 4
    model = model_of(function)
    inputs = {"x": padded(num_tokens, 0)}
    contract = InputContract(TOKENS_FIRST)
    buffers = buffers or Buffers(max(BUCKETS))
    bound = contract.bind(inputs)
    module: Any = breakable if backend == "breakable" else piecewise
    forward: Any
    if backend == "breakable":
        forward = EagerProgram(model, (), choose((), compiler=Compiler.EAGER, device_type="cpu"))
    else:
        forward = make_program(model, inputs)
    device = TapeDevice()
    with torch.inference_mode():
        CALLS.clear()
        tensors = StaticInputs(contract, buffers).fill(bound, num_tokens)
        work = Work(forward=forward, tensors=tensors, sizes=bound.sizes, bucket=num_tokens, buffers=buffers)
        _, observed = module.observe(work)
        CALLS.clear()
        with device.session(device.open_pool()) as session:
            capture = Capture(*module.capture(session, work, observed), tracked=work.tracked_addresses())
    assert not CALLS
    return capture


def copies_of(capture: Capture) -> list[int]:
    """The copies that its segments make: 1 for a tensor by itself, a number for those that share a kernel."""
    segments: list[Any] = [step for step in capture.steps if not isinstance(step, SplitCall)]
    steps = [step for segment in segments for step in segment._recording.steps]
    aten = torch.ops.aten
    counts = {
        aten.copy_.default: lambda args: 1,
        aten._foreach_copy_.default: lambda args: len(args[0]),
    }
    return [counts[step.op](step.args) for step in steps if getattr(step, "op", None) in counts]


def layers_of(num_layers: int) -> Callable[..., Any]:
    """A model of equal layers with one split op each."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(num_layers):
            q = x * 2
            out = torch.empty_like(q)
            attend(q, m.cache, out)
            x = x + out.relu()
        return x

    return forward


@split_op(mutates_args=("cache", "out"), name="piecework_stage::mix")
def mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
    """Takes what attention takes."""
    CALLS["mix"] += 1
    cache.mul_(0.5).add_(k.sum(0))
    out.copy_(q * cache + v)


def attention_layers(num_layers: int) -> Callable[..., Any]:
    """A model whose split ops take new tensors and a part of one."""

    def forward(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(num_layers):
            qkv = torch.cat((x, x + 1, x * 2), 1)
            q, k, v = qkv[:, :WIDTH].cos(), qkv[:, WIDTH : 2 * WIDTH].sin(), qkv[:, 2 * WIDTH :]
            out = torch.empty_like(q)
            mix(q, k, v, m.cache, out)
            x = x + out.relu()
        return x, x.sum(1)

    return forward


RESULT: list[Any] = []
"""What `fickle` does differently."""


@split_op(mutates_args=(), name="piecework_stage::fickle", fake=lambda x: [x.new_empty(x.shape), x.new_empty(2)])
def fickle(x: torch.Tensor) -> list[torch.Tensor]:
    """Two tensors, or what RESULT says."""
    results = [x + 1, x.new_ones(2)]
    for change in RESULT:
        results = change(results)
    return results


CHANGES = {
    "shape": (lambda r: [r[0], torch.ones(3)], r"expected to return float32\[2\] on cpu, .* got float32\[3\]"),
    "dtype": (lambda r: [r[0].double(), r[1]], r"expected to return float32\[4, 4\] on cpu, .* got float64\[4, 4\]"),
    "number": (lambda r: [r[0]], "expected to return 2 results, .* got 1"),
}


def two_results(m: Any, x: torch.Tensor) -> Any:
    a, b = fickle(x * 2)
    return a + b.sum(), b


def check_changed_result(backend: str, change: str) -> None:
    """A split op that returns something else at a replay is an error that names it; the next step is right again."""
    function, message = CHANGES[change]
    model = model_of(two_results)
    runtime = runtime_of(model, backend)
    inputs = {"x": padded(3, 0)}
    expected = copy.deepcopy(runtime.run("decode", inputs))
    RESULT.append(function)
    try:
        with pytest.raises(CaptureError, match="split op piecework_stage::fickle: " + message) as caught:
            runtime.run("decode", inputs)
    finally:
        RESULT.clear()
    assert caught.value.op == "piecework_stage::fickle"
    with runtime.counters.expect(replays=1, steps=1):
        assert_exactly(runtime.run("decode", inputs), expected)


FOREIGN: list[int] = []


@torch.library.custom_op("piecework_foreign::scale", mutates_args=("out",))
def scale(x: torch.Tensor, out: torch.Tensor, by: float) -> None:
    """An operator of somebody else."""
    FOREIGN.append(x.shape[0])
    out.copy_(x * by)


def scaled_twice(m: Any, x: torch.Tensor) -> Any:
    y, out, other = x + 1, torch.empty_like(x), torch.empty_like(x)
    scale(y, out, 2.0)
    scale(out.relu(), other, by=-1.0)
    return out * other


def check_foreign(backend: str) -> None:
    """It runs at each replay and not at the capture, like one of our own."""
    model = model_of(scaled_twice)
    runtime = runtime_of(model, backend)
    for seed, num_tokens in enumerate(SIZES):
        x = padded(num_tokens, seed)
        FOREIGN.clear()
        got = runtime.run("decode", {"x": x[:num_tokens]})
        assert [len(x)] * 2 == FOREIGN
        with torch.inference_mode():
            assert_exactly(got, model(x))
    assert not runtime.counters["fallbacks"]
    assert runtime.counters["replays"] == len(SIZES) - 2


@split_op(mutates_args=(), name="piecework_stage::mixed", fake=lambda x: (x.new_empty(x.shape), [x.new_empty(x.shape)]))
def mixed(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A list among the results."""
    return x + 1, [x + 2]


def list_among_results(m: Any, x: torch.Tensor) -> Any:
    first, (second,) = mixed(x * 2)
    return first * second


def check_refused(function: Callable[..., Any], backend: str, reason: str, compiler: str = "eager") -> None:
    """A forward that cannot be captured is right all the same, and counted."""
    model = model_of(function)
    runtime = runtime_of(model, backend, compiler)
    for seed in range(3):
        x = padded(4, seed)
        got = runtime.run("decode", {"x": x})
        with torch.inference_mode():
            assert_exactly(got, model(x))
    ((counted, times),) = runtime.counters["fallbacks"].items()
    assert reason in counted
    assert (times, runtime.counters["captures"]) == (3, 0)
