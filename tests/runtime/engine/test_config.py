"""config.json as transformers 4 and 5 write it, and everything that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from piecework.errors import ModelError
from piecework.runtime.engine.config import ModelConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
}


def read(directory: Path, **changes: Any) -> ModelConfig:
    """The config of LLAMA with `changes`; a change to `...` takes the key away."""
    values = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(values))
    return ModelConfig.from_directory(directory, frozenset({"LlamaForCausalLM"}))


def test_reads_the_architecture(tmp_path: Path) -> None:
    assert read(tmp_path, rope_theta=500000.0, torch_dtype="bfloat16") == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
        eos_token_ids=frozenset({1}),
    )


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"num_key_value_heads": ...}, "num_kv_heads", 4),
        ({"head_dim": 32}, "head_size", 32),
        ({"head_dim": None}, "head_size", 16),
        ({"rope_theta": ...}, "rope_theta", 10000.0),
        ({"rope_scaling": None, "rope_theta": 500}, "rope_theta", 500.0),
        ({"rope_scaling": {"type": "default"}}, "rope_theta", 10000.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}, "rope_theta", 700.0),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", True),
        ({"attention_bias": True}, "attention_bias", True),
        ({"mlp_bias": True}, "mlp_bias", True),
        ({"dtype": "float16"}, "dtype", torch.float16),
        ({}, "dtype", None),
        ({"eos_token_id": [1, 7]}, "eos_token_ids", frozenset({1, 7})),
        ({"eos_token_id": None}, "eos_token_ids", frozenset()),
        ({"eos_token_id": 0}, "eos_token_ids", frozenset({0})),
    ],
)
def test_reads_the_forms_that_configs_come_in(
    tmp_path: Path, changes: dict[str, Any], field: str, value: object
) -> None:
    assert getattr(read(tmp_path, **changes), field) == value


def test_the_end_tokens_of_the_generation_config_go_first(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read(tmp_path).eos_token_ids == {5, 6}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert read(tmp_path).eos_token_ids == {1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "expected one of LlamaForCausalLM, got MambaForCausalLM"),
        ({"architectures": ...}, "architectures: expected a list with one of LlamaForCausalLM, got None"),
        ({"architectures": []}, "architectures: expected a list"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling: rope scaling is not .* got 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: .* got 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: rope scaling is not supported; .* got 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: expected 1.0, got 0.5"),
        ({"rope_scaling": "linear"}, "rope_scaling: expected an object or null"),
        ({"rope_theta": 0}, "rope_theta: expected a positive number, got 0"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantised weights are not supported"),
        ({"hidden_size": ...}, "hidden_size: expected a positive integer, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a positive integer, got 0"),
        ({"vocab_size": "512"}, "vocab_size: expected a positive integer, got '512'"),
        ({"vocab_size": True}, "vocab_size: expected a positive integer, got True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads 4, got 3"),
        ({"head_dim": 15}, "head_dim: expected an even number, got 15"),
        ({"rms_norm_eps": None}, "rms_norm_eps: expected a positive number, got None"),
        ({"mlp_bias": "no"}, "mlp_bias: expected true or false, got 'no'"),
        ({"dtype": "int8"}, "dtype: expected one of float32, bfloat16, float16, float64, got 'int8'"),
        ({"eos_token_id": "</s>"}, "eos_token_id: expected a token id or a list of them, got '</s>'"),
    ],
)
def test_what_cannot_be_run_is_refused_by_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path, **changes)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_all_wrong_keys_are_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, hidden_size=-1, hidden_act="relu", rope_scaling={"type": "dynamic"})
    message = str(caught.value)
    assert all(key in message for key in ("hidden_size", "hidden_act", "rope_scaling")), message


def test_a_missing_directory_and_a_file_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere does not exist; pass the directory of a downloaded checkpoint"):
        ModelConfig.from_directory(tmp_path / "nowhere", frozenset())
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="file is a file"):
        ModelConfig.from_directory(tmp_path / "file", frozenset())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json: the file is missing"),
        (b"{", "config.json: not readable as JSON"),
        (b"\xff\xfe\x00", "config.json: not readable as JSON"),
        (b"[]", "config.json: expected a JSON object, got list"),
    ],
)
def test_a_config_that_is_no_config(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_directory(tmp_path, frozenset())
