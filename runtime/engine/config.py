"""What a checkpoint's config.json says, checked: everything the engine relies on is right or is refused here."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import ModelError

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""The dtypes that weights can have in a model, by the names that config.json uses."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The architecture of one checkpoint."""

    architecture: str
    """A key of `models.ARCHITECTURES`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    """The longest context that the model was made for, in tokens."""
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    """The embedding is also the output projection; there is no lm_head.weight."""
    dtype: torch.dtype | None
    """What config.json calls the weights' dtype; None if it does not say."""
    eos_token_ids: frozenset[int]
    """Tokens that end a text; may be empty."""

    @classmethod
    def from_directory(cls, directory: Path, architectures: frozenset[str]) -> ModelConfig:
        """Reads config.json, and generation_config.json for the end tokens if there is one.

        Raises:
            ModelError: no such directory or file, no JSON object, an architecture that is not in `architectures`, or
                a key with a value that is not supported; all keys that are wrong are listed.
        """
        if not directory.is_dir():
            what = "is a file" if directory.exists() else "does not exist"
            raise ModelError(
                f"model: expected a directory with config.json, model.safetensors and tokenizer.json, but {directory} "
                f"{what}; pass the directory of a downloaded checkpoint"
            )
        path = directory / "config.json"
        keys = _Keys(path, read_json(path))
        architecture = _architecture(keys, architectures)
        config = _read(keys, architecture, _generation_eos(directory))
        keys.raise_problems()
        return config


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ModelError: the file is missing, unreadable, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: the file is missing; download the checkpoint again, with this file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error}); download this file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(content).__name__}; download this file again")
    return content


class _Keys:
    """Typed access to the keys of a JSON object; what is wrong is collected, so that one error lists it all."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values
        self.problems: list[str] = []

    def raise_problems(self) -> None:
        if self.problems:
            raise ModelError(
                f"{self.path}: this model cannot be run; use another checkpoint, or correct the file:"
                + "".join(f"\n  {problem}" for problem in self.problems)
            )

    def size(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.problems.append(f"{key}: expected a positive integer, got {value!r}")
        return 1

    def number(self, key: str, value: Any) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
            return float(value)
        self.problems.append(f"{key}: expected a positive number, got {value!r}")
        return 1.0

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{key}: expected true or false, got {value!r}")
        return value is True


def _architecture(keys: _Keys, architectures: frozenset[str]) -> str:
    named = keys.values.get("architectures")
    supported = ", ".join(sorted(architectures))
    if not isinstance(named, list) or not named:
        raise ModelError(
            f"{keys.path}: architectures: expected a list with one of {supported}, got {named!r}; name the "
            f"model's architecture there"
        )
    for name in named:
        if name in architectures:
            return str(name)
    raise ModelError(
        f"{keys.path}: architectures: expected one of {supported}, got {', '.join(map(str, named))}; this engine "
        f"cannot run that model, so use a checkpoint of a supported architecture"
    )


def _read(keys: _Keys, architecture: str, generation_eos: object) -> ModelConfig:
    hidden_size = keys.size("hidden_size")
    num_heads = keys.size("num_attention_heads")
    num_kv_heads = keys.size("num_key_value_heads", num_heads)
    head_size = keys.size("head_dim", max(1, hidden_size // num_heads))
    if num_heads % num_kv_heads:
        keys.problems.append(
            f"num_key_value_heads: expected a divisor of num_attention_heads {num_heads}, got {num_kv_heads}"
        )
    if head_size % 2:
        keys.problems.append(f"head_dim: expected an even number, got {head_size}")
    activation = keys.values.get("hidden_act", "silu")
    if activation != "silu":
        keys.problems.append(f"hidden_act: expected 'silu', got {activation!r}")
    if keys.values.get("quantization_config") is not None:
        keys.problems.append("quantization_config: quantised weights are not supported; expected none")
    return ModelConfig(
        architecture=architecture,
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.size("intermediate_size"),
        num_layers=keys.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_position_embeddings=keys.size("max_position_embeddings", 2048),
        rms_norm_eps=keys.number("rms_norm_eps", keys.values.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(keys),
        attention_bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        dtype=_dtype(keys),
        eos_token_ids=_eos(keys, generation_eos),
    )


def _rope_theta(keys: _Keys) -> float:
    """The base of the rotary embedding; it is a key of its own, or in rope_parameters where transformers 5 wrote it."""
    theta = keys.values.get("rope_theta", 10000.0)
    for key in ("rope_scaling", "rope_parameters"):
        value = keys.values.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            keys.problems.append(f"{key}: expected an object or null, got {value!r}")
            continue
        kind = value.get("rope_type", value.get("type", "default"))
        if kind != "default":
            keys.problems.append(f"{key}: rope scaling is not supported; expected rope_type 'default', got {kind!r}")
        if value.get("partial_rotary_factor", 1.0) != 1.0:
            keys.problems.append(f"{key}.partial_rotary_factor: expected 1.0, got {value['partial_rotary_factor']!r}")
        theta = value.get("rope_theta", theta)
    return keys.number("rope_theta", theta)


def _dtype(keys: _Keys) -> torch.dtype | None:
    name = keys.values.get("dtype", keys.values.get("torch_dtype"))
    if name is None:
        return None
    if name not in DTYPES:
        keys.problems.append(f"dtype: expected one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES.get(name)


def _generation_eos(directory: Path) -> object:
    """generation_config.json's eos_token_id, which goes before config.json's; None if it says nothing."""
    path = directory / "generation_config.json"
    return read_json(path).get("eos_token_id") if path.exists() else None


def _eos(keys: _Keys, generation_eos: object) -> frozenset[int]:
    value = generation_eos if generation_eos is not None else keys.values.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        keys.problems.append(f"eos_token_id: expected a token id or a list of them, got {value!r}")
        return frozenset()
    return frozenset(ids)
