"""Blocks: whose they are, and how much memory the cache takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from piecework.errors import InputError
from piecework.runtime.engine.config import ModelConfig
from piecework.runtime.engine.kv_cache import KVCache, default_num_blocks
from piecework.runtime.engine.models import ARCHITECTURES, build_model
from piecework.runtime.engine.models.llama import LlamaForCausalLM


@pytest.fixture
def model(checkpoint: Path) -> LlamaForCausalLM:
    model = build_model(ModelConfig.from_directory(checkpoint, frozenset(ARCHITECTURES)))
    model.allocate(torch.device("cpu"), torch.bfloat16)
    return model


def test_every_layer_has_its_own_cache(model: LlamaForCausalLM) -> None:
    KVCache(model, num_blocks=5, block_size=4)
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


def test_blocks_belong_to_one_request_until_they_are_freed(model: LlamaForCausalLM) -> None:
    cache = KVCache(model, num_blocks=5, block_size=4)
    first, second = cache.allocate(9), cache.allocate(4)
    assert (len(first), len(second), cache.num_free_blocks) == (3, 1, 1)
    assert not set(first) & set(second)
    with pytest.raises(InputError, match="5 tokens need 2 blocks of 4, but 1 of 5 are free"):
        cache.allocate(5)
    assert cache.num_free_blocks == 1
    cache.free(first)
    assert first == []
    cache.free(first)
    assert cache.num_free_blocks == 4
    assert set(cache.allocate(16)).isdisjoint(second)


def test_default_size(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # 256 tokens are 16 blocks of 16, and 64 requests of them 1024.
    assert default_num_blocks(model, block_size=16, max_model_len=256) == 1024
    # A token takes K and V of 3 layers of 2 heads of 16 elements of 2 bytes: 384 bytes, a block 6144.
    monkeypatch.setattr("piecework.runtime.engine.kv_cache._CPU_BYTES", 100 * 6144)
    assert default_num_blocks(model, block_size=16, max_model_len=256) == 100
    # One request of the longest length has to fit in any case.
    monkeypatch.setattr("piecework.runtime.engine.kv_cache._CPU_BYTES", 1)
    assert default_num_blocks(model, block_size=16, max_model_len=250) == 16
