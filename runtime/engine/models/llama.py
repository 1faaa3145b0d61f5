"""Llama, functional in (input_ids, positions): everything else that a step needs is in the attention context.

Layers differ in nothing but their tensors, so that all the pieces between two attentions are equal: no layer knows its
number, and the rotary tables are computed once, before the first layer. Checkpoints name q, k and v (and gate and up)
apart; here they are one parameter each, and `checkpoint_tensors` says which rows belong to which name.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ....ops.attention import paged_attention
from ..config import ModelConfig


def linear(in_features: int, out_features: int, *, bias: bool) -> nn.Linear:
    """A projection on the meta device: no memory, no initialisation that the checkpoint would overwrite."""
    return nn.Linear(in_features, out_features, bias=bias, device="meta")


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    """Projections, rotary embedding and the split op; the layer's KV cache is two buffers of this module."""

    k_cache: torch.Tensor | None
    v_cache: torch.Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_size = config.head_size
        self.scale = config.head_size**-0.5
        num_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_size
        self.qkv_proj = linear(config.hidden_size, num_rows, bias=config.attention_bias)
        self.o_proj = linear(config.num_heads * config.head_size, config.hidden_size, bias=config.attention_bias)
        # Not persistent: part of the module, so that a trace binds them by name, but no part of a checkpoint.
        self.register_buffer("k_cache", None, persistent=False)
        self.register_buffer("v_cache", None, persistent=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_size))
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = torch.empty_like(q)
        paged_attention(q, k, v, self.k_cache, self.v_cache, out, self.scale)
        return self.o_proj(out.flatten(1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to what came in."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class LlamaModel(nn.Module):
    """What the runtime traces: from token ids to the hidden states after the last norm."""

    inv_freq: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size, self.rope_theta = config.head_size, config.rope_theta
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, device="meta")
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("inv_freq", torch.empty(config.head_size // 2, device="meta"), persistent=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids, positions: [num_tokens], int64. Returns [num_tokens, hidden_size]."""
        x = self.embed_tokens(input_ids)
        angles = positions.unsqueeze(-1).to(torch.float32) * self.inv_freq
        cos, sin = angles.cos().to(x.dtype).unsqueeze(1), angles.sin().to(x.dtype).unsqueeze(1)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]


class LlamaForCausalLM(nn.Module):
    """The decoder and the projection to logits, which only the last row of each request needs."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = None if config.tie_word_embeddings else linear(config.hidden_size, config.vocab_size, bias=False)
        self.requires_grad_(False)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [num_rows, hidden_size]. Returns [num_rows, vocab_size], float32 or wider."""
        weight = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        logits = F.linear(hidden, weight)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        """Gives every parameter memory of `dtype` on `device`; the values are the loader's business."""
        self.to(dtype=dtype).to_empty(device=device)
        # As float32 whatever the weights are: a rotation angle has thousands of radians, and bfloat16 8 bits.
        model, exponents = self.model, torch.arange(0, self.model.head_size, 2, dtype=torch.int64).to(torch.float32)
        model.inv_freq = (1.0 / model.rope_theta ** (exponents / model.head_size)).to(device)

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Where each tensor of a checkpoint goes, by its name there: parameters, or rows of one."""
        config = self.config
        kv_rows = config.num_kv_heads * config.head_size
        fused = {
            "qkv_proj": {"q_proj": config.num_heads * config.head_size, "k_proj": kv_rows, "v_proj": kv_rows},
            "gate_up_proj": {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
        }
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.named_parameters():
            module = name.split(".")[-2]
            parts = fused.get(module, {module: parameter.shape[0]})
            for part, rows in zip(parts, torch.split(parameter.data, list(parts.values())), strict=True):
                tensors[name.replace(module, part)] = rows
        return tensors

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold a tensor of this name that the model has no use for."""
        copied = name == "lm_head.weight" and self.lm_head is None
        return copied or name.endswith(".rotary_emb.inv_freq")


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding; x: [num_tokens, heads, head_size], cos and sin: [num_tokens, 1, head_size // 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
