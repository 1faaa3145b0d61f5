"""Rotary frequencies against transformers', bit for bit; the forms in which configs say them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from piecework.errors import ModelError
from piecework.runtime.engine.json_keys import Keys
from piecework.runtime.engine.rope import ROPE_TYPES, LinearRope, Llama3Rope, Rope, YarnRope, read_rope

LINEAR = {"rope_type": "linear", "factor": 2.5}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def read(**values: Any) -> Rope:
    keys = Keys(Path("config.json"), values)
    rope = read_rope(keys)
    keys.raise_problems()
    return rope


def theirs(head_size: int, max_position_embeddings: int = 131072, **parameters: Any) -> tuple[torch.Tensor, float]:
    """What transformers computes for the same parameters."""
    config = transformers.LlamaConfig(
        hidden_size=4 * head_size,
        num_attention_heads=4,
        head_dim=head_size,
        max_position_embeddings=max_position_embeddings,
        rope_parameters=parameters,
    )
    if parameters["rope_type"] == "default":
        model: Any = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
        return model.compute_default_rope_parameters(config)  # type: ignore[no-any-return]
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))  # type: ignore[no-any-return]


@pytest.mark.parametrize("head_size", [8, 24, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000, 1e6])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        LINEAR,
        LLAMA3,
        LLAMA3 | {"factor": 32, "low_freq_factor": 0.5, "high_freq_factor": 2, "original_max_position_embeddings": 32},
        YARN,
        YARN | {"truncate": False, "beta_fast": 20, "beta_slow": 2.0},
        YARN | {"attention_factor": 0.75},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
        YARN | {"factor": 1.0},
        YARN | {"beta_fast": 1.01, "beta_slow": 1.0, "original_max_position_embeddings": 8},
    ],
    ids=lambda p: "-".join(str(value) for value in p.values()),
)
def test_equals_transformers_bit_for_bit(parameters: dict[str, Any], theta: float, head_size: int) -> None:
    rope = read(rope_parameters={"rope_theta": theta, **parameters})
    expected, factor = theirs(head_size, rope_theta=theta, **parameters)
    found = rope.inv_freq(head_size)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert rope.attention_factor == factor


def test_scaling_moves_the_frequencies_and_not_the_fastest() -> None:
    plain = Rope(theta=10000.0).inv_freq(64)
    for parameters in (LLAMA3, YARN):
        stretched = read(rope_scaling=parameters).inv_freq(64)
        assert stretched[0] == plain[0]
        assert float(stretched[-1]) == pytest.approx(float(plain[-1]) / parameters["factor"], rel=1e-6)
        assert bool((stretched[1:] <= stretched[:-1]).all())


@pytest.mark.parametrize(
    ("values", "rope"),
    [
        ({}, Rope(theta=10000.0)),
        ({"rope_theta": 500}, Rope(theta=500.0)),
        ({"rope_theta": 500, "rope_scaling": None, "rope_parameters": {}}, Rope(theta=500.0)),
        ({"rope_scaling": {"type": "default"}}, Rope(theta=10000.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}, Rope(theta=700.0)),
        ({"rope_theta": 500, "rope_parameters": {"rope_theta": 700.0}}, Rope(theta=700.0)),
        ({"rope_theta": 500, "rope_scaling": {"type": "linear", "factor": 2}}, LinearRope(theta=500.0, factor=2.0)),
        ({"rope_parameters": LINEAR}, LinearRope(theta=10000.0, factor=2.5)),
        ({"rope_parameters": LINEAR, "rope_scaling": LINEAR}, LinearRope(theta=10000.0, factor=2.5)),
        (
            {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
            Llama3Rope(
                theta=500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 4096},
            YarnRope(
                theta=10000.0,
                factor=4.0,
                original_max_position_embeddings=4096,
                temperature=1.1386294361119891,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=True,
            ),
        ),
        ({"rope_parameters": {"partial_rotary_factor": 1.0}, "partial_rotary_factor": None}, Rope(theta=10000.0)),
    ],
)
def test_reads_what_both_generations_of_transformers_write(values: dict[str, Any], rope: Rope) -> None:
    assert read(**values) == rope


def without(parameters: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name != key}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_theta": 0}, "rope_theta: expected a positive number, got 0"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, r"rope_parameters\.rope_theta: expected a positive .* got '1e6'"),
        ({"rope_scaling": "linear"}, "rope_scaling: expected an object or null, got 'linear'"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
            r"rope_scaling\.rope_type: expected one of default, linear, llama3, yarn, got 'longrope' \(its .*change",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            r"rope_scaling\.type: .*, got 'dynamic' \(its frequencies",
        ),
        (
            {"rope_parameters": {"rope_type": "proportional"}},
            r"rope_parameters\.rope_type: .* got 'proportional'; this",
        ),
        ({"rope_scaling": {"rope_type": ["linear"]}}, r"rope_scaling\.rope_type: expected one of .* got \['linear'\]"),
        ({"rope_scaling": {"type": None}}, r"rope_scaling\.type: expected one of .* got None"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor: is missing; rope type 'linear' needs it"),
        (
            {"rope_scaling": LINEAR | {"factor": 0.5}},
            r"rope_scaling\.factor: expected a number of at least 1, got 0\.5",
        ),
        ({"rope_scaling": LINEAR | {"factor": "2"}}, r"rope_scaling\.factor: expected a number .* got '2'"),
        ({"rope_scaling": without(LLAMA3, "factor")}, r"rope_scaling\.factor: is missing; rope type 'llama3' needs it"),
        ({"rope_parameters": without(LLAMA3, "low_freq_factor")}, r"rope_parameters\.low_freq_factor: is missing"),
        ({"rope_scaling": without(LLAMA3, "high_freq_factor")}, r"rope_scaling\.high_freq_factor: is missing"),
        (
            {"rope_scaling": without(LLAMA3, "original_max_position_embeddings")},
            r"rope_scaling\.original_max_position_embeddings: is missing",
        ),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            r"high_freq_factor: expected more than low_freq_factor 1",
        ),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 1.5}}, "expected a positive integer, got 1.5"),
        ({"rope_scaling": without(YARN, "factor")}, r"rope_scaling\.factor: is missing; rope type 'yarn' needs it"),
        (
            {"rope_scaling": YARN | {"beta_fast": 0.5}},
            r"rope_scaling\.beta_fast: expected more than beta_slow 1, got 0\.5",
        ),
        ({"rope_scaling": YARN | {"beta_slow": "x"}}, r"rope_scaling\.beta_slow: expected a positive number, got 'x'"),
        ({"rope_scaling": YARN | {"attention_factor": -1}}, r"rope_scaling\.attention_factor: expected a positive"),
        ({"rope_scaling": YARN | {"truncate": 1}}, r"rope_scaling\.truncate: expected true or false, got 1"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta: expected more than 1, got 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"rope_parameters\.partial_rotary_factor: expected 1\.0"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: expected 1\.0, got 0\.5"),
        ({"rope_parameters": {"full_attention": LINEAR}}, "rope_parameters: expected one rope for all layers, got"),
        ({"rope_scaling": LINEAR, "rope_parameters": YARN}, "rope_scaling and rope_parameters: expected one of them"),
    ],
)
def test_what_is_not_supported_is_refused_by_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(**values)
    assert str(caught.value).startswith("config.json: this model cannot be run; ")


def test_every_type_that_an_error_offers_can_be_read() -> None:
    given = {"default": {"rope_type": "default"}, "linear": LINEAR, "llama3": LLAMA3, "yarn": YARN}
    assert set(ROPE_TYPES) == set(given)
    assert len({type(read(rope_scaling=parameters)) for parameters in given.values()}) == len(given)
