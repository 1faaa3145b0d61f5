"""What bench_attention.py measures with: the tensors of a step in many layers, ways to attend, what is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from piecework.ops.attention import AttentionContext
from piecework.ops.triton.kv_store import store
from piecework.ops.triton.paged_attention import prepare
from piecework.ops.triton.tuning import Tuning

BLOCK_SIZE = 16
COLD_BYTES = 160 << 20
"""Caches of all layers: three times the L2 cache of an H200."""
MAX_BYTES = 48 << 30
MAX_CHECKED_BYTES = 4 << 30
"""Of a layer's cache, whose requests are compared with float64: some of them where it is larger."""
REFERENCE_ROWS = 256
"""Rows of q that the reference takes at once: scores in float64 are large."""

Calls = list[Callable[[], Any]]
"""One a layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a row: one step."""

    num_reqs: int
    new: int
    cached: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128

    @property
    def name(self) -> str:
        return f"{self.num_reqs} x {self.new} + {self.cached}"

    @property
    def length(self) -> int:
        return self.new + self.cached

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)

    @property
    def kv_bytes(self) -> int:
        return 2 * 2 * self.num_reqs * self.length * self.num_kv_heads * self.head_size

    @property
    def flops(self) -> int:
        seen = self.new * self.cached + self.new * (self.new + 1) // 2
        return 4 * self.num_reqs * self.num_heads * self.head_size * seen


def dtype_on(device: torch.device) -> torch.dtype:
    """Of all tensors of a step."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Layers:
    """Tensors of one step in as many layers as make the L2 cache cold."""

    def __init__(self, shape: Shape, device: torch.device, at_least: int) -> None:
        self.shape, self.device = shape, device
        num_blocks = -(-shape.length // BLOCK_SIZE)
        cold = -(-COLD_BYTES // shape.kv_bytes)
        count = min(max(at_least, min(cold, 160)), max(1, MAX_BYTES // shape.kv_bytes)) if device.type == "cuda" else 2
        order = torch.randperm(shape.num_reqs * num_blocks).view(shape.num_reqs, num_blocks).tolist()
        self.own = AttentionContext.build(
            query_lens=[shape.new] * shape.num_reqs,
            seq_lens=[shape.length] * shape.num_reqs,
            block_tables=order,
            block_size=BLOCK_SIZE,
            device=device,
        )
        # A decode step is captured with the static copy, a prompt is not.
        self.context = self.own.as_static({}) if shape.new == 1 else self.own
        rows = shape.num_reqs * shape.new
        dtype = dtype_on(device)
        heads = shape.num_heads + 2 * shape.num_kv_heads
        projections = torch.randn(count, rows, heads, shape.head_size, device=device, dtype=dtype)
        self.qkv = [p.split([shape.num_heads, *[shape.num_kv_heads] * 2], 1) for p in projections]
        cache = (shape.num_reqs * num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_size)
        self.caches = [torch.randn(2, *cache, device=device, dtype=dtype).unbind() for _ in range(count)]
        self.outs = [torch.empty(rows, shape.num_heads, shape.head_size, device=device, dtype=dtype) for _ in self.qkv]

    def tensors(self) -> list[tuple[torch.Tensor, ...]]:
        """q, k, v, k_cache, v_cache and out of each layer."""
        return [(*qkv, *caches, out) for qkv, caches, out in zip(self.qkv, self.caches, self.outs, strict=True)]

    def fresh_context(self) -> AttentionContext:
        """One of its own for each way and tuning: what is kept in it goes away with it."""
        return dataclasses.replace(self.context, scratch={})

    def ours(self, tuning: Tuning | None = None) -> Calls:
        """The Triton kernels."""
        context, shape = self.fresh_context(), self.shape
        calls = [prepare(*tensors, shape.scale, 0, _tuning=tuning) for tensors in self.tensors()]
        return [lambda call=call: call(context) for call in calls]

    def stores(self) -> Calls:
        """What is a part of the other ways: K and V go to the cache."""
        slots = self.context.slot_mapping
        return [lambda kv=kv, c=c: store(*kv, *c, slots) for (_, *kv), c in zip(self.qkv, self.caches, strict=True)]

    def sdpa(self) -> Calls:
        """The same bytes in the order in which they lie. Without a cached prefix, or for one new token."""
        shape = self.shape
        calls: Calls = []
        for (q, *_), caches in zip(self.qkv, self.caches, strict=True):
            query = q.view(shape.num_reqs, shape.new, *q.shape[1:]).transpose(1, 2)
            key, value = (self._in_order(cache) for cache in caches)
            calls.append(lambda q=query, k=key, v=value: self._attend(q, k, v))
        return calls

    def reference(self) -> torch.Tensor:
        """[checked requests, new, num_heads, head_size], float64: what the first layer's output is to be."""
        return torch.stack([self._attend_in_float64(request) for request in self._checked()])

    def error(self, call: Callable[[], Any], reference: torch.Tensor) -> float:
        """By relative norm, of the first layer's output after its call."""
        shape, out = self.shape, self.outs[0]
        out.fill_(float("nan"))
        call()
        got = out.view(shape.num_reqs, shape.new, *out.shape[1:])[list(self._checked())].double()
        return float((got - reference).norm() / reference.norm())

    def _checked(self) -> range:
        return range(0, self.shape.num_reqs, -(-self.shape.kv_bytes // MAX_CHECKED_BYTES))

    def _attend_in_float64(self, request: int) -> torch.Tensor:
        """After the new tokens have been stored."""
        shape = self.shape
        blocks = self.context.block_table[request].long()
        key, value = (cache[blocks].flatten(0, 1)[: shape.length].double() for cache in self.caches[0])
        first = request * shape.new
        query = self.qkv[0][0][first : first + shape.new].double().unflatten(1, (shape.num_kv_heads, -1))
        at = torch.arange(shape.length, device=self.device)
        outs = []
        for start in range(0, shape.new, REFERENCE_ROWS):
            rows = query[start : start + REFERENCE_ROWS]
            own = at[shape.cached + start :][: len(rows)]
            scores = torch.einsum("rkgd,skd->rkgs", rows, key) * shape.scale
            scores.masked_fill_((at > own[:, None])[:, None, None], float("-inf"))
            outs.append(torch.einsum("rkgs,skd->rkgd", scores.softmax(-1), value).flatten(1, 2))
        return torch.cat(outs)

    def _in_order(self, cache: torch.Tensor) -> torch.Tensor:
        by_request = cache.view(self.shape.num_reqs, -1, *cache.shape[2:])
        return by_request[:, : self.shape.length].transpose(1, 2)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        is_causal = self.shape.new > 1
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
