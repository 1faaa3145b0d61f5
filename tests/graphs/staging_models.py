"""Models whose split ops take and leave tensors of every kind, and what it takes to capture one and compare."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

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

from .test_fuzz import assert_exactly
from .toys import CALLS, TOKENS_FIRST, Fn, applied, double, halves, make_program

WIDTH = 4
BUCKETS = (4, 8)
SIZES = (3, 8, 4, 0, 3, 7, 4, 1)


@split_op(mutates_args=("cache",), name="piecework_stage::store")
def store(k: torch.Tensor, cache: torch.Tensor) -> None:
    """Keeps what it last saw."""
    CALLS["store"] += 1
    cache.mul_(0.5).add_(k.sum(0))


@split_op(mutates_args=("out",), name="piecework_stage::attend", capturable=True)
def attend(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
    """Reads what was stored."""
    CALLS["attend"] += 1
    out.copy_(q * cache)


@split_op(mutates_args=("a", "b"), name="piecework_stage::fill_both")
def fill_both(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Writes two tensors, which may be parts of one."""
    CALLS["fill_both"] += 1
    a.copy_(x[:, : a.shape[1]] + 1)
    b.copy_(x[:, : b.shape[1]] - 1)


@split_op(mutates_args=("out",), name="piecework_stage::some_rows")
def some_rows(x: torch.Tensor, out: torch.Tensor) -> None:
    """Writes every other row."""
    CALLS["some_rows"] += 1
    out[::2] = x[::2] * 10


@split_op(mutates_args=("outs",), name="piecework_stage::to_list")
def to_list(xs: list[torch.Tensor], outs: list[torch.Tensor], scale: float, bias: torch.Tensor | None = None) -> None:
    """Lists in, lists out."""
    CALLS["to_list"] += 1
    for x, out in zip(xs, outs, strict=True):
        out.copy_(x * scale if bias is None else x * scale + bias)


@split_op(mutates_args=(), name="piecework_stage::in_list", fake=lambda x: [x.new_empty(x.shape), x.new_empty(1)])
def in_list(x: torch.Tensor) -> list[torch.Tensor]:
    """A list of two."""
    CALLS["in_list"] += 1
    return [x + 1, x.sum().reshape(1)]


@split_op(mutates_args=(), name="piecework_stage::turned", fake=lambda x: x.new_empty(x.shape[::-1]).t())
def turned(x: torch.Tensor) -> torch.Tensor:
    """A result of other strides than a new tensor's."""
    CALLS["turned"] += 1
    return (x + 1).t().contiguous().t()


@split_op(mutates_args=(), name="piecework_stage::spread", fake=lambda x: x.new_empty(x.shape[0], 1).expand(-1, WIDTH))
def spread(x: torch.Tensor) -> torch.Tensor:
    """A result whose elements share memory."""
    CALLS["spread"] += 1
    return (x + 1).sum(1, keepdim=True).expand(-1, WIDTH)


def out_after_the_next_call(m: Any, x: torch.Tensor) -> Any:
    first = applied(x + 1)
    second = applied(first.relu())
    third = applied(second - 1)
    return first * 3, second + third, first


def out_of_two_calls_ago(m: Any, x: torch.Tensor) -> Any:
    outs = [x + 1]
    for _ in range(4):
        outs.append(applied(outs[-1] * 0.5 + outs[0]))
    return sum(outs)


def view_made_before(m: Any, x: torch.Tensor) -> Any:
    out = torch.empty_like(x)
    cube, column = out.view(-1, 2, 2), out[:, 1:3]
    double(x + 1, out)
    return cube * 2, column + 1, out


def view_kept_across_calls(m: Any, x: torch.Tensor) -> Any:
    out = torch.empty_like(x)
    cube = out.view(-1, 2, 2)
    double(x + 1, out)
    other = applied(x * 2)
    return cube.flatten(1) * other


def view_is_written(m: Any, x: torch.Tensor) -> Any:
    y = x * 2
    double(x[:, :2] + 1, y[:, 1:3])
    return y + 1, y


def views_of_one_tensor(m: Any, x: torch.Tensor) -> Any:
    y = x * 2
    left, right = y[:, :2], y[:, 2:]
    double(x[:, :2] + 1, left)
    double(x[:, 2:] - 1, right)
    return y.relu(), left * right


