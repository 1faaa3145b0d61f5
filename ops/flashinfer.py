"""Norms and SiLU-and-mul of FlashInfer, as functional operators; its attention is in `flashinfer_attention.py`.

No rotary embedding: each function of `flashinfer.rope` finds a token's cosines and sines by its position, in one
table of float32, or computes them. Our models compute them once a step, in the model's dtype; to make a table and
positions of that takes more kernels than the rotation. Its `fused_qk_rmsnorm_rope` turns by the three dims of a video.

FlashInfer compiles a kernel at its first call: seconds, which are those of a bucket's first run, before its capture.
"""

from __future__ import annotations

import torch

from .opaque import aligned, like_first, like_two, opaque, with_half
from .packages import needs

available = needs("flashinfer", "flashinfer-python")
DTYPES = (torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)


@opaque("flashinfer_rms_norm", fake=like_first)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., size], 16-bit, in the dtype of `weight`, with a size that is a multiple of 8."""
    import flashinfer.norm

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        size = x.shape[-1]
        flashinfer.norm.rmsnorm(aligned(x.reshape(-1, size)), aligned(weight), eps, out=out.view(-1, size))
    return out


@opaque("flashinfer_fused_add_rms_norm", fake=like_two)
def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rms_norm`. The kernel writes into both: it gets copies, which one launch makes."""
    import flashinfer.norm

    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if x.numel():
        size = x.shape[-1]
        torch._foreach_copy_([out, total], [x, residual])
        flashinfer.norm.fused_add_rmsnorm(out.view(-1, size), total.view(-1, size), aligned(weight), eps)
    return out, total


@opaque("flashinfer_silu_and_mul", fake=with_half)
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [..., 2 * d], 16-bit, with a d that is a multiple of 8."""
    import flashinfer.activation

    size = gate_up.shape[-1]
    out = torch.empty((*gate_up.shape[:-1], size // 2), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        flashinfer.activation.silu_and_mul(aligned(gate_up.reshape(-1, size)), out=out.view(-1, size // 2))
    return out
