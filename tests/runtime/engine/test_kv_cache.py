"""How much memory the cache takes, and where it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from piecework.errors import ConfigError
from piecework.runtime.engine.config import ModelConfig
from piecework.runtime.engine.kv_cache import allocate_kv_cache, default_num_blocks
from piecework.runtime.engine.models import ARCHITECTURES, build_model


@pytest.fixture
def config(checkpoint: Path) -> ModelConfig:
    return ModelConfig.from_directory(checkpoint, frozenset(ARCHITECTURES))


@pytest.fixture
def model(config: ModelConfig) -> torch.nn.Module:
    model = build_model(config)
    model.allocate(torch.device("cpu"), torch.bfloat16)
    return model


def test_every_layer_has_its_own_cache(model: torch.nn.Module, config: ModelConfig) -> None:
    allocate_kv_cache(model, config, num_blocks=5, block_size=4)
    buffers = dict(model.named_buffers())
    caches = {name: buffer for name, buffer in buffers.items() if name.endswith("_cache")}
    assert sorted(caches) == sorted(f"model.layers.{n}.self_attn.{kv}_cache" for n in range(3) for kv in "kv")
    assert len({cache.data_ptr() for cache in caches.values()}) == 6
    for cache in caches.values():
        assert cache.shape == (5, 4, 2, 16)
        assert cache.dtype == torch.bfloat16
        assert cache.is_inference()
        assert not cache.any()
    assert not any(name.endswith("_cache") for name in model.state_dict())


@pytest.mark.parametrize("num_blocks", [2**50, 2**62, 2**70])
def test_a_cache_that_does_not_fit_says_how_large_it_is(
    model: torch.nn.Module, config: ModelConfig, num_blocks: int
) -> None:
    # K and V of 3 layers of 2 heads of 16 elements of 2 bytes: 384 bytes a token.
    message = rf"memory of cpu, got {num_blocks} blocks of 4 tokens, {num_blocks * 4 * 384} bytes; lower one of them"
    with pytest.raises(ConfigError, match=message):
        allocate_kv_cache(model, config, num_blocks=num_blocks, block_size=4)


def test_default_size(model: torch.nn.Module, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    # 256 tokens are 16 blocks of 16, and 64 requests of them 1024.
    assert default_num_blocks(model, config, block_size=16, max_model_len=256) == 1024
    # A token takes 384 bytes, as above; a block 6144.
    monkeypatch.setattr("piecework.runtime.engine.kv_cache._CPU_BYTES", 100 * 6144)
    assert default_num_blocks(model, config, block_size=16, max_model_len=256) == 100
    # One request of the longest length has to fit in any case.
    monkeypatch.setattr("piecework.runtime.engine.kv_cache._CPU_BYTES", 1)
    assert default_num_blocks(model, config, block_size=16, max_model_len=250) == 16
