"""Backend `tc_piecewise` on the tape: what crosses between pieces and split ops, in every form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from piecework.errors import CaptureError
from piecework.graphs.buffers import Buffers
from piecework.graphs.split_calls import SplitCall
from piecework.ops.split_op import split_op

from .staging_checks import (
    CHANGES,
    attention_layers,
    captured,
    check,
    check_changed_result,
    check_foreign,
    check_refused,
    copies_of,
    exported,
    layers_of,
    list_among_results,
    model_of,
    padded,
    runtime_of,
)
from .staging_models import MODELS
from .toys import applied


@pytest.mark.parametrize("name", MODELS)
def test_every_form_of_argument_and_result(name: str) -> None:
    check(MODELS[name], "tc_piecewise", "eager", specialize="all")


@pytest.mark.parametrize("name", [name for name in MODELS if name != "constant_is_written"])
def test_the_same_of_programs_that_were_traced_elsewhere(name: str) -> None:
    """Of those the stitched graph has no fake tensors. One that writes a constant cannot leave its process."""
    programs = exported(MODELS[name], "tc_piecewise", "aot_eager")
    check(MODELS[name], "tc_piecewise", "aot_eager", programs=programs)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_result_is_an_error(change: str) -> None:
    check_changed_result("tc_piecewise", change)


def test_an_operator_of_somebody_else(registry_snapshot: set[OpOverload]) -> None:
    registry_snapshot.add(split_op.register("piecework_foreign::scale"))
    check_foreign("tc_piecewise")


def test_layers_share_the_buffers_and_blank_outs_are_not_copied() -> None:
    few, many = Buffers(8), Buffers(8)
    captured(layers_of(2), "tc_piecewise", few)
    capture = captured(layers_of(6), "tc_piecewise", many)
    assert few.num_bytes == many.num_bytes
    calls = [step for step in capture.steps if isinstance(step, SplitCall)]
    assert (capture.num_segments, capture.num_split_calls) == (7, 6)
    assert len({tuple(tensor.data_ptr() for tensor in call.args) for call in calls}) == 1
    # The query of each layer, and the output.
    assert copies_of(capture) == [1] * (6 + 1)


def test_what_lies_alike_is_copied_by_one_kernel() -> None:
    """Of a layer, q and k, but not v, which is a part of the projection; and both outputs."""
    capture = captured(attention_layers(3), "tc_piecewise")
    assert copies_of(capture) == [2, 1] * 3 + [2]
    check(attention_layers(3), "tc_piecewise", "eager")


def test_outputs_are_those_of_the_next_replay() -> None:
    capture = captured(layers_of(2), "tc_piecewise")
    (output,) = capture.outputs
    output.fill_(5)
    with torch.inference_mode():
        capture.replay()
        first = output.clone()
        output.fill_(5)
        capture.replay()
    assert torch.equal(output, first)
    assert not (first == 5).any()
    capture.release()
    capture.release()
    assert not capture.steps


def test_a_list_among_results_is_refused() -> None:
    check_refused(list_among_results, "tc_piecewise", "mixed: result 1: expected tensors and numbers, got a list")


def size_of_data(m: Any, x: torch.Tensor) -> Any:
    rows = x[x[:, 0] > 0]
    return x + applied(rows).sum(0)


def number_of_data(m: Any, x: torch.Tensor) -> Any:
    return applied(x) * x.sum().item()


@pytest.mark.parametrize("backend", ["tc_piecewise", "full"])
@pytest.mark.parametrize(("function", "op"), [(size_of_data, "getitem"), (number_of_data, "item")])
def test_what_depends_on_data_is_refused(function: Callable[..., Any], op: str, backend: str) -> None:
    """A piece is an opaque call, in which the tape would not see that it waits for data."""
    compiler = "aot_eager" if backend == "full" else "eager"
    check_refused(function, backend, f"{op}: expected sizes that follow from those of the inputs", compiler)
    with pytest.raises(CaptureError, match="depends on data") as caught:
        captured(function, "tc_piecewise")
    assert caught.value.op == op
    assert caught.value.line is not None
    line = inspect.getsourcelines(function)[1] + 1
    assert caught.value.line == f"{__file__}:{line}"


@pytest.mark.parametrize(("backend", "compiler"), [("tc_piecewise", "eager"), ("full", "aot_eager")])
def test_the_debug_mode_sees_split_ops_and_captures(backend: str, compiler: str) -> None:
    model = model_of(layers_of(2))
    runtime = runtime_of(model, backend, compiler, evaluate_guards=True)
    for seed in range(3):
        x = padded(4, seed)
        with torch.inference_mode():
            assert torch.equal(runtime.run("decode", {"x": x}), model(x))
    assert not runtime.counters["fallbacks"]
    assert runtime.counters["replays"] == 2
    assert "attend" not in str(runtime.explain().as_dict()["never_written"])
