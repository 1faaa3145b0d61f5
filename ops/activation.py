"""Gated activations."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..errors import InputError
from . import flashinfer, sgl_kernel
from .fused import fused_op, is_traced
from .opaque import opaque, with_half
from .packages import needs


@fused_op("silu_and_mul")
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, where the first half of the last dim is the gate: [..., 2 * d] -> [..., d].

    Raises:
        InputError: the last dim is odd; checked by the native body, and not while it is traced.
    """
    if not is_traced() and (gate_up.dim() == 0 or gate_up.shape[-1] % 2):
        raise InputError(
            f"silu_and_mul: expected [..., 2 * d], gate and up behind each other, got {list(gate_up.shape)}; "
            f"concatenate the two along the last dim"
        )
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@silu_and_mul.kernel(
    "triton",
    device_types=("cuda",),
    available=needs("triton", "triton"),
    dtypes=(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    # Equal to what Inductor makes, alone; but where all are kernels of ours, one begins while the one before ends.
    beats_inductor=True,
    why="one kernel, whatever the strides of the rows",
)
@opaque("triton_silu_and_mul", fake=with_half)
def _triton_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """A kernel; the native body where the last dim is odd, and until the kernel is compiled."""
    if gate_up.dim() > 0 and gate_up.shape[-1] % 2 == 0:
        from .triton.activation import silu_and_mul as kernel

        result = kernel(gate_up)
        if result is not None:
            return result
    return silu_and_mul.native(gate_up).contiguous()


def _fits_packages(gate_up: torch.Tensor) -> bool:
    """Whether the kernels of packages, which move 16 bytes at once, can do it. Asked in traces too."""
    return gate_up.dtype in sgl_kernel.DTYPES and gate_up.dim() > 0 and gate_up.shape[-1] % 16 == 0


@silu_and_mul.kernel(
    "sgl_kernel",
    device_types=("cuda",),
    available=sgl_kernel.available,
    dtypes=sgl_kernel.DTYPES,
    min_capability=sgl_kernel.MIN_CAPABILITY,
    operators=(sgl_kernel.silu_and_mul,),
)
def _sgl_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The native body for other dtypes, and for a result whose size is no multiple of 8. Rounds once."""
    if not _fits_packages(gate_up):
        return silu_and_mul.native(gate_up)
    result: torch.Tensor = sgl_kernel.silu_and_mul(gate_up)
    return result


@silu_and_mul.kernel(
    "flashinfer",
    device_types=("cuda",),
    available=flashinfer.available,
    dtypes=flashinfer.DTYPES,
    min_capability=flashinfer.MIN_CAPABILITY,
    operators=(flashinfer.silu_and_mul,),
)
def _flashinfer_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `_sgl_silu_and_mul`."""
    if not _fits_packages(gate_up):
        return silu_and_mul.native(gate_up)
    result: torch.Tensor = flashinfer.silu_and_mul(gate_up)
    return result
