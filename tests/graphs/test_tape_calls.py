"""Opaque calls on the tape: a compiled callable is recorded as a whole, and really runs at each replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd

from piecework.errors import CaptureError
from piecework.graphs.layouts import CallLayout, TensorLayout

from .tape_recording import DEVICE


def test_a_compiled_callable_runs_at_replay_and_not_while_recording() -> None:
    compiles: list[int] = []
    runs: list[int] = []

    def compile_counted(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiles.append(1)

        def run(*args: Any) -> Any:
            runs.append(1)
            return graph(*args)

        return run

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compile_counted)
    compiled = torch.compile(lambda a, b, c: [F.gelu(a @ b), a.sum(0) + c], backend=backend, fullgraph=True)
    with torch.inference_mode():
        a, b = torch.randn(4, 4), torch.randn(4, 4)
        layout = CallLayout.observe([a, b, a], compiled(a, b, a))
        assert (len(compiles), len(runs)) == (1, 1)
        with DEVICE.session(DEVICE.open_pool()) as session:
            session.begin()
            c = a * 2
            d, e = session.call(compiled, [c, b, c], layout)
            f = d + 1
            segment = session.end()
        assert len(runs) == 1
        assert d.isnan().all()
        assert e.isnan().all()
        for _ in range(2):
            a.copy_(torch.randn(4, 4))
            segment.replay()
            assert torch.equal(d, F.gelu((a * 2) @ b))
            assert torch.equal(e, (a * 2).sum(0) + a * 2)
            assert torch.equal(f, d + 1)
    # Nothing was compiled again: an argument that comes twice is still one tensor.
    assert (len(compiles), len(runs)) == (1, 3)


def test_a_call_that_writes_and_returns_its_arguments() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[Any]:
        x.add_(1)
        return [x[1:], x + y, 7, y > 5, y.int()]

    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(3), torch.ones(3)

    sample = inputs()
    layout = CallLayout.observe(sample, function(*sample))
    x, y = inputs()
    with DEVICE.session(DEVICE.open_pool()) as session:
        session.begin()
        tail, total, number, mask, whole = session.call(function, [x, y], layout)
        segment = session.end()
    assert (number, x.tolist()) == (7, [0.0, 0.0, 0.0])
    assert tail.data_ptr() == x[1:].data_ptr()
    assert total.isnan().all()
    assert mask.all()
    assert (whole == torch.iinfo(torch.int32).min).all()
    segment.replay()
    segment.replay()
    assert torch.equal(x, torch.full((3,), 2.0))
    assert torch.equal(tail, torch.full((2,), 2.0))
    assert torch.equal(total, torch.full((3,), 3.0))
    assert not mask.any()
    assert torch.equal(whole, torch.ones(3, dtype=torch.int32))


def test_a_call_sees_the_modes_of_its_capture_and_no_mode_of_the_tape() -> None:
    seen: list[tuple[Any, ...]] = []

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        modes = len(torch.utils._python_dispatch._get_current_dispatch_mode_stack())
        functions = len(torch.overrides._get_current_function_mode_stack())
        seen.append((modes, functions, torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
        return [x.clone()]

    x = torch.ones(2)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        layout = CallLayout.observe([x], function(x))
        with DEVICE.session(DEVICE.open_pool()) as session:
            session.begin()
            session.call(function, [x], layout)
            segment = session.end()
    with torch.inference_mode():
        segment.replay()
    assert seen == [(0, 0, False, True), (0, 0, False, True)]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (lambda x: [x[:1] + 1], r"expected torch.float32\[2\] as output 0 of .*got torch.float32\[1\]"),
        (lambda x: [x.double()], r"expected torch.float32\[2\] .*got torch.float64\[2\]"),
        (lambda x: [x + 1, x + 2], "expected 1 outputs of .*got 2"),
        (lambda x: [None], "got a NoneType"),
    ],
)
def test_a_call_that_returns_something_else_at_replay_is_an_error(returned: Callable[..., Any], expected: str) -> None:
    x = torch.ones(2)
    with DEVICE.session(DEVICE.open_pool()) as session:
        session.begin()
        session.call(returned, [x], CallLayout.observe([x], [x + 1]))
        segment = session.end()
    with pytest.raises(CaptureError, match=expected):
        segment.replay()


def test_layouts_of_calls_are_kept() -> None:
    x = torch.ones(2, 3)
    layout = CallLayout.observe([x], [torch.ones(3, 2).t()])
    with DEVICE.session(DEVICE.open_pool()) as session:
        session.begin()
        (out,) = session.call(lambda x: [x.t().contiguous().t()], [x], layout)
        segment = session.end()
    assert TensorLayout.of(out) == layout.outputs[0]
    segment.replay()
    assert torch.equal(out, x)
