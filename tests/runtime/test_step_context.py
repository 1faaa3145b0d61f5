"""A context beside its inputs: names that no input has are refused, and what was forgotten is warned about."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import pytest
import torch

import piecework as pw
from piecework.graphs.inputs import InputContract
from piecework.ops.attention import AttentionContext
from piecework.ops.context import padded_fields
from piecework.runtime.step_context import fill_field, pad_context


@pw.split_op(mutates_args=("out",), name="piecework_test::plus_context")
def plus_context(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x + 1)


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty_like(x)
        plus_context(x, out)
        return out if table is None else out + table.sum()


@dataclasses.dataclass(frozen=True)
class Typo:
    slots: torch.Tensor = pw.context_field(pad=-1, dims={0: "token"})


@dataclasses.dataclass(frozen=True)
class Forgotten:
    weights: torch.Tensor
    lengths: torch.Tensor = pw.context_field(pad=0, dims={})
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Optional:
    rows: torch.Tensor = pw.context_field(pad=0, dims={0: "rows"})


def make_runtime(compiler: str = "aot_eager") -> pw.Runtime:
    phase = pw.PhaseConfig(backend="disabled", compiler=compiler, buckets=(4, 8))
    return pw.Runtime(Model(), pw.GraphConfig(prefill=phase), dynamic_dims={"x": {0: "tokens"}, "table": {0: "rows"}})


def step(runtime: pw.Runtime, num_tokens: int, context: object) -> None:
    x = torch.randn(num_tokens, 2)
    torch.testing.assert_close(runtime.run("prefill", {"x": x}, context=context), x + 1)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("num_tokens", [3, 4])
def test_a_dim_name_that_no_input_has_is_refused_with_the_known_names(compiler: str, num_tokens: int) -> None:
    with pytest.raises(pw.InputError) as caught:
        step(make_runtime(compiler), num_tokens, Typo(slots=torch.zeros(num_tokens)))
    text = str(caught.value)
    assert text.startswith("context Typo.slots: dims: expected names of dynamic_dims, which are 'rows', 'tokens'")
    assert "got 'token' for dim 0; correct the name" in text


def test_a_name_of_an_input_that_this_step_lacks_is_fine() -> None:
    step(make_runtime(), 3, Optional(rows=torch.zeros(5)))


def warned(runtime: pw.Runtime) -> dict[str, int]:
    warnings: dict[str, int] = runtime.counters["warnings"]
    return warnings


def test_a_field_with_a_row_a_token_that_is_not_padded_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    runtime = make_runtime()
    with caplog.at_level(logging.WARNING, "piecework"):
        for _ in range(2):
            step(runtime, 3, Forgotten(weights=torch.zeros(3, 2), lengths=torch.zeros(3)))
    [(text, count)] = warned(runtime).items()
    assert count == 2
    assert text.startswith("context Forgotten.weights: has a row a token and is not padded to the bucket; make it with")
    assert [r.getMessage() for r in caplog.records if "Forgotten" in r.getMessage()] == [text]
    assert [event.detail["text"] for event in runtime.events if event.kind == "warning"] == [text]
    assert runtime.counters["fallbacks"] == {}


@pytest.mark.parametrize(
    ("compiler", "num_tokens", "rows"),
    [
        pytest.param("aot_eager", 3, 2, id="another size"),
        pytest.param("aot_eager", 4, 4, id="nothing is padded: the bucket's size"),
        pytest.param("aot_eager", 9, 9, id="nothing is padded: above the ladder"),
        pytest.param("eager", 3, 3, id="nothing is padded: eager"),
        pytest.param("aot_eager", 1, 1, id="a lone token"),
    ],
)
def test_no_warning_where_nothing_can_be_wrong(compiler: str, num_tokens: int, rows: int) -> None:
    runtime = make_runtime(compiler)
    step(runtime, num_tokens, Forgotten(weights=torch.zeros(rows), lengths=torch.zeros(num_tokens)))
    assert warned(runtime) == {}


def decoding(num_tokens: int) -> AttentionContext:
    """One token a request, so that every tensor has a row a token."""
    ones = [1] * num_tokens
    return AttentionContext.build(query_lens=ones, seq_lens=ones, block_tables=[[0]] * num_tokens, block_size=4)


@pytest.mark.parametrize(
    "context",
    [
        pytest.param(pw.PackedContext.build(seq_lens=[1, 2]), id="as many starts as tokens"),
        pytest.param(decoding(3), id="decode"),
        pytest.param({"a": torch.zeros(3)}, id="no dataclass"),
    ],
)
def test_our_own_contexts_and_what_is_no_dataclass_are_not_warned_about(context: object) -> None:
    runtime = make_runtime()
    step(runtime, 3, context)
    assert warned(runtime) == {}


# What padding does to the fields, without a runtime.

CONTRACT = InputContract({"x": {0: "tokens"}, "table": {0: "rows"}})


@dataclasses.dataclass(frozen=True)
class Fields:
    starts: torch.Tensor | None = pw.context_field(pad="last", dims={0: "tokens"}, plus={0: 1}, default=None)
    slots: torch.Tensor | None = pw.context_field(pad=7, dims={1: "tokens"}, slots={0: "requests"}, default=None)
    lengths: torch.Tensor | None = pw.context_field(pad=0, slots={0: "requests"}, plus={0: 1}, default=None)
    half: torch.Tensor | None = pw.context_field(pad=0.5, default=None)


@dataclasses.dataclass(frozen=True)
class TokensAsSlots:
    rows: torch.Tensor = pw.context_field(pad=0, slots={0: "tokens"})


def padded(context: object, num_tokens: int, bucket: int) -> Any:
    bound = CONTRACT.bind({"x": torch.zeros(num_tokens, 2)})
    return pad_context(context, bound, bucket, CONTRACT, pytest.fail)


def test_the_tail_repeats_the_last_element_and_plus_is_kept() -> None:
    starts = torch.tensor([0, 4, 5, 9])
    assert padded(Fields(starts=starts), 3, 6).starts.tolist() == [0, 4, 5, 9, 9, 9, 9]
    context = Fields(starts=starts)
    assert padded(context, 3, 3) is context, "nothing to pad"


def test_slots_do_not_grow_in_an_ordinary_step() -> None:
    context = Fields(slots=torch.ones(2, 3), lengths=torch.arange(3))
    step = padded(context, 3, 4)
    assert step.slots.tolist() == [[1, 1, 1, 7], [1, 1, 1, 7]]
    assert step.lengths is context.lengths


@pytest.mark.parametrize(
    ("context", "message"),
    [
        pytest.param(
            Fields(starts=torch.zeros(3)),
            "context Fields.starts: expected 3 + 1 rows on dim 0 ('tokens'), like the inputs, got shape [3]",
            id="plus",
        ),
        pytest.param(
            Fields(lengths=torch.zeros(0)),
            "context Fields.lengths: expected a dim 0 ('requests') of 1 or more, got shape [0]",
            id="too short for plus",
        ),
        pytest.param(
            Fields(lengths=torch.zeros(())),
            "context Fields.lengths: expected a dim 0 ('requests') of 1 or more, got shape []",
            id="no such slot dim",
        ),
        pytest.param(
            Fields(half=torch.zeros(3, dtype=torch.int32)),
            "context Fields.half: pad: expected a value that torch.int32 can hold, got 0.5; pad with an integer",
            id="pad that the dtype cannot hold",
        ),
        pytest.param(
            TokensAsSlots(rows=torch.zeros(3)),
            "context TokensAsSlots.rows: slots: expected names that no input has, got 'tokens' for dim 0",
            id="a slot with an input's name",
        ),
    ],
)
def test_what_does_not_fit_is_refused(context: object, message: str) -> None:
    with pytest.raises(pw.InputError) as caught:
        padded(context, 3, 4)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("value", [9, "last"])
@pytest.mark.parametrize(
    ("shape", "room"), [((2, 3), (4, 5)), ((2, 3), (2, 5)), ((2, 3), (4, 3)), ((0, 3), (2, 4)), ((3,), (3,)), ((), ())]
)
def test_fill_field_defines_every_element(value: float | str, shape: tuple[int, ...], room: tuple[int, ...]) -> None:
    """Along each dim in turn: the definition is written with torch.cat."""
    tensor = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    expected = tensor
    for dim, size in enumerate(room):
        tail = list(expected.shape)
        tail[dim] = size - shape[dim]
        if value == "last" and 0 not in shape:
            more = expected.narrow(dim, shape[dim] - 1, 1).expand(tail)
        else:
            more = torch.full(tail, 0.0 if value == "last" else float(value))
        expected = torch.cat((expected, more), dim)
    padding = padded_fields(Fields())["starts"]
    target = torch.full(room, float("nan"))
    assert fill_field(target, tensor, dataclasses.replace(padding, value=value)) is target
    torch.testing.assert_close(target, expected, rtol=0, atol=0)
