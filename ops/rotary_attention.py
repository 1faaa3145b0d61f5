"""Rotary embedding and paged attention as one split op.

Between two pieces a layer's Q and K are rotated, K and V are stored, and Q attends. An implementation of attention with
kernels of its own can rotate while it stores, which saves the two kernels a layer that Inductor makes of the rotation
(seen with torch 2.11). Every other implementation gets Q and K rotated by `rotary_embedding`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol, cast

import torch

from ..errors import InputError
from .attention import _kind_of
from .attention import _why_not_captured as _why_attention_is_not_captured
from .attention_context import AttentionContext
from .attention_table import Chosen
from .context import get_context
from .rotary import rotary_embedding
from .split_op import split_op

_Call = Callable[[AttentionContext], None]


class _RotatingPrepare(Protocol):
    """As `AttentionPrepare`, for calls whose q and k are to be rotated by rows of cos and sin."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        window_size: int,
        /,
    ) -> _Call: ...


def _load_triton() -> _RotatingPrepare:
    return cast(_RotatingPrepare, importlib.import_module("..triton.paged_attention", __name__).prepare_rotary)


_ROTATING: Mapping[str, Callable[[], _RotatingPrepare]] = MappingProxyType({"triton": _load_triton})
"""By the name of an implementation of attention, if it rotates itself: imports what makes its calls ready."""


def _call(
    chosen: Chosen,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window_size: int,
) -> _Call:
    """What `chosen` does with these tensors, for a step's context."""
    if chosen.name in _ROTATING:
        return _ROTATING[chosen.name]()(q, k, v, cos, sin, k_cache, v_cache, out, scale, window_size)

    def call(context: AttentionContext) -> None:
        turned_q, turned_k = rotary_embedding(q, k, cos, sin)
        chosen.forward(turned_q, turned_k, v, k_cache, v_cache, out, scale, window_size, context)

    return call


@functools.lru_cache(maxsize=1024)
def _check_angles(q: torch.Size, cos: torch.Size, sin: torch.Size) -> None:
    """Raises InputError unless there is a row of angles a token, at most half a head wide."""
    if len(cos) != 2 or sin != cos or cos[0] != q[0] or 2 * cos[1] > q[2]:
        raise InputError(
            f"rotary_paged_attention: expected cos and sin [{q[0]}, rotary_size // 2] with rotary_size up to the "
            f"head_size {q[2]}, got cos {list(cos)} and sin {list(sin)}; gather one row a token, half a head wide"
        )


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window_size: int = 0,
) -> Callable[[], None]:
    """The operator for tensors that stay where they are. Raises: InputError when they do not fit each other."""
    kind = _kind_of(q, k, v, k_cache, v_cache, out, window_size)
    _check_angles(q.shape, cos.shape, sin.shape)
    calls: dict[str, _Call] = {}

    def call() -> None:
        context = get_context(AttentionContext)
        chosen = kind.chosen(context)
        run = calls.get(chosen.name)
        if run is None:
            run = _call(chosen, q, k, v, cos, sin, k_cache, v_cache, out, scale, window_size)
            calls[chosen.name] = run
        run(context)

    return call


def _why_not_captured(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window_size: int = 0,
) -> str | None:
    """As that of `paged_attention`: rotating depends on nothing but tensors."""
    return _why_attention_is_not_captured(q, k, v, k_cache, v_cache, out, scale, window_size)


@split_op(mutates_args=("k_cache", "v_cache", "out"), capturable=_why_not_captured, prepare=_prepare)
def rotary_paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window_size: int = 0,
) -> None:
    """`rotary_embedding` of q and k, then `paged_attention`: what is stored and attended to is rotated.

    Rotated values are rounded to the dtype of q and of k before they are used. `rotary_embedding` itself is what
    rotates unless the implementation of attention does, as "triton" does: then in float32, whatever a runtime chose
    for `rotary_embedding`. Reads this step's `AttentionContext`.

    Args:
        q: [num_tokens_padded, num_heads, head_size], any strides; not rotated yet, and left as it is.
        k: [num_tokens_padded, num_kv_heads, head_size], any strides; likewise.
        v: like `k`.
        cos: [num_tokens_padded, rotary_size // 2], of each token's angles; rotary_size is at most head_size.
        sin: like `cos`.
        k_cache: as in `paged_attention`, like the arguments after it.

    Raises:
        ContextError: no step is running, or its context is no `AttentionContext`.
        InputError: shapes do not fit each other or the context, or `window_size` is negative.
        NotAvailableError: no implementation of attention supports these tensors.
    """
    context = get_context(AttentionContext)
    chosen = _kind_of(q, k, v, k_cache, v_cache, out, window_size).chosen(context)
    _check_angles(q.shape, cos.shape, sin.shape)
    _call(chosen, q, k, v, cos, sin, k_cache, v_cache, out, scale, window_size)(context)
