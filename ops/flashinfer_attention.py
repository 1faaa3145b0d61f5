"""Paged attention on FlashInfer's kernels, which follow a plan that is made on the host, once a step for all layers.

See Note [Plans of a context] in attention_plans.py. K and V are stored by our own kernel. FlashInfer 0.6 is what this
was written for: its wrappers for paged decode and paged prefill, in their CUDA-graph mode where a context is static.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CaptureError, InputError, KernelNotReadyError
from . import torch_native, torch_static
from .attention_choice import attention_backend
from .attention_plans import PLANS, Lengths, lengths_of, plans_of
from .capturing import is_capturing_whole
from .deferred import deferring
from .flashinfer_kernels import ALIGNED_BYTES, is_ready, may_plan, note_built, store
from .flashinfer_pages import pages_of_decode, pages_of_slots, pages_of_step
from .flashinfer_wrapper import Buffers, Memory, PlanSpec, Wrapper

if TYPE_CHECKING:
    from .attention import AttentionContext


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window_size: int,
    context: AttentionContext,
) -> None:
    """Stores K and V, then attends; arguments as in `piecework.ops.attention.paged_attention`.

    Plans at the first call with a step's context, or with a static one that is not captured yet.

    Raises:
        CaptureError: in a capture, with a context that has no plan.
        InputError: the caches do not lie alike, or whole vectors of their heads cannot be loaded.
        KernelNotReadyError: under `defer_compiles`, in a capture: the kernels are not compiled yet.
        RuntimeError: FlashInfer cannot plan or compile.
    """
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise InputError(
            f"paged_attention: flashinfer expects k_cache and v_cache with the same strides, 1 in a head, got "
            f"{k_cache.stride()} and {v_cache.stride()}; allocate them alike, or pass attention_backend triton"
        )
    if not _is_aligned(k_cache) or not _is_aligned(v_cache):
        raise InputError(
            f"paged_attention: flashinfer expects caches whose every head begins at a multiple of {ALIGNED_BYTES} "
            f"bytes, got strides {k_cache.stride()} of {k_cache.dtype}; allocate them so, or pass attention_backend "
            f"triton"
        )
    if not q.numel():
        return
    if not k_cache.shape[0]:  # not even padding has something to look at
        out.zero_()
        return
    spec = _spec(q, k_cache, scale, window_size)
    submit = deferring()
    if submit is not None and not is_ready(spec, (k, v, k_cache, v_cache), context.slot_mapping, submit):
        _attend_without(spec, q, k, v, k_cache, v_cache, out, scale, window_size, context)
        return
    store(k, v, k_cache, v_cache, context.slot_mapping)
    plan = _static_plan(spec, context) if context.is_static else _step_plan(spec, context)
    fits = out.is_contiguous() and _is_aligned(out)
    target = out if fits else torch.empty_like(out, memory_format=torch.contiguous_format)
    plan.run(_readable(q), (k_cache, v_cache), target)
    if target is not out:
        out.copy_(target)


def why_not_captured(
    q: torch.Tensor, k_cache: torch.Tensor, scale: float, window_size: int, context: AttentionContext
) -> str | None:
    """Why a call with this static context cannot be captured; see `RefuseCapture`."""
    if not q.numel() or not k_cache.shape[0]:
        return None
    if _spec(q, k_cache, scale, window_size) not in context.scratch.get(PLANS, ()):
        return "flashinfer has no plan for this context yet; run the call once before it is captured"
    if Lengths not in context.scratch:
        return "nobody plans for this context; call its plan_for(step) whenever it was filled, also before a replay"
    return None


def _spec(q: torch.Tensor, k_cache: torch.Tensor, scale: float, window_size: int) -> PlanSpec:
    num_rows, num_heads, head_size = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    return PlanSpec(q.device, q.dtype, num_rows, num_heads, num_kv_heads, head_size, block_size, scale, window_size)


def _readable(q: torch.Tensor) -> torch.Tensor:
    """`q`, or a copy where FlashInfer could not load whole vectors of a head."""
    return q if q.stride(2) == 1 and _is_aligned(q) else q.clone(memory_format=torch.contiguous_format)


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether every head begins where a whole vector can be loaded."""
    size = tensor.element_size()
    return tensor.data_ptr() % ALIGNED_BYTES == 0 and not any(s * size % ALIGNED_BYTES for s in tensor.stride()[:-1])


def _is_capturing(tensor: torch.Tensor) -> bool:
    return is_capturing_whole() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


# ---- a step's own context


class _OfThread(threading.local):
    """What uncaptured steps of one thread use, by the stream."""

    def __init__(self) -> None:
        self.memories: dict[int, Memory] = {}
        self.wrappers: dict[tuple[int, PlanSpec, bool], Wrapper] = {}


