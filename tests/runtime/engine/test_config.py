"""config.json as transformers 4 and 5 write it, and everything that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from piecework.errors import ModelError
from piecework.runtime.engine.config import FAMILIES, ModelConfig
from piecework.runtime.engine.rope import Llama3Rope, Rope

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

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3_ROPE = Llama3Rope(
    theta=700.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)


def read(directory: Path, **changes: Any) -> ModelConfig:
    """The config of LLAMA with `changes`; a change to `...` takes the key away."""
    values = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(values))
    return ModelConfig.from_directory(directory, frozenset(FAMILIES))


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
        rope=Rope(theta=500000.0),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        window_sizes=(0, 0, 0),
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
        ({"rope_theta": ...}, "rope", Rope(theta=10000.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}, "rope", Rope(theta=700.0)),
        ({"rope_theta": 700.0, "rope_scaling": LLAMA3}, "rope", LLAMA3_ROPE),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 700.0}}, "rope", LLAMA3_ROPE),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", True),
        ({"attention_bias": True}, "qkv_bias", True),
        ({"attention_bias": True}, "o_bias", True),
        ({"mlp_bias": True}, "mlp_bias", True),
        ({"sliding_window": 4}, "window_sizes", (0, 0, 0)),
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


MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}
WINDOW = {"use_sliding_window": True, "sliding_window": 4}
TYPES = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (MISTRAL, {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False, "head_size": 16}),
        (MISTRAL, {"window_sizes": (4096,) * 3}),  # what transformers takes for a missing key
        (MISTRAL | {"attention_bias": True, "mlp_bias": True}, {"qkv_bias": False, "o_bias": False, "mlp_bias": False}),
        (MISTRAL | {"sliding_window": 4}, {"window_sizes": (4, 4, 4)}),
        (MISTRAL | {"sliding_window": None}, {"window_sizes": (0, 0, 0)}),
        (MISTRAL | {"sliding_window": 4, "layer_types": ["sliding_attention"] * 3}, {"window_sizes": (4, 4, 4)}),
        (QWEN2, {"qkv_bias": True, "o_bias": False, "mlp_bias": False, "qk_norm": False, "window_sizes": (0, 0, 0)}),
        (QWEN2 | {"attention_bias": False}, {"qkv_bias": True}),
        (
            QWEN2 | {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0},
            {"window_sizes": (0,) * 3},
        ),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": None}, {"window_sizes": (0, 0, 0)}),
        (QWEN2 | WINDOW, {"window_sizes": (0, 0, 0)}),  # from layer 28 on
        (QWEN2 | WINDOW | {"max_window_layers": 2}, {"window_sizes": (0, 0, 4)}),
        (QWEN2 | WINDOW | {"max_window_layers": 0, "layer_types": TYPES}, {"window_sizes": (0, 4, 0)}),
        (QWEN3, {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": True, "head_size": 128}),
        (QWEN3 | {"attention_bias": True, "head_dim": 24}, {"qkv_bias": True, "o_bias": True, "head_size": 24}),
        (QWEN3 | WINDOW | {"max_window_layers": 1}, {"window_sizes": (0, 4, 4)}),
    ],
)
def test_reads_what_families_differ_in(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    config = read(tmp_path, **changes)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("key", ["head_dim", "window_sizes"])
@pytest.mark.parametrize(
    "changes",
    [
        MISTRAL,
        MISTRAL | {"sliding_window": 4},
        QWEN2,
        QWEN2 | WINDOW,
        QWEN2 | WINDOW | {"max_window_layers": 2},
        QWEN2 | {"use_sliding_window": True, "max_window_layers": 1},
        QWEN2 | WINDOW | {"layer_types": TYPES},
        QWEN3,
        QWEN3 | WINDOW | {"max_window_layers": 0},
    ],
)
def test_what_is_missing_is_taken_as_transformers_does(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    ours = read(tmp_path, **changes)
    kind = getattr(transformers, ours.architecture.replace("ForCausalLM", "Config"))
    theirs = kind(**{name: value for name, value in (LLAMA | changes).items() if name != "architectures"})
    if key == "head_dim":
        assert ours.head_size == (getattr(theirs, "head_dim", None) or ours.hidden_size // ours.num_heads)
        return
    types = getattr(theirs, "layer_types", ["sliding_attention"] * ours.num_layers)
    assert ours.window_sizes == tuple(theirs.sliding_window if t == "sliding_attention" else 0 for t in types)


def test_the_end_tokens_of_the_generation_config_go_first(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read(tmp_path).eos_token_ids == {5, 6}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert read(tmp_path).eos_token_ids == {1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "expected one of LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, got Mamba",
        ),
        ({"architectures": ...}, "architectures: expected a list with one of LlamaForCausalLM, .*, got None"),
        ({"architectures": []}, "architectures: expected a list"),
        ({"architectures": [["x"]]}, r"architectures: expected one of .*, got \['x'\]"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor: is missing"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type: expected one of default, linear, .* got 'longrope'"),
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
        ({"attention_bias": 1}, "attention_bias: expected true or false, got 1"),
        (MISTRAL | {"sliding_window": -1}, "sliding_window: expected a positive integer, got -1"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window: expected a positive integer, got 0"),
        (
            MISTRAL | {"sliding_window": 4, "layer_types": TYPES},
            "layer_types: expected 'sliding_attention' for each of the 3 layers, as sliding_window says, got",
        ),
        (QWEN2 | {"use_sliding_window": "yes"}, "use_sliding_window: expected true or false, got 'yes'"),
        (QWEN2 | WINDOW | {"sliding_window": "4"}, "sliding_window: expected a positive integer, got '4'"),
        (QWEN2 | WINDOW | {"max_window_layers": -1}, "max_window_layers: expected a number of layers, got -1"),
        (QWEN2 | {"layer_types": TYPES}, "layer_types: expected a list of 3 of full_attention, as use_sliding_window"),
        (
            QWEN2 | WINDOW | {"layer_types": TYPES[:2]},
            "layer_types: expected a list of 3 of full_attention and sliding",
        ),
        (QWEN3 | WINDOW | {"layer_types": ["chunked_attention"] * 3}, "layer_types: expected .* got \\['chunked_att"),
        (QWEN3 | WINDOW | {"layer_types": "full_attention"}, "layer_types: expected a list of 3"),
        ({"dtype": ["x"]}, r"dtype: expected one of float32, bfloat16, float16, float64, got \['x'\]"),
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
