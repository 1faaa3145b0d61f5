"""One of FlashInfer's wrappers for paged attention, and the memory that its plan and its kernels need.

Imports FlashInfer when a wrapper is made. FlashInfer compiles its kernels at the first plan of a kind, or takes what
its `flashinfer-jit-cache` package has.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

from .flashinfer_pages import Pages

_FLOAT_BYTES = (128 << 20, 512 << 20, 2 << 30)
"""Sizes of the memory for partial results. The first is what FlashInfer asks for; a plan that does not fit gets the
next."""
_INT_BYTES = 8 << 20
"""Memory of a plan itself."""
_PLAIN_GROUPS = (1, 2, 3)
"""Query heads per key head for which decode takes no tensor cores: they pay from 4 on, and do every number."""


class PlanSpec(NamedTuple):
    """What calls have in common that one plan serves; key of a plan in the context's scratch."""

    device: torch.device
    dtype: torch.dtype
    """Of q, of the cache and of what comes out."""
    num_rows: int
    """Rows of q, padding included."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    scale: float
    window_size: int
    """As in `paged_attention`: 0 for none."""

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether a decode wrapper is to."""
        return self.num_heads // self.num_kv_heads not in _PLAIN_GROUPS


class Memory:
    """What wrappers that run one after the other on one stream share."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[object, ...], torch.Tensor] = {}

    def floats(self, device: torch.device, num_bytes: int) -> torch.Tensor:
        """For partial results, which are of no use when a call has ended."""
        return self._tensor(("floats", num_bytes), device, num_bytes)

    def ints(self, spec: PlanSpec, is_decode: bool) -> torch.Tensor:
        """For a plan: calls of different kinds in one step have different ones, buckets of one kind the same."""
        return self._tensor((spec._replace(num_rows=0), is_decode), spec.device, _INT_BYTES)

    def _tensor(self, key: tuple[object, ...], device: torch.device, num_bytes: int) -> torch.Tensor:
        name = (*key, device)
        known = self._tensors.get(name)
        if known is None:
            # FlashInfer wants zeros, and outside of inference mode too. Not out of a capture's pool: never in one.
            with torch.inference_mode(False):
                known = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._tensors[name] = known
        return known


class Buffers(NamedTuple):
    """int32, at addresses that a capture holds: what FlashInfer copies a plan's lists to."""

    query_start: torch.Tensor
    page_start: torch.Tensor
    pages: torch.Tensor
    last_page_len: torch.Tensor

    @classmethod
    def of(cls, num_reqs: int, max_pages: int, device: torch.device) -> Buffers:
        """For so many requests, which have at most `max_pages` together."""
        with torch.inference_mode(False):
            sizes = (num_reqs + 1, num_reqs + 1, max_pages, num_reqs)
            return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))


class Wrapper:
    """Plans and runs calls of one kind.

    Args:
        is_decode: every row is a request of its own.
        buffers: for captures: every plan has as many rows and requests as the first; None: any plan goes.
    """

    def __init__(self, spec: PlanSpec, memory: Memory, *, is_decode: bool, buffers: Buffers | None = None) -> None:
        self.spec, self.is_decode = spec, is_decode
        self.planned: object = None
        """What it was planned for last, by whoever called `plan`."""
        self._memory = memory
        self._ints = memory.ints(spec, is_decode)
        self._copied: torch.cuda.Event | None = None
        """The plan is copied to the device when this has happened: not before may the next one be written."""
        self._sizes = list(_FLOAT_BYTES)
        self._is_fixed = False
        flashinfer: Any = importlib.import_module("flashinfer")
        floats = memory.floats(spec.device, self._sizes[0])
        graph: dict[str, Any] = {"use_cuda_graph": buffers is not None}
        if is_decode:
            if buffers is not None:
                graph |= {
                    "paged_kv_indptr_buffer": buffers.page_start,
                    "paged_kv_indices_buffer": buffers.pages,
                    "paged_kv_last_page_len_buffer": buffers.last_page_len,
                }
            self._wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                floats, "NHD", use_tensor_cores=spec.uses_tensor_cores, **graph
            )
        else:
            if buffers is not None:
                graph |= {
                    "qo_indptr_buf": buffers.query_start,
                    "paged_kv_indptr_buf": buffers.page_start,
                    "paged_kv_indices_buf": buffers.pages,
                    "paged_kv_last_page_len_buf": buffers.last_page_len,
                }
            self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(floats, "NHD", **graph)
        self._is_captured = buffers is not None
        self._wrapper.reset_workspace_buffer(floats, self._ints)

    def plan(self, pages: Pages, listed: torch.Tensor, of: object) -> None:
        """Plans for these requests, on the current stream; `listed`: what `pages.list` returned.

        Waits until the plan before is on the device, which steps that follow closely may have to.

        Raises:
            Exception: whatever FlashInfer raises, such as where a plan needs too much memory.
        """
        self.planned = None
        if self._copied is not None:
            self._copied.synchronize()
        while True:
            try:
                self._plan(pages, listed)
                break
            except Exception as error:
                # A capture holds the address: there it may not move any more, and does not have to.
                if "AlignedAllocator" not in str(error) or self._is_fixed or len(self._sizes) == 1:
                    raise
                del self._sizes[0]
                self._wrapper.reset_workspace_buffer(self._memory.floats(self.spec.device, self._sizes[0]), self._ints)
        self._is_fixed = self._is_captured
        if self.spec.device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self.spec.device))
        self.planned = of

    def _plan(self, pages: Pages, listed: torch.Tensor) -> None:
        spec = self.spec
        common: dict[str, Any] = {
            "sm_scale": spec.scale,
            "window_left": spec.window_size - 1,  # tokens before its own; -1: all
            "q_data_type": spec.dtype,
            "kv_data_type": spec.dtype,
        }
        lists = (pages.page_start, listed, pages.last_page_len)
        sizes = (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.block_size)
        if self.is_decode:
            self._wrapper.plan(*lists, *sizes, **common)
        else:
            self._wrapper.plan(pages.query_start, *lists, *sizes, causal=True, **common)

    @property
    def key(self) -> tuple[int, ...]:
        """What a capture freezes of the plan: numbers that FlashInfer's launches take from the host."""
        info = getattr(self._wrapper, "_plan_info", None)  # there is no public name for it
        return tuple([int(number) for number in info]) if info is not None else ()

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        """Attends as planned; q and out [rows, num_heads, head_size], out contiguous."""
        self._wrapper.run(q, caches, out=out)
