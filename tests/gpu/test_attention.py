"""The Triton kernels on the device, against plain loops in float64: launched, launched quickly, and captured."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from piecework import use_context
from piecework.ops.attention import AttentionContext, AttentionSpec, choose_implementation, paged_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_only")]

BLOCK = 16
SHAPES = {
    "grouped": (8, 2, 128),
    "odd": (6, 2, 80),
    "alone": (4, 4, 64),
    "wide group": (32, 1, 64),
    "large": (8, 2, 256),
}
"""Query heads, KV heads, head size."""
BATCHES = {
    "decode": ((1, 1, 1, 1), (300, 1, 17, 1064)),
    "ragged": ((5, 1, 0, 77), (5, 200, 0, 133)),
}
"""New tokens and length of each request."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
COMBINATIONS = [
    *((torch.bfloat16, shape) for shape in SHAPES),
    *((torch.float32, shape) for shape in ("grouped", "wide group")),
    (torch.float16, "odd"),
]


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


def grown(context: AttentionContext, num_tokens: int, num_reqs: int, num_blocks: int | None = None) -> AttentionContext:
    """The static copy that a runtime would make: empty requests, padded tokens and blocks at the end."""
    table = context.block_table
    more = num_reqs - context.num_reqs
    spare = 3 if num_blocks is None else num_blocks - table.shape[1]
    pad = torch.nn.functional.pad
    fields = {
        "slot_mapping": pad(context.slot_mapping, (0, num_tokens - len(context.slot_mapping)), value=-1),
        "query_start_loc": torch.cat([context.query_start_loc, context.query_start_loc[-1:].expand(more)]),
        "seq_lens": pad(context.seq_lens, (0, more)),
        "block_table": pad(table, (0, spare, 0, more)),
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
        if not query_len:
            continue
        keys = k_cache[blocks].double().flatten(0, 1)[:seq_len].repeat_interleave(group, 1)
        values = v_cache[blocks].double().flatten(0, 1)[:seq_len].repeat_interleave(group, 1)
        for position in range(seq_len - query_len, seq_len):
            first = max(0, position + 1 - window) if window else 0
            scores = torch.einsum("hd,shd->hs", q[token].double(), keys[first : position + 1]) * scale
            rows.append(torch.einsum("hs,shd->hd", scores.softmax(-1), values[first : position + 1]))
            token += 1
    return torch.stack(rows)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def prepared(*arguments: object) -> None:
    """The call, prepared anew, twice: the second time it is launched quickly."""
    from piecework.ops.triton.paged_attention import prepare

    *tensors, context = arguments
    call = prepare(*tensors)  # type: ignore[arg-type]
    call(context)
    call(context)


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("dtype", "shape"), COMBINATIONS, ids=str)
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
    spec = AttentionSpec(
        device_type="cuda", dtype=dtype, cache_dtype=dtype, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_size=head_size, block_size=BLOCK, window_size=window, is_static=True,
    )  # fmt: skip
    assert choose_implementation(spec).name == "triton"
    stored = k_cache.clone(), v_cache.clone()
    for cache, new in zip(stored, (k, v), strict=True):
        cache.view(-1, num_kv_heads, head_size)[context.slot_mapping] = new[:total]
    want = expected(q, *stored, context, tables, head_size**-0.5, window)
    outs = []
    # More slots than rows: rows attend one by one; fewer: tiles of them, unless there is one new token a request.
    for static in (grown(context, padded, num_reqs=padded + 5), grown(context, padded, num_reqs=4)):
        out = torch.full((padded, num_heads, head_size), float("nan"), device="cuda", dtype=dtype)
        arguments = (q, k, v, k_cache.clone(), v_cache.clone(), out, head_size**-0.5, window)
        with use_context(static):
            paged_attention(*arguments)
        for cache, right in zip(arguments[3:5], stored, strict=True):
            assert torch.equal(cache.nan_to_num(7), right.nan_to_num(7))
        assert not out[total:].any(), "padded rows are zeros"
        assert error(out[:total], want) < TOLERANCE[dtype]
        again = torch.full_like(out, float("nan"))
        prepared(*arguments[:5], again, *arguments[6:], static)
        assert torch.equal(out, again), "splits are put together in one order"
        outs.append(out)
    assert error(outs[0], outs[1].double()) < 2 * TOLERANCE[dtype]


