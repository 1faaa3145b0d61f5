"""A stand-in for FlashInfer: its wrappers for paged attention, with the arguments of FlashInfer 0.6, computed by torch.

It is not FlashInfer. What it attends to comes from the planned lists alone, read from the buffers on the device; it
refuses what FlashInfer would refuse or would silently get wrong: a run without a plan, with a plan that another wrapper
wrote over, with buffers that moved since the wrapper was made, with other rows than planned.
"""

from __future__ import annotations

import types
from typing import Any

import torch

CALLS: list[str] = []
"""What was called, in order: "decode plan", "prefill run" and so on."""
OVERFLOWS: list[int] = []
"""Sizes of workspaces in which a plan does not fit, in bytes."""
INFO: list[int] = [0]
"""What a plan has for launches beside addresses."""
_OWNERS: dict[int, object] = {}
"""By the address of a workspace: the wrapper whose plan lies there."""


class _Wrapper:
    _kind = ""
    _takes_any_group = True

    def __init__(self, floats: torch.Tensor, layout: str, use_cuda_graph: bool, lists: tuple[Any, ...]) -> None:
        assert layout == "NHD"
        assert floats.dtype == torch.uint8
        assert use_cuda_graph == all(isinstance(each, torch.Tensor) for each in lists)
        self._graph = use_cuda_graph
        self._lists = lists
        self._floats = floats
        self._ints = torch.zeros(8, dtype=torch.uint8)
        self._plan_info: list[int] | None = None
        self._addresses = self._where() if use_cuda_graph else None

    def _where(self) -> list[int]:
        return [each.data_ptr() for each in (self._floats, self._ints, *self._lists)]

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert self._plan_info is None or not self._graph, "a captured workspace was replaced"
        self._floats, self._ints = float_workspace_buffer, int_workspace_buffer
        self._addresses = self._where() if self._graph else None

    def _planned(self, starts: torch.Tensor, indptr: Any, indices: Any, last: Any, sizes: Any, options: Any) -> None:
        CALLS.append(f"{self._kind} plan")
        heads, kv_heads, head_size, page_size, dtype = sizes
        for host in (starts, indptr, last):
            assert host.device.type == "cpu"
            assert host.dtype == torch.int32
        assert indices.dtype == torch.int32
        assert len(indices) == indptr[-1]
        assert heads % kv_heads == 0
        assert self._takes_any_group or heads // kv_heads in (1, 2, 3, 4, 8), "there is no such decode kernel"
        if self._floats.numel() in OVERFLOWS:
            raise RuntimeError("Buffer overflow when allocating memory, bytes available in AlignedAllocator.")
        given = (starts, indptr, indices, last)
        if self._graph:
            for buffer, values in zip(self._lists, given, strict=True):
                assert len(values) <= len(buffer) if values is indices else len(values) == len(buffer)
                buffer[: len(values)].copy_(values)
        else:
            self._lists = tuple(each.clone() for each in given)
        self._num_rows = int(starts[-1])
        self._sizes = (heads, kv_heads, head_size, page_size, dtype)
        self._scale, self._window_left = options["sm_scale"], options["window_left"]
        self._plan_info = list(INFO)
        _OWNERS[self._ints.data_ptr()] = self

    def run(self, q: torch.Tensor, paged_kv_cache: Any, *, out: torch.Tensor) -> torch.Tensor:
        CALLS.append(f"{self._kind} run")
        k_cache, v_cache = paged_kv_cache
        assert self._plan_info is not None, "run without a plan"
        assert _OWNERS[self._ints.data_ptr()] is self, "a stale plan: another wrapper has planned in its workspace"
        assert self._addresses in (None, self._where()), "buffers moved"
        heads, kv_heads, head_size, page_size, dtype = self._sizes
        assert q.shape == out.shape == (self._num_rows, heads, head_size)
        assert k_cache.shape[1:] == v_cache.shape[1:] == (page_size, kv_heads, head_size)
        assert q.dtype == out.dtype == k_cache.dtype == dtype
        assert out.is_contiguous()
        for each in (q, k_cache, v_cache, out):
            assert each.stride(-1) == 1
            assert each.data_ptr() % 16 == 0, "a misaligned address"
            assert not any(stride * each.element_size() % 16 for stride in each.stride()[:-1]), "a misaligned address"
        assert k_cache.stride() == v_cache.stride()
        starts, indptr, indices, last = (each.tolist() for each in self._lists)
        for request, tokens in enumerate(last):
            rows = slice(starts[request], starts[request + 1])
            pages = indices[indptr[request] : indptr[request + 1]]
            if rows.start == rows.stop:
                continue
            length = (len(pages) - 1) * page_size + tokens if pages else 0
            keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            out[rows] = self._attend(q[rows], keys, values)
        return out

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        num_rows, length, group = len(q), len(keys), q.shape[1] // keys.shape[1]
        own = torch.arange(length - num_rows, length)[:, None]
        at = torch.arange(length)[None]
        hidden = at > own
        if self._window_left >= 0:
            hidden |= at < own - self._window_left
        keys, values = (each.double().repeat_interleave(group, 1).transpose(0, 1) for each in (keys, values))
        scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) * self._scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return (weights @ values).transpose(0, 1).to(q.dtype)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    _kind = "decode"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        own = torch.zeros(len(paged_kv_indptr_buffer), dtype=torch.int32) if use_cuda_graph else None  # type: ignore
        lists = (own, paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, lists)
        self._takes_any_group = use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None:
        assert kv_data_type == q_data_type
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type)
        starts = torch.arange(len(indptr), dtype=torch.int32)
        options = {"sm_scale": sm_scale, "window_left": window_left}
        self._planned(starts, indptr, indices, last_page_len, sizes, options)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    _kind = "prefill"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
    ) -> None:
        lists = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, lists)
        self._max_rows: int | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float,
        window_left: int = -1,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        assert kv_data_type == q_data_type
        if self._graph:
            self._max_rows = self._max_rows or int(qo_indptr[-1])
            assert int(qo_indptr[-1]) <= self._max_rows
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type)
        options = {"sm_scale": sm_scale, "window_left": window_left}
        self._planned(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, sizes, options)


def module() -> types.ModuleType:
    """To be put into `sys.modules` as `flashinfer`; forgets what was called before."""
    CALLS.clear()
    OVERFLOWS.clear()
    _OWNERS.clear()
    INFO[:] = [0]
    made = types.ModuleType("flashinfer")
    made.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    made.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    return made
