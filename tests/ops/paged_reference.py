"""Paged attention as plain loops in float64, and random steps to compare an implementation with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn.functional import pad

from piecework.ops.attention import AttentionContext


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """What hypothesis draws; everything else of a step follows from it."""

    requests: list[tuple[int, int]]
    """(new tokens, cached tokens) of each."""
    heads: tuple[int, int]
    """(query heads, KV heads)."""
    head_size: int
    block_size: int
    window_size: int
    padding: int
    """Rows that no request has."""
    empty_slots: int
    """Of the static copy, behind the requests."""
    spare_blocks: int
    """Of each row of the block table."""
    seed: int


def batches(max_new_tokens: int = 6) -> st.SearchStrategy[Batch]:
    return st.builds(
        Batch,
        requests=st.lists(st.tuples(st.integers(0, max_new_tokens), st.integers(0, 9)), max_size=5),
        heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (10, 1)]),
        head_size=st.sampled_from([1, 5, 8, 16]),
        block_size=st.sampled_from([1, 3, 4, 16]),
        window_size=st.sampled_from([0, 0, 1, 2, 5, 100]),
        padding=st.integers(0, 4),
        empty_slots=st.integers(0, 3),
        spare_blocks=st.integers(0, 2),
        seed=st.integers(0, 2**20),
    )


@dataclasses.dataclass(kw_only=True)
class Step:
    """The arguments of one call. Rows of padding and slots that were never written hold NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    scale: float
    window_size: int
    context: AttentionContext

    def run(self, implementation: Any, context: AttentionContext | None = None) -> tuple[torch.Tensor, ...]:
        """(out, k_cache, v_cache) after a call on copies of the caches; `out` began as NaN, between its rows too."""
        caches = self.k_cache.clone(), self.v_cache.clone()
        num_tokens, num_heads, head_size = self.q.shape
        memory = torch.full((num_heads, num_tokens + 1, 2 * head_size), float("nan"), dtype=self.q.dtype)
        out = memory.transpose(0, 1)[:num_tokens, :, :head_size]
        with torch.inference_mode():
            context = self.context if context is None else context
            implementation(self.q, self.k, self.v, *caches, out, self.scale, self.window_size, context)
        assert memory[:, num_tokens:].isnan().all()
        assert memory[:, :, head_size:].isnan().all()
        return (out, *caches)

    def expected(self) -> tuple[torch.Tensor, ...]:
        """The same in loops; `out` in float64."""
        caches = self.k_cache.clone(), self.v_cache.clone()
        block_size = self.k_cache.shape[1]
        for token, slot in enumerate(self.context.slot_mapping.tolist()):
            if slot != -1:
                for new, cache in zip((self.k, self.v), caches, strict=True):
                    cache[slot // block_size, slot % block_size] = new[token]
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        group = self.q.shape[1] // self.k.shape[1]
        start, table = self.context.query_start_loc.tolist(), self.context.block_table.tolist()
        for request, seq_len in enumerate(self.context.seq_lens.tolist()):
            for token in range(start[request], start[request + 1]):
                last = seq_len - start[request + 1] + token
                first = max(0, last + 1 - self.window_size) if self.window_size else 0
                blocks = [table[request][position // block_size] for position in range(first, last + 1)]
                offsets = [position % block_size for position in range(first, last + 1)]
                keys, values = (cache[blocks, offsets].double() for cache in caches)
                for head in range(self.q.shape[1]):
                    weights = (keys[:, head // group] @ self.q[token, head].double() * self.scale).softmax(0)
                    out[token, head] = weights @ values[:, head // group]
        return (out, *caches)


def make_step(batch: Batch, dtype: torch.dtype) -> Step:
    """q, k and v are views of one projection, the caches of one tensor; the blocks of the requests lie anywhere."""
    generator = torch.Generator().manual_seed(batch.seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    num_heads, num_kv_heads = batch.heads
    num_tokens = sum(new for new, _ in batch.requests)
    projection = randn(num_tokens + batch.padding, num_heads + 2 * num_kv_heads, batch.head_size)
    projection[num_tokens:] = float("nan")
    q, k, v = projection.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    seq_lens = [new + cached for new, cached in batch.requests]
    num_used = [-(-seq_len // batch.block_size) for seq_len in seq_lens]
    num_blocks = sum(num_used) + 2
    order = iter(torch.randperm(num_blocks, generator=generator).tolist())
    blocks = [[next(order) for _ in range(used)] for used in num_used]
    caches = torch.full((num_blocks, 2, batch.block_size, num_kv_heads, batch.head_size), float("nan"), dtype=dtype)
    for (_, cached), request_blocks in zip(batch.requests, blocks, strict=True):
        for position in range(cached):
            block = request_blocks[position // batch.block_size]
            caches[block, :, position % batch.block_size] = randn(2, num_kv_heads, batch.head_size)
    context = AttentionContext.build(
        query_lens=[new for new, _ in batch.requests],
        seq_lens=seq_lens,
        block_tables=blocks,
        block_size=batch.block_size,
    )
    slots = context.slot_mapping
    for token in range(0, num_tokens, 5):  # some tokens are in the cache already
        if batch.seed % 2:
            slot = int(slots[token])
            caches[slot // batch.block_size, :, slot % batch.block_size] = randn(2, num_kv_heads, batch.head_size)
            slots[token] = -1
    # Past a request's length the table may hold any block that exists.
    table = pad(context.block_table, (0, batch.spare_blocks), value=num_blocks - 1)
    context = dataclasses.replace(context, slot_mapping=pad(slots, (0, batch.padding), value=-1), block_table=table)
    return Step(
        q=q,
        k=k,
        v=v,
        k_cache=caches[:, 0],
        v_cache=caches[:, 1],
        scale=batch.head_size**-0.5,
        window_size=batch.window_size,
        context=context,
    )


def static_copy(context: AttentionContext, *, empty_slots: int = 0, spare_blocks: int = 0) -> AttentionContext:
    """What the runtime makes of a step's context for a capture of a whole forward; the tokens are padded already."""
    last = context.query_start_loc[-1:].expand(empty_slots)
    return context.as_static(
        {
            "slot_mapping": context.slot_mapping.clone(),
            "query_start_loc": torch.cat((context.query_start_loc, last)),
            "seq_lens": pad(context.seq_lens, (0, empty_slots)),
            "block_table": pad(context.block_table, (0, spare_blocks, 0, empty_slots)),
        }
    )


def check(step: Step, implementation: Any, context: AttentionContext, *, rtol: float, atol: float) -> None:
    """The outputs of a call are close to the loops', what it wrote to the caches is the same to the bit."""
    got, expected = step.run(implementation, context), step.expected()
    torch.testing.assert_close(got[0].double(), expected[0], rtol=rtol, atol=atol)
    num_tokens = int(step.context.query_start_loc[-1])
    assert torch.equal(got[0][num_tokens:], torch.zeros_like(got[0][num_tokens:]))
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
