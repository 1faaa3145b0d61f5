"""Gated activations."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..errors import InputError
from .fused import fused_op


@fused_op("silu_and_mul")
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, where the first half of the last dim is the gate: [..., 2 * d] -> [..., d].

    Raises:
        InputError: the last dim is odd; checked by the native body, and not while it is traced.
    """
    if not torch.compiler.is_compiling() and (gate_up.dim() == 0 or gate_up.shape[-1] % 2):
        raise InputError(
            f"silu_and_mul: expected [..., 2 * d], gate and up behind each other, got {list(gate_up.shape)}; "
            f"concatenate the two along the last dim"
        )
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
