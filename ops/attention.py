"""Paged attention: the split op, the context it reads, and which implementation runs.

Layers differ in nothing but their tensors: a layer's cache comes in as two mutated arguments, and everything that
changes with the step (where the new tokens go, how long each request is) comes from this step's `AttentionContext`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..errors import NotAvailableError, PieceworkError
from .attention_choice import AUTO, attention_backend
from .attention_context import AttentionContext as AttentionContext
from .attention_rows import IMPLEMENTATIONS as IMPLEMENTATIONS
from .attention_rows import in_order
from .attention_shapes import check_context, check_tensors
from .attention_table import AttentionForward as AttentionForward
from .attention_table import AttentionImplementation as AttentionImplementation
from .attention_table import AttentionPrepare as AttentionPrepare
from .attention_table import AttentionSpec as AttentionSpec
from .attention_table import Choice as Choice
from .attention_table import Chosen
from .attention_table import choose as _choose
from .context import get_context
from .split_op import split_op


def choose_implementation(spec: AttentionSpec, backend: str = AUTO) -> Choice:
    """Returns the first implementation of `IMPLEMENTATIONS` that supports `spec`, in the order of `preferred`.

    Args:
        backend: only rows of this one, see `GraphConfig.attention_backend`.

    Raises:
        NotAvailableError: none does; the message lists each one with its reason, and what `backend` may be.
    """
    return _choose(spec, in_order(IMPLEMENTATIONS, spec), backend).choice


def check_attention_backend(
    backend: str, device_type: str, *, dtype: torch.dtype | None = None, head_size: int | None = None
) -> None:
    """Refuses a backend that cannot serve any call of a model, as far as that is known before the first one.

    Raises:
        NotAvailableError: as `choose_implementation`.
    """
    if backend == AUTO:
        return
    sizes = (128, 64, 256) if head_size is None else (head_size,)
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64) if dtype is None else (dtype,)
    errors = []
    for each, size in itertools.product(dtypes, sizes):
        spec = AttentionSpec(
            device_type=device_type,
            dtype=each,
            cache_dtype=each,
            num_heads=1,
            num_kv_heads=1,
            head_size=size,
            block_size=16,
        )
        try:
            choose_implementation(spec, backend)
        except NotAvailableError as error:
            errors.append(error)
        else:
            return
    raise errors[0]


class _Kind:
    """Calls that fit one implementation and one context as well as another: same shapes, dtypes, device and window.

    Layers are of one kind, so that a context is checked for the first of them only.
    """

    __slots__ = ("_backend", "_under", "block_size", "num_blocks", "num_tokens", "spec", "table")

    def __init__(
        self,
        spec: AttentionSpec,
        num_tokens: int,
        num_blocks: int,
        table: tuple[AttentionImplementation, ...],
        backend: str = AUTO,
    ) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.num_blocks = num_blocks
        self.num_tokens = num_tokens
        self.table = table
        self._backend = backend
        self._under: dict[str, _Kind] = {}

    def chosen(self, context: AttentionContext) -> Chosen:
        """What serves such a call with this context, after the checks. Raises: InputError, NotAvailableError.

        That is what `attention_backend` allows where it is asked; each backend has a key of its own into the scratch.
        """
        backend = attention_backend().name
        if backend != self._backend:
            return self._of(backend).chosen(context)
        scratch = context.scratch
        found: Chosen | None = scratch.get(self)
        of: _ContextFields | None = scratch.get(_ContextFields)
        if (
            of is not None
            and of.slot_mapping is context.slot_mapping
            and of.block_table is context.block_table
            and of.seq_lens is context.seq_lens
            and of.query_start_loc is context.query_start_loc
            and of.query_lens_host is context.query_lens_host
            and of.seq_lens_host is context.seq_lens_host
            and of.is_static is context.is_static
        ):
            if found is not None:
                return found
        else:
            _begin_anew(context, of)
        check_context(context, self.num_tokens, self.num_blocks, self.block_size)
        spec = dataclasses.replace(self.spec, is_static=context.is_static, is_decode=context.is_decode)
        chosen = scratch[self] = _choose(spec, in_order(self.table, spec), self._backend)
        return chosen

    def _of(self, backend: str) -> _Kind:
        """The same calls under another backend."""
        known = self._under.get(backend)
        if known is None:
            known = _Kind(self.spec, self.num_tokens, self.num_blocks, self.table, backend)
            known = self._under.setdefault(backend, known)
        return known


def _begin_anew(context: AttentionContext, before: _ContextFields | None) -> None:
    """Notes whose scratch it is. See Note [Scratch of a context]."""
    scratch = context.scratch
    # For a static copy that nobody has called with, the runtime may have noted lengths.
    if before is not None or not context.is_static:
        scratch.clear()
    scratch[_ContextFields] = _ContextFields.of(context)


class _ContextFields(NamedTuple):
    """What of a context its calls depend on; no context, since its scratch holds this.

    Note [Scratch of a context]
    Copies of a context share its scratch, and may have other tensors: padded ones, or whatever a caller replaced. What
    was found or made of the one is wrong for the other, such as addresses. So the scratch says in itself of which
    tensors it is, and a copy with others begins anew. One step has one copy, so that costs nothing.
    """

    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    query_lens_host: tuple[int, ...]
    seq_lens_host: tuple[int, ...]
    is_static: bool

    @classmethod
    def of(cls, context: AttentionContext) -> _ContextFields:
        """Those of a context."""
        return cls(*(getattr(context, name) for name in cls._fields))


def _kind_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    window_size: int,
) -> _Kind:
    """The one object for all such calls. Raises: InputError when the shapes do not fit each other."""
    shapes = (q.shape, k.shape, v.shape, k_cache.shape, v_cache.shape, out.shape)
    return _kind(*shapes, window_size, q.dtype, k_cache.dtype, q.device.type, id(IMPLEMENTATIONS))


@functools.lru_cache(maxsize=1024)
def _kind(
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    k_cache: torch.Size,
    v_cache: torch.Size,
    out: torch.Size,
    window_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device_type: str,
    table_id: int,
) -> _Kind:
    # The table by its id: to hash it costs as much as all the rest. A kind holds its table, so the id stays its own.
    check_tensors(q, k, v, k_cache, v_cache, out, window_size)
    spec = AttentionSpec(
        device_type=device_type,
        dtype=dtype,
        cache_dtype=cache_dtype,
        num_heads=q[1],
        num_kv_heads=k[1],
        head_size=q[2],
        block_size=k_cache[1],
        window_size=window_size,
        num_tokens=q[0],
    )
    return _Kind(spec, q[0], k_cache[0], IMPLEMENTATIONS)


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window_size: int = 0,
) -> Callable[[], None]:
    """`paged_attention` for tensors that stay where they are. Raises: InputError when they do not fit each other."""
    kind = _kind_of(q, k, v, k_cache, v_cache, out, window_size)
    launches: dict[str, Callable[[AttentionContext], None]] = {}

    def call() -> None:
        context = get_context(AttentionContext)
        chosen = kind.chosen(context)
        launch = launches.get(chosen.name)
        if launch is None:
            launch = launches[chosen.name] = chosen.prepared((q, k, v, k_cache, v_cache, out), scale, window_size)
        launch(context)

    return call


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
        chosen = _kind_of(q, k, v, k_cache, v_cache, out, window_size).chosen(context).implementation
    except PieceworkError as error:
        return str(error)
    if not chosen.captures:
        return f"{chosen.name} reads lengths on the host: a replay would go on with those of the step that was captured"
    if not context.is_static:
        return f"{chosen.name} would read the tensors of this step's context for ever: it is not the static copy"
    if chosen.load_refusal is not None:
        return chosen.load_refusal()(q, k_cache, scale, window_size, context)
    return None


@split_op(mutates_args=("k_cache", "v_cache", "out"), capturable=_why_not_captured, prepare=_prepare)
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
    chosen = _kind_of(q, k, v, k_cache, v_cache, out, window_size).chosen(context)
    chosen.forward(q, k, v, k_cache, v_cache, out, scale, window_size, context)
