"""What an implementation of paged attention is, and which one of a table serves a call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from ..errors import NotAvailableError
from .attention_choice import AUTO
from .attention_context import AttentionContext


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
    num_tokens: int = 0
    """Rows of q; 0 where that is not known."""


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


class AttentionPrepare(Protocol):
    """Makes an implementation's call ready for tensors that stay where they are; launches nothing.

    What it returns does what `AttentionForward` does with these tensors, for a step's context.
    """

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
        /,
    ) -> Callable[[AttentionContext], None]: ...


class RefuseCapture(Protocol):
    """Why a call cannot be captured with a static context, as far as that depends on it; None when it can."""

    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, scale: float, window_size: int, context: AttentionContext, /
    ) -> str | None: ...


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
    load_prepare: Callable[[], AttentionPrepare] | None = None
    """Imports and returns what makes its calls ready; None: its forward is called as ever."""
    load_refusal: Callable[[], RefuseCapture] | None = None
    """Imports and returns what knows of an obstacle to a capture; None: with a static context there is none."""
    backend: str = ""
    """What `attention_backend` calls it; its name, if not given."""

    def __post_init__(self) -> None:
        if not self.backend:
            object.__setattr__(self, "backend", self.name)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which implementation serves a spec, and why."""

    name: str
    reason: str
    passed_over: tuple[tuple[str, str], ...]
    """(name, reason) of every implementation that was preferred but could not serve."""


class Chosen(NamedTuple):
    """An implementation that serves a spec, loaded."""

    name: str
    forward: AttentionForward
    implementation: AttentionImplementation
    choice: Choice

    def prepared(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        scale: float,
        window_size: int,
    ) -> Callable[[AttentionContext], None]:
        """A call with `tensors`, q to out, which stay where they are: for a step's context."""
        if self.implementation.load_prepare is None:
            return functools.partial(self.forward, *tensors, scale, window_size)
        return self.implementation.load_prepare()(*tensors, scale, window_size)


@functools.lru_cache(maxsize=1024)
def choose(spec: AttentionSpec, table: tuple[AttentionImplementation, ...], backend: str = AUTO) -> Chosen:
    """The first implementation of `table` that supports `spec`; of those of `backend`, if that is not auto.

    Raises:
        NotAvailableError: none does, or `backend` is not that of any row; the message lists each one with its reason.
    """
    passed_over: list[tuple[str, str]] = []
    for implementation in table:
        if backend not in (AUTO, implementation.backend):
            continue
        reason = implementation.reject(spec)
        if reason is None:
            choice = Choice(name=implementation.name, reason=implementation.why, passed_over=tuple(passed_over))
            return Chosen(implementation.name, implementation.load(), implementation, choice)
        passed_over.append((implementation.name, reason))
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in passed_over)
    if backend == AUTO:
        raise NotAvailableError(
            f"paged_attention: no implementation supports {spec}; change the dtype, the cache or the device:{reasons}"
        )
    others = dict.fromkeys(row.backend for row in table if row.backend != backend and row.reject(spec) is None)
    raise NotAvailableError(
        f"attention_backend: expected one that supports {spec}: {', '.join((AUTO, *others)) if others else 'none does'}"
        f"; got {backend}, which cannot; pass one of the former:{reasons or ' nothing has that name'}"
    )
