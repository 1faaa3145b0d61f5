"""Outputs without token rows: refused when the program is made, unless `output_dims` leaves them alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import piecework as pw


class Pooled(torch.nn.Module):
    """A row a token, and what a padded row would change; no model of its own is needed to see it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = x + 1
        return {"rows": y, "last": y[-1], "table": self.table}


def make_runtime(compiler: str = "aot_eager", **options: Any) -> pw.Runtime:
    phase = pw.PhaseConfig(backend="disabled", compiler=compiler, buckets=(4,))
    return pw.Runtime(Pooled(), pw.GraphConfig(prefill=phase), dynamic_dims={"x": {0: "tokens"}}, **options)


X = torch.arange(6.0).view(3, 2)


@pytest.mark.parametrize("num_tokens", [3, 4, 9])
def test_refused_at_every_size_since_the_program_serves_them_all(num_tokens: int) -> None:
    runtime = make_runtime()
    with pytest.raises(pw.InputError) as caught:
        runtime.run("prefill", {"x": torch.ones(num_tokens, 2)})
    text = str(caught.value)
    assert text.startswith("output 'last': expected a dim that grows with 'tokens'")
    assert "got shape [2]" in text
    assert 'say output_dims={"last": None} if padding cannot change it' in text


def test_refused_again_without_another_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    from piecework.runtime import programs

    num_traces = []
    real = programs.trace
    monkeypatch.setattr(programs, "trace", lambda *args, **kwargs: num_traces.append(1) or real(*args, **kwargs))
    runtime = make_runtime()
    errors = []
    for _ in range(2):
        with pytest.raises(pw.InputError) as caught:
            runtime.run("prefill", {"x": X})
        errors.append(caught.value)
    assert errors[0] is errors[1]
    assert len(num_traces) == 1


def test_refused_in_the_constructor_under_eager_startup() -> None:
    phase = pw.PhaseConfig(backend="disabled", compiler="aot_eager", buckets=(4,))
    with pytest.raises(pw.InputError, match="output 'last'"):
        pw.Runtime(
            Pooled(),
            pw.GraphConfig(prefill=phase, startup="eager"),
            dynamic_dims={"x": {0: "tokens"}},
            example_inputs={"x": X},
        )


def test_left_alone_when_the_user_says_so() -> None:
    runtime = make_runtime(output_dims={"last": None})
    got = runtime.run("prefill", {"x": X})
    assert got["rows"].tolist() == (X + 1).tolist()
    assert got["last"].tolist() == [1, 1]  # of the padded row: what the user has taken on
    assert got["table"].tolist() == [0, 1, 2]


def test_compiler_eager_pads_nothing_and_refuses_nothing() -> None:
    got = make_runtime("eager").run("prefill", {"x": X})
    assert got["last"].tolist() == [5, 6]
