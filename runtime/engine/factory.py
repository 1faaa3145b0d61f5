"""The engine's decoder made anew by another process, out of plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..model_factory import ModelFactory
from .config import DTYPES, ModelConfig
from .kv_cache import allocate_kv_cache
from .models import build_model


def engine_factory(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, num_blocks: int, block_size: int
) -> ModelFactory:
    """The factory of the decoder that `LLMEngine` gives its Runtime.

    Args:
        dtype: of the weights and the KV cache, as they are in the engine; one of `DTYPES`.
        device: where they are.
        num_blocks, block_size: of the KV cache.
    """
    return ModelFactory(
        target=f"{__name__}:build_decoder",
        arguments={
            "config": config.to_json(),
            "dtype": next(name for name, known in DTYPES.items() if known is dtype),
            "device": str(device),
            "num_blocks": num_blocks,
            "block_size": block_size,
        },
    )


def build_decoder(
    config: Mapping[str, Any], dtype: str, device: str, num_blocks: int, block_size: int
) -> torch.nn.Module:
    """The decoder with its KV caches and without a checkpoint's values; what `engine_factory` targets.

    Raises:
        ModelError: `config` is not what `ModelConfig.to_json` writes.
    """
    model_config = ModelConfig.from_json(config)
    model = build_model(model_config)
    model.allocate(torch.device(device), DTYPES[dtype])
    allocate_kv_cache(model, model_config, num_blocks=num_blocks, block_size=block_size)
    return model.model
