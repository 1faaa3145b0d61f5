"""Paged attention: the split op, the context it reads, and which implementation runs.

Layers differ in nothing but their tensors: a layer's cache comes in as two mutated arguments, and everything that
changes with the step (where the new tokens go, how long each request is) comes from this step's `AttentionContext`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Protocol, cast

import torch

from ..errors import InputError, NotAvailableError, PieceworkError
from .attention_context import AttentionContext as AttentionContext
from .context import get_context
from .split_op import split_op


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """What an implementation has to support; equal specs get the same implementation."""

    device_type: str
    """Where the tensors live: "cpu", "cuda", ..."""
    dtype: torch.dtype
    """Of q, k, v and out."""
    cache_dtype: torch.dtype
    """Of the layer's cache."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; each serves `num_heads // num_kv_heads` query heads."""
    head_size: int
    """Elements of one head."""
    block_size: int
    """Tokens in one cache block."""
    window_size: int = 0
    """Tokens that a token attends to, itself included; 0: all before it."""
    is_static: bool = False
    """Whether the context is the runtime's static copy, of which nothing can be read on the host."""
    is_decode: bool = False
    """Whether every request has exactly one new token; False for a static context, where it is not known."""


class AttentionForward(Protocol):
    """Stores K and V by `context.slot_mapping`, then fills every row of `out`; shapes as in `paged_attention`."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        window_size: int,
        context: AttentionContext,
        /,
    ) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionImplementation:
    """A row of the table from which the implementation is chosen."""

    name: str
    why: str
    """What speaks for it, in a few words; becomes the reason of the choice."""
    reject: Callable[[AttentionSpec], str | None]
    """Why it cannot serve a spec, or None when it can. Must not import the implementation."""
    load: Callable[[], AttentionForward]
    """Imports and returns it; called at its first use."""
    captures: bool = False
    """Whether a call under a static context can be captured whole: it launches kernels, the same ones in each step."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which implementation serves a spec, and why."""

    name: str
    reason: str
    passed_over: tuple[tuple[str, str], ...]
    """(name, reason) of every implementation that was preferred but could not serve."""


_TORCH_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TRITON_MAX_HEAD_SIZE = 512


def _reject_dtypes(spec: AttentionSpec, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if spec.dtype not in dtypes:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"computes {', '.join(others)} and {last}, not {spec.dtype}"
    if spec.cache_dtype != spec.dtype:
        return f"needs the cache in the dtype of q, {spec.dtype}, not {spec.cache_dtype}"
    return None


def _reject_triton(spec: AttentionSpec) -> str | None:
    if spec.device_type != "cuda":
        return f"runs on cuda, not on {spec.device_type}"
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed; pip install triton"
    if not (spec.is_static or spec.is_decode):
        return "is slower than torch's operators where requests have many new tokens"
    if spec.head_size > _TRITON_MAX_HEAD_SIZE:
        return f"holds heads of at most {_TRITON_MAX_HEAD_SIZE} elements, not {spec.head_size}"
    return _reject_dtypes(spec, _TRITON_DTYPES)


def _reject_torch_native(spec: AttentionSpec) -> str | None:
    if spec.is_static:
        return "reads lengths on the host, and a static context has none there"
    return _reject_dtypes(spec, _TORCH_DTYPES)


def _reject_torch_static(spec: AttentionSpec) -> str | None:
    return _reject_dtypes(spec, _TORCH_DTYPES)


def _load_triton() -> AttentionForward:
    return cast(AttentionForward, importlib.import_module("..triton.paged_attention", __name__).paged_attention)


def _load_torch_native() -> AttentionForward:
    return cast(AttentionForward, importlib.import_module("..torch_native", __name__).paged_attention)


def _load_torch_static() -> AttentionForward:
    return cast(AttentionForward, importlib.import_module("..torch_static", __name__).paged_attention)


IMPLEMENTATIONS: tuple[AttentionImplementation, ...] = (
    AttentionImplementation(
        name="triton",
        why="two kernels, which read every length on the device",
        reject=_reject_triton,
        load=_load_triton,
        captures=True,
    ),
    AttentionImplementation(
        name="torch_native",
        why="runs on every device, with torch's own operators",
        reject=_reject_torch_native,
        load=_load_torch_native,
    ),
    AttentionImplementation(
        name="torch_static",
        why="runs on every device, with torch's own operators, and reads every length on the device",
        reject=_reject_torch_static,
        load=_load_torch_static,
        captures=True,
    ),
)
"""In the order of preference."""


def choose_implementation(spec: AttentionSpec) -> Choice:
    """Returns the first implementation of `IMPLEMENTATIONS` that supports `spec`.

    Raises:
        NotAvailableError: none does; the message lists each one with its reason.
    """
    return _choose(spec, IMPLEMENTATIONS)[0]


@functools.lru_cache(maxsize=256)
def _choose(
    spec: AttentionSpec, table: tuple[AttentionImplementation, ...]
) -> tuple[Choice, AttentionForward, AttentionImplementation]:
    passed_over: list[tuple[str, str]] = []
    for implementation in table:
        reason = implementation.reject(spec)
        if reason is None:
            choice = Choice(name=implementation.name, reason=implementation.why, passed_over=tuple(passed_over))
            return choice, implementation.load(), implementation
        passed_over.append((implementation.name, reason))
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in passed_over)
    raise NotAvailableError(
        f"paged_attention: no implementation supports {spec}; change the dtype, the cache or the device:{reasons}"
    )


