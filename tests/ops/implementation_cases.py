"""What every implementation of every fused op is compared with: arguments and one float64 reference, op by op.

An op gets its cases here, from one function that `cases` calls, and with them the tests of all its implementations, on
the CPU (`test_implementations.py`) and on a GPU (`tests/gpu/test_implementations.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from piecework.ops.activation import silu_and_mul
from piecework.ops.fused import NATIVE, FusedOp, KernelSpec
from piecework.ops.linear import linear, silu_and_mul_linear
from piecework.ops.norm import fused_add_rms_norm, rms_norm
from piecework.ops.rotary import qk_norm_rotary, rotary_embedding
from piecework.ops.sampling import sample

from .sampling_reference import allowed

TOLERANCE = MappingProxyType({torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2})
"""Of the largest difference, relative to the reference's largest entry."""
DTYPES = tuple(TOLERANCE)
EPS = 1e-5
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of a fused op, in any dtype, and what must come out."""

    op: FusedOp[Any, Any]
    name: str
    """What is special about the arguments."""
    make: Callable[[torch.dtype], tuple[Any, ...]]
    """The arguments, on the CPU, with activations of this dtype; drawn anew at each call."""
    reference: Callable[..., Any]
    """A function of the same arguments, where each floating tensor is float64: a tensor or a tuple of them, float64."""
    dtypes: tuple[torch.dtype, ...] = DTYPES
    tolerance: Mapping[torch.dtype, float] | None = None
    """TOLERANCE if not given. A case that has its own says why where it is made."""

    def __str__(self) -> str:
        return f"{self.op.name}-{self.name}"

    def check(self, runs: str, dtype: torch.dtype, device: str = "cpu") -> None:
        """Compares what the native body, or a kernel by its name, returns with the reference."""
        torch.manual_seed(0)
        arguments = self.make(dtype)
        placed = tuple(_moved(argument, device) for argument in arguments)
        before = [argument.clone() for argument in placed if isinstance(argument, torch.Tensor)]
        with torch.inference_mode():
            got = body_of(self.op, runs)(*placed)
        after = [argument for argument in placed if isinstance(argument, torch.Tensor)]
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one, other), "an argument was written into"
        wide = (a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments)
        expected = self.reference(*wide)
        assert isinstance(got, tuple) == isinstance(expected, tuple)
        for one, other in zip(_tuple(got), _tuple(expected), strict=True):
            assert one.shape == other.shape
            assert one.dtype == (dtype if other.is_floating_point() else other.dtype)
            assert one.device.type == device
            if other.numel():
                difference = (one.cpu().double() - other.double()).abs().max().item()
                largest = other.double().abs().max().item()
                bound = (self.tolerance or TOLERANCE)[dtype]
                assert difference <= bound * largest, f"{difference / largest} of the largest entry"


def body_of(op: FusedOp[Any, Any], runs: str) -> Callable[..., Any]:
    """The native body, or that of a kernel."""
    if runs == NATIVE:
        return op.native
    [kernel] = [kernel for kernel in op.kernels if kernel.name == runs]
    return kernel.body


def implementations(case: Case, dtype: torch.dtype, device: str) -> list[str]:
    """What can run a case here. On the CPU, torch's own run too, and in a process with Triton's interpreter, Triton's.

    On a GPU whatever can serve the dtype there and is installed.
    """
    if device == "cpu":
        names = ("torch", "triton") if INTERPRETED else ("torch",)
        kernels = [k for k in case.op.kernels if k.name in names and (k.dtypes is None or dtype in k.dtypes)]
    else:
        spec = KernelSpec(device_type=device, dtype=dtype, capability=torch.cuda.get_device_capability())
        kernels = [kernel for kernel in case.op.kernels if kernel.reject(spec) is None]
    return [NATIVE, *(kernel.name for kernel in kernels)]


def _moved(argument: Any, device: str) -> Any:
    """The same tensor elsewhere, with its strides and the alignment of its first element."""
    if not isinstance(argument, torch.Tensor) or device == "cpu":
        return argument
    storage = torch.empty(0, dtype=argument.dtype).set_(argument.untyped_storage()).to(device)
    return storage.as_strided(argument.shape, argument.stride(), argument.storage_offset())


def _tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def sliced(*shape: int, dtype: torch.dtype, spare: int = 3) -> torch.Tensor:
    """Rows with something between them, which begin at no multiple of 16 bytes."""
    return torch.randn(*shape[:-1], shape[-1] + spare).to(dtype)[..., 1 : shape[-1] + 1]


def cases() -> list[Case]:
    """All of them. Every fused op has one; a test sees to it."""
    of_rows = [*norm_cases(), *fused_add_cases(), *silu_cases(), *rotary_cases(), *qk_norm_cases()]
    return [*of_rows, *linear_cases(), *silu_linear_cases(), *sample_cases()]


# ---- norms


def norm_of(x: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None) -> torch.Tensor:
    """The formula of RMSNorm."""
    mean = x[..., :variance_size].square().sum(-1, keepdim=True) / (variance_size or x.shape[-1])
    return x / (mean + eps).sqrt() * weight


def weight_of(size: int, dtype: torch.dtype) -> torch.Tensor:
    return (1 + torch.rand(size)).to(dtype)


NORM_SHAPES: dict[str, tuple[int, ...]] = {
    "one token": (1, 4096),
    "odd": (3, 1037),
    "one entry": (5, 1),
    "many heads": (300, 64),
    "more rows than a program takes": (1027, 8),
    "three dims": (2, 3, 96),
    "one dim": (40,),
    "no rows": (0, 64),
    "rows in pieces": (2, 20000),
}


def norm_cases() -> list[Case]:
    def case(name: str, make: Callable[[torch.dtype], tuple[Any, ...]]) -> Case:
        return Case(op=rms_norm, name=name, make=make, reference=norm_of)

    def heads(dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(6, 8, 32).to(dtype)[:, 2:7]

    def plain(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        return torch.randn(shape).to(dtype), weight_of(shape[-1], dtype), EPS

    return [
        *[case(name, functools.partial(plain, shape)) for name, shape in NORM_SHAPES.items()],
        case("heads of a projection", lambda dtype: (heads(dtype), weight_of(32, dtype), EPS)),
        case("sliced", lambda dtype: (sliced(4, 70, dtype=dtype), weight_of(70, dtype), EPS)),
        case("sliced twice", lambda dtype: (sliced(4, 2, 3, 70, dtype=dtype)[:, :, :2], weight_of(70, dtype), EPS)),
        case("columns", lambda dtype: (torch.randn(40, 6).to(dtype).T, weight_of(40, dtype), EPS)),
        case("a weight with strides", lambda dtype: (torch.randn(4, 9).to(dtype), weight_of(18, dtype)[::2], EPS)),
        case("variance of some", lambda dtype: (torch.randn(4, 96).to(dtype), weight_of(96, dtype), EPS, 33)),
        case("variance of a piece", lambda dtype: (torch.randn(2, 17000).to(dtype), weight_of(17000, dtype), EPS, 5)),
    ]


def fused_add_cases() -> list[Case]:
    # The sum is rounded to the dtype before it is normed; the bound of a sum of two roundings is that of TOLERANCE.
    def reference(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norm_of(x + residual, weight, eps, variance_size), x + residual

    def case(name: str, make: Callable[[torch.dtype], tuple[Any, ...]]) -> Case:
        return Case(op=fused_add_rms_norm, name=name, make=make, reference=reference)

    def plain(shape: tuple[int, ...], dtype: torch.dtype, *others: int) -> tuple[Any, ...]:
        return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), weight_of(shape[-1], dtype), EPS, *others

    return [
        *[case(name, functools.partial(plain, shape)) for name, shape in NORM_SHAPES.items()],
        case(
            "sliced",
            lambda dtype: (sliced(4, 70, dtype=dtype), torch.randn(4, 70).to(dtype), weight_of(70, dtype), EPS),
        ),
        case(
            "residual of columns",
            lambda dtype: (torch.randn(6, 40).to(dtype), torch.randn(40, 6).to(dtype).T, weight_of(40, dtype), EPS),
        ),
        case("variance of some", lambda dtype: plain((4, 96), dtype, 33)),
        case("variance of a piece", lambda dtype: plain((2, 17000), dtype, 16500)),
    ]


# ---- activation


def silu_cases() -> list[Case]:
    def reference(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return gate / (1 + torch.exp(-gate)) * up

    def case(name: str, make: Callable[[torch.dtype], torch.Tensor]) -> Case:
        return Case(op=silu_and_mul, name=name, make=lambda dtype: (make(dtype),), reference=reference)

    shapes = {
        "one token": (1, 28672),
        "odd": (3, 2 * 1037),
        "one entry": (5, 2),
        "many rows": (300, 32),
        "three dims": (2, 3, 64),
        "one dim": (40,),
        "no rows": (0, 64),
    }

    def plain(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return (4 * torch.randn(shape)).to(dtype)

    return [
        *[case(name, functools.partial(plain, shape)) for name, shape in shapes.items()],
        case("sliced", lambda dtype: sliced(4, 70, dtype=dtype)),
        case("sliced twice", lambda dtype: sliced(4, 2, 3, 70, dtype=dtype)[:, :, :2]),
        case("columns", lambda dtype: torch.randn(40, 6).to(dtype).T),
        case(
            "far from zero", lambda dtype: torch.tensor([[-300.0, 300.0, 200.0, -200.0, 3.0, 3.0, 3.0, 3.0]]).to(dtype)
        ),
    ]


# ---- rotary


def rotary_of(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of entries as complex numbers, turned by a multiplication."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        half = cos.shape[1]
        pairs = torch.complex(x[..., :half].contiguous(), x[..., half : 2 * half].contiguous())
        pairs = pairs * torch.complex(cos.contiguous(), sin.contiguous())[:, None]
        return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), -1)

    return turned(q), turned(k)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rotary_size: int


ROTARY_SHAPES = {
    "one token": Heads(num_tokens=1, num_heads=32, num_kv_heads=8, head_size=128, rotary_size=128),
    "many tokens": Heads(num_tokens=130, num_heads=4, num_kv_heads=2, head_size=16, rotary_size=16),
    "part of a head": Heads(num_tokens=7, num_heads=5, num_kv_heads=1, head_size=80, rotary_size=20),
    "odd": Heads(num_tokens=3, num_heads=3, num_kv_heads=7, head_size=11, rotary_size=6),
    "a pair": Heads(num_tokens=2, num_heads=1, num_kv_heads=1, head_size=2, rotary_size=2),
    "nothing turns": Heads(num_tokens=2, num_heads=2, num_kv_heads=1, head_size=6, rotary_size=0),
    "no tokens": Heads(num_tokens=0, num_heads=4, num_kv_heads=2, head_size=16, rotary_size=16),
}


def heads_of(heads: Heads, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q and k as views of one projection, and the tables."""
    sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    rows = torch.randn(heads.num_tokens, sum(sizes), heads.head_size).to(dtype)
    q, k, _ = rows.split(sizes, dim=1)
    angles = 100 * torch.rand(heads.num_tokens, heads.rotary_size // 2, dtype=torch.float64)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def rotary_cases() -> list[Case]:
    plain = ROTARY_SHAPES["part of a head"]

    def case(name: str, make: Callable[[torch.dtype], tuple[Any, ...]]) -> Case:
        return Case(op=rotary_embedding, name=name, make=make, reference=rotary_of)

    def one_table(dtype: torch.dtype) -> tuple[Any, ...]:
        q, k, cos, sin = heads_of(plain, dtype)
        return q, k, *torch.cat((cos, sin), -1).chunk(2, -1)

    def columns(dtype: torch.dtype) -> tuple[Any, ...]:
        return tuple(t.transpose(0, -1).contiguous().transpose(0, -1) for t in heads_of(plain, dtype))

    def wide(dtype: torch.dtype) -> tuple[Any, ...]:
        q, k, cos, sin = heads_of(plain, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        return q, k, cos.to(wide), sin.to(wide)

    return [
        *[case(name, functools.partial(heads_of, shape)) for name, shape in ROTARY_SHAPES.items()],
        case("one table", one_table),
        case("columns", columns),
        case("wide tables", wide),
    ]


def qk_norm_cases() -> list[Case]:
    def reference(
        *tensors: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, q_weight, k_weight, cos, sin, eps = tensors
        return rotary_of(norm_of(q, q_weight, eps), norm_of(k, k_weight, eps), cos, sin)

    def make(heads: Heads, dtype: torch.dtype) -> tuple[Any, ...]:
        q, k, cos, sin = heads_of(heads, dtype)
        return q, k, weight_of(heads.head_size, dtype), weight_of(heads.head_size, dtype), cos, sin, EPS

    return [
        Case(
            op=qk_norm_rotary,
            name=name,
            make=functools.partial(make, shape),
            reference=reference,
        )
        for name, shape in ROTARY_SHAPES.items()
    ]


# ---- sampling


def sample_cases() -> list[Case]:
    """Token ids, which must be the same: no number is close to where one token ends (test_sampling.py has those)."""

    def case(name: str, vocab_size: int, top_k: int, top_p: float, heat: float) -> Case:
        def make(dtype: torch.dtype) -> tuple[Any, ...]:
            logits = (3 * torch.randn(6, vocab_size)).to(dtype)
            uniform = torch.arange(6, dtype=torch.float64) / 6 + 0.07
            cuts = (torch.full((6,), value, dtype=torch.float64) for value in (heat, top_k, top_p))
            return logits, uniform, *cuts

        return Case(op=sample, name=name, make=make, reference=sample_of, tolerance=dict.fromkeys(DTYPES, 0.0))

    return [
        case("all", 300, 0, 1.0, 1.0),
        case("top-k", 300, 40, 1.0, 0.8),
        case("top-p", 300, 0, 0.9, 1.3),
        case("both", 300, 40, 0.8, 1.0),
        case("one token", 1, 0, 1.0, 1.0),
        case("greedy", 300, 0, 1.0, 0.0),
    ]


def sample_of(
    logits: torch.Tensor, uniform: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """By loops; of each row the only token that a number as good as this one draws."""
    rows = zip(*(tensor.tolist() for tensor in (logits, uniform, temperature, top_k, top_p)), strict=True)
    found = [allowed(row, number, heat, int(count), share) for row, number, heat, count, share in rows]
    assert all(len(tokens) == 1 for tokens in found), "choose other numbers"
    return torch.tensor([tokens.pop() for tokens in found])


# ---- linear

LINEAR_SHAPES = {
    "one row": (1, 96, 2100),
    "a few rows": (3, 70, 100),
    "tiles": (5, 40, 3000),
    "sixteen rows": (16, 33, 128),
    "many rows": (17, 24, 64),
    "one of each": (1, 1, 1),
    "no rows": (0, 8, 16),
}
"""Rows, out_features, in_features."""


def linear_weight(out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)


def linear_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product = (x[..., None, :] * weight).sum(-1)
    return product if bias is None else product + bias


def linear_cases() -> list[Case]:
    def case(name: str, make: Callable[[torch.dtype], tuple[Any, ...]]) -> Case:
        return Case(op=linear, name=name, make=make, reference=linear_of)

    def plain(rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, in_features).to(dtype), linear_weight(out_features, in_features, dtype)

    return [
        *[case(name, functools.partial(plain, *shape)) for name, shape in LINEAR_SHAPES.items()],
        case("bias", lambda dtype: (*plain(2, 30, 64, dtype), torch.randn(30).to(dtype))),
        case("bias of tiles", lambda dtype: (*plain(6, 30, 64, dtype), torch.randn(30).to(dtype))),
        case("three dims", lambda dtype: (torch.randn(2, 3, 64).to(dtype), linear_weight(24, 64, dtype))),
        case("sliced", lambda dtype: (sliced(2, 64, dtype=dtype), linear_weight(24, 64, dtype))),
        case("weights of columns", lambda dtype: (torch.randn(2, 64).to(dtype), linear_weight(64, 24, dtype).T)),
    ]


def silu_linear_cases() -> list[Case]:
    # The activation is rounded to the dtype, and so is half of it before: the bounds are twice those of one product.
    tolerance = {dtype: 2 * bound for dtype, bound in TOLERANCE.items()}

    def reference(gate_up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return linear_of(gate / (1 + torch.exp(-gate)) * up, weight)

    def make(rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, 2 * in_features).to(dtype), linear_weight(out_features, in_features, dtype)

    return [
        Case(
            op=silu_and_mul_linear,
            name=name,
            make=functools.partial(make, *shape),
            reference=reference,
            tolerance=tolerance,
        )
        for name, shape in LINEAR_SHAPES.items()
    ]
