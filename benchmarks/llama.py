"""The model that benchmarks run, a decoder of our engine with random weights, and the steps that they make of it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from piecework.ops.attention import AttentionContext
from piecework.runtime.engine.config import ModelConfig
from piecework.runtime.engine.kv_cache import allocate_kv_cache
from piecework.runtime.engine.models import build_model
from piecework.runtime.engine.rope import Rope

BLOCK_SIZE = 16

_SIZES: dict[str, dict[str, int]] = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_size": 128,
    },
    "narrow": {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 64,
    },
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16,
    },
}
"""`8b` is Llama-3-8B's shape; `narrow` is as deep and so thin that a GPU waits for its host; `tiny` is for a CPU."""


def model_config(num_layers: int, shape: str = "8b") -> ModelConfig:
    """A config of one of the shapes."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        **_SIZES[shape],
        num_layers=num_layers,
        max_position_embeddings=1 << 16,
        rms_norm_eps=1e-5,
        rope=Rope(theta=500000.0),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        window_sizes=(0,) * num_layers,
        # One table for both ends: all weights are read in a step, and are 15.0 GB like those that Llama-3-8B reads.
        tie_word_embeddings=True,
        dtype=None,
        eos_token_ids=frozenset(),
    )


class WithHead(nn.Module):
    """A decoder and the projection of every row to logits, as one forward."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids, positions: [num_tokens], int64. Returns [num_tokens, vocab_size] in the weights' dtype."""
        return F.linear(self.decoder(input_ids, positions), self.decoder.embed_tokens.weight)


class Llama:
    """The decoder with random weights (never zeros, on which products are faster) and random KV caches.

    Args:
        num_blocks: cache blocks of 16 tokens a layer.
    """

    def __init__(
        self, device: torch.device | str, dtype: torch.dtype, *, num_layers: int, shape: str, num_blocks: int
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.config = model_config(num_layers, shape)
        causal = build_model(self.config)
        causal.allocate(self.device, dtype)
        self.decoder = causal.model
        torch.manual_seed(0)
        with torch.inference_mode():
            for name, parameter in causal.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.fill_(1)
                else:
                    parameter.normal_(std=0.02)
        self.num_blocks = 0
        self.allocate_caches(num_blocks)

    @property
    def weight_bytes(self) -> int:
        """Of what a step with logits reads."""
        return sum(parameter.nbytes for parameter in self.decoder.parameters())

    @property
    def kv_bytes_per_token(self) -> int:
        """Of one token in all layers."""
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_size * self.dtype.itemsize

    def allocate_caches(self, num_blocks: int, *, num_distinct: int | None = None) -> None:
        """Gives the layers other caches, full of random values.

        Args:
            num_distinct: caches that there are; later layers share those of earlier ones. None: one a layer.
        """
        layers = [layer.self_attn for layer in self.decoder.layers]
        for layer in layers:
            layer.k_cache = layer.v_cache = None  # the memory is wanted again
        own = layers[: num_distinct or len(layers)]
        allocate_kv_cache(nn.ModuleList(own), self.config, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        with torch.inference_mode():
            for layer in own:
                layer.k_cache.normal_()
                layer.v_cache.normal_()
        for i, layer in enumerate(layers):
            layer.k_cache, layer.v_cache = own[i % len(own)].k_cache, own[i % len(own)].v_cache
        self.num_blocks = num_blocks

    def step(
        self, query_lens: Iterable[int], seq_lens: Iterable[int], *, seed: int = 0
    ) -> tuple[dict[str, torch.Tensor], AttentionContext]:
        """The inputs and the context of a step: random tokens, and blocks that lie anywhere, each of one request."""
        query_lens, seq_lens = list(query_lens), list(seq_lens)
        draw = random.Random(seed)
        widths = [-(-seq_len // BLOCK_SIZE) for seq_len in seq_lens]
        blocks = iter(draw.sample(range(self.num_blocks), sum(widths)))
        context = AttentionContext.build(
            query_lens=query_lens,
            seq_lens=seq_lens,
            block_tables=[[next(blocks) for _ in range(width)] for width in widths],
            block_size=BLOCK_SIZE,
            device=self.device,
        )
        positions = [p for n, s in zip(query_lens, seq_lens, strict=True) for p in range(s - n, s)]
        ids = [draw.randrange(self.config.vocab_size) for _ in positions]
        inputs: dict[str, Any] = {"input_ids": ids, "positions": positions}
        return {name: torch.tensor(value, device=self.device) for name, value in inputs.items()}, context

    def decode_step(
        self, num_reqs: int, seq_len: int, *, seed: int = 0
    ) -> tuple[dict[str, torch.Tensor], AttentionContext]:
        """A step of one new token for each of `num_reqs` requests of one length, the new token counted."""
        return self.step([1] * num_reqs, [seq_len] * num_reqs, seed=seed)