def _spec(
    q: torch.Tensor, k: torch.Tensor, k_cache: torch.Tensor, window_size: int, context: AttentionContext
) -> AttentionSpec:
    return AttentionSpec(
        device_type=q.device.type,
        dtype=q.dtype,
        cache_dtype=k_cache.dtype,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_size=q.shape[2],
        block_size=k_cache.shape[1],
        window_size=window_size,
        is_static=context.is_static,
        is_decode=context.is_decode,
    )


def _why_not_captured(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window_size: int = 0,
) -> str | None:
    """Why a call with this step's context cannot be captured whole, or None when it can; raises nothing."""
    try:
        context = get_context(AttentionContext)
        _check_shapes(q, k, v, k_cache, v_cache, out, context)
        chosen = _choose(_spec(q, k, k_cache, window_size, context), IMPLEMENTATIONS)[2]
    except PieceworkError as error:
        return str(error)
    if not chosen.captures:
        return f"{chosen.name} reads lengths on the host: a replay would go on with those of the step that was captured"
    if not context.is_static:
        return f"{chosen.name} would read the tensors of this step's context for ever: it is not the static copy"
    return None


@split_op(mutates_args=("k_cache", "v_cache", "out"), capturable=_why_not_captured)
def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window_size: int = 0,
) -> None:
    """Stores this step's K and V into a layer's paged cache, then attends causally over each request's tokens.

    Reads this step's `AttentionContext`. Rows of `out` past the last request's tokens become zeros, whatever the
    inputs hold there. Accumulates in float32 or better.

    Args:
        q: [num_tokens_padded, num_heads, head_size], any strides.
        k: [num_tokens_padded, num_kv_heads, head_size], any strides.
        v: like `k`.
        k_cache: [num_blocks, block_size, num_kv_heads, head_size]; written at `slot_mapping`.
        v_cache: like `k_cache`.
        out: like `q`; every row is written.
        scale: factor on the scores, usually `head_size ** -0.5`.
        window_size: a token attends to itself and the `window_size - 1` tokens before it; 0: to all before it.

    Raises:
        ContextError: no step is running, or its context is no `AttentionContext`.
        InputError: shapes do not fit each other or the context, or `window_size` is negative.
        NotAvailableError: no implementation supports these tensors.
    """
    context = get_context(AttentionContext)
    _check_shapes(q, k, v, k_cache, v_cache, out, context)
    if window_size < 0:
        raise InputError(f"paged_attention: window_size: expected 1 or more, or 0 for none, got {window_size}; use 0")
    forward = _choose(_spec(q, k, k_cache, window_size, context), IMPLEMENTATIONS)[1]
    forward(q, k, v, k_cache, v_cache, out, scale, window_size, context)


def _check_shapes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    context: AttentionContext,
) -> None:
    """Refuses what would read or write the wrong place; looks at shapes only, so that it costs no device wait."""
    if q.dim() != 3 or out.shape != q.shape:
        _refuse("q and out: [num_tokens, num_heads, head_size], the same for both", q=q, out=out)
    num_tokens, num_heads, head_size = q.shape
    if k.dim() != 3 or v.shape != k.shape or k.shape[0] != num_tokens or k.shape[2] != head_size:
        _refuse(f"k and v: [{num_tokens}, num_kv_heads, {head_size}]", k=k, v=v)
    num_kv_heads = k.shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        _refuse("the query heads to be a multiple of the key heads", q=q, k=k)
    if k_cache.dim() != 4 or v_cache.shape != k_cache.shape or k_cache.shape[2:] != k.shape[1:]:
        _refuse(
            f"k_cache and v_cache: [num_blocks, block_size, {num_kv_heads}, {head_size}]",
            k_cache=k_cache,
            v_cache=v_cache,
        )
    fewer = not context.is_static and context.num_tokens > num_tokens
    if context.slot_mapping.shape != (num_tokens,) or fewer:
        has = "is a static copy with" if context.is_static else f"has {context.num_tokens} and"
        raise InputError(
            f"paged_attention: q has {num_tokens} tokens, but the context {has} a slot_mapping of "
            f"{list(context.slot_mapping.shape)}; give this step's context, padded with -1 to the inputs' size"
        )
    room = context.block_table.shape[1] * k_cache.shape[1]
    if max(context.seq_lens_host, default=0) > room:
        raise InputError(
            f"paged_attention: a request has {max(context.seq_lens_host)} tokens, but block_table and block_size "
            f"{k_cache.shape[1]} hold {room}; give the context as many blocks as its longest request needs"
        )


def _refuse(expected: str, **tensors: torch.Tensor) -> None:
    got = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    raise InputError(f"paged_attention: expected {expected}; got {got}; correct the call in the model's forward")
