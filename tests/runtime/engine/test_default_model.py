"""The model that comes with the package: it is there, it is small, and it has learnt to write."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from safetensors import safe_open

from piecework.errors import ModelError
from piecework.runtime.engine import default_model
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.output import RequestOutput
from piecework.runtime.engine.params import SamplingParams

HELD_OUT = (
    "When Jane and Elizabeth were alone, the former, who had been cautious in her praise of Mr. Bingley before, "
    "expressed to her sister just how very much she admired him.",
    "Miss Bingley's letter arrived, and put an end to doubt. The very first sentence conveyed the assurance of their "
    "being all settled in London for the winter, and concluded with her brother's regret at not having had time to pay "
    "his respects to his friends in Hertfordshire before he left the country.",
)
"""From chapters that it was not trained on."""
PROMPTS = ["Early in the morning", "They walked"]


def nats_per_token(model: torch.nn.Module, text: str) -> float:
    ids = torch.tensor([tokenizers.Tokenizer.from_file(str(default_model.path() / "tokenizer.json")).encode(text).ids])
    with torch.inference_mode():
        return float(model(input_ids=ids, labels=ids).loss)


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(default_model.path()).eval()


@pytest.fixture(scope="module")
def outputs() -> list[RequestOutput]:
    """What the engine writes after PROMPTS, greedily."""
    with LLMEngine(None, device="cpu") as engine:
        return engine.generate(PROMPTS, SamplingParams(max_new_tokens=28))


def test_it_is_small_and_says_where_it_comes_from() -> None:
    files = list(default_model.path().iterdir())
    assert sum(file.stat().st_size for file in files) < 8e6
    assert all(os.access(file, os.R_OK) and file.stat().st_mode & 0o044 == 0o044 for file in files)
    notice = (default_model.path() / "NOTICE.md").read_text()
    assert "public domain" in notice
    assert "Apache-2.0" in notice


def test_it_is_stored_in_half_the_bytes_that_it_runs_in(reference: torch.nn.Module) -> None:
    with safe_open(default_model.path() / "model.safetensors", framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F16"}  # noqa: SIM118
    assert {parameter.dtype for parameter in reference.parameters()} == {torch.float32}
    with LLMEngine(None, device="cpu") as engine:
        assert engine.model_config.dtype == torch.float32
        assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}


def test_it_expects_sentences_that_it_has_not_seen(reference: torch.nn.Module) -> None:
    # Random weights give ln(2048) = 7.6 nats; the mean of all held-out chapters is 3.41.
    for text in HELD_OUT:
        assert nats_per_token(reference, text) < 3.5
    shuffled = " ".join(sorted(HELD_OUT[0].split(), key=lambda word: word[::-1]))
    assert nats_per_token(reference, shuffled) > nats_per_token(reference, HELD_OUT[0]) + 2


def test_the_engine_continues_prompts_as_transformers_does(
    reference: torch.nn.Module, outputs: list[RequestOutput]
) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(default_model.path() / "tokenizer.json"))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=28, do_sample=False, pad_token_id=0
        )
        assert list(output.token_ids) == expected[0, ids.shape[1] :].tolist()


def test_what_it_writes_is_words(outputs: list[RequestOutput]) -> None:
    vocabulary = json.loads((default_model.path() / "tokenizer.json").read_text())["model"]["vocab"]
    common = {token[1:].lower() for token in vocabulary if token.startswith("Ġ")}
    for output in outputs:
        words = [word for word in output.text.replace("\n", " ").split(" ") if word.isalpha()]
        assert len(words) >= 10
        # Frequent words are tokens of their own. The last word may be cut off.
        known = [word for word in words[:-1] if word.lower() in common]
        assert len(known) >= 0.8 * (len(words) - 1), output.text
        assert len(set(words)) >= len(words) / 2, output.text


@pytest.mark.parametrize("lost", [["model.safetensors"], ["config.json", "tokenizer.json"]])
def test_a_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: list[str]) -> None:
    copy = Path(shutil.copytree(default_model.path(), tmp_path / "default"))
    monkeypatch.setattr(default_model, "_DIRECTORY", copy)
    assert default_model.path() == copy
    for name in lost:
        (copy / name).unlink()
    with pytest.raises(ModelError) as caught:
        default_model.path()
    assert f"but {', '.join(lost)} {'is' if len(lost) == 1 else 'are'} missing; reinstall piecework" in str(
        caught.value
    )
    assert str(copy) in str(caught.value)
