"""Rotary position embedding."""

from __future__ import annotations

import torch

from ..errors import InputError
from .fused import fused_op


@fused_op("rotary_embedding")
def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates the heads of `q` and `k` by each token's angles: new tensors of their shapes and dtypes.

    Entry `i` of the first half of a head's first `rotary_size` entries is paired with entry `i` of the second half
    (as in GPT-NeoX); the entries behind them stay as they are. Computed in the wider of the dtypes.

    Args:
        q: [num_tokens, num_heads, head_size].
        k: [num_tokens, num_kv_heads, head_size].
        cos: [num_tokens, rotary_size // 2].
        sin: like `cos`.

    Raises:
        InputError: shapes do not fit each other; checked by the native body, and not while it is traced.
    """
    if not torch.compiler.is_compiling():
        _check_shapes(q, k, cos, sin)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [num_tokens, heads, head_size]; cos, sin: [num_tokens, 1, rotary_size // 2]."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = ((first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype))
    rest = (x[..., 2 * half :],) if 2 * half < x.shape[-1] else ()
    return torch.cat((*turned, *rest), dim=-1)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, cos {list(cos.shape)} and sin {list(sin.shape)}"
    if q.dim() != 3 or k.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise InputError(
            f"rotary_embedding: expected q and k [num_tokens, heads, head_size] with one number of tokens and one "
            f"head_size, got {shapes}; reshape them"
        )
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] != q.shape[0] or 2 * cos.shape[1] > q.shape[2]:
        raise InputError(
            f"rotary_embedding: expected cos and sin [{q.shape[0]}, rotary_size // 2] with rotary_size up to the "
            f"head_size {q.shape[2]}, got {shapes}; gather one row a token, half a head wide"
        )
