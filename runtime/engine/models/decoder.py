"""Decoders of the Llama kind, functional in (input_ids, positions): all else that a step needs is in its context.

One file for all the families: what they differ in is in `ModelConfig`. Layers differ in nothing but their tensors (and
their attention window, which only the split op sees), so that all the pieces between two attentions are equal: no
layer knows its number, the rotary tables are computed once, before the first layer, and the first layer gets a residual
of zeros, where the others get their predecessor's. Checkpoints name q, k and v (and gate and up) apart; here they are
one parameter each, and `checkpoint_tensors` says which rows belong to which name.
"""

from __future__ import annotations

import torch
from torch import nn

from ....ops.activation import silu_and_mul
from ....ops.attention import paged_attention
from ....ops.linear import Linear
from ....ops.linear import linear as multiply
from ....ops.norm import RMSNorm
from ....ops.rotary import qk_norm_rotary
from ....ops.rotary_attention import rotary_paged_attention
from ..config import ModelConfig


def linear(in_features: int, out_features: int, *, bias: bool) -> Linear:
    """A projection on the meta device: no memory, no initialisation that the checkpoint would overwrite."""
    return Linear(in_features, out_features, bias=bias, device="meta")


class Attention(nn.Module):
    """Projections, rotary embedding and the split op; the layer's KV cache is two buffers of this module."""

    k_cache: torch.Tensor | None
    v_cache: torch.Tensor | None

    def __init__(self, config: ModelConfig, window_size: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_size = config.head_size
        self.scale = config.head_size**-0.5
        self.window_size = window_size
        num_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_size
        self.qkv_proj = linear(config.hidden_size, num_rows, bias=config.qkv_bias)
        self.o_proj = linear(config.num_heads * config.head_size, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_size, config.rms_norm_eps, device="meta") if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_size, config.rms_norm_eps, device="meta") if config.qk_norm else None
        # Not persistent: part of the module, so that a trace binds them by name, but no part of a checkpoint.
        self.register_buffer("k_cache", None, persistent=False)
        self.register_buffer("v_cache", None, persistent=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_size))
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk_norm_rotary(q, k, self.q_norm.weight, self.k_norm.weight, cos, sin, self.q_norm.eps)
            out = torch.empty_like(q)
            paged_attention(q, k, v, self.k_cache, self.v_cache, out, self.scale, self.window_size)
        else:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)  # q is a view of the projection
            cache = (self.k_cache, self.v_cache)
            rotary_paged_attention(q, k, v, cos, sin, *cache, out, self.scale, self.window_size)
        return self.o_proj(out.flatten(1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm; what is yet to be added up travels as the pair (x, residual)."""

    def __init__(self, config: ModelConfig, window_size: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, device="meta")
        self.self_attn = Attention(config, window_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, device="meta")
        self.mlp = MLP(config)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [num_tokens, hidden_size]; their sum is what came in, and the results' sum what goes out."""
        x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(x, cos, sin), residual)
        return self.mlp(x), residual


class DecoderModel(nn.Module):
    """What the runtime traces: from token ids to the hidden states after the last norm."""

    inv_freq: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.rope_factor = config.rope.attention_factor
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, device="meta")
        self.layers = nn.ModuleList(DecoderLayer(config, window_size) for window_size in config.window_sizes)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device="meta")
        self.register_buffer("inv_freq", torch.empty(config.head_size // 2, device="meta"), persistent=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids, positions: [num_tokens], int64. Returns [num_tokens, hidden_size]."""
        x = self.embed_tokens(input_ids)
        angles = positions.unsqueeze(-1).to(torch.float32) * self.inv_freq
        cos, sin = (angles.cos() * self.rope_factor).to(x.dtype), (angles.sin() * self.rope_factor).to(x.dtype)
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin)
        return self.norm(x, residual)[0]  # type: ignore[no-any-return]


class DecoderForCausalLM(nn.Module):
    """The decoder and the projection to logits, which only the last row of each request needs."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderModel(config)
        self.lm_head = None if config.tie_word_embeddings else linear(config.hidden_size, config.vocab_size, bias=False)
        self.requires_grad_(False)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [num_rows, hidden_size]. Returns [num_rows, vocab_size], float32 or wider."""
        weight = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        logits = multiply(hidden, weight)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        """Gives every parameter memory of `dtype` on `device`; the values are the loader's business."""
        self.to(dtype=dtype).to_empty(device=device)
        # As float32 whatever the weights are: a rotation angle has thousands of radians, and bfloat16 8 bits.
        self.model.inv_freq = self.config.rope.inv_freq(self.config.head_size).to(device)

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

    def checkpoint_copies(self) -> dict[str, str]:
        """Tensors that a checkpoint may hold as copies of others, by their names: copy -> original."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.lm_head is None else {}

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold a tensor of this name that the model has no use for."""
        return name in self.checkpoint_copies() or name.endswith(".rotary_emb.inv_freq")