class _StepPlan:
    """For all layers of one kind in one step."""

    def __init__(self, spec: PlanSpec, context: AttentionContext) -> None:
        self.num_tokens = context.num_tokens
        if not self.num_tokens:
            return
        is_decode = context.is_decode
        threads = attention_backend().memory.setdefault((__name__, "threads"), _OfThread())
        stream = torch.cuda.current_stream(spec.device).cuda_stream if spec.device.type == "cuda" else 0
        memory = threads.memories.setdefault(stream, Memory())
        key = (stream, spec._replace(num_rows=0), is_decode)
        wrapper = threads.wrappers.get(key)
        if wrapper is None:
            wrapper = threads.wrappers[key] = Wrapper(key[1], memory, is_decode=is_decode)
        self.wrapper = wrapper
        self._pages = pages_of_step(lengths_of(context), spec.block_size)
        self._listed = self._pages.list(context.block_table)

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        """Attends, and writes zeros behind the last token."""
        num_tokens = self.num_tokens
        if num_tokens:
            if self.wrapper.planned is not self:  # the first layer, or another step came between
                self.wrapper.plan(self._pages, self._listed, self)
                note_built(self.wrapper)
            self.wrapper.run(q[:num_tokens], caches, out[:num_tokens])
        if num_tokens < out.shape[0]:
            out[num_tokens:].zero_()


def _step_plan(spec: PlanSpec, context: AttentionContext) -> _StepPlan:
    plan: _StepPlan | None = context.scratch.get(spec)
    if plan is None:
        plan = context.scratch[spec] = _StepPlan(spec, context)
    return plan


# ---- a static context


class _StaticPlan:
    """For a static context: renewed at the same addresses for each step that fills it.

    Rows may be requests of one token each, as far as is known from the step that comes first. When another one shows
    that they are not, the plan goes over to the wrapper for prompts for good, and its `key` changes.
    """

    def __init__(self, spec: PlanSpec, context: AttentionContext) -> None:
        self._spec = spec
        self._memory: Memory = attention_backend().memory.setdefault((__name__, "static"), Memory())
        self._block_table = context.block_table
        self._num_slots = context.num_reqs
        with torch.inference_mode(False):
            self._rows = torch.arange(spec.num_rows, device=spec.device).view(-1, 1, 1)
            self._is_padding = torch.zeros_like(self._rows, dtype=torch.bool)
        self._is_decode = spec.num_rows <= self._num_slots
        """Whether rows were requests of one token each so far."""
        self._wrapper: Wrapper | None = None
        """None while there may be no plan: while its kernels are compiled beside the steps."""

    @property
    def is_made(self) -> bool:
        """Whether it can run."""
        return self._wrapper is not None

    def _make(self) -> Wrapper:
        spec, table, is_decode = self._spec, self._block_table, self._is_decode
        num_reqs = spec.num_rows if is_decode else self._num_slots + 1
        buffers = Buffers.of(num_reqs, table.numel() + spec.num_rows, spec.device)
        return Wrapper(spec, self._memory, is_decode=is_decode, buffers=buffers)

    def renew(self, lengths: Lengths) -> None:
        """See `Plan`. Raises: as `Wrapper.plan`."""
        spec, wrapper = self._spec, self._wrapper
        self._is_decode = self._is_decode and max(lengths.query_lens, default=0) <= 1
        if not may_plan(spec, self._is_decode):
            self._wrapper = None  # its plan is of an earlier step: nothing may follow it
            return
        if wrapper is None or wrapper.is_decode != self._is_decode:
            wrapper = self._make()
        if wrapper.is_decode:
            pages = pages_of_decode(lengths, spec.block_size, spec.num_rows)
        else:
            pages = pages_of_slots(lengths, spec.block_size, spec.num_rows, self._num_slots)
        with torch.inference_mode():
            wrapper.plan(pages, pages.list(self._block_table), self)
            torch.ge(self._rows, sum(lengths.query_lens), out=self._is_padding)
        self._wrapper = wrapper
        note_built(wrapper)

    @property
    def key(self) -> Hashable:
        """See `Plan`. The wrapper itself too: a capture reads its buffers, and another one's is planned into others."""
        return (self._wrapper, self._wrapper.key) if self._wrapper is not None else None

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        """Attends, and writes zeros behind the last token."""
        assert self._wrapper is not None
        self._wrapper.run(q, caches, out)
        out.masked_fill_(self._is_padding, 0)


def _static_plan(spec: PlanSpec, context: AttentionContext) -> _StaticPlan:
    plans = plans_of(context)
    plan: _StaticPlan | None = plans.get(spec)
    if plan is None or not plan.is_made:
        if _is_capturing(context.slot_mapping):
            raise CaptureError(
                "paged_attention: flashinfer expects a plan for the static context before a capture, got none; run "
                "the step once before it is captured"
            )
        plan = plan or _StaticPlan(spec, context)
        plan.renew(lengths_of(context))
        plans[spec] = plan
    return plan


def _attend_without(spec: PlanSpec, q: torch.Tensor, *others: Any) -> None:
    """Does a call with torch's own operators; may wait for the device. Raises: KernelNotReadyError in a capture."""
    context = others[-1]
    if _is_capturing(q):
        raise KernelNotReadyError(
            "paged_attention: expected FlashInfer's kernels to be compiled before a capture, got one while that is "
            "left to others (defer_compiles); capture again later, or outside of defer_compiles"
        )
    if not context.is_static:
        torch_native.paged_attention(q, *others)
        return
    # There will be a plan when a later step, or what comes before a capture, renews those of the context.
    plans = plans_of(context)
    if spec not in plans:
        plans[spec] = _StaticPlan(spec, context)
    longest = max(lengths_of(context).seq_lens, default=0)
    torch_static.paged_attention(q, *others, longest=longest)