def results_kept(m: Any, x: torch.Tensor) -> Any:
    a, b = halves(x + 1)
    c, d = halves(a * 2)
    e, f = halves(c - b)
    return a + d, b * e, f, c


def result_written_later(m: Any, x: torch.Tensor) -> Any:
    a, b = halves(x + 1)
    a.add_(1)
    c, d = halves(a)
    c.mul_(b)
    return a, c, d


def args_share_what_is_written(m: Any, x: torch.Tensor) -> Any:
    base = x * 1
    double(base[:, :2], base[:, 2:])
    return base.relu(), applied(base)


def blank_parts_are_written(m: Any, x: torch.Tensor) -> Any:
    y, base, out = x + 1, torch.empty_like(x), torch.empty_like(x)
    fill_both(y, base[:, :2], base[:, 2:])
    double(base, out)
    return out, base


def stored_then_attended(m: Any, x: torch.Tensor) -> Any:
    for _ in range(2):
        q, k = x * 2, x + 1
        out = torch.empty_like(q)
        store(k, m.cache)
        attend(q, m.cache, out)
        x = x + out
    return x


def stored_then_attended_with_glue(m: Any, x: torch.Tensor) -> Any:
    for _ in range(2):
        qk = torch.cat((x * 2, x + 1), 1)
        out = torch.empty(x.shape[0], 2, 2)
        store(qk[:, WIDTH:], m.cache)
        attend(qk[:, :WIDTH].view(-1, WIDTH), m.cache, out.view(-1, WIDTH))
        x = x + out.flatten(1)
    return x


def one_op_twice_in_a_row(m: Any, x: torch.Tensor) -> Any:
    y, z = x + 1, x * 3
    first, second = torch.empty_like(x), torch.empty_like(x)
    double(y, first)
    double(z, second)
    return first - second


def one_op_on_its_own_out(m: Any, x: torch.Tensor) -> Any:
    y, first, second = x + 1, torch.empty_like(x), torch.empty_like(x)
    double(y, first)
    double(first, second)
    double(second, first)
    return first, second, y


def one_op_on_its_own_results(m: Any, x: torch.Tensor) -> Any:
    a, b = halves(x + 1)
    c, d = halves(a)
    e, f = halves(b)
    return a, c + d, e * f


def two_ops_in_turn(m: Any, x: torch.Tensor) -> Any:
    y, z, out, other = x + 1, x - 1, torch.empty_like(x), torch.empty_like(x)
    double(y, out)
    a, b = halves(z)
    double(z, other)
    c, d = halves(y)
    return out * other, a + b + c + d


def out_read_before_the_op_is_called_again(m: Any, x: torch.Tensor) -> Any:
    first = applied(x + 1)
    y, z = first.relu(), x * 3
    store(first, m.cache)
    double(y, z)
    a, _ = halves(z + 1)
    w = a.relu()
    store(a, m.cache)
    b, c = halves(w)
    return z, b, c


def read_after_a_write_in_a_row(m: Any, x: torch.Tensor) -> Any:
    y, z, out = x + 1, x * 3, torch.empty_like(x)
    a, b = halves(y)
    some_rows(a, z)
    double(z, out)
    return out, b


def lists_of_tensors(m: Any, x: torch.Tensor) -> Any:
    y, first, second = x + 1, torch.empty_like(x), torch.empty_like(x)
    to_list([y, m.row, x], [first, m.cache, second], 0.5)
    to_list([first.relu(), second], [second, first], 2.0, m.row)
    return first + second, first


def list_returned(m: Any, x: torch.Tensor) -> Any:
    y, total = in_list(x * 2)
    z, other = in_list(y + total)
    return y * z, total + other


def returned_as_it_came(m: Any, x: torch.Tensor) -> Any:
    early = x + 1
    y = applied(early)
    z = applied(y.relu())
    return {"x": x, "part": x[:, 1:], "row": m.row, "view": m.cache[:2], "twice": (y, y), "early": early, "z": z.t()}


def other_strides(m: Any, x: torch.Tensor) -> Any:
    wide = (x + 1).sum(1, keepdim=True).expand(-1, WIDTH)
    a, b = halves(wide)
    c, d = halves((x * 2).t())
    qkv = torch.cat((x, x + 1, x + 2), 1)
    e, f = halves(qkv[:, WIDTH : 2 * WIDTH])
    return a + b, c * d, e - f


