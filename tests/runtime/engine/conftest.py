"""Checkpoints that several engine tests read, made once; a test that changes one works on a copy."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from piecework.runtime.engine.toy_checkpoint import make_checkpoint

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {"num_layers": 3},
    "all heads apart": {"num_kv_heads": 4, "head_size": 24, "rope_theta": 500.0},
    "tied embeddings": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "sharded": {"max_shard_size": "100KB", "num_kv_heads": 1},
    "bfloat16": {"dtype": "bfloat16"},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_size": 24},
}


@pytest.fixture(scope="session")
def checkpoint_variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a key of VARIANTS to a directory that must not be changed."""

    @functools.cache
    def make(variant: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), **VARIANTS[variant])

    return make


@pytest.fixture(scope="session")
def checkpoint(checkpoint_variant: Callable[[str], Path]) -> Path:
    """Three layers, four query heads, two key heads; must not be changed."""
    return checkpoint_variant("grouped heads")


@pytest.fixture
def own_checkpoint(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of `checkpoint` that a test may spoil."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


@pytest.fixture
def own_shards(checkpoint_variant: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the sharded checkpoint that a test may spoil."""
    return Path(shutil.copytree(checkpoint_variant("sharded"), tmp_path / "shards"))


class Reference:
    """transformers on the same checkpoint, in float32 with its eager attention; answers are kept."""

    @functools.cached_property
    def _model_of(self) -> Callable[[Path], Any]:
        return functools.cache(
            lambda directory: transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        )

    @functools.cached_property
    def tokens(self) -> Callable[..., tuple[int, ...]]:
        """(directory, prompt, max_new_tokens) -> what transformers' own greedy generate adds to one prompt."""

        def generate(directory: Path, prompt: tuple[int, ...], max_new_tokens: int) -> tuple[int, ...]:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                result = self._model_of(directory).generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    pad_token_id=0,
                )
            return tuple(result[0, len(prompt) :].tolist())

        return functools.cache(generate)

    def logprobs(self, directory: Path, prompt: tuple[int, ...], token_ids: tuple[int, ...]) -> torch.Tensor:
        """[len(token_ids), vocab_size]: the log-probabilities that each token of an answer was chosen from."""
        ids = torch.tensor([[*prompt, *token_ids]])
        with torch.inference_mode():
            logits = self._model_of(directory)(ids).logits[0].float()
        return logits.log_softmax(-1)[len(prompt) - 1 : -1]


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()
