"""Makes a small Llama checkpoint with random weights and a real tokenizer: for tests and for the demo."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...errors import ModelError
from .config import DTYPES

BOS, EOS = "<|begin|>", "<|end|>"

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
    seed: int = 0,
    num_layers: int = 2,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int | None = None,
    max_position_embeddings: int = 256,
    rope_theta: float = 10000.0,
    tie_word_embeddings: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    initializer_range: float = 0.1,
    dtype: str = "float32",
    max_shard_size: int | str = "5GB",
) -> Path:
    """Writes config.json, safetensors and tokenizer.json as transformers would, and returns the directory.

    The same arguments give the same weights. A `max_shard_size` below the model's size gives shards and an index.

    Raises:
        ModelError: transformers or tokenizers is not installed.
    """
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
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
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
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        initializer_range=initializer_range,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
    )
    with torch.random.fork_rng(devices=[]), _quiet(transformers):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config).to(DTYPES[dtype])
        _randomise_vectors(model, initializer_range)
        model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


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
