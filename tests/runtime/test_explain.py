"""What a person reads of a runtime: the table, the counters' text, and the warnings."""

from __future__ import annotations

import logging
import re

import pytest
import torch

import piecework as pw


def make_runtime(model: torch.nn.Module, compiler: str = "aot_eager", **phase: object) -> pw.Runtime:
    config = pw.PhaseConfig(backend="disabled", compiler=compiler, buckets=(4,), **phase)
    return pw.Runtime(model, pw.GraphConfig(prefill=config), dynamic_dims={"input": {0: "tokens"}})


def step(runtime: pw.Runtime, num_tokens: int = 3) -> None:
    runtime.run("prefill", {"input": torch.randn(num_tokens, 2)})


def test_one_of_a_thing_is_not_many() -> None:
    runtime = make_runtime(torch.nn.Linear(2, 2))
    step(runtime)
    text = str(runtime.explain())
    assert "1 piece (1 distinct), 0 opaque regions" in text
    assert "prefill: backend disabled, compiler aot_eager, 1 bucket 4 to 4" in text
    assert not re.search(r"\b1 (pieces|opaque regions|compiles|buckets|values)", text)


def test_a_trace_says_its_compiles_and_seconds(kit) -> None:
    runtime = kit.runtime(kit.Toy(4), kit.config(decode={"specialize": (4,)}))
    kit.step(runtime, "decode", 2)
    [trace] = runtime.explain().as_dict()["traces"]
    assert trace["compiles"] == runtime.counters["compiles_general"] == 3
    kit.step(runtime, "decode", 4)
    [trace] = runtime.explain().as_dict()["traces"]
    assert trace["compiles"] == 6
    seconds = {kind: sum(e.seconds for e in runtime.events if e.kind.startswith(kind)) for kind in ("trace", "compile")}
    assert trace["trace_s"] == pytest.approx(seconds["trace"])
    assert trace["compile_s"] == pytest.approx(seconds["compile"])
    assert all(seconds.values())
    assert f"  traced in {trace['trace_s']:.2f} s, 6 compiles in {trace['compile_s']:.2f} s" in str(runtime.explain())


def test_counters_are_readable() -> None:
    runtime = make_runtime(torch.nn.Linear(2, 2))
    assert repr(runtime.counters) == "Counters()"
    step(runtime)
    step(runtime, 9)
    text = repr(runtime.counters)
    assert text.startswith("Counters(traces=1, ")
    assert "steps=2, fallbacks={'above the ladder': 1}, in_step_seconds=" in text
    assert "captures" not in text  # what has not happened is left out


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_model_in_training_mode_is_warned_about_once(compiler: str, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(2)).train()
    runtime = make_runtime(model, compiler)
    with caplog.at_level(logging.WARNING, "piecework"):
        for num_tokens in (3, 4, 9):
            step(runtime, num_tokens)
    [(text, count)] = runtime.counters["warnings"].items()
    assert count == 1
    assert text.startswith("the model is in training mode, where 1 (Dropout) and 1 more drops values")
    assert text.endswith("call model.eval() before the first step")
    assert [r.getMessage() for r in caplog.records].count(text) == 1
    assert f"warning x1: {text}" in str(runtime.explain())


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)).eval(), id="eval"),
        pytest.param(
            torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)).train(), id="nothing that differs"
        ),
        pytest.param(
            torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0)).train(), id="dropout of nothing"
        ),
    ],
)
def test_training_mode_without_effect_is_not_warned_about(model: torch.nn.Module) -> None:
    runtime = make_runtime(model)
    step(runtime)
    assert runtime.counters["warnings"] == {}


def test_explain_and_events_say_what_happened(kit):
    @pw.split_op(mutates_args=("out",), name="piecework_test::never_called")
    def never_called(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x)

    runtime = kit.runtime(kit.Toy(), kit.config(decode={"specialize": (4,)}))
    kit.step(runtime, "decode", 3)
    kit.step(runtime, "decode", 9)
    data = runtime.explain().as_dict()
    assert [(e["phase"], e["bucket"], e["program"], e["steps"]) for e in data["entries"]] == [
        ("decode", 4, "specialized", 1),
        ("decode", None, "general", 1),
    ]
    assert data["traces"][0]["split_ops"] == {"piecework_test::mix": 2}
    assert "piecework_test::never_called" in data["unmatched_split_ops"]
    assert "piecework_test::mix" not in data["unmatched_split_ops"]
    text = str(runtime.explain())
    assert "3 pieces (3 distinct), 2 opaque regions" in text
    assert "specialize names the bucket" in text
    kinds = [event.kind for event in runtime.events]
    assert kinds.count("trace") == 1
    assert kinds.count("compile_general") == kinds.count("compile_specialized") == 3
    compiled = next(event for event in runtime.events if event.kind == "compile_specialized")
    assert compiled.scope.in_step
    assert (compiled.scope.phase, compiled.scope.bucket) == ("decode", 4)
    assert compiled.seconds > 0
    assert len(compiled.detail["fingerprint"]) == 64
