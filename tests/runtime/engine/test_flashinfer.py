"""The engine on a stand-in for FlashInfer, on the tape: planned before each replay, and tokens are the same."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from piecework.errors import NotAvailableError
from piecework.ops import attention_rows, attention_table
from piecework.phases import GraphConfig, PhaseConfig
from piecework.runtime.engine import engine as engine_module
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.params import SamplingParams

from ...ops import fake_flashinfer
from ...ops.fake_flashinfer import CALLS

PROMPTS = ["What is the capital of France? It is", "A", "Once upon a time"]
NEW_TOKENS = 6
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer.module())
    monkeypatch.setattr(attention_rows, "FLASHINFER_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(attention_rows, "FLASHINFER_DTYPES", (torch.float32,))
    monkeypatch.setattr(attention_rows, "FLASHINFER_HEAD_SIZES", (8, 16, 32, 64))
    attention_table.choose.cache_clear()
    yield
    attention_table.choose.cache_clear()


def config(backend: str, compiler: str = "eager", **options: Any) -> GraphConfig:
    phase = {"backend": backend, "compiler": compiler}
    return GraphConfig(
        prefill=PhaseConfig(**phase, buckets=(16, 64)),
        decode=PhaseConfig(**phase, buckets=(1, 2, 4)),
        capture_device="tape",
        attention_backend="flashinfer",
        **options,
    )


@pytest.mark.parametrize(
    ("backend", "compiler"),
    [("full", "eager"), ("full", "aot_eager"), ("breakable", "eager"), ("tc_piecewise", "aot_eager")],
)
def test_tokens_are_those_of_transformers(checkpoint: Path, backend: str, compiler: str, reference: Any) -> None:
    with LLMEngine(checkpoint, config(backend, compiler), device="cpu") as engine:
        for prompts in (PROMPTS, PROMPTS[:2], PROMPTS, PROMPTS[:1]):
            for output in engine.generate(prompts, GREEDY):
                assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, NEW_TOKENS)
        assert engine.runtime.counters["replays"] > 0


@pytest.mark.parametrize("backend", ["full", "tc_piecewise"])
def test_each_step_is_planned_once_before_its_layers_run(checkpoint: Path, backend: str) -> None:
    with LLMEngine(checkpoint, config(backend), device="cpu") as engine:
        engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=5, ignore_eos=True))
        CALLS.clear()
        engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=5, ignore_eos=True))
        layers = 3
        assert ["prefill plan", *["prefill run"] * layers, *["decode plan", *["decode run"] * layers] * 4] == CALLS


@pytest.mark.parametrize("startup", ["eager", "tiered"])
def test_captures_before_the_first_step_and_between_steps_are_planned_for(
    checkpoint: Path, startup: str, reference: Any
) -> None:
    with LLMEngine(checkpoint, config("full", startup=startup), device="cpu") as engine:
        for _ in range(3):
            for output in engine.generate(PROMPTS, GREEDY):
                assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, NEW_TOKENS)
            engine.runtime.wait_settled(20)
        assert engine.runtime.counters["replays"] > 0


def test_a_deferred_capture_and_one_in_another_pool_plan_again(checkpoint: Path, reference: Any) -> None:
    with LLMEngine(checkpoint, config("full", startup="tiered"), device="cpu") as engine:
        engine.generate(PROMPTS, GREEDY)
        engine.runtime.wait_settled(20)
        CALLS.clear()
        engine.runtime.compact()
        captured = sum(entry["captured"] for entry in engine.runtime.explain().as_dict()["entries"])
        assert len([call for call in CALLS if "plan" in call]) == captured > 0
        for output in engine.generate(PROMPTS, GREEDY):
            assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, NEW_TOKENS)


def test_a_model_that_it_cannot_serve_is_refused_before_weights_are_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_rows, "FLASHINFER_HEAD_SIZES", (64, 128))
    attention_table.choose.cache_clear()
    with pytest.raises(NotAvailableError, match="expected one that supports .*: auto, torch; got flashinfer"):
        LLMEngine(checkpoint, config("full"), device="cpu")
    LLMEngine(checkpoint, dataclasses.replace(config("full"), attention_backend="torch"), device="cpu").close()


def test_the_dtype_that_the_checkpoint_says_is_refused_before_weights_are_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_rows, "FLASHINFER_DTYPES", (torch.bfloat16, torch.float16))
    attention_table.choose.cache_clear()
    monkeypatch.setattr(engine_module, "load_weights", None)
    with pytest.raises(NotAvailableError, match=r"computes bfloat16 and float16, not torch.float32"):
        LLMEngine(checkpoint, config("full"), device="cpu")
