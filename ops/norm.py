"""RMSNorm, alone and with the addition to the residual that comes before it."""

from __future__ import annotations

from typing import overload

import torch
from torch import nn
from torch.nn import functional as F

from ..errors import InputError
from . import flashinfer, sgl_kernel
from .fused import fused_op, is_traced
from .opaque import opaque
from .packages import needs

# The order of the kernels below is that of their times on an H200 (`benchmarks/bench_ops.py`), from 1 to 4096 tokens.
_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@fused_op("rms_norm")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None) -> torch.Tensor:
    """`weight * x / rms(x)` over the last dim, computed in float32 (in float64 for float64).

    Args:
        x: [..., size].
        weight: [size].
        eps: added to the mean of squares.
        variance_size: the mean of squares is that of the first `variance_size` entries; of all if not given.

    Raises:
        InputError: shapes do not fit each other; checked by the native body, and not while it is traced.
    """
    return _rms_norm("rms_norm", x, weight, eps, variance_size)


@fused_op("fused_add_rms_norm")
def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + residual`, rounded to their dtype, behind its `rms_norm`: (normed, x + residual). Writes into neither.

    Args:
        x: [..., size].
        residual: like `x`.

    The other arguments and the errors are those of `rms_norm`.
    """
    if not is_traced() and x.shape != residual.shape:
        raise InputError(
            f"fused_add_rms_norm: expected x and residual of one shape, got {list(x.shape)} and "
            f"{list(residual.shape)}; pass the residual of the same tokens"
        )
    total = _traced_sum(x, residual) if is_traced() else x + residual
    return _rms_norm("fused_add_rms_norm", total, weight, eps, variance_size), total


def _traced_sum(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """`x + residual`, in the wide dtype and rounded, which is what it is anyway.

    Inductor would make a plain sum part of the product that `x` mostly is, whose kernel then wants the residual copied
    to where the sum goes: one more kernel (seen with torch 2.11 on CUDA). The norm's kernel adds for nothing.
    """
    dtype = torch.promote_types(x.dtype, residual.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (x.to(wide) + residual.to(wide)).to(dtype)


def _fits(x: torch.Tensor, weight: torch.Tensor, variance_size: int | None) -> bool:
    is_norm = x.dim() > 0 and weight.shape == x.shape[-1:] and weight.dtype == x.dtype
    return is_norm and (variance_size is None or 1 <= variance_size <= x.shape[-1])


def _fits_packages(x: torch.Tensor, weight: torch.Tensor, variance_size: int | None) -> bool:
    """Whether the kernels of packages, which move 16 bytes at once, have this formula. Asked in traces too."""
    is_plain = variance_size is None and x.dtype in sgl_kernel.DTYPES
    return is_plain and _fits(x, weight, None) and x.shape[-1] % 8 == 0


def _fake_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


@rms_norm.kernel(
    "triton",
    device_types=("cuda",),
    available=needs("triton", "triton"),
    dtypes=_TRITON_DTYPES,
    beats_inductor=True,
    why="one kernel, whatever the strides of the rows",
)
@opaque("triton_rms_norm", fake=_fake_rms_norm)
def _triton_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None
) -> torch.Tensor:
    """A kernel; the native body where dtypes differ, where shapes do not fit, and until the kernel is compiled."""
    if _fits(x, weight, variance_size):
        from .triton.norm import rms_norm as kernel

        result = kernel(x, weight, eps, variance_size)
        if result is not None:
            return result
    return rms_norm.native(x, weight, eps, variance_size).contiguous()


@rms_norm.kernel(
    "sgl_kernel",
    device_types=("cuda",),
    available=sgl_kernel.available,
    dtypes=sgl_kernel.DTYPES,
    min_capability=sgl_kernel.MIN_CAPABILITY,
    operators=(sgl_kernel.rms_norm,),
)
def _sgl_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None) -> torch.Tensor:
    """The native body where `_fits_packages` says no, as with a `variance_size`. Rounds once, behind the weight."""
    if not _fits_packages(x, weight, variance_size):
        return rms_norm.native(x, weight, eps, variance_size)
    result: torch.Tensor = sgl_kernel.rms_norm(x, weight, eps)
    return result


@rms_norm.kernel(
    "flashinfer",
    device_types=("cuda",),
    available=flashinfer.available,
    dtypes=flashinfer.DTYPES,
    min_capability=flashinfer.MIN_CAPABILITY,
    operators=(flashinfer.rms_norm,),
)
def _flashinfer_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None
) -> torch.Tensor:
    """As `_sgl_rms_norm`."""
    if not _fits_packages(x, weight, variance_size):
        return rms_norm.native(x, weight, eps, variance_size)
    result: torch.Tensor = flashinfer.rms_norm(x, weight, eps)
    return result


@rms_norm.kernel("torch", device_types=("cuda",))
def _torch_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None
) -> torch.Tensor:
    """Torch's own: one kernel where the native body is seven. Rounds once, behind the weight."""
    if variance_size is not None or not _fits(x, weight, None):  # a formula or a dtype it has not, an error
        return rms_norm.native(x, weight, eps, variance_size)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _fake_fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return x.new_empty(x.shape, dtype=torch.promote_types(dtype, weight.dtype)), x.new_empty(x.shape, dtype=dtype)


@fused_add_rms_norm.kernel(
    "triton",
    device_types=("cuda",),
    available=needs("triton", "triton"),
    dtypes=_TRITON_DTYPES,
    beats_inductor=True,
    why="one kernel, whatever the strides of the rows",
)
@opaque("triton_fused_add_rms_norm", fake=_fake_fused_add_rms_norm)
def _triton_fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel; the native body where `_triton_rms_norm` has it."""
    if x.shape == residual.shape and x.dtype == residual.dtype and _fits(x, weight, variance_size):
        from .triton.norm import fused_add_rms_norm as kernel

        results = kernel(x, residual, weight, eps, variance_size)
        if results is not None:
            return results
    normed, total = fused_add_rms_norm.native(x, residual, weight, eps, variance_size)
    return normed.contiguous(), total.contiguous()


@fused_add_rms_norm.kernel("torch", device_types=("cuda",))
def _torch_fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum, and torch's own norm."""
    if (
        variance_size is not None
        or not _fits(x, weight, None)
        or x.shape != residual.shape
        or x.dtype != residual.dtype
    ):
        return fused_add_rms_norm.native(x, residual, weight, eps, variance_size)
    total = x + residual
    return F.rms_norm(total, total.shape[-1:], weight, eps), total


@fused_add_rms_norm.kernel(
    "sgl_kernel",
    device_types=("cuda",),
    available=sgl_kernel.available,
    dtypes=sgl_kernel.DTYPES,
    min_capability=sgl_kernel.MIN_CAPABILITY,
    operators=(sgl_kernel.fused_add_rms_norm,),
    why="writes into its arguments: copies of them, here",
)
def _sgl_fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_sgl_rms_norm`. Norms the sum before it is rounded."""
    if not _fits_packages(x, weight, variance_size) or x.shape != residual.shape or x.dtype != residual.dtype:
        return fused_add_rms_norm.native(x, residual, weight, eps, variance_size)
    results: tuple[torch.Tensor, torch.Tensor] = sgl_kernel.fused_add_rms_norm(x, residual, weight, eps)
    return results


@fused_add_rms_norm.kernel(
    "flashinfer",
    device_types=("cuda",),
    available=flashinfer.available,
    dtypes=flashinfer.DTYPES,
    min_capability=flashinfer.MIN_CAPABILITY,
    operators=(flashinfer.fused_add_rms_norm,),
    why="writes into its arguments: copies of them, here",
)
def _flashinfer_fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_sgl_fused_add_rms_norm`."""
    if not _fits_packages(x, weight, variance_size) or x.shape != residual.shape or x.dtype != residual.dtype:
        return fused_add_rms_norm.native(x, residual, weight, eps, variance_size)
    results: tuple[torch.Tensor, torch.Tensor] = flashinfer.fused_add_rms_norm(x, residual, weight, eps)
    return results


