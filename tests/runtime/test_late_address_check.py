"""`late_address_check`: whether what was captured is where it was is asked behind a replay, and a no is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import piecework as pw
from piecework.graphs.addresses import Addresses
from piecework.graphs.capture import Capture

from . import toy_captures as toy
from .plan_models import num_short
from .toy_captures import BACKENDS, Toy, plain, step


def warmed(model: Toy, backend: str, compiler: str, **options: Any) -> pw.Runtime:
    """A runtime whose next step of 3 tokens takes the shorter way."""
    runtime = toy.runtime_of(model, backend, compiler, options=options)
    for seed in range(3):
        step(runtime, 3, seed)
    assert num_short(runtime) == 1
    return runtime


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("backend", "compiler"), BACKENDS)
def test_it_is_asked_once_a_step_before_or_behind(
    backend: str, compiler: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = warmed(Toy(), backend, compiler, late_address_check=late)
    log: list[str] = []
    hold, replay = Addresses.hold, Capture.replay
    monkeypatch.setattr(Addresses, "hold", lambda self: log.append("asked") or hold(self))
    monkeypatch.setattr(Capture, "replay", lambda self: log.append("replayed") or replay(self))
    step(runtime, 3)
    assert log == (["replayed", "asked"] if late else ["asked", "replayed"])
    assert num_short(runtime) == 2


@pytest.mark.parametrize("how", ["replaced", "moved"])
@pytest.mark.parametrize(("backend", "compiler"), BACKENDS)
def test_a_tensor_that_moved_fails_the_step_and_the_next_one_captures_again(
    backend: str, compiler: str, how: str
) -> None:
    model, reference = Toy(), Toy()
    runtime = warmed(model, backend, compiler, late_address_check=True)
    for seed in range(3):
        step(runtime, 8, seed)  # another bucket
    for each in (model, reference):
        linear = next(module for module in each.modules() if isinstance(module, torch.nn.Linear))
        if how == "replaced":
            linear.weight = torch.nn.Parameter(linear.weight.detach() * 2)
        else:
            linear.weight.data = linear.weight.detach() * 2
    with pytest.raises(
        pw.CaptureError, match=r"^late_address_check: expected .*weight was replaced or moved before this"
    ):
        step(runtime, 3)
    for name, buffer in model.named_buffers():  # what the step has written is void
        reference.get_buffer(name).copy_(buffer)
    before, captures = num_short(runtime), runtime.counters["captures"]
    for seed in range(3, 8):  # no further step fails, neither of this bucket nor of the other one
        for num_tokens in (3, 8):
            torch.testing.assert_close(step(runtime, num_tokens, seed), plain(reference, num_tokens, seed))
    assert runtime.counters["captures"] == captures + 2
    assert num_short(runtime) > before
    model.layers[0].up.weight.data = model.layers[0].up.weight.data.clone()
    with pytest.raises(pw.CaptureError, match="^late_address_check: "):  # it is asked behind again
        step(runtime, 8)
