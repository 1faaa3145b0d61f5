"""Checkpoints that several engine tests read, made once; a test that changes one works on a copy."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from piecework.runtime.engine.toy_checkpoint import make_checkpoint

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {"num_layers": 3},
    "all heads apart": {"num_kv_heads": 4, "head_size": 24, "rope_theta": 500.0},
    "tied embeddings": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "sharded": {"max_shard_size": "100KB", "num_kv_heads": 1},
    "bfloat16": {"dtype": "bfloat16"},
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
