"""Norms and SiLU-and-mul of the package sglang-kernel, as functional operators.

Two of its kernels are not here, as none of them takes the cosines and sines of each token that our models compute
once a step: `rotary_embedding` reads a table by positions, in place, and `fused_qk_norm_rope` computes the angles
itself and writes into the packed projection. Each would need more kernels around it than it saves.

Its own `rmsnorm` and `fused_add_rmsnorm` hand 16-bit tensors to FlashInfer where that is installed. What is called here
are the operators below them, so that this is always sglang-kernel.
"""

from __future__ import annotations

import torch

from .opaque import aligned, like_first, like_two, opaque, with_half
from .packages import needs

available = needs("sgl_kernel", "sglang-kernel")
DTYPES = (torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)


@opaque("sgl_rms_norm", fake=like_first)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., size], 16-bit, in the dtype of `weight`, with a size that is a multiple of 8."""
    import sgl_kernel

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        size = x.shape[-1]
        early = sgl_kernel.utils.is_arch_support_pdl()
        rows = aligned(x.reshape(-1, size))
        torch.ops.sgl_kernel.rmsnorm.default(out.view(-1, size), rows, aligned(weight), eps, early)
    return out


@opaque("sgl_fused_add_rms_norm", fake=like_two)
def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rms_norm`. The kernel writes into both: it gets copies, which one launch makes."""
    import sgl_kernel

    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if x.numel():
        size = x.shape[-1]
        torch._foreach_copy_([out, total], [x, residual])
        early = sgl_kernel.utils.is_arch_support_pdl()
        operator = torch.ops.sgl_kernel.fused_add_rmsnorm.default
        operator(out.view(-1, size), total.view(-1, size), aligned(weight), eps, early)
    return out, total


@opaque("sgl_silu_and_mul", fake=with_half)
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [..., 2 * d], 16-bit, with a d that is a multiple of 8."""
    import sgl_kernel

    size = gate_up.shape[-1]
    out = torch.empty((*gate_up.shape[:-1], size // 2), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        sgl_kernel.silu_and_mul(aligned(gate_up.reshape(-1, size)), out=out.view(-1, size // 2))
    return out
