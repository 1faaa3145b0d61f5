"""The Triton kernels on the device, against plain loops in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from piecework import use_context
from piecework.ops import attention
from piecework.ops.attention import AttentionContext, choose_implementation, paged_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_only")]

BLOCK = 16
SHAPES = {"grouped": (8, 2, 128), "odd": (6, 2, 80), "alone": (4, 4, 64), "wide group": (32, 2, 64)}
"""Query heads, KV heads, head size."""
BATCHES = {
    "decode": ((1, 1, 1, 1), (300, 1, 17, 64)),
    "ragged": ((5, 1, 0, 17), (5, 200, 0, 33)),
}
"""New tokens and length of each request."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def build(
    query_lens: Sequence[int], seq_lens: Sequence[int], first_block: int = 0
) -> tuple[AttentionContext, list[list[int]]]:
    """A context whose blocks lie in any order, and its block tables."""
    needed = [-(-seq_len // BLOCK) for seq_len in seq_lens]
    order = [first_block + i for i in torch.randperm(sum(needed) + 4).tolist()]
    tables = [[order.pop() for _ in range(n)] for n in needed]
    context = AttentionContext.build(
        query_lens=query_lens, seq_lens=seq_lens, block_tables=tables, block_size=BLOCK, device="cuda"
    )
    return context, tables


def grown(context: AttentionContext, num_tokens: int, num_reqs: int) -> AttentionContext:
    """The static copy that a runtime would make: empty requests and padded tokens at the end."""
    table = context.block_table
    more = num_reqs - context.num_reqs
    fields = {
        "slot_mapping": torch.nn.functional.pad(
            context.slot_mapping, (0, num_tokens - len(context.slot_mapping)), value=-1
        ),
        "query_start_loc": torch.cat([context.query_start_loc, context.query_start_loc[-1:].expand(more)]),
        "seq_lens": torch.nn.functional.pad(context.seq_lens, (0, more)),
        "block_table": torch.nn.functional.pad(table, (0, 3, 0, more)),
    }
    return context.as_static(fields)


def expected(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: AttentionContext, tables: list[list[int]],
    scale: float, window: int,
) -> torch.Tensor:  # fmt: skip
    """[tokens of the step, heads, head size], float64, from caches in which the new tokens are."""
    rows = []
    group = q.shape[1] // k_cache.shape[2]
    token = 0
    for query_len, seq_len, blocks in zip(context.query_lens_host, context.seq_lens_host, tables, strict=True):
        keys = k_cache[blocks].double().flatten(0, 1)[:seq_len].repeat_interleave(group, 1)
        values = v_cache[blocks].double().flatten(0, 1)[:seq_len].repeat_interleave(group, 1)
        for position in range(seq_len - query_len, seq_len):
            first = max(0, position + 1 - window) if window else 0
            scores = torch.einsum("hd,shd->hs", q[token].double(), keys[first : position + 1]) * scale
            rows.append(torch.einsum("hs,shd->hd", scores.softmax(-1), values[first : position + 1]))
            token += 1
    return torch.stack(rows)


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_against_float64(dtype: torch.dtype, shape: str, batch: str, window: int) -> None:
    num_heads, num_kv_heads, head_size = SHAPES[shape]
    query_lens, seq_lens = BATCHES[batch]
    context, tables = build(query_lens, seq_lens)
    total, padded = sum(query_lens), sum(query_lens) + 3
    num_blocks = sum(map(len, tables)) + 4
    k_cache = torch.randn(num_blocks, BLOCK, num_kv_heads, head_size, device="cuda").to(dtype)
    v_cache = torch.randn_like(k_cache)
    for table, seq_len in zip(tables, seq_lens, strict=True):
        if table and seq_len % BLOCK:  # what was never written may be anything
            k_cache[table[-1], seq_len % BLOCK :] = float("nan")
            v_cache[table[-1], seq_len % BLOCK :] = float("nan")
    # As in a model: views of one projection, not contiguous.
    heads = torch.randn(padded, num_heads + 2 * num_kv_heads, head_size, device="cuda").to(dtype)
    heads[total:] = float("nan")
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
    out = torch.full((padded, num_heads, head_size), float("nan"), device="cuda", dtype=dtype)
    static = grown(context, padded, num_reqs=8)
    spec = attention._spec(q, k, k_cache, window, static)
    assert choose_implementation(spec).name == "triton"
    stored = k_cache.clone(), v_cache.clone()
    for cache, new in zip(stored, (k, v), strict=True):
        cache.view(-1, num_kv_heads, head_size)[context.slot_mapping] = new[:total]
    with use_context(static):
        paged_attention(q, k, v, k_cache, v_cache, out, head_size**-0.5, window)
    for cache, right in zip((k_cache, v_cache), stored, strict=True):
        assert torch.equal(cache.nan_to_num(7), right.nan_to_num(7))
    want = expected(q, k_cache, v_cache, context, tables, head_size**-0.5, window)
    assert not out[total:].any(), "padded rows are zeros"
    error = (out[:total].double() - want).norm() / want.norm()
    assert error < TOLERANCE[dtype], float(error)


def test_a_cache_of_more_elements_than_an_int32_counts() -> None:
    num_kv_heads, head_size = 8, 128
    num_blocks = (1 << 31) // (BLOCK * num_kv_heads * head_size) + 64
    k_cache = torch.empty(num_blocks, BLOCK, num_kv_heads, head_size, device="cuda", dtype=torch.bfloat16)
    v_cache = torch.empty_like(k_cache)
    assert k_cache.numel() > 1 << 31
    context, tables = build((3, 40), (3, 40), first_block=num_blocks - 8)
    k_cache[num_blocks - 8 :] = v_cache[num_blocks - 8 :] = float("nan")
    q = torch.randn(43, 8, head_size, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn_like(q), torch.randn_like(q)
    out = torch.empty_like(q)
    with use_context(grown(context, 43, num_reqs=2)):
        paged_attention(q, k, v, k_cache, v_cache, out, head_size**-0.5)
    want = expected(q, k_cache, v_cache, context, tables, head_size**-0.5, 0)
    assert (out.double() - want).norm() / want.norm() < TOLERANCE[torch.bfloat16]
