"""The paged KV cache: its memory, one pair of tensors a layer, and which blocks are whose."""

from __future__ import annotations

import math

import torch

from ...errors import ConfigError, InputError
from .models.llama import Attention, LlamaForCausalLM

_DEFAULT_NUM_REQS = 64
"""Requests of the longest length that a cache of the default size holds, if the memory allows."""
_CPU_BYTES = 1 << 30
_CUDA_SHARE = 0.5


class KVCache:
    """Allocates the cache tensors of a model's layers, and hands out their blocks.

    A block is `block_size` tokens of one request, in all layers at once. The tensors are made in inference mode and
    stay the same objects for the life of the model.
    """

    def __init__(self, model: LlamaForCausalLM, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        parameter = model.model.embed_tokens.weight
        config = model.config
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_size)
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        try:
            with torch.inference_mode():
                for layer in layers:
                    layer.k_cache = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
                    layer.v_cache = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
        except (RuntimeError, MemoryError) as error:
            num_bytes = 2 * len(layers) * math.prod(shape) * parameter.element_size()
            raise ConfigError(
                f"num_blocks, block_size: expected a KV cache that fits into the memory of {parameter.device}, got "
                f"{num_blocks} blocks of {block_size} tokens, {num_bytes} bytes; lower one of them"
            ) from error
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that belong to no request."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_tokens: int) -> list[int]:
        """Takes the blocks for `num_tokens` of one request.

        Raises:
            InputError: fewer blocks are free.
        """
        num_blocks = self.blocks_for(num_tokens)
        if num_blocks > len(self._free):
            raise InputError(
                f"num_blocks: {num_tokens} tokens need {num_blocks} blocks of {self.block_size}, but {len(self._free)} "
                f"of {self.num_blocks} are free; raise num_blocks or send less at once"
            )
        return [self._free.pop() for _ in range(num_blocks)]

    def free(self, blocks: list[int]) -> None:
        """Gives a request's blocks back and empties the list, so that nothing can be given back twice."""
        self._free.extend(reversed(blocks))
        blocks.clear()


def default_num_blocks(model: LlamaForCausalLM, *, block_size: int, max_model_len: int) -> int:
    """Enough for 64 requests of the longest length, within 1 GiB on a CPU or half of a GPU's free memory.

    Never less than one request of the longest length needs: if that does not fit, the allocation says so.
    """
    parameter, config = model.model.embed_tokens.weight, model.config
    per_request = -(-max_model_len // block_size)
    token_bytes: int = 2 * config.num_layers * config.num_kv_heads * config.head_size * parameter.dtype.itemsize
    budget_bytes = _CPU_BYTES
    if parameter.device.type == "cuda":
        budget_bytes = int(torch.cuda.mem_get_info(parameter.device)[0] * _CUDA_SHARE)
    return max(per_request, min(budget_bytes // (token_bytes * block_size), _DEFAULT_NUM_REQS * per_request))
