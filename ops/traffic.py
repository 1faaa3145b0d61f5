"""The traffic model of fused add + RMSNorm: how many bytes a call must move, and how many an unfused one moves.

Bytes are logical: an operation reads each of its operands and writes its result, each tensor once and in its own dtype;
views move nothing, and a scalar that is no tensor is free. What a device moves may be less (a result still lies in a
cache when the next operation reads it) or more (sectors, spilled registers): `benchmarks/ncu_traffic.py` measures it.
"""

from __future__ import annotations

import dataclasses
import math

import torch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation whose result is a new tensor in memory."""

    name: str
    """What torch calls it: `_to_copy`, `add`, ..."""
    what: str
    """What it computes."""
    reads: int
    """Bytes."""
    writes: int
    """Bytes."""

    @property
    def moves(self) -> int:
        """Bytes read and written."""
        return self.reads + self.writes


def fused_bytes(num_tokens: int, size: int, dtype: torch.dtype) -> int:
    """Bytes that a fused call moves: reads `x`, `residual` and the weight, writes the normed sum and the sum.

    The weight is read once a call, whatever the number of tokens. `variance_size` changes nothing: all of the sum is
    written. One token of 4096 in bf16: five rows of 8,192 bytes, 40,960.
    """
    row = size * dtype.itemsize
    return 4 * num_tokens * row + row


def unfused_operations(
    num_tokens: int, size: int, dtype: torch.dtype, variance_size: int | None = None
) -> tuple[Operation, ...]:
    """What `unfused_add_rms_norm` makes torch do, in order: eleven operations for a 16-bit dtype.

    Seven for float32 and float64, where the four casts are none. One token of 4096 in bf16 (8,192 bytes a row, 16,384
    in float32, 4 a mean):

        x to float32            reads  8,192          writes 16,384
        residual to float32     reads  8,192          writes 16,384
        their sum               reads 16,384 twice    writes 16,384
        sum to bf16             reads 16,384          writes  8,192
        square of the sum       reads 16,384          writes 16,384
        mean of squares         reads 16,384          writes      4
        mean + eps              reads      4          writes      4
        rsqrt                   reads      4          writes      4
        sum x rsqrt             reads 16,384 and 4    writes 16,384
        normed sum to bf16      reads 16,384          writes  8,192
        weight x normed sum     reads  8,192 twice    writes  8,192

    253,976 bytes in all. `variance_size` makes the square and its mean that of a view.
    """
    wide_dtype = _wide(dtype)
    row = size * dtype.itemsize
    own = num_tokens * row
    wide = num_tokens * size * wide_dtype.itemsize
    part = num_tokens * (size if variance_size is None else variance_size) * wide_dtype.itemsize
    mean = num_tokens * wide_dtype.itemsize

    def operation(name: str, what: str, reads: int, writes: int) -> Operation:
        return Operation(name=name, what=what, reads=reads, writes=writes)

    every = (
        operation("_to_copy", "x in the wide dtype", own, wide),
        operation("_to_copy", "residual in the wide dtype", own, wide),
        operation("add", "their sum", 2 * wide, wide),
        operation("_to_copy", "the sum in the dtype", wide, own),
        operation("pow", "its square", part, part),
        operation("mean", "mean of the squares", part, mean),
        operation("add", "mean + eps", mean, mean),
        operation("rsqrt", "one over the root", mean, mean),
        operation("mul", "the sum, normed", wide + mean, wide),
        operation("_to_copy", "that in the dtype", wide, own),
        operation("mul", "weight x that", row + own, own),
    )
    return every if dtype != wide_dtype else tuple(each for each in every if each.name != "_to_copy")


def unfused_bytes(num_tokens: int, size: int, dtype: torch.dtype, variance_size: int | None = None) -> int:
    """Logical bytes of all of `unfused_operations`."""
    return sum(each.moves for each in unfused_operations(num_tokens, size, dtype, variance_size))


def num_call_sites(num_layers: int) -> int:
    """Calls of fused add + RMSNorm in the layers of a decoder: two each, before attention and before the MLP.

    The norm behind the last layer, which is one more, belongs to none.
    """
    return 2 * num_layers


def unfused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference that is counted: `fused_add_rms_norm` as models write it, the sum in float32, one operation each.

    Args and results are those of `piecework.ops.norm.fused_add_rms_norm`. The sum is not rounded before it is normed,
    so that results in 16 bits differ from its by a rounding.
    """
    wide_dtype = _wide(x.dtype)
    total = x.to(wide_dtype) + residual.to(wide_dtype)
    rounded = total.to(x.dtype)
    part = total if variance_size is None else total[..., :variance_size]
    normed = total * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype), rounded


def ratio(num_tokens: int, size: int, dtype: torch.dtype, variance_size: int | None = None) -> float:
    """Unfused bytes over fused ones: how many times less a fused call moves. NaN where neither moves any."""
    fused = fused_bytes(num_tokens, size, dtype)
    return unfused_bytes(num_tokens, size, dtype, variance_size) / fused if fused else math.nan


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
