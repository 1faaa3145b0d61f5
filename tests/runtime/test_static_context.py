"""The static copy of a context: fixed shapes, fixed addresses, defined tails, and a clear no where it does not fit."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import piecework as pw
from piecework.errors import CaptureError, ConfigError, ContextError, InputError
from piecework.graphs.inputs import BoundInputs, InputContract
from piecework.graphs.prepared_fill import PreparedFill
from piecework.ops.attention import AttentionContext
from piecework.ops.context import host_field
from piecework.runtime.static_context import ContextDoesNotFit, StaticContext
from piecework.runtime.step_context import pad_context

CONTRACT = InputContract({"x": {0: "tokens"}, "table": {0: "rows"}})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    rows: torch.Tensor = pw.context_field(pad=-1)
    start: torch.Tensor = pw.context_field(pad="last", slots={0: "requests"}, plus={0: 1})
    table: torch.Tensor = pw.context_field(pad=7, slots={0: "requests", 1: "blocks"})
    factor: int = 2
    lens: tuple[int, ...] = host_field(default=())
    names: list[str] = host_field(default_factory=list)
    number: int = host_field()
    optional: torch.Tensor | None = pw.context_field(pad=0, dims={}, default=None)


def step(query_lens: list[int], num_blocks: int = 2, **fields: Any) -> Step:
    starts = [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
    given = {
        "rows": torch.arange(sum(query_lens)),
        "start": torch.tensor(starts, dtype=torch.int32),
        "table": torch.ones(len(query_lens), num_blocks, dtype=torch.int32),
        "lens": tuple(query_lens),
        "names": ["a"],
        "number": len(query_lens),
    }
    return Step(**{**given, **fields})


def bound(num_tokens: int) -> BoundInputs:
    return CONTRACT.bind({"x": torch.zeros(num_tokens)})


def make(max_num_tokens: int = 16, **sizes: int) -> StaticContext:
    return StaticContext(CONTRACT, sizes, max_num_tokens)


def fill(static: StaticContext, context: Step, bucket: int) -> Any:
    return static.fill(context, bound(len(context.rows)), bucket)


# Shapes and tails.


def test_each_field_has_the_size_of_its_bucket_and_a_defined_tail():
    copied = fill(make(requests=3, blocks=4), step([2, 1]), 8)
    assert copied.rows.tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
    assert copied.start.tolist() == [0, 2, 3, 3]
    assert copied.table.tolist() == [[1, 1, 7, 7], [1, 1, 7, 7], [7, 7, 7, 7]]
    assert (copied.start.dtype, copied.optional, copied.factor) == (torch.int32, None, 2)


def test_a_longer_step_leaves_nothing_behind():
    static = make(requests=3, blocks=4)
    fill(static, step([2, 3, 2], num_blocks=4), 8)
    copied = fill(static, step([1]), 8)
    assert copied.rows.tolist() == [0] + [-1] * 7
    assert copied.start.tolist() == [0, 1, 1, 1]
    assert copied.table.tolist() == [[1, 1, 7, 7], [7] * 4, [7] * 4]


def test_no_requests_at_all():
    copied = fill(make(requests=2, blocks=1), step([], num_blocks=0), 4)
    assert copied.start.tolist() == [0, 0, 0]
    assert copied.table.tolist() == [[7], [7]]
    assert copied.rows.tolist() == [-1] * 4


@pytest.mark.parametrize(("bucket", "capacity", "slots"), [(2, 4, 2), (8, 4, 4), (8, None, 8)])
def test_there_are_no_more_requests_than_tokens(bucket, capacity, slots):
    sizes = {} if capacity is None else {"requests": capacity}
    assert fill(make(**sizes), step([1, 1]), bucket).table.shape == (slots, 2)


def test_other_names_that_are_at_most_tokens():
    static = StaticContext(CONTRACT, {}, 16, at_most_tokens=frozenset({"blocks"}))
    assert fill(static, step([1, 1, 1]), 8).table.shape == (4, 8), "3 requests, in powers of two; 8 blocks"


def test_a_name_without_a_capacity_grows_in_powers_of_two_and_never_shrinks():
    static, widths = make(), []
    for num_blocks in (0, 1, 3, 2, 4, 5, 1):
        widths.append(fill(static, step([1], num_blocks=num_blocks), 4).table.shape[1])
    assert widths == [1, 1, 4, 4, 4, 8, 8]


# Addresses.


def test_the_same_object_at_the_same_addresses_for_each_bucket():
    static = make(requests=4, blocks=4)
    first, keys = {}, {}
    for bucket in (16, 4, 8, 4, 16, 8):
        copied = fill(static, step([1, 2]), bucket)
        assert first.setdefault(bucket, copied) is copied
        assert keys.setdefault(bucket, static.address_key(copied)) == static.address_key(copied)
        assert all(t.is_contiguous() for t in (copied.rows, copied.start, copied.table))
    assert len(set(keys.values())) == 3
    assert len({copied.rows.data_ptr() for copied in first.values()}) == 1, "the start of one buffer"
    num_bytes = static.num_bytes
    fill(static, step([1] * 4, num_blocks=4), 16)
    assert static.num_bytes == num_bytes == 16 * 8 + 5 * 4 + 4 * 4 * 4


@pytest.mark.parametrize("order", [(1, 2, 16), (2, 16, 1), (16, 1, 2)])
def test_buffers_have_the_size_of_the_largest_bucket_from_the_start(order):
    static = make(blocks=4)
    addresses = {bucket: static.address_key(fill(static, step([1]), bucket)) for bucket in order}
    for bucket in order:
        assert static.address_key(fill(static, step([1]), bucket)) == addresses[bucket]


def test_growth_changes_the_address_key_and_old_copies_are_let_go():
    static = make(requests=4)
    before = fill(static, step([1]), 4)
    key = static.address_key(before)
    assert static.address_key(fill(static, step([1], num_blocks=2), 4)) == key
    grown = fill(static, step([1], num_blocks=200), 4)
    assert static.address_key(grown) != key
    again = fill(static, step([1], num_blocks=1), 4)
    assert again is grown
    assert again.table.shape == (4, 256)
    assert [copied.context for copied in static._copies.values()] == [grown]


def test_the_number_of_copies_is_bounded():
    static = make(requests=1, blocks=1)
    for size in reversed(range(520)):
        copied = fill(static, step([1], num_blocks=1, optional=torch.zeros(size)), 1)
    assert len(static._copies) == 512
    assert fill(static, step([1], num_blocks=1, optional=torch.zeros(0)), 1) is copied, "the oldest went"


def test_buffers_are_no_inference_tensors_and_can_be_written_in_any_mode():
    static = make(requests=4, blocks=4)
    with torch.inference_mode():
        copied = fill(static, step([1, 1]), 4)
    assert not any(t.is_inference() for t in (copied.rows, copied.start, copied.table))
    with torch.no_grad():
        assert fill(static, step([2]), 4) is copied
    assert copied.start.tolist() == [0, 2, 2, 2, 2]
    needs_grad = step([1], optional=torch.ones(2, requires_grad=True))
    assert not fill(static, needs_grad, 4).optional.requires_grad


def test_strides_of_the_step_do_not_matter():
    table = torch.arange(8, dtype=torch.int32).reshape(4, 2).t()[:, ::2]
    copied = fill(make(requests=2, blocks=2), step([1, 1], table=table), 2)
    assert copied.table.tolist() == table.tolist()


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), max_size=5), st.integers(0, 5), st.sampled_from([1, 2, 4, 8])),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_whatever_came_before_a_fill_equals_the_definition(steps):
    static, keys = make(max_num_tokens=8, requests=4, blocks=4), {}
    for query_lens, num_blocks, bucket in steps:
        context, room = step(query_lens, num_blocks), min(4, bucket)
        if sum(query_lens) > bucket:
            continue
        if len(query_lens) > room or num_blocks > 4:
            with pytest.raises(ContextDoesNotFit):
                fill(static, context, bucket)
            continue
        copied = fill(static, context, bucket)
        assert copied.rows.tolist() == [*range(sum(query_lens)), *[-1] * (bucket - sum(query_lens))]
        starts = context.start.tolist()
        assert copied.start.tolist() == starts + [starts[-1]] * (room - len(query_lens))
        row = [1] * num_blocks + [7] * (4 - num_blocks)
        assert copied.table.tolist() == [row] * len(query_lens) + [[7] * 4] * (room - len(query_lens))
        assert keys.setdefault(bucket, static.address_key(copied)) == static.address_key(copied)


# The copy.


def test_host_fields_have_their_defaults_or_follow_the_step():
    static = make(requests=4, blocks=4)
    context = step([2, 1])
    first = fill(static, context, 8)
    assert (first.lens, first.names, first.number) == ((), [], 2)
    assert fill(static, step([1, 1, 1]), 8) is first
    assert first.number == 3
    assert (context.lens, context.names, context.number) == ((2, 1), ["a"], 2), "the step's own is left alone"


def test_another_plain_value_makes_another_copy_at_the_same_addresses():
    static = make(requests=4, blocks=4)
    first = fill(static, step([1]), 4)
    second = fill(static, step([1], factor=3), 4)
    assert (first.factor, second.factor) == (2, 3)
    assert static.address_key(second) == static.address_key(first)


def test_a_missing_tensor_changes_the_address_key():
    static = make(requests=4, blocks=4)
    without = fill(static, step([1]), 4)
    key = static.address_key(without)
    copied = fill(static, step([1], optional=torch.tensor([5.0])), 4)
    assert copied.optional.tolist() == [5]
    assert without.optional is None
    assert static.address_key(copied) != key
    assert fill(static, step([1]), 4).optional is None


def test_no_context_and_what_is_no_dataclass_come_back():
    static = make()
    for context in (None, {"a": torch.zeros(2)}, Step):
        assert static.fill(context, bound(2), 4) is context
        assert static.fill_tokens_only(context, bound(2), 4) is context
        assert static.address_key(context) == ()


def test_plan_is_called_after_each_fill():
    calls = []

    @dataclasses.dataclass
    class Planned:
        rows: torch.Tensor = pw.context_field(pad=-1)

        def plan(self) -> None:
            calls.append((id(self), self.rows.tolist()))

    static = make()
    copied = static.fill(Planned(rows=torch.tensor([1])), bound(1), 2)
    static.fill(Planned(rows=torch.tensor([2, 3])), bound(2), 2)
    assert calls == [(id(copied), [1, -1]), (id(copied), [2, 3])]
    static.fill_tokens_only(Planned(rows=torch.tensor([4])), bound(1), 2)
    assert len(calls) == 2, "no static copy"


def test_as_static_makes_the_copy():
    @dataclasses.dataclass
    class Own:
        rows: torch.Tensor = pw.context_field(pad=-1)
        is_static: bool = False

        def as_static(self, fields: Mapping[str, torch.Tensor]) -> Own:
            return Own(rows=fields["rows"], is_static=True)

    static = make()
    copied: Any = static.fill(Own(rows=torch.tensor([1])), bound(1), 2)
    assert (copied.is_static, copied.rows.tolist()) == (True, [1, -1])
    assert static.fill(Own(rows=torch.tensor([2])), bound(1), 2) is copied


@pytest.mark.parametrize(
    ("as_static", "message"),
    [
        (lambda self, fields: self, "got the context itself; return a copy.copy"),
        (lambda self, fields: copy.copy(self), "got other ones in rows; return a copy.copy"),
        (lambda self, fields: None, "got other ones in rows; return a copy.copy"),
    ],
)
def test_as_static_must_return_a_copy_with_the_static_tensors(as_static, message):
    @dataclasses.dataclass
    class Wrong:
        rows: torch.Tensor = pw.context_field(pad=-1)

    Wrong.as_static = as_static
    with pytest.raises(ContextError, match=f"Wrong.as_static: expected a copy with the tensors .*{message}"):
        make().fill(Wrong(rows=torch.tensor([1])), bound(1), 2)


def attention(query_lens: list[int], seq_lens: list[int], num_blocks: int) -> AttentionContext:
    tables = [list(range(num_blocks))] * len(query_lens)
    return AttentionContext.build(query_lens=query_lens, seq_lens=seq_lens, block_tables=tables, block_size=4)


def test_the_context_of_our_own_attention():
    static = make(requests=3, blocks=4)
    copied: Any = static.fill(attention([1, 2], [5, 2], 2), bound(3), 4)
    assert copied.query_start_loc.tolist() == [0, 1, 3, 3]
    assert copied.seq_lens.tolist() == [5, 2, 0]
    assert copied.block_table.tolist() == [[0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert copied.slot_mapping.tolist() == [4, 0, 1, -1]
    assert (copied.query_lens_host, copied.seq_lens_host, copied.is_static) == ((), (), True)
    assert static.fill(attention([1], [1], 1), bound(1), 4) is copied


# What does not fit.


@pytest.mark.parametrize(
    ("context", "bucket", "message", "reason"),
    [
        (
            step([1] * 4),
            8,
            'context Step: context_sizes["requests"] is 3, got a step with 4; pass a larger number to Runtime',
            "the step has more requests than context_sizes",
        ),
        (
            step([1], num_blocks=5),
            8,
            'context Step: context_sizes["blocks"] is 4, got a step with 5; pass a larger number to Runtime',
            "the step has more blocks than context_sizes",
        ),
        (
            step([1, 0]),
            1,
            "context Step: expected at most as many requests as tokens, got 2 in the bucket of 1 tokens; leave out",
            "the step has more requests than its bucket has tokens",
        ),
    ],
)
def test_a_step_that_does_not_fit_says_why_and_changes_nothing(context, bucket, message, reason):
    static = make(requests=3, blocks=4)
    before = fill(static, step([1]), bucket)
    state = [t.clone() for t in (before.rows, before.start, before.table)]
    with pytest.raises(ContextDoesNotFit) as caught:
        fill(static, context, bucket)
    assert str(caught.value).startswith(message)
    assert caught.value.reason == reason
    assert isinstance(caught.value, CaptureError)
    for tensor, old in zip((before.rows, before.start, before.table), state, strict=True):
        assert torch.equal(tensor, old)


def test_fields_that_disagree_about_a_size():
    with pytest.raises(
        InputError, match=r"Step.table: dim 0 is for 3 requests, but start is for 2; a name has one size in a step"
    ):
        fill(make(), step([1, 1], table=torch.ones(3, 1)), 4)


def test_a_context_that_does_not_fit_the_inputs():
    with pytest.raises(InputError, match=r"context Step.rows: expected 3 rows on dim 0"):
        make().fill(step([2]), bound(3), 4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"requests": 0}, r"context_sizes\['requests'\]: expected a number of 1 or more, got 0"),
        ({"requests": 1.5}, r"context_sizes\['requests'\]: expected a number of 1 or more, got 1.5"),
        ({"requests": True}, r"context_sizes\['requests'\]: expected a number of 1 or more, got True"),
        ({"tokens": 8}, r"context_sizes\['tokens'\]: .* got one of dynamic_dims, whose buckets are in the config"),
        ({"rows": 8}, r"context_sizes\['rows'\]: expected a name that only contexts have, got one of dynamic_dims; le"),
    ],
)
def test_capacities_that_make_no_sense(sizes, message):
    with pytest.raises(ConfigError, match=message):
        make(**sizes)


# Where split ops run uncaptured between captured segments.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed:
    rows: torch.Tensor = pw.context_field(pad=-1)
    table: torch.Tensor = pw.context_field(pad=0, dims={0: "tokens"}, slots={1: "blocks"})
    start: torch.Tensor = pw.context_field(pad="last", slots={0: "requests"}, plus={0: 1})
    lens: tuple[int, ...] = host_field(default=())


def test_only_what_follows_from_the_inputs_is_static():
    static, keys = make(), set()
    for num_tokens, num_requests in ((3, 1), (2, 2)):
        context = Mixed(
            rows=torch.arange(num_tokens),
            table=torch.ones(num_tokens, 1),
            start=torch.arange(num_requests + 1),
            lens=(num_requests,),
        )
        copied: Any = static.fill_tokens_only(context, bound(num_tokens), 4)
        assert copied.rows.tolist() == [*range(num_tokens), *[-1] * (4 - num_tokens)]
        assert copied.table[:, 0].tolist() == [1] * num_tokens + [0] * (4 - num_tokens)
        assert copied.start is context.start
        assert copied.lens == (num_requests,)
        keys.add(static.address_key(copied, tokens_only=True))
        padded: Any = pad_context(context, bound(num_tokens), 4, CONTRACT, pytest.fail)
        for field in ("rows", "table", "start"):
            assert torch.equal(getattr(copied, field), getattr(padded, field))
    [key] = keys
    assert [name for name, *_ in key] == ["rows"]


def test_a_context_in_which_nothing_grows_is_the_steps_own():
    @dataclasses.dataclass
    class Fixed:
        start: torch.Tensor = pw.context_field(pad="last", slots={0: "requests"})

    context = Fixed(start=torch.arange(2))
    static = make()
    assert static.fill_tokens_only(context, bound(1), 4) is context
    assert static.num_bytes == 0


SIZES = st.lists(
    st.tuples(
        st.integers(0, 3),  # requests
        st.integers(0, 5),  # blocks
        st.sampled_from((4, 8)),  # the bucket
        st.sampled_from(["prepared", "prepared", "scratch"]),
    ),
    min_size=2,
    max_size=25,
)


@pytest.mark.parametrize("sizes", [{"blocks": 5, "requests": 4}, {}])
@settings(max_examples=40, deadline=None)
@given(steps=SIZES)
def test_random_sequences_leave_what_filling_everything_leaves(sizes: dict[str, int], steps: Any) -> None:
    static = StaticContext(CONTRACT, sizes, 8)
    plans: dict[Any, tuple[int, PreparedFill, Any]] = {}
    for seed, (num_requests, num_blocks, bucket, way) in enumerate(steps):
        given_step = step([1] * num_requests, num_blocks, number=seed)
        torch.manual_seed(seed)
        for tensor in (given_step.rows, given_step.start, given_step.table):
            tensor.random_(1, 50)
        inputs = bound(num_requests)
        known = plans.get((num_requests, num_blocks, bucket))
        if way == "scratch" or known is None or known[0] != static.generation:
            copied = static.fill(given_step, inputs, bucket)
            fill = PreparedFill(static.targets(given_step, copied))
            plans[num_requests, num_blocks, bucket] = static.generation, fill, copied
        else:
            _, fill, copied = known
            sources = [given_step.rows, given_step.start, given_step.table]
            with torch.inference_mode():
                fill.run(sources)
        fresh = StaticContext(CONTRACT, sizes, 8)
        fresh._seen = dict(static._seen)
        expected: Any = fresh.fill(given_step, inputs, bucket)
        for name in ("rows", "start", "table"):
            assert torch.equal(getattr(copied, name), getattr(expected, name)), name


def test_the_generation_grows_when_static_tensors_may_be_others() -> None:
    static = StaticContext(CONTRACT, {}, 8)
    static.fill(step([1, 1]), bound(2), 4)
    known = static.generation
    static.fill(step([1, 1], number=2), bound(2), 4)
    static.fill(step([1]), bound(1), 4)
    assert static.generation == known
    static.fill(step([1, 1], num_blocks=9), bound(2), 4)
    grown = static.generation
    assert grown > known
    static.fill(step([1, 1]), bound(2), 2)  # a bucket that had none yet
    assert static.generation > grown
