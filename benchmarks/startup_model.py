"""The decoder of the startup benchmarks, for the process that measures and, without values, for its compile workers."""

from __future__ import annotations

import torch
from llama import BLOCK_SIZE, model_config
from torch import nn

from piecework.runtime.engine.kv_cache import allocate_kv_cache
from piecework.runtime.engine.models import build_model
from piecework.runtime.model_factory import ModelFactory


def make_decoder(shape: str, num_layers: int, dtype: str, device: str, num_blocks: int) -> nn.Module:
    """The decoder that `llama.Llama` makes, its weights and caches left as they are."""
    config = model_config(num_layers, shape)
    causal = build_model(config)
    causal.allocate(torch.device(device), getattr(torch, dtype))
    allocate_kv_cache(causal, config, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    return causal.model


def factory(shape: str, num_layers: int, dtype: torch.dtype, device: torch.device, num_blocks: int) -> ModelFactory:
    """What tells a worker to call `make_decoder`; this directory has to be on its PYTHONPATH."""
    return ModelFactory(
        target="startup_model:make_decoder",
        arguments={
            "shape": shape,
            "num_layers": num_layers,
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
            "num_blocks": num_blocks,
        },
    )
