"""The baseline: the decoder as a good user writes it in PyTorch, without us, over the very same weights.

Fused qkv and gate_up projections, torch's own RMSNorm, rotary tables made once, a static contiguous KV cache of
[batch, kv_heads, max_len, head_size] that is written in place, and scaled_dot_product_attention with grouped heads.
It is favoured where it can be: all requests have one length, which is exactly that of the cache, so that attention
needs no mask and takes its fastest kernel. No engine could have that, since each step is one token longer.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class PlainLayer(nn.Module):
    """One layer, whose parameters are those of a layer of our decoder."""

    def __init__(self, layer: nn.Module, batch: int, max_len: int) -> None:
        super().__init__()
        attention = layer.self_attn
        self.heads, self.head_size = (attention.num_heads, attention.num_kv_heads), attention.head_size
        self.scale = attention.scale
        self.eps = layer.input_layernorm.eps
        self.norm_1, self.norm_2 = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self.qkv, self.o = attention.qkv_proj.weight, attention.o_proj.weight
        self.gate_up, self.down = layer.mlp.gate_up_proj.weight, layer.mlp.down_proj.weight
        shape = (batch, attention.num_kv_heads, max_len, attention.head_size)
        for name in ("k_cache", "v_cache"):
            # A buffer, so that torch.compile takes its address for fixed, and captures writes to it in place.
            cache = torch.zeros(shape, dtype=self.qkv.dtype, device=self.qkv.device)
            self.register_buffer(name, cache, persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [batch, num_tokens, hidden]; cos, sin: [num_tokens, head_size // 2]."""
        num_heads, num_kv_heads = self.heads
        qkv = F.linear(F.rms_norm(x, x.shape[-1:], self.norm_1, self.eps), self.qkv)
        heads = qkv.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        self.k_cache.index_copy_(2, positions, k)
        self.v_cache.index_copy_(2, positions, v)
        is_prompt = x.shape[1] > 1
        if not is_prompt:
            k, v = self.k_cache, self.v_cache
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_prompt, scale=self.scale, enable_gqa=True)
        x = x + F.linear(y.transpose(1, 2).flatten(2), self.o)
        gate, up = F.linear(F.rms_norm(x, x.shape[-1:], self.norm_2, self.eps), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class PlainModel(nn.Module):
    """From token ids to logits, or to hidden states.

    Args:
        decoder: of our engine; the weights are its tensors.
        batch: requests.
        max_len: tokens of each request after the step.
        with_head: whether it returns logits.
    """

    def __init__(self, decoder: nn.Module, *, batch: int, max_len: int, with_head: bool) -> None:
        super().__init__()
        self.max_len, self.with_head = max_len, with_head
        self.embed, self.norm, self.eps = decoder.embed_tokens.weight, decoder.norm.weight, decoder.norm.eps
        self.layers = nn.ModuleList(PlainLayer(layer, batch, max_len) for layer in decoder.layers)
        positions = torch.arange(max_len, dtype=torch.float32, device=self.embed.device)
        angles = positions[:, None] * decoder.inv_freq
        self.register_buffer("cos", angles.cos().to(self.embed.dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(self.embed.dtype), persistent=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One new token a request, at the cache's last position, or prompts that fill the cache.

        Args:
            input_ids: [batch, num_tokens], int64; num_tokens is 1 or `max_len`.
            positions: [num_tokens], int64: the last ones of the cache.

        Returns:
            [batch, num_tokens, vocab_size or hidden_size], in the weights' dtype.

        Raises:
            ValueError: another number of tokens.
        """
        num_tokens = input_ids.shape[1]
        if num_tokens not in (1, self.max_len):
            raise ValueError(f"PlainModel: expected 1 or {self.max_len} tokens a request, got {num_tokens}")
        x = F.embedding(input_ids, self.embed)
        cos, sin = self.cos[positions], self.sin[positions]
        for layer in self.layers:
            x = layer(x, positions, cos, sin)
        x = F.rms_norm(x, x.shape[-1:], self.norm, self.eps)
        return F.linear(x, self.embed) if self.with_head else x

    def fill_caches(self, decoder: nn.Module, block_table: torch.Tensor) -> None:
        """Copies what our paged caches hold for these requests; block_table: [batch, max_blocks]."""
        with torch.inference_mode():
            for own, layer in zip(self.layers, decoder.layers, strict=True):
                for name in ("k_cache", "v_cache"):
                    cache, paged = getattr(own, name), getattr(layer.self_attn, name)
                    for request, blocks in enumerate(block_table):  # all at once would take the memory again
                        rows = paged[blocks].flatten(0, 1)[: self.max_len]
                        cache[request].copy_(rows.transpose(0, 1))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [batch, heads, num_tokens, head_size]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
