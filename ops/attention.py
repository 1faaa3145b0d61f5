"""Paged attention: the split op, the context it reads, and which implementation runs.

Layers differ in nothing but their tensors: a layer's cache comes in as two mutated arguments, and everything that
changes with the step (where the new tokens go, how long each request is) comes from this step's `AttentionContext`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch

from ..errors import InputError, NotAvailableError
from .context import context_field, get_context
from .split_op import split_op


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionContext:
    """What one step's attention needs to know about its requests; the tokens of a step lie request after request.

    A request's new tokens are its last ones: a request with `n` new tokens and length `s` has them at the positions
    `s - n` to `s - 1`, and whatever lies before is read from the cache.

    Raises:
        InputError: the fields disagree about the number of requests.
    """

    slot_mapping: torch.Tensor = context_field(pad=-1)  # noqa: RUF009 (it returns a dataclasses.field)
    """[num_tokens], int64: `block * block_size + offset` where a token's K and V go; -1 writes nothing."""
    query_start_loc: torch.Tensor = context_field(pad=0, dims={})  # noqa: RUF009
    """[num_reqs + 1], int32: request `r` has the tokens `query_start_loc[r]` to `query_start_loc[r + 1] - 1`."""
    seq_lens: torch.Tensor = context_field(pad=0, dims={})  # noqa: RUF009
    """[num_reqs], int32: tokens of each request, the new ones included."""
    block_table: torch.Tensor = context_field(pad=0, dims={})  # noqa: RUF009
    """[num_reqs, max_blocks], int32: the cache blocks of each request in order; past its length any valid block."""
    query_lens_host: tuple[int, ...] = ()
    """New tokens of each request, so that no layer waits for the device; read from the tensors if not given."""
    seq_lens_host: tuple[int, ...] = ()
    """`seq_lens` on the host, for the same reason; read from the tensor if not given."""

    def __post_init__(self) -> None:
        num_reqs = self.num_reqs
        if self.query_start_loc.shape != (num_reqs + 1,) or self.block_table.shape[:1] != (num_reqs,):
            raise InputError(
                f"AttentionContext: seq_lens has {num_reqs} requests, so query_start_loc must have {num_reqs + 1} "
                f"elements and block_table {num_reqs} rows; got {list(self.query_start_loc.shape)} and "
                f"{list(self.block_table.shape)}; build the context with AttentionContext.build(...)"
            )
        if not self.query_lens_host:
            object.__setattr__(self, "query_lens_host", tuple(self.query_start_loc.diff().tolist()))
        if not self.seq_lens_host:
            object.__setattr__(self, "seq_lens_host", tuple(self.seq_lens.tolist()))
        if len(self.query_lens_host) != num_reqs or len(self.seq_lens_host) != num_reqs:
            raise InputError(
                f"AttentionContext: there are {num_reqs} requests, but query_lens_host has "
                f"{len(self.query_lens_host)} and seq_lens_host {len(self.seq_lens_host)}; give one number a request, "
                f"or leave both out"
            )

    @property
    def num_reqs(self) -> int:
        """Number of requests in this step."""
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Number of new tokens, padding not counted."""
        return sum(self.query_lens_host)

    @classmethod
    def build(
        cls,
        *,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionContext:
        """Makes the tensors of a step from each request's new tokens, length and cache blocks.

        Raises:
            InputError: a request is shorter than its new tokens, or its blocks do not hold its length.
        """
        if not len(query_lens) == len(seq_lens) == len(block_tables):
            raise InputError(
                f"AttentionContext.build: query_lens, seq_lens and block_tables must have one element a request; got "
                f"{len(query_lens)}, {len(seq_lens)} and {len(block_tables)} elements"
            )
        for request, (query_len, seq_len, blocks) in enumerate(zip(query_lens, seq_lens, block_tables, strict=True)):
            if not 0 <= query_len <= seq_len <= len(blocks) * block_size:
                raise InputError(
                    f"AttentionContext.build: request {request} has {query_len} new tokens, length {seq_len} and "
                    f"{len(blocks)} blocks of {block_size}; expected 0 <= new tokens <= length <= room in its blocks; "
                    f"allocate more blocks or correct the lengths"
                )
        width = max((len(blocks) for blocks in block_tables), default=0)
        table = torch.tensor([[*b, *[0] * (width - len(b))] for b in block_tables], dtype=torch.int64)
        table = table.view(len(block_tables), width)
        new = torch.tensor(query_lens, dtype=torch.int64)
        total = torch.tensor(seq_lens, dtype=torch.int64)
        start = torch.zeros(len(query_lens) + 1, dtype=torch.int64)
        torch.cumsum(new, 0, out=start[1:])
        request_of = torch.repeat_interleave(torch.arange(len(query_lens)), new)
        position = torch.arange(len(request_of)) + (total - new - start[:-1])[request_of]
        block = table[request_of, position // block_size]
        return cls(
            slot_mapping=(block * block_size + position % block_size).to(device),
            query_start_loc=start.to(device, torch.int32),
            seq_lens=total.to(device, torch.int32),
            block_table=table.to(device, torch.int32),
            query_lens_host=tuple(query_lens),
            seq_lens_host=tuple(seq_lens),
        )


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which implementation serves a spec, and why."""

    name: str
    reason: str
    passed_over: tuple[tuple[str, str], ...]
    """(name, reason) of every implementation that was preferred but could not serve."""


_NATIVE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _reject_torch_native(spec: AttentionSpec) -> str | None:
    if spec.dtype not in _NATIVE_DTYPES:
        return f"computes float64, float32, bfloat16 and float16, not {spec.dtype}"
    if spec.cache_dtype != spec.dtype:
        return f"needs the cache in the dtype of q, {spec.dtype}, not {spec.cache_dtype}"
    return None


def _load_torch_native() -> AttentionForward:
    return cast(AttentionForward, importlib.import_module("..torch_native", __name__).paged_attention)


IMPLEMENTATIONS: tuple[AttentionImplementation, ...] = (
    AttentionImplementation(
        name="torch_native",
        why="runs on every device, with torch's own operators",
        reject=_reject_torch_native,
        load=_load_torch_native,
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
def _choose(spec: AttentionSpec, table: tuple[AttentionImplementation, ...]) -> tuple[Choice, AttentionForward]:
    passed_over: list[tuple[str, str]] = []
    for implementation in table:
        reason = implementation.reject(spec)
        if reason is None:
            choice = Choice(name=implementation.name, reason=implementation.why, passed_over=tuple(passed_over))
            return choice, implementation.load()
        passed_over.append((implementation.name, reason))
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in passed_over)
    raise NotAvailableError(
        f"paged_attention: no implementation supports {spec}; change the dtype, the cache or the device:{reasons}"
    )


@split_op(mutates_args=("k_cache", "v_cache", "out"))
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
    spec = AttentionSpec(
        device_type=q.device.type,
        dtype=q.dtype,
        cache_dtype=k_cache.dtype,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_size=q.shape[2],
        block_size=k_cache.shape[1],
        window_size=window_size,
    )
    _choose(spec, IMPLEMENTATIONS)[1](q, k, v, k_cache, v_cache, out, scale, window_size, context)


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
    if context.slot_mapping.shape != (num_tokens,) or context.num_tokens > num_tokens:
        raise InputError(
            f"paged_attention: q has {num_tokens} tokens, but the context has {context.num_tokens} and a slot_mapping "
            f"of {list(context.slot_mapping.shape)}; give this step's context, padded with -1 to the inputs' size"
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