def results_of_other_strides(m: Any, x: torch.Tensor) -> Any:
    a, b = turned(x * 2), spread(x * 3)
    return a.t() + b.t(), turned(a) * spread(b)


def nothing_in_it(m: Any, x: torch.Tensor) -> Any:
    a, b = halves(x[:, :0] + 1)
    empty = torch.empty(x.shape[0], 0)
    double(a, empty)
    double(x[:, 2:2], empty)
    return torch.cat((a, b, empty, x), 1), applied(x)


def some_rows_are_written(m: Any, x: torch.Tensor) -> Any:
    y = x * 3
    some_rows(x + 1, y)
    z = y + 1
    some_rows(z, y)
    return y, z


def sizes_grow(m: Any, x: torch.Tensor) -> Any:
    small = applied(x[:, :1] + 1)
    wide = applied(torch.cat((x, x, x, x), 1))
    again = applied(wide[:, :1] * 2)
    a, _ = halves(x.sum(0))
    b, _ = halves(x @ x.t())
    return small + again, wide, a, b


def input_is_written(m: Any, x: torch.Tensor) -> Any:
    double(x + 1, x)
    return x * 2


def buffer_is_written(m: Any, x: torch.Tensor) -> Any:
    double(m.table[: x.shape[0]] + x, m.table[: x.shape[0]])
    return m.table.sum(0) + x


CONSTANT = torch.ones(WIDTH)
"""A tensor that no model holds."""


def constant_is_written(m: Any, x: torch.Tensor) -> Any:
    store(x + 1, CONSTANT)
    return x * CONSTANT


MODELS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        out_after_the_next_call, out_of_two_calls_ago, view_made_before, view_kept_across_calls, view_is_written,
        views_of_one_tensor, results_kept, result_written_later, args_share_what_is_written, blank_parts_are_written,
        stored_then_attended, stored_then_attended_with_glue, one_op_twice_in_a_row, one_op_on_its_own_out,
        one_op_on_its_own_results, two_ops_in_turn, lists_of_tensors, list_returned, returned_as_it_came,
        out_read_before_the_op_is_called_again, read_after_a_write_in_a_row, other_strides, results_of_other_strides,
        nothing_in_it, some_rows_are_written, sizes_grow, input_is_written, buffer_is_written, constant_is_written,
    )
}  # fmt: skip


def model_of(function: Callable[..., Any]) -> Fn:
    return Fn(
        function,
        cache=torch.ones(WIDTH),
        row=torch.arange(float(WIDTH)),
        table=torch.linspace(0, 1, 8 * WIDTH).reshape(8, WIDTH),
    )


def runtime_of(model: nn.Module, backend: str, compiler: str = "eager", **options: Any) -> pw.Runtime:
    phase = {"backend": backend, "compiler": compiler, "buckets": BUCKETS}
    config = pw.GraphConfig(prefill=phase, decode=phase, capture_device="tape", **options)
    return pw.Runtime(model, config, dynamic_dims=TOKENS_FIRST, output_dims=None)


def padded(num_tokens: int, seed: int) -> torch.Tensor:
    """A step's `x`, followed by zeros up to its bucket."""
    size = next(bucket for bucket in BUCKETS if bucket >= num_tokens)
    x = torch.zeros(size, WIDTH)
    x[:num_tokens] = torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x


def check(function: Callable[..., Any], backend: str, compiler: str) -> None:
    """Steps of mixed sizes, captured and replayed, are bit for bit the model's forward; so are inputs and buffers.

    Each step runs as many bodies as the forward: none of them while it is captured.
    """
    model, reference = model_of(function), model_of(function)
    runtime = runtime_of(model, backend, compiler)
    before = CONSTANT.clone()
    states: list[torch.Tensor] = []
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
    module, forward = piecewise, cast(Any, None)
    if backend == "breakable":
        module = breakable
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
            capture = Capture(*module.capture(session, work, observed))
    assert not CALLS
    return capture


def num_copies(capture: Capture) -> int:
    """How many copies its segments make."""
    segments: list[Any] = [step for step in capture.steps if not isinstance(step, SplitCall)]
    steps = [step for segment in segments for step in segment._recording.steps]
    return sum(getattr(step, "op", None) is torch.ops.aten.copy_.default for step in steps)


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