def test_a_steps_own_context() -> None:
    """The lengths on the host bound the splits, and say which kernel it is."""
    num_heads, num_kv_heads, head_size = SHAPES["grouped"]
    for query_lens, seq_lens in BATCHES.values():
        context, tables = build(query_lens, seq_lens)
        total = sum(query_lens)
        k_cache = torch.randn(
            sum(map(len, tables)) + 4, BLOCK, num_kv_heads, head_size, device="cuda", dtype=torch.bfloat16
        )
        v_cache = torch.randn_like(k_cache)
        q = torch.randn(total, num_heads, head_size, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, total, num_kv_heads, head_size, device="cuda", dtype=torch.bfloat16)
        out = torch.full_like(q, float("nan"))
        prepared(q, k, v, k_cache, v_cache, out, head_size**-0.5, 0, context)
        want = expected(q, k_cache, v_cache, context, tables, head_size**-0.5, 0)
        assert error(out, want) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("kind", ["rows", "tiles"])
def test_a_capture_holds_for_every_length(kind: str) -> None:
    """Captured with short requests in two layers, replayed up to the longest that the block table has room for."""
    from piecework.ops.triton.paged_attention import prepare

    num_heads, num_kv_heads, head_size = SHAPES["grouped"]
    dtype, room = torch.bfloat16, 32768
    rows, slots = (4, 4) if kind == "rows" else (48, 3)
    num_blocks = (room + 12000) // BLOCK
    layers = []
    for _ in range(2):
        k_cache = torch.randn(num_blocks, BLOCK, num_kv_heads, head_size, device="cuda", dtype=dtype)
        q = torch.randn(rows, num_heads, head_size, device="cuda", dtype=dtype)
        k, v = torch.randn(2, rows, num_kv_heads, head_size, device="cuda", dtype=dtype)
        layers.append((q, k, v, k_cache, torch.randn_like(k_cache), torch.empty_like(q)))
    calls = [prepare(*layer, head_size**-0.5, 0) for layer in layers]
    first = build((1, 1), (5, 1)) if kind == "rows" else build((7, 1), (7, 3))
    static = grown(first[0], rows, slots, num_blocks=room // BLOCK)
    for call in calls:  # what is compiled and allocated, is before the capture
        call(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call(static)
    steps = [((1, 1), (9, 130)), ((1, 1, 1, 1), (1, 10000, 64, 1500)), ((0, 1), (0, room)), ((1,), (1,))]
    if kind == "tiles":
        steps = [((40, 8), (40, 130)), ((1, 0, 33), (1000, 0, 33)), ((48,), (room,)), ((16,), (16,))]
    for query_lens, seq_lens in steps:
        context, tables = build(query_lens, seq_lens)
        filled = grown(context, rows, slots, num_blocks=room // BLOCK)
        for name in ("slot_mapping", "query_start_loc", "seq_lens", "block_table"):
            getattr(static, name).copy_(getattr(filled, name))
        for *_, out in layers:
            out.fill_(float("nan"))
        graph.replay()
        total = sum(query_lens)
        for q, _, _, k_cache, v_cache, out in layers:
            want = expected(q, k_cache, v_cache, context, tables, head_size**-0.5, 0)
            assert error(out[:total], want) < TOLERANCE[dtype]
            assert not out[total:].any()
        q, *_, out = layers[0]
        before = out.clone()
        graph.replay()
        assert torch.equal(out, before)


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
    for num_reqs in (2, 50):
        out = torch.empty_like(q)
        with use_context(grown(context, 43, num_reqs=num_reqs)):
            paged_attention(q, k, v, k_cache, v_cache, out, head_size**-0.5)
        want = expected(q, k_cache, v_cache, context, tables, head_size**-0.5, 0)
        assert error(out, want) < TOLERANCE[torch.bfloat16]
