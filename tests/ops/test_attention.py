"""The paged attention op against dense float64 attention, its checks, and what opcheck says about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.testing._internal.optests.generate_tests import OpCheckError

from piecework.errors import CaptureError, ContextError, InputError, NotAvailableError
from piecework.ops import attention, torch_native, torch_static
from piecework.ops.attention import AttentionContext, AttentionSpec, choose_implementation, paged_attention
from piecework.ops.attention_rows import load_torch_native
from piecework.ops.capturing import capture_refusal, capturing_whole
from piecework.ops.context import padded_fields, use_context
from piecework.ops.split_op import split_op

HEAD_SIZE = 8


@dataclasses.dataclass
class Step:
    """The arguments of one call, and what it has to produce."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    context: AttentionContext
    expected: torch.Tensor
    """[num_tokens, num_heads, head_size], float64, padding not included."""
    keys: list[torch.Tensor]
    """Per request, all its keys: [seq_len, num_kv_heads, head_size]."""
    window_size: int = 0

    def run(self, out: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.full(self.q.shape, float("nan"), dtype=self.q.dtype) if out is None else out
        with use_context(self.context):
            caches = (self.k_cache, self.v_cache)
            paged_attention(self.q, self.k, self.v, *caches, out, HEAD_SIZE**-0.5, self.window_size)
        return out


def dense(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window_size: int = 0) -> torch.Tensor:
    """One request: q [n, heads, d], keys and values [s, kv_heads, d], causal with the queries last; float64."""
    n, s, group = len(q), len(keys), q.shape[1] // keys.shape[1]
    result = torch.empty(q.shape, dtype=torch.float64)
    for row in range(n):
        for head in range(q.shape[1]):
            end = s - n + row + 1
            seen = slice(max(0, end - window_size) if window_size else 0, end)
            scores = keys[seen, head // group].double() @ q[row, head].double() * HEAD_SIZE**-0.5
            result[row, head] = scores.softmax(0) @ values[seen, head // group].double()
    return result


def make_step(
    query_lens: Sequence[int],
    prefix_lens: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    block_size: int = 4,
    padding: int = 0,
    dtype: torch.dtype = torch.float64,
    stale: float = float("nan"),
    window_size: int = 0,
) -> Step:
    """Requests whose prefix is in the cache already; q, k and v are views of one fused projection."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(query_lens)
    width = num_heads + 2 * num_kv_heads
    fused = torch.randn(num_tokens + padding, width, HEAD_SIZE, generator=generator, dtype=torch.float64).to(dtype)
    fused[num_tokens:] = float("nan")
    q, k, v = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    seq_lens = [n + p for n, p in zip(query_lens, prefix_lens, strict=True)]
    num_blocks = sum(-(-s // block_size) for s in seq_lens) + 2
    order = torch.randperm(num_blocks, generator=generator).tolist()
    shape = (num_blocks, block_size, num_kv_heads, HEAD_SIZE)
    k_cache, v_cache = torch.full(shape, stale, dtype=dtype), torch.full(shape, stale, dtype=dtype)
    tables, expected, all_keys, row = [], [], [], 0
    for n, p in zip(query_lens, prefix_lens, strict=True):
        blocks = [order.pop() for _ in range(-(-(n + p) // block_size))]
        prefix = torch.randn(2, p, num_kv_heads, HEAD_SIZE, generator=generator, dtype=torch.float64).to(dtype)
        for position in range(p):
            block, offset = blocks[position // block_size], position % block_size
            k_cache[block, offset], v_cache[block, offset] = prefix[0, position], prefix[1, position]
        keys, values = (torch.cat((old, new[row : row + n])) for old, new in zip(prefix, (k, v), strict=True))
        expected.append(dense(q[row : row + n], keys, values, window_size))
        all_keys.append(keys)
        tables.append(blocks)
        row += n
    context = AttentionContext.build(
        query_lens=query_lens, seq_lens=seq_lens, block_tables=tables, block_size=block_size
    )
    slots = torch.nn.functional.pad(context.slot_mapping, (0, padding), value=-1)
    context = dataclasses.replace(context, slot_mapping=slots)
    expected_all = torch.cat(expected) if expected else torch.empty(0, num_heads, HEAD_SIZE, dtype=torch.float64)
    return Step(q, k, v, k_cache, v_cache, context, expected_all, all_keys, window_size)


BATCHES = {
    "one prompt": ([7], [0]),
    "one token": ([1], [0]),
    "ragged prefill": ([5, 1, 9, 3], [0, 0, 0, 0]),
    "prefill after a prefix": ([5, 2, 4], [3, 8, 0]),
    "decode": ([1, 1, 1], [6, 0, 11]),
    "prefill and decode mixed": ([1, 6, 1], [9, 2, 4]),
    "a request without new tokens": ([3, 0, 2], [0, 5, 1]),
}


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=lambda heads: f"heads{heads[0]}over{heads[1]}")
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_dense_attention(batch: str, block_size: int, heads: tuple[int, int]) -> None:
    query_lens, prefix_lens = BATCHES[batch]
    step = make_step(query_lens, prefix_lens, num_heads=heads[0], num_kv_heads=heads[1], block_size=block_size)
    assert not step.k.is_contiguous() or len(step.k) == 1
    torch.testing.assert_close(step.run(), step.expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("window_size", [1, 2, 5, 11, 100])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_window_hides_what_lies_before_it(
    batch: str, window_size: int, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_parts:
        monkeypatch.setattr("piecework.ops.torch_native._SCORE_ROWS", 2)
        monkeypatch.setattr("piecework.ops.torch_native._DECODE_TOKENS", 1)
    step = make_step(*BATCHES[batch], window_size=window_size)
    torch.testing.assert_close(step.run(), step.expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batch", ["prefill after a prefix", "decode"])
def test_what_a_window_hides_may_be_anything(batch: str) -> None:
    query_lens, prefix_lens = BATCHES[batch]
    step = make_step(query_lens, prefix_lens, window_size=2, block_size=1)
    for request, prefix_len in enumerate(prefix_lens):
        hidden = step.context.block_table[request, : max(0, prefix_len - 1)]
        step.k_cache[hidden] = step.v_cache[hidden] = float("nan")
    torch.testing.assert_close(step.run(), step.expected, rtol=1e-10, atol=1e-12)


def test_without_a_window_size_there_is_no_window() -> None:
    step = make_step([5, 1], [3, 6])
    out = torch.empty_like(step.q)
    with use_context(step.context):
        paged_attention(step.q, step.k, step.v, step.k_cache, step.v_cache, out, HEAD_SIZE**-0.5)
    torch.testing.assert_close(out, step.expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batch", ["ragged prefill", "decode", "prefill and decode mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulates_in_float32(batch: str, dtype: torch.dtype) -> None:
    step = make_step(*BATCHES[batch], dtype=dtype)
    out = step.run()
    assert out.dtype == dtype
    # The error of float32 sums, and then only the rounding of the result to its own dtype.
    torch.testing.assert_close(out.double(), step.expected, rtol=torch.finfo(dtype).eps / 2, atol=2e-6)


@pytest.mark.parametrize("batch", BATCHES)
def test_long_requests_are_scored_in_parts(batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piecework.ops.torch_native._SCORE_ROWS", 2)
    monkeypatch.setattr("piecework.ops.torch_native._DECODE_TOKENS", 1)
    step = make_step(*BATCHES[batch])
    torch.testing.assert_close(step.run(), step.expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batch", ["ragged prefill", "decode"])
def test_padded_rows_become_zeros_and_write_nothing(batch: str) -> None:
    step = make_step(*BATCHES[batch], padding=5)
    before = step.k_cache.clone(), step.v_cache.clone()
    out = step.run()
    num_tokens = step.context.num_tokens
    assert torch.equal(out[num_tokens:], torch.zeros_like(out[num_tokens:]))
    torch.testing.assert_close(out[:num_tokens], step.expected, rtol=1e-10, atol=1e-12)
    written = step.context.slot_mapping[:num_tokens]
    for old, new in zip(before, (step.k_cache, step.v_cache), strict=True):
        untouched = torch.ones(old.shape[0] * old.shape[1], dtype=torch.bool).index_fill(0, written, False)
        assert torch.equal(old.flatten(0, 1)[untouched].isnan(), new.flatten(0, 1)[untouched].isnan())
        kept = new.flatten(0, 1)[untouched]
        assert torch.equal(old.flatten(0, 1)[untouched].nan_to_num(), kept.nan_to_num())
        assert not new.flatten(0, 1)[written].isnan().any()


def test_keys_land_in_the_requests_blocks() -> None:
    step = make_step([5, 3], [3, 0], block_size=4)
    step.run()
    for request, keys in enumerate(step.keys):
        stored = step.k_cache[step.context.block_table[request]].flatten(0, 1)[: len(keys)]
        assert torch.equal(stored, keys)


@pytest.mark.parametrize("skipped", [(0,), (2,), (0, 3), (0, 1, 2, 3)])
def test_slot_minus_one_writes_nothing(skipped: tuple[int, ...]) -> None:
    # Slot 0 belongs to the step too, so that a clamped -1 would show.
    context = AttentionContext.build(query_lens=[4], seq_lens=[4], block_tables=[[0, 1]], block_size=2)
    slots = context.slot_mapping.clone()
    slots[list(skipped)] = -1
    context = dataclasses.replace(context, slot_mapping=slots)
    k, v = torch.randn(2, 4, 1, HEAD_SIZE)
    k_cache, v_cache = torch.randn(2, 3, 2, 1, HEAD_SIZE)
    expected = k_cache.clone(), v_cache.clone()
    for token in set(range(4)) - set(skipped):
        for new, cache in zip((k, v), expected, strict=True):
            cache[token // 2, token % 2] = new[token]
    q = torch.randn(4, 2, HEAD_SIZE)
    with use_context(context):
        paged_attention(q, k, v, k_cache, v_cache, torch.empty_like(q), 1.0)
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


def test_a_cache_with_strides_of_its_own() -> None:
    step = make_step([5, 1], [3, 6])
    both = torch.stack((step.k_cache, step.v_cache), dim=1)
    step.k_cache, step.v_cache = both[:, 0], both[:, 1]
    assert not step.k_cache.is_contiguous()
    torch.testing.assert_close(step.run(), step.expected, rtol=1e-10, atol=1e-12)


def test_out_may_have_strides_of_its_own() -> None:
    step = make_step([5, 1], [3, 6], padding=1)
    out = torch.full((4, 7, HEAD_SIZE), float("nan"), dtype=torch.float64).transpose(0, 1)
    torch.testing.assert_close(step.run(out)[:6], step.expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("body", [torch_native.paged_attention, torch_static.paged_attention])
def test_a_call_that_is_all_padding_does_not_touch_the_cache(body: Callable[..., None]) -> None:
    """Not even with what is there: such calls are made in a thread beside steps, which write."""
    k_cache, v_cache = torch.randn(2, 3, 4, 2, HEAD_SIZE).unbind()
    context = AttentionContext.build(query_lens=[], seq_lens=[], block_tables=[], block_size=4, num_blocks=3)
    padded = dataclasses.replace(context, slot_mapping=torch.full((5,), -1))
    assert padded.num_tokens == 0
    q, kv = torch.randn(5, 4, HEAD_SIZE), torch.randn(5, 2, HEAD_SIZE)
    out = torch.full_like(q, float("nan"))
    before = k_cache._version, v_cache._version
    body(q, kv, kv, k_cache, v_cache, out, 1.0, 0, padded)
    assert (k_cache._version, v_cache._version) == before
    assert torch.equal(out, torch.zeros_like(q))


def test_a_batch_of_no_requests_is_all_padding() -> None:
    out = make_step([], [], padding=3).run()
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("grad_mode", [torch.inference_mode, torch.no_grad])
def test_caches_of_either_grad_mode(grad_mode: Callable[[], Any]) -> None:
    with grad_mode():
        step = make_step([3, 1], [0, 4])
    with torch.inference_mode():
        torch.testing.assert_close(step.run(), step.expected, rtol=1e-10, atol=1e-12)


# ---- the context


def test_build_gives_the_tensors_of_the_contract() -> None:
    context = AttentionContext.build(query_lens=[3, 1], seq_lens=[5, 4], block_tables=[[7, 2, 9], [4]], block_size=4)
    assert context.slot_mapping.tolist() == [7 * 4 + 2, 7 * 4 + 3, 2 * 4 + 0, 4 * 4 + 3]
    assert context.query_start_loc.tolist() == [0, 3, 4]
    assert context.seq_lens.tolist() == [5, 4]
    assert context.block_table.tolist() == [[7, 2, 9], [4, 0, 0]]
    assert context.slot_mapping.dtype == torch.int64
    assert {context.query_start_loc.dtype, context.seq_lens.dtype, context.block_table.dtype} == {torch.int32}


def test_host_copies_are_read_from_the_tensors_if_not_given() -> None:
    built = AttentionContext.build(query_lens=[3, 1], seq_lens=[5, 4], block_tables=[[1, 2], [3]], block_size=4)
    given = AttentionContext(
        slot_mapping=built.slot_mapping,
        query_start_loc=built.query_start_loc,
        seq_lens=built.seq_lens,
        block_table=built.block_table,
    )
    assert (given.query_lens_host, given.seq_lens_host) == ((3, 1), (5, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_lens": [4, 1]}, "request 0 has 4 new tokens, length 3"),
        ({"query_lens": [-1, 1]}, "request 0 has -1 new tokens"),
        ({"block_tables": [[0], []]}, "request 1 has 1 new tokens, length 1 and 0 blocks"),
        ({"seq_lens": [3]}, "2, 1 and 2 elements"),
    ],
)
def test_build_refuses_lengths_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"query_lens": [3, 1], "seq_lens": [3, 1], "block_tables": [[0], [1]], "block_size": 4}
    with pytest.raises(InputError, match=message):
        AttentionContext.build(**arguments | change)


def test_a_context_whose_fields_disagree_is_refused() -> None:
    context = make_step([3, 1], [0, 4]).context
    with pytest.raises(InputError, match="seq_lens has 1 requests"):
        dataclasses.replace(context, seq_lens=context.seq_lens[:1])
    with pytest.raises(InputError, match="query_lens_host has 1"):
        dataclasses.replace(context, query_lens_host=(4,))


@pytest.mark.parametrize(("query_lens", "is_decode"), [([1, 1], True), ([1, 2], False), ([1, 0], False), ([3], False)])
def test_a_step_is_decode_if_each_request_has_one_new_token(query_lens: list[int], is_decode: bool) -> None:
    context = make_step(query_lens, [4] * len(query_lens)).context
    assert context.is_decode == is_decode
    assert not context.as_static({}).is_decode


def test_a_static_copy_has_the_given_tensors_and_nothing_on_the_host() -> None:
    context = make_step([3, 1], [0, 4], padding=2).context
    seq_lens = torch.tensor([9, 9, 9, 9], dtype=torch.int32)
    static = context.as_static({"seq_lens": seq_lens})
    assert static.is_static
    assert static.seq_lens is seq_lens
    assert static.block_table is context.block_table
    assert (static.query_lens_host, static.seq_lens_host) == ((), ())
    assert not context.is_static
    assert context.query_lens_host == (3, 1)
    with pytest.raises(InputError, match="num_tokens: expected a step's own context, got the runtime's static copy"):
        static.num_tokens  # noqa: B018
    again = dataclasses.replace(context.as_static({}), block_table=context.block_table[:, :1])
    assert (again.query_lens_host, again.seq_lens_host) == ((), ())


def test_how_the_tensors_of_a_context_grow() -> None:
    fields = padded_fields(make_step([1], [0]).context)
    grown = {name: (dict(f.dims), dict(f.slots), dict(f.plus), f.value) for name, f in fields.items()}
    assert grown == {
        "slot_mapping": ({0: "tokens"}, {}, {}, -1),
        "query_start_loc": ({}, {0: "requests"}, {0: 1}, "last"),
        "seq_lens": ({}, {0: "requests"}, {}, 0),
        "block_table": ({}, {0: "requests", 1: "blocks"}, {}, 0),
    }


# ---- under the capture of a whole forward


def arguments(step: Step) -> tuple[Any, ...]:
    return (step.q, step.k, step.v, step.k_cache, step.v_cache, torch.empty(step.q.shape, dtype=step.q.dtype), 1.0, 0)


def static_step() -> Step:
    step = make_step([1, 3], [4, 0], padding=2)
    return dataclasses.replace(step, context=step.context.as_static({}))


def test_a_static_context_can_be_captured() -> None:
    step = static_step()
    with use_context(step.context), capturing_whole():
        assert capture_refusal(paged_attention, arguments(step), {}) is None
        torch.testing.assert_close(step.run()[:4], step.expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (None, "torch_native reads lengths on the host"),
        (slice(3, 4), "torch_static would read the tensors of this step's context for ever: it is not the static copy"),
        (slice(0, 0), "no implementation supports"),
    ],
)
def test_a_step_that_cannot_be_captured_says_why(
    rows: slice | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step([1, 3], [4, 0])
    if rows is not None:
        monkeypatch.setattr(attention, "IMPLEMENTATIONS", attention.IMPLEMENTATIONS[rows])
    before = step.k_cache.clone()
    with use_context(step.context), capturing_whole(), pytest.raises(CaptureError, match=reason) as raised:
        paged_attention(*arguments(step))
    assert raised.value.op == "piecework::paged_attention"
    assert torch.equal(before.isnan(), step.k_cache.isnan())


def test_a_call_that_would_fail_cannot_be_captured_either() -> None:
    step = static_step()
    assert "got no context" in str(capture_refusal(paged_attention, arguments(step), {}))
    with use_context(step.context):
        wrong = (step.q[:2], *arguments(step)[1:])
        assert "expected q and out" in str(capture_refusal(paged_attention, wrong, {}))


def test_a_static_context_of_another_size_is_refused() -> None:
    step = static_step()
    step.context = step.context.as_static({"slot_mapping": step.context.slot_mapping[:4]})
    with pytest.raises(
        InputError, match=r"q has 6 tokens, but the context is a static copy with a slot_mapping of \[4"
    ):
        step.run()


def test_needs_a_context() -> None:
    step = make_step([2], [0])
    with pytest.raises(ContextError, match="AttentionContext and got no context"):
        paged_attention(step.q, step.k, step.v, step.k_cache, step.v_cache, torch.empty_like(step.q), 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"q": s.q[:, 0]}, r"expected q and out: .* got q \[3, 8\]"),
        (lambda s: {"k": s.k[:2]}, r"expected k and v: \[3, num_kv_heads, 8\]; got k \[2, 2, 8\]"),
        (lambda s: {"q": s.q[:, :3]}, "multiple of the key heads"),
        (lambda s: {"window_size": -1}, "window_size: expected 1 or more, or 0 for none, got -1"),
        (lambda s: {"k_cache": s.k_cache[..., :4]}, r"k_cache and v_cache: \[num_blocks, block_size, 2, 8\]"),
        (lambda s: {"context": make_step([2], [0]).context}, "q has 3 tokens, but the context has 2"),
        (
            lambda s: {"context": dataclasses.replace(s.context, seq_lens_host=(9,))},
            "a request has 9 tokens, but block_table and block_size 4 hold 4",
        ),
        (
            lambda s: {"context": dataclasses.replace(s.context, block_size=2, num_blocks=0)},
            r"expected a context for the layer's cache of 3 blocks of 4 tokens, got one for blocks of 2 tokens",
        ),
        (
            lambda s: {"context": dataclasses.replace(s.context, num_blocks=len(s.k_cache) + 1)},
            r"cache of 3 blocks of 4 tokens, got one for 4 blocks of 4 tokens",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: Callable[[Step], dict[str, Any]], message: str) -> None:
    step = make_step([3], [0], stale=0.0)
    step = dataclasses.replace(step, **change(step))
    before = step.k_cache.clone()
    with pytest.raises(InputError, match=message):
        step.run()
    assert torch.equal(step.k_cache, before)


# ---- the choice of implementation


def spec(**changes: Any) -> AttentionSpec:
    plain = AttentionSpec(
        device_type="cpu",
        dtype=torch.float32,
        cache_dtype=torch.float32,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        block_size=4,
    )
    return dataclasses.replace(plain, **changes)


def test_the_choice_says_why_and_what_was_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_implementation(spec()).name == choose_implementation(spec(window_size=4)).name == "torch_native"
    calls: list[int] = []

    def forward(*args: Any) -> None:
        calls.append(args[0].shape[0])
        load_torch_native()(*args)

    def load() -> Callable[..., None]:
        return forward

    def never() -> Callable[..., None]:
        raise AssertionError("an implementation that was passed over must not be imported")

    small = attention.AttentionImplementation(
        name="small", why="fast", reject=lambda s: "head sizes below 8 only" if s.head_size >= 8 else None, load=never
    )
    counting = attention.AttentionImplementation(name="counting", why="counts", reject=lambda s: None, load=load)
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", (small, counting, *attention.IMPLEMENTATIONS))
    choice = choose_implementation(spec())
    assert choice == attention.Choice(
        name="counting", reason="counts", passed_over=(("small", "head sizes below 8 only"),)
    )
    step = make_step([3, 2], [0, 0])
    torch.testing.assert_close(step.run(), step.expected, rtol=1e-10, atol=1e-12)
    assert calls == [5]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.int8}, "torch_native: computes float64, .* not torch.int8"),
        ({"cache_dtype": torch.float8_e4m3fn}, "torch_native: needs the cache in the dtype of q"),
    ],
)
def test_no_implementation_lists_each_with_its_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotAvailableError, match=reason):
        choose_implementation(spec(**change))


# ---- opcheck


def test_opcheck() -> None:
    step = make_step([3, 1], [2, 4], padding=2, stale=0.0)
    arguments = (step.q.nan_to_num(), step.k.nan_to_num(), step.v.nan_to_num(), step.k_cache, step.v_cache)
    with use_context(step.context):
        torch.library.opcheck(paged_attention, (*arguments, torch.zeros_like(step.q), 0.5))
        torch.library.opcheck(paged_attention, (*arguments, torch.zeros_like(step.q), 0.5, 2))
    with use_context(step.context.as_static({})):
        torch.library.opcheck(paged_attention, (*arguments, torch.zeros_like(step.q), 0.5))


def _functional(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float
) -> torch.Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    paged_attention(q, k, v, k_cache, v_cache, out, scale)
    return out


def _transposed_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float
) -> torch.Tensor:
    return q.new_empty(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1)


def _right_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float
) -> torch.Tensor:
    return q.new_empty(q.shape)


@pytest.mark.parametrize(
    ("name", "mutates", "fake", "complaint"),
    [
        ("right", ("k_cache", "v_cache"), _right_fake, None),
        pytest.param(
            *("wrong_strides", ("k_cache", "v_cache"), _transposed_fake, "[Ss]tride"),
            marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11's opcheck compares no strides"),
        ),
        ("hidden_write", ("k_cache",), _right_fake, "v_cache"),
    ],
)
def test_opcheck_catches_wrong_strides_and_a_hidden_write(
    name: str, mutates: tuple[str, ...], fake: Callable[..., torch.Tensor], complaint: str | None
) -> None:
    op = split_op(mutates_args=mutates, name=f"piecework_test_attention::{name}", fake=fake)(_functional)
    step = make_step([3, 1], [2, 4], stale=0.0)
    with use_context(step.context):
        if complaint is None:
            torch.library.opcheck(op, (step.q, step.k, step.v, step.k_cache, step.v_cache, 0.5))
        else:
            with pytest.raises(OpCheckError, match=complaint):
                torch.library.opcheck(op, (step.q, step.k, step.v, step.k_cache, step.v_cache, 0.5))
