"""A context beside its inputs: names that no input has are refused, and what was forgotten is warned about."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

import piecework as pw
from piecework.ops.attention import AttentionContext


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
