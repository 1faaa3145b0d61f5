"""Which split ops run while a whole forward is captured: those that said that they can."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch

from piecework.errors import CaptureError, ContextError, RegistrationError
from piecework.ops import registry
from piecework.ops.capturing import capture_refusal, capturing_whole, is_capturing_whole
from piecework.ops.context import get_context
from piecework.ops.split_op import split_op

pytestmark = pytest.mark.usefixtures("own_registry")


def define(capturable: Any = False) -> Any:
    """An operator whose body leaves a 1 in `out`."""

    @split_op(mutates_args=("out",), name="piecework_tests::op", capturable=capturable)
    def op(x: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
        out.fill_(1)

    return op


def runs(op: Any, *args: Any) -> bool:
    out = torch.zeros(2)
    op(torch.ones(2), out, *args)
    return out.tolist() == [1, 1]


def test_an_operator_that_does_not_say_so_refuses_before_it_runs():
    op, out = define(), torch.zeros(2)
    with capturing_whole(), pytest.raises(CaptureError) as caught:
        op(torch.ones(2), out)
    assert str(caught.value) == (
        "piecework_tests::op does not say that it can be captured; pass capturable=True to @split_op if its body only "
        "launches kernels and reads its context from device tensors, or use backend tc_piecewise or breakable"
    )
    assert caught.value.op == "piecework_tests::op"
    assert out.tolist() == [0, 0]
    assert runs(op), "outside of a capture it runs"


def test_an_operator_that_says_so_runs():
    op = define(capturable=True)
    with capturing_whole():
        assert runs(op)
    assert capture_refusal(op, (), {}) is None


def only_small_scales(x: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> str | None:
    return f"scale {scale} is read on the host" if scale > 1 else None


def test_a_function_of_the_call_decides():
    op = define(capturable=only_small_scales)
    with capturing_whole():
        assert runs(op)
        assert runs(op, 0.5)
        with pytest.raises(CaptureError) as caught:
            runs(op, 2.0)
    assert str(caught.value) == (
        "piecework_tests::op: this call cannot be captured: scale 2.0 is read on the host; use backend tc_piecewise or "
        "breakable"
    )
    assert runs(op, 2.0)
    x = torch.ones(2)
    assert capture_refusal(op, (x, x), {"scale": 0.5}) is None
    assert "scale 3.0" in str(capture_refusal(op, (x, x), {"scale": 3.0}))


def test_what_the_function_raises_comes_through():
    def asks_the_context(*args: Any) -> str | None:
        get_context(dict)
        return None

    op = define(capturable=asks_the_context)
    with capturing_whole(), pytest.raises(ContextError, match="got no context"):
        runs(op)


@pytest.mark.parametrize("answer", [True, False, 3])
def test_the_function_must_return_a_reason_or_none(answer):
    op = define(capturable=lambda *args: answer)
    message = rf"py:\d+: piecework_tests::op: capturable: expected the reason .* or None, got {answer}; return a text"
    with pytest.raises(RegistrationError, match=message):
        capture_refusal(op, (), {})


def test_operators_of_others():
    """Their bodies cannot refuse, so whoever sees the call asks."""
    cos, x = torch.ops.aten.cos.default, torch.ones(2)
    assert capture_refusal(cos, (x,), {}) is None, "no split op"
    split_op.register("aten::cos")
    reason = str(capture_refusal(cos, (x,), {}))
    assert reason.startswith(
        'aten::cos does not say that it can be captured; write split_op.register("aten::cos", capturable=True) if its'
    )
    split_op.register("aten::sin", capturable=True)
    assert capture_refusal(torch.ops.aten.sin.default, (x,), {}) is None


def test_a_redefinition_counts():
    before = define()
    registry.record_matches({before: 3})
    op = define(capturable=True)
    assert (before in registry.REGISTRY.capturable, op in registry.REGISTRY.capturable) == (False, True)
    assert not registry.REGISTRY.matched
    assert capture_refusal(op, (), {}) is None
    with capturing_whole():
        assert runs(op)
        assert runs(torch.ops.piecework_tests.op)


def test_it_is_scoped_also_by_an_error_and_nests():
    assert not is_capturing_whole()
    with contextlib.suppress(ZeroDivisionError), capturing_whole():
        with capturing_whole():
            assert is_capturing_whole()
        assert is_capturing_whole()
        raise ZeroDivisionError
    assert not is_capturing_whole()


def test_another_thread_is_undisturbed():
    op, results = define(), []
    thread = threading.Thread(target=lambda: results.append(runs(op)))
    with capturing_whole():
        thread.start()
        thread.join()
    assert results == [True]


def test_the_guard_is_invisible_to_opcheck():
    torch.library.opcheck(define(), (torch.ones(2), torch.empty(2)))
