"""The checkpoint maker: the same for the same seed, readable by transformers, and no trace left in the process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from piecework.errors import ModelError
from piecework.runtime.engine.toy_checkpoint import make_checkpoint


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    first, again, other = (make_checkpoint(tmp_path / str(n), seed=seed) for n, seed in enumerate((3, 3, 4)))
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (first / name).read_bytes() == (again / name).read_bytes()
    weights, different = load_file(first / "model.safetensors"), load_file(other / "model.safetensors")
    assert weights.keys() == different.keys()
    assert not any(torch.equal(weights[name], different[name]) for name in weights)


def test_transformers_reads_it(checkpoint: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    assert config.architectures == ["LlamaForCausalLM"]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    assert len(tokenizer) == config.vocab_size
    assert tokenizer.decode(tokenizer("lazy dog").input_ids, skip_special_tokens=True) == "lazy dog"


@pytest.mark.parametrize(
    ("family", "extra"),
    [("mistral", {"sliding_window": 3}), ("qwen2", {"sliding_window": 3, "max_window_layers": 1}), ("qwen3", {})],
)
def test_makes_each_family_with_its_own_keys(tmp_path: Path, family: str, extra: dict[str, Any]) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    directory = make_checkpoint(tmp_path, family=family, rope_theta=500.0, rope_scaling=scaling, **extra)
    config = transformers.AutoConfig.from_pretrained(directory)
    assert config.model_type == family
    assert config.architectures == [f"{family.capitalize()}ForCausalLM"]
    assert config.rope_parameters == {"rope_theta": 500.0, **scaling}
    assert config.sliding_window == extra.get("sliding_window")
    assert {key: getattr(config, key) for key in extra} == extra
    assert scaling == {"rope_type": "linear", "factor": 2.0}
    assert not any(hasattr(config, key) for key in ("mlp_bias", "max_window_layers") if family == "mistral")


def test_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    shown = transformers.utils.logging.is_progress_bar_enabled()
    make_checkpoint(tmp_path)
    assert torch.equal(torch.rand(3), expected)
    assert transformers.utils.logging.is_progress_bar_enabled() == shown


@pytest.mark.parametrize("library", ["transformers", "tokenizers"])
def test_a_missing_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModelError, match=r"pip install 'piecework\[hf\]'"):
        make_checkpoint(tmp_path / "model")
    assert not (tmp_path / "model").exists()
