"""Linear projections of a step's rows: few of them wait for the weights alone, which a kernel of ours only reads.

Which rows and shapes that kernel takes is decided in the operator's body, where the number of rows is known, by
`piecework.ops.triton.linear_table`; all else goes to torch's own linear. For inference: the operators have no gradient.
`linear` runs it under `inductor` too, which fuses nothing into a product: for one row of Llama-3-8B's projections it
takes 4 to 23% less time than cuBLAS (H200, benchmarks/results/gpu_linear.json). In a forward that is compiled whole the
native body is the default, since the operator would take the products out of what `max-autotune` tries out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from .activation import silu_and_mul
from .fused import KernelSpec, fused_op
from .opaque import opaque
from .packages import needs

_DTYPES = (torch.bfloat16, torch.float16)
_MAX_ROWS = 16
"""`MAX_ROWS` of the table, which is imported when it is used: with more rows nobody looks further."""


@fused_op("linear", fuses=False)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`: [..., in_features] -> [..., out_features].

    Args:
        x: [..., in_features].
        weight: [out_features, in_features].
        bias: [out_features].
    """
    return F.linear(x, weight, bias)


@fused_op("silu_and_mul_linear")
def silu_and_mul_linear(gate_up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`linear(silu_and_mul(gate_up), weight)`, the activation rounded to its dtype in between.

    Args:
        gate_up: [..., 2 * in_features], the gate first.
        weight: [out_features, in_features].
    """
    return F.linear(silu_and_mul.native(gate_up), weight)


def _skinny_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if x.dim() and 0 < x.numel() <= _MAX_ROWS * x.shape[-1] and x.dtype in _DTYPES:
        multiply = _multiply()
        result = multiply(x, weight, bias) if multiply is not None else None
        if result is not None:
            return result
    return F.linear(x, weight, bias)


def _silu_and_mul_linear(gate_up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if gate_up.dim() and 0 < gate_up.numel() <= _MAX_ROWS * gate_up.shape[-1] and gate_up.dtype in _DTYPES:
        multiply = _multiply()
        result = multiply(gate_up, weight, None, activates=True) if multiply is not None else None
        if result is not None:
            return result
    return _skinny_linear(_activation(gate_up.device.type)(gate_up), weight)


@functools.cache
def _multiply() -> Callable[..., torch.Tensor | None] | None:
    """What launches our kernels, or returns None for what they do not take; None where there is no Triton."""
    if needs("triton", "triton")() is not None:
        return None
    from .triton.linear_plan import multiply

    return multiply


@functools.cache
def _activation(device_type: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation alone, as one kernel where there is one for the device."""
    spec = KernelSpec(device_type=device_type)
    kernels = (kernel.body for kernel in silu_and_mul.kernels if kernel.reject(spec) is None)
    return next(kernels, silu_and_mul.native)


def _linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    torch._check(x.dim() > 0 and x.shape[-1] == weight.shape[-1], lambda: _mismatch(x, weight))
    return x.new_empty((*x.shape[:-1], *weight.shape[:-1]))


def _silu_and_mul_linear_fake(gate_up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    torch._check(
        gate_up.dim() > 0 and gate_up.shape[-1] == 2 * weight.shape[-1], lambda: _mismatch(gate_up, weight, "2 * ")
    )
    return gate_up.new_empty((*gate_up.shape[:-1], *weight.shape[:-1]))


def _mismatch(x: torch.Tensor, weight: torch.Tensor, factor: str = "") -> str:
    return (
        f"linear: expected x [..., {factor}in_features] and weight [out_features, in_features], got {list(x.shape)} "
        f"and {list(weight.shape)}; multiply by a weight whose last dim is that of x"
    )


skinny_linear = opaque("skinny_linear", fake=_linear_fake)(_skinny_linear)
"""`linear` by our kernels where the table has one for the number of rows, which is known in here only; else torch's."""
triton_silu_and_mul_linear = opaque("triton_silu_and_mul_linear", fake=_silu_and_mul_linear_fake)(_silu_and_mul_linear)
"""`silu_and_mul_linear` by one kernel of ours for as many rows as the table says; else by two."""


@linear.kernel(
    "triton",
    device_types=("cuda",),
    available=needs("triton", "triton"),
    dtypes=_DTYPES,
    min_capability=(8, 0),
    operators=(skinny_linear,),
    why="made for 1 to 16 rows, which wait for the weights alone; torch's own linear for more",
)
def _triton_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The operator; under autocast the native body, whose casts are autocast's business."""
    if torch.is_autocast_enabled(x.device.type):
        return linear.native(x, weight, bias)
    result: torch.Tensor = skinny_linear(x, weight, bias)
    return result


@silu_and_mul_linear.kernel(
    "triton",
    device_types=("cuda",),
    available=needs("triton", "triton"),
    dtypes=_DTYPES,
    min_capability=(8, 0),
    operators=(triton_silu_and_mul_linear,),
    why="1 to 3 rows: one kernel, the activation computed while it is loaded",
)
def _triton_silu_and_mul_linear(gate_up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The operator; under autocast the native body."""
    if torch.is_autocast_enabled(gate_up.device.type):
        return silu_and_mul_linear.native(gate_up, weight)
    result: torch.Tensor = triton_silu_and_mul_linear(gate_up, weight)
    return result


class Linear(nn.Linear):
    """`nn.Linear` whose forward is the fused op `linear`; parameters and their names are the same."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: [..., in_features]. Returns [..., out_features]."""
        return linear(input, self.weight, self.bias)
