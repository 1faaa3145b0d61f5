"""Rotary position embedding, alone and behind the norms of the heads."""

from __future__ import annotations

import torch

from ..errors import InputError
from .fused import fused_op, is_traced
from .norm import rms_norm
from .opaque import like_two, opaque
from .packages import needs

_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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
    if not is_traced():
        _check_shapes("rotary_embedding", q, k, cos, sin)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


@fused_op("qk_norm_rotary")
def qk_norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` over each head of `q` and of `k`, then `rotary_embedding`.

    Args:
        q_weight: [head_size].
        k_weight: like `q_weight`.

    The other arguments and the errors are those of `rms_norm` and `rotary_embedding`.
    """
    if not is_traced():
        _check_shapes("qk_norm_rotary", q, k, cos, sin)
    return rotary_embedding.native(rms_norm.native(q, q_weight, eps), rms_norm.native(k, k_weight, eps), cos, sin)


@rotary_embedding.kernel(
    "triton",
    device_types=("cuda",),
    available=needs("triton", "triton"),
    dtypes=_TRITON_DTYPES,
    beats_inductor=True,
    why="q and k in one kernel",
)
@opaque("triton_rotary_embedding", fake=like_two)
def _triton_rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel, which rounds once; the native body until the kernel is compiled."""
    _check_shapes("rotary_embedding", q, k, cos, sin)
    from .triton.rotary import rotary_embedding as kernel

    results = kernel(q, k, cos, sin)
    return rotary_embedding.native(q, k, cos, sin) if results is None else results


def _fake_qk_norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtypes = torch.promote_types(q.dtype, q_weight.dtype), torch.promote_types(k.dtype, k_weight.dtype)
    return q.new_empty(q.shape, dtype=dtypes[0]), k.new_empty(k.shape, dtype=dtypes[1])


@qk_norm_rotary.kernel(
    "triton",
    device_types=("cuda",),
    available=needs("triton", "triton"),
    dtypes=_TRITON_DTYPES,
    beats_inductor=True,
    why="norms and rotation of q and k in one kernel",
)
@opaque("triton_qk_norm_rotary", fake=_fake_qk_norm_rotary)
def _triton_qk_norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel; the native body for weights of other dtypes, and until the kernel is compiled."""
    _check_shapes("qk_norm_rotary", q, k, cos, sin)
    fit = q_weight.shape == k_weight.shape == q.shape[2:]
    if fit and q_weight.dtype == q.dtype and k_weight.dtype == k.dtype:
        from .triton.rotary import qk_norm_rotary as kernel

        results = kernel(q, k, q_weight, k_weight, cos, sin, eps)
        if results is not None:
            return results
    return qk_norm_rotary.native(q, k, q_weight, k_weight, cos, sin, eps)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [num_tokens, heads, head_size]; cos, sin: [num_tokens, 1, rotary_size // 2]."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = ((first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype))
    rest = (x[..., 2 * half :],) if 2 * half < x.shape[-1] else ()
    return torch.cat((*turned, *rest), dim=-1)


def _check_shapes(op: str, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, cos {list(cos.shape)} and sin {list(sin.shape)}"
    if q.dim() != 3 or k.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise InputError(
            f"{op}: expected q and k [num_tokens, heads, head_size] with one number of tokens and one "
            f"head_size, got {shapes}; reshape them"
        )
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] != q.shape[0] or 2 * cos.shape[1] > q.shape[2]:
        raise InputError(
            f"{op}: expected cos and sin [{q.shape[0]}, rotary_size // 2] with rotary_size up to the "
            f"head_size {q.shape[2]}, got {shapes}; gather one row a token, half a head wide"
        )
