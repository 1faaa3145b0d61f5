"""The debug mode: guards that are kept, and mutations that are declared and never happen."""

from __future__ import annotations

import pytest
import torch

import piecework as pw


def test_evaluate_guards_fails_when_the_trace_no_longer_holds(kit):
    class Scaled(torch.nn.Module):
        factor = 2

        def forward(self, x):
            return x * self.factor

    model = Scaled()
    runtime = pw.Runtime(model, kit.config(evaluate_guards=True), dynamic_dims={"x": 0})
    for num_tokens in (1, 3, 9):
        x = torch.randn(num_tokens, 2)
        torch.testing.assert_close(runtime.run("decode", {"x": x}), x * 2)
    model.factor = 3
    with pytest.raises(pw.RecompileError, match="conditions that no longer hold"):
        runtime.run("decode", {"x": torch.ones(1, 2)})
    # Without the mode the value is frozen, and listed.
    plain = pw.Runtime(model, kit.config(), dynamic_dims={"x": 0})
    plain.run("decode", {"x": torch.ones(1, 2)})
    assert any("factor = 3" in state for state in plain.explain().as_dict()["traces"][0]["frozen"])


def test_the_debug_mode_looks_into_lists(kit):
    @pw.split_op(mutates_args=("outs",), name="piecework_test::fill")
    def fill(x: torch.Tensor, outs: list[torch.Tensor]) -> None:
        for out in outs:
            out.copy_(x)

    class Model(torch.nn.Module):
        def forward(self, x):
            outs = [torch.zeros_like(x), torch.zeros_like(x)]
            fill(x * 2, outs)
            return outs[0] + outs[1]

    runtime = pw.Runtime(Model(), kit.config(evaluate_guards=True), dynamic_dims={"x": 0})
    torch.testing.assert_close(runtime.run("decode", {"x": torch.ones(2, 2)}), torch.full((2, 2), 4.0))
    assert runtime.explain().as_dict()["never_written"] == {}


def test_the_debug_mode_reports_a_mutation_that_never_happens(kit):
    @pw.split_op(mutates_args=("x", "out"), name="piecework_test::over_declared")
    def over_declared(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x + 1)

    class Model(torch.nn.Module):
        def forward(self, x):
            y = x * 2
            out = torch.zeros_like(y)
            over_declared(y, out)
            return out * 2

    runtime = pw.Runtime(Model(), kit.config(evaluate_guards=True), dynamic_dims={"x": 0})
    torch.testing.assert_close(runtime.run("decode", {"x": torch.ones(2, 2)}), torch.full((2, 2), 6.0))
    explanation = runtime.explain()
    assert explanation.as_dict()["never_written"] == {"piecework_test::over_declared": ["x"]}
    assert "declares x mutated and has never changed it" in str(explanation)