class RMSNorm(nn.Module):
    """`rms_norm` with a weight of its own, and `fused_add_rms_norm` when it is given a residual."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        variance_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raises: InputError if `variance_size` is not in 1 to `size`."""
        super().__init__()
        _check_variance_size("RMSNorm", variance_size, size)
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self.eps = eps
        self.variance_size = variance_size

    @overload
    def forward(self, x: torch.Tensor, residual: None = None) -> torch.Tensor: ...

    @overload
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [..., size]. Returns the normed `x`, or (normed `x + residual`, `x + residual`)."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps, self.variance_size)
        return fused_add_rms_norm(x, residual, self.weight, self.eps, self.variance_size)

    def extra_repr(self) -> str:
        variance = f", variance_size={self.variance_size}" if self.variance_size is not None else ""
        return f"{self.weight.shape[0]}, eps={self.eps}{variance}"


def _rms_norm(name: str, x: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None) -> torch.Tensor:
    if not is_traced():
        if x.dim() == 0 or weight.shape != x.shape[-1:]:
            raise InputError(
                f"{name}: expected x [..., size] and weight [size], got {list(x.shape)} and {list(weight.shape)}; "
                f"norm over the dim that the weight has"
            )
        _check_variance_size(name, variance_size, x.shape[-1])
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    part = wide if variance_size is None else wide[..., :variance_size]
    normed = wide * torch.rsqrt(part.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def _check_variance_size(name: str, variance_size: int | None, size: int) -> None:
    if variance_size is not None and not 1 <= variance_size <= size:
        raise InputError(
            f"{name}: variance_size: expected 1 to the size {size} of the last dim, got {variance_size}; "
            f"leave it out to take the variance of all"
        )
