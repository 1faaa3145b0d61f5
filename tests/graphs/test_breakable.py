"""Backend `breakable` on the tape: what crosses between segments and split ops, in every form."""

from __future__ import annotations

import pytest
import torch
from torch._ops import OpOverload

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
    layers_of,
    list_among_results,
)
from .staging_models import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_every_form_of_argument_and_result(name: str) -> None:
    check(MODELS[name], "breakable", "eager")


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_result_is_an_error(change: str) -> None:
    check_changed_result("breakable", change)


def test_an_operator_of_somebody_else(registry_snapshot: set[OpOverload]) -> None:
    registry_snapshot.add(split_op.register("piecework_foreign::scale"))
    check_foreign("breakable")


def test_layers_share_the_buffers_and_blank_outs_are_not_copied() -> None:
    few, many = Buffers(8), Buffers(8)
    captured(layers_of(2), "breakable", few)
    capture = captured(layers_of(6), "breakable", many)
    assert few.num_bytes == many.num_bytes
    calls = [step for step in capture.steps if isinstance(step, SplitCall)]
    assert (capture.num_segments, capture.num_split_calls) == (7, 6)
    assert len({tuple(tensor.data_ptr() for tensor in call.args) for call in calls}) == 1
    # The query of each layer, what its op wrote, and the output.
    assert copies_of(capture) == [1] * (2 * 6 + 1)


def test_what_lies_alike_is_copied_by_one_kernel() -> None:
    """Of a layer, q and k, but not v, which is a part of the projection; and both outputs."""
    capture = captured(attention_layers(3), "breakable")
    # And `out` comes back by itself.
    assert copies_of(capture) == [2, 1, 1] * 3 + [2]
    check(attention_layers(3), "breakable", "eager")


def test_outputs_are_those_of_the_next_replay() -> None:
    capture = captured(layers_of(2), "breakable")
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
    check_refused(list_among_results, "breakable", "mixed: result 1: expected tensors and numbers, got a list")
