"""Makes a small checkpoint of any family with random weights and a real tokenizer: for tests and for the demo."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import ConfigError, ModelError
from .config import DTYPES

BOS, EOS = "<|begin|>", "<|end|>"

FAMILIES: dict[str, tuple[str, frozenset[str]]] = {
    "llama": ("Llama", frozenset({"attention_bias", "mlp_bias"})),
    "mistral": ("Mistral", frozenset({"sliding_window"})),
    "qwen2": ("Qwen2", frozenset({"sliding_window", "max_window_layers"})),
    "qwen3": ("Qwen3", frozenset({"attention_bias", "sliding_window", "max_window_layers"})),
}
"""For each family, how the names of transformers' classes begin, and which arguments only some families have."""

SENTENCES = (
    "A model is traced once, and its graph is cut at the operators that must not be compiled.",
    "Every piece that differs only in its weights shares one compiled program with the others.",
    "The first request of a new size pays for its bucket, and the next one finds it ready.",
    "A server that answers at once and gets faster while it serves needs no long warm-up.",
    "The quick brown fox jumps over the lazy dog; the dog, being lazy, does not mind at all.",
    "Once upon a time there was a small machine that could only count to seven.",
    "What is the capital of France? It is Paris, and it lies on the river Seine.",
    "Write a short poem about the sea, the wind and the light of an early morning.",
)
"""What the tokenizer is trained on."""


def make_checkpoint(
    directory: str | os.PathLike[str],
    *,
    family: str = "llama",
    seed: int = 0,
    num_layers: int = 2,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int | None = None,
    max_position_embeddings: int = 256,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    sliding_window: int | None = None,
    max_window_layers: int = 0,
    tie_word_embeddings: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    initializer_range: float = 0.1,
    dtype: str = "float32",
    max_shard_size: int | str = "5GB",
) -> Path:
    """Writes config.json, safetensors and tokenizer.json as transformers would, and returns the directory.

    The same arguments give the same weights. A `max_shard_size` below the model's size gives shards and an index.

    Args:
        family: "llama", "mistral", "qwen2" or "qwen3".
        rope_scaling: the rope type and its parameters, by their names in config.json.
        sliding_window: tokens that a token attends to, itself included; by default all before it.
        max_window_layers: the first layer that has the window, in Qwen's families.

    Raises:
        ConfigError: there is no such family, or it does not have what an argument asks for.
        ModelError: transformers or tokenizers is not installed.
    """
    extras: dict[str, Any] = {"attention_bias": attention_bias, "mlp_bias": mlp_bias, "sliding_window": sliding_window}
    prefix, only = _family(family, **extras, max_window_layers=max_window_layers)
    extras = {name: value for name, value in extras.items() if name in only}
    if "max_window_layers" in only:
        extras |= {"max_window_layers": max_window_layers, "use_sliding_window": sliding_window is not None}
    if rope_scaling is not None:
        extras["rope_scaling"] = dict(rope_scaling)
    try:
        tokenizers: Any = importlib.import_module("tokenizers")
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ModelError(
            "toy checkpoint: it is made with transformers and tokenizers, which are not installed; "
            "run: pip install 'piecework[hf]'"
        ) from error
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(tokenizers)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = getattr(transformers, f"{prefix}Config")(
        architectures=[f"{prefix}ForCausalLM"],
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_size if head_size is not None else hidden_size // num_heads,
        max_position_embeddings=max_position_embeddings,
        rope_theta=rope_theta,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=initializer_range,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        **extras,
    )
    with torch.random.fork_rng(devices=[]), _quiet(transformers):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(DTYPES[dtype])
        _randomise_vectors(model, initializer_range)
        model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def _family(family: str, **asked: Any) -> tuple[str, frozenset[str]]:
    """The row of FAMILIES; everything that is asked for must be in it."""
    if family not in FAMILIES:
        raise ConfigError(f"family: expected one of {', '.join(FAMILIES)}, got {family!r}; use one of these")
    for name, value in asked.items():
        if value and name not in FAMILIES[family][1]:
            having = ", ".join(other for other, (_, names) in FAMILIES.items() if name in names)
            raise ConfigError(
                f"{name}: expected none, as {family} has no such key, got {value!r}; only {having} has it"
            )
    return FAMILIES[family]


def _randomise_vectors(model: torch.nn.Module, spread: float) -> None:
    """Moves norms and biases away from the ones and zeros that they start as, so that a test sees a lost one."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape), alpha=spread)


def _train_tokenizer(tokenizers: Any) -> Any:
    """A byte-level BPE tokenizer that puts the begin token in front of every text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[BOS, EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bars from transformers inside; what was set before comes back."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
