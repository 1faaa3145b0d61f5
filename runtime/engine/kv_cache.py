"""The memory of the paged KV cache: one pair of tensors a layer."""

from __future__ import annotations

import math

import torch

from ...errors import ConfigError
from .config import ModelConfig

_DEFAULT_NUM_REQS = 64
"""Requests of the longest length that a cache of the default size holds, if the memory allows."""
_CPU_BYTES = 1 << 30
_CUDA_SHARE = 0.5


def allocate_kv_cache(model: torch.nn.Module, config: ModelConfig, *, num_blocks: int, block_size: int) -> None:
    """Gives every module of `model` that has buffers `k_cache` and `v_cache` memory for them, all zeros.

    The tensors are made in inference mode and stay the same objects for the life of the model.

    Raises:
        ConfigError: they do not fit into the device's memory.
    """
    parameter = next(model.parameters())
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_size)
    layers = [module for module in model.modules() if hasattr(module, "k_cache") and hasattr(module, "v_cache")]
    try:
        with torch.inference_mode():
            for layer in layers:
                layer.k_cache = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
                layer.v_cache = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
    except (RuntimeError, MemoryError, TypeError) as error:  # TypeError: a size that no 64 bits hold
        num_bytes = 2 * len(layers) * math.prod(shape) * parameter.element_size()
        raise ConfigError(
            f"num_blocks, block_size: expected a KV cache that fits into the memory of {parameter.device}, got "
            f"{num_blocks} blocks of {block_size} tokens, {num_bytes} bytes; lower one of them, or max_model_len if "
            f"num_blocks was left out"
        ) from error


def default_num_blocks(
    model: torch.nn.Module, config: ModelConfig, *, block_size: int, max_model_len: int, reserved_bytes: int = 0
) -> int:
    """Enough for 64 requests of the longest length, within 1 GiB on a CPU or half of a GPU's free memory.

    Never less than one request of the longest length needs: if that does not fit, the allocation says so.

    Args:
        reserved_bytes: of a GPU's free memory, what others will take.
    """
    parameter = next(model.parameters())
    per_request = -(-max_model_len // block_size)
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_size * parameter.element_size()
    budget_bytes = _CPU_BYTES
    if parameter.device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(parameter.device)[0]
        budget_bytes = int(max(0, free_bytes - reserved_bytes) * _CUDA_SHARE)
    return max(per_request, min(budget_bytes // (token_bytes * block_size), _DEFAULT_NUM_REQS * per_request))
