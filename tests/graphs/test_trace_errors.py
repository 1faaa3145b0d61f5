"""What a failed trace says: the user's line and the reason first, then what to do; and nothing of torch's own noise."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from piecework.errors import DynamicDimError, PieceworkError, TraceError
from piecework.ops.context import get_context, use_context

from .toys import Fn, assert_equals_model, trace_model

X = {"x": torch.randn(3, 4)}
HERE = Path(__file__).name


@dataclasses.dataclass
class Step:
    factor: int = 3


def breaks(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x * 2


def on_data(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


def wrong_shape(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ m.weight


def exactly_three(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] == 3 else x


def reads(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x * get_context(Step).factor


def inside_torch(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.inner(x)


def failure(body: Any, **tensors: torch.Tensor) -> TraceError:
    model = Fn(body, **tensors)
    model.inner = torch.nn.Linear(9, 9)
    with pytest.raises(TraceError) as caught:
        trace_model(model, X)
    return caught.value


@pytest.mark.parametrize(
    ("body", "code", "reason"),
    [
        (breaks, "torch._dynamo.graph_break()", "graph_break"),
        (on_data, "return x * 2 if x.sum() > 0 else x", "Data-dependent branching"),
        (wrong_shape, "return x @ m.weight", "reduction dim|shapes cannot be multiplied"),
        (exactly_three, "return x * 2 if x.shape[0] == 3 else x", r"to be a constant \(3\)"),
        (inside_torch, "return m.inner(x)", "reduction dim|shapes cannot be multiplied"),
    ],
)
def test_the_line_and_the_reason_come_before_the_advice(body: Any, code: str, reason: str) -> None:
    error = failure(body, weight=torch.zeros(9, 9))
    first = str(error).splitlines()[0]
    place, separator, rest = first.partition(f", in {body.__name__}, `{code}`: ")
    assert separator, first
    assert HERE in place
    told, separator, after = rest.partition("; ")
    assert separator
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(told)
    assert "remove the graph break, move it into the body of a split op" in after or isinstance(error, DynamicDimError)
    assert "x: float32[tokens, 4]" in after
    assert "from user code" in str(error) or "User stack" in str(error)  # Dynamo's own text stays


def test_the_class_says_what_kind_it_is() -> None:
    assert type(failure(breaks)) is TraceError
    assert type(failure(exactly_three)) is DynamicDimError


def test_the_reason_of_the_unbacked_attempt_is_told_only_when_it_is_another() -> None:
    assert "with dims of any size it had said" not in str(failure(on_data))
    assert "with dims of any size it had said: " in str(failure(exactly_three))


@pytest.mark.parametrize("with_context", [True, False])
def test_reading_the_context_on_the_traced_path_is_an_error_that_says_so(with_context: bool) -> None:
    """The hazard: Dynamo cannot trace ContextVar.get, and a frozen value would be worse."""
    with use_context(Step() if with_context else None):
        first = str(failure(reads)).splitlines()[0]
    assert f"{HERE}:" in first
    assert "`return x * get_context(Step).factor`: forward calls get_context, and a trace would freeze" in first
    assert "call get_context in the body of a split op" in first
    assert "graph break" not in first


def test_an_error_of_the_model_is_a_trace_error_with_its_text() -> None:
    with pytest.raises(PieceworkError, match="wrong_shape|mat|shapes"):
        trace_model(Fn(wrong_shape, weight=torch.zeros(9, 9)), X)


def test_a_failed_trace_leaves_nothing_behind() -> None:
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    failure(lambda m, x: x * m.nothing)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    assert {name: logging.getLogger(name).level for name in _LOGGERS} == levels
    assert_equals_model(Fn(lambda m, x: x * 2), X)


_LOGGERS = ("torch._guards", "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.name for record in caplog.records if record.name.startswith("torch")]


@pytest.mark.parametrize("body", [breaks, on_data, wrong_shape, exactly_three, reads])
def test_torch_logs_nothing_of_attempts_that_fail(body: Any, caplog: pytest.LogCaptureFixture) -> None:
    failure(body, weight=torch.zeros(9, 9))
    assert logged(caplog) == []


def test_who_asked_to_see_more_of_torch_sees_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torch._subclasses.fake_tensor"):
        failure(wrong_shape, weight=torch.zeros(9, 9))
    assert "torch._subclasses.fake_tensor" in logged(caplog)
