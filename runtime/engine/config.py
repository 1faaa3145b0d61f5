"""What a checkpoint's config.json says, checked: everything the engine relies on is right or is refused here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import ModelError
from .json_keys import Keys, read_json
from .rope import Rope, read_rope

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
    """A key of `FAMILIES`."""
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
    rope: Rope
    """How the heads of queries and keys are turned by their position."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Each head of queries and keys goes through a norm of its own."""
    window_sizes: tuple[int, ...]
    """For each layer, how many tokens a token attends to, itself included; 0: all before it."""
    tie_word_embeddings: bool
    """The embedding is also the output projection; there is no lm_head.weight."""
    dtype: torch.dtype | None
    """What config.json calls the weights' dtype; None if it does not say."""
    eos_token_ids: frozenset[int]
    """Tokens that end a text; may be empty."""

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON data, for another process."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **data,
            "rope": self.rope.to_json(),
            "window_sizes": list(self.window_sizes),
            "dtype": next((name for name, dtype in DTYPES.items() if dtype is self.dtype), None),
            "eos_token_ids": sorted(self.eos_token_ids),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelConfig:
        """The config that `to_json` wrote down.

        Raises:
            ModelError: it has other fields, or a value that no config has.
        """
        expected = {field.name for field in dataclasses.fields(cls)}
        if set(data) != expected or data["dtype"] not in (None, *DTYPES) or data["architecture"] not in FAMILIES:
            raise ModelError(
                f"model config: expected {', '.join(sorted(expected))} as ModelConfig.to_json writes them, got "
                f"{dict(data)}; write it with the same version of Piecework"
            )
        return cls(
            **{
                **data,
                "rope": Rope.from_json(data["rope"]),
                "window_sizes": tuple(data["window_sizes"]),
                "dtype": DTYPES[data["dtype"]] if data["dtype"] is not None else None,
                "eos_token_ids": frozenset(data["eos_token_ids"]),
            }
        )

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
        keys = Keys(path, read_json(path))
        architecture = _architecture(keys, architectures)
        config = _read(keys, architecture, _generation_eos(directory))
        keys.raise_problems()
        return config


def _architecture(keys: Keys, architectures: frozenset[str]) -> str:
    named = keys.values.get("architectures")
    supported = ", ".join(sorted(architectures))
    if not isinstance(named, list) or not named:
        raise ModelError(
            f"{keys.path}: architectures: expected a list with one of {supported}, got {named!r}; name the "
            f"model's architecture there"
        )
    for name in named:
        if isinstance(name, str) and name in architectures:
            return name
    raise ModelError(
        f"{keys.path}: architectures: expected one of {supported}, got {', '.join(map(str, named))}; this engine "
        f"cannot run that model, so use a checkpoint of a supported architecture"
    )


def _read(keys: Keys, architecture: str, generation_eos: object) -> ModelConfig:
    family = FAMILIES[architecture]
    num_layers = keys.size("num_hidden_layers")
    attention_bias = keys.flag("attention_bias") if None in (family.qkv_bias, family.o_bias) else False
    hidden_size = keys.size("hidden_size")
    num_heads = keys.size("num_attention_heads")
    num_kv_heads = keys.size("num_key_value_heads", num_heads)
    head_size = keys.size("head_dim", family.head_size or max(1, hidden_size // num_heads))
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
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_position_embeddings=keys.size("max_position_embeddings", 2048),
        rms_norm_eps=keys.number("rms_norm_eps", keys.values.get("rms_norm_eps", 1e-6)),
        rope=read_rope(keys),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=family.mlp_bias and keys.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        window_sizes=family.windows(keys, num_layers),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        dtype=_dtype(keys),
        eos_token_ids=_eos(keys, generation_eos),
    )


def _no_windows(keys: Keys, num_layers: int) -> tuple[int, ...]:
    return (0,) * num_layers


def _one_window(keys: Keys, num_layers: int) -> tuple[int, ...]:
    """Mistral's: `sliding_window` for every layer. Where the key is missing, transformers takes 4096."""
    value = keys.values.get("sliding_window", 4096)
    window = keys.integer("sliding_window", value) if value is not None else 0
    expected = "sliding_attention" if window else "full_attention"
    layer_types = keys.values.get("layer_types")
    if layer_types is not None and layer_types != [expected] * num_layers:
        keys.problems.append(
            f"layer_types: expected {expected!r} for each of the {num_layers} layers, as sliding_window says, got "
            f"{layer_types!r}"
        )
    return (window,) * num_layers


def _windows_of_layers(keys: Keys, num_layers: int) -> tuple[int, ...]:
    """Qwen's: `sliding_window` if `use_sliding_window`, for the layers of `layer_types` or from `max_window_layers`."""
    window = 0
    if keys.flag("use_sliding_window") and (value := keys.values.get("sliding_window", 4096)) is not None:
        window = keys.integer("sliding_window", value)
    layer_types = keys.values.get("layer_types")
    if layer_types is None:
        first = keys.values.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            keys.problems.append(f"max_window_layers: expected a number of layers, got {first!r}")
            first = 0
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    kinds = ["full_attention", "sliding_attention"] if window else ["full_attention"]
    if not isinstance(layer_types, list) or len(layer_types) != num_layers or any(t not in kinds for t in layer_types):
        without = "" if window else ", as use_sliding_window and sliding_window give no window"
        keys.problems.append(
            f"layer_types: expected a list of {num_layers} of {' and '.join(kinds)}{without}, got {layer_types!r}"
        )
        return (0,) * num_layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in layer_types)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What the architectures of one model file differ in, as transformers' modelling files have it."""

    qkv_bias: bool | None = None
    """Whether q, k and v have biases; None: `attention_bias` says."""
    o_bias: bool | None = None
    """Whether the attention's output projection has one; None: `attention_bias` says."""
    mlp_bias: bool = False
    """Whether `mlp_bias` is a key."""
    qk_norm: bool = False
    """See `ModelConfig.qk_norm`."""
    head_size: int | None = None
    """Where `head_dim` is missing; None: hidden size over heads."""
    windows: Callable[[Keys, int], tuple[int, ...]] = _no_windows
    """Reads `ModelConfig.window_sizes`, given the number of layers."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "MistralForCausalLM": Family(qkv_bias=False, o_bias=False, windows=_one_window),
    "Qwen2ForCausalLM": Family(qkv_bias=True, o_bias=False, windows=_windows_of_layers),
    "Qwen3ForCausalLM": Family(qk_norm=True, head_size=128, windows=_windows_of_layers),
}
"""By the name that config.json gives under `architectures`."""


def _dtype(keys: Keys) -> torch.dtype | None:
    name = keys.values.get("dtype", keys.values.get("torch_dtype"))
    if name is None:
        return None
    if not isinstance(name, str) or name not in DTYPES:
        keys.problems.append(f"dtype: expected one of {', '.join(DTYPES)}, got {name!r}")
        return None
    return DTYPES[name]


def _generation_eos(directory: Path) -> object:
    """generation_config.json's eos_token_id, which goes before config.json's; None if it says nothing."""
    path = directory / "generation_config.json"
    return read_json(path).get("eos_token_id") if path.exists() else None


def _eos(keys: Keys, generation_eos: object) -> frozenset[int]:
    value = generation_eos if generation_eos is not None else keys.values.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        keys.problems.append(f"eos_token_id: expected a token id or a list of them, got {value!r}")
        return frozenset()
    return frozenset(ids)
