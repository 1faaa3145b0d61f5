"""The context of attention: what `build` makes, what copies share, and what `check` finds."""

from __future__ import annotations

import copy
import dataclasses
import random
from array import array
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecework.errors import InputError
from piecework.graphs.inputs import InputContract
from piecework.ops.attention import AttentionContext
from piecework.runtime.context_values import moving_tensors, plain_values, problems
from piecework.runtime.static_context import StaticContext
from piecework.runtime.step_context import pad_context

BLOCK, NUM_BLOCKS = 4, 12

# Request 0: 2 new tokens at positions 3 and 4; 1: one at position 0; 2: none; 3: one at position 7.
# Slots: 5*4+3, 2*4+0; 7*4+0; none; 9*4+3.
BATCH: dict[str, Any] = {
    "query_lens": (2, 1, 0, 1),
    "seq_lens": (5, 1, 0, 8),
    "block_tables": ([5, 2], [7], [], [3, 9]),
    "block_size": BLOCK,
}
SLOTS = [23, 8, 28, 39]


def batch(**changes: Any) -> AttentionContext:
    return AttentionContext.build(**{**BATCH, "num_blocks": NUM_BLOCKS, **changes})


def with_values(context: AttentionContext, field: str, values: dict[Any, int]) -> AttentionContext:
    """A copy in which elements of a tensor are others, set behind the host's back."""
    tensor = getattr(context, field).clone()
    for index, value in values.items():
        tensor[index] = value
    return dataclasses.replace(context, **{field: tensor})


# ---- build


def test_build_by_hand() -> None:
    context = batch()
    assert context.slot_mapping.tolist() == SLOTS
    assert context.query_start_loc.tolist() == [0, 2, 3, 3, 4]
    assert context.seq_lens.tolist() == [5, 1, 0, 8]
    assert context.block_table.tolist() == [[5, 2], [7, 0], [0, 0], [3, 9]]
    dtypes = [context.slot_mapping, context.query_start_loc, context.seq_lens, context.block_table]
    assert [tensor.dtype for tensor in dtypes] == [torch.int64, torch.int32, torch.int32, torch.int32]
    assert (context.query_lens_host, context.seq_lens_host) == ((2, 1, 0, 1), (5, 1, 0, 8))
    assert (context.num_blocks, context.block_size, context.scratch) == (NUM_BLOCKS, BLOCK, {})


def test_build_of_nothing() -> None:
    context = AttentionContext.build(query_lens=(), seq_lens=(), block_tables=(), block_size=BLOCK, max_blocks=3)
    assert (context.slot_mapping.shape, context.block_table.shape) == ((0,), (0, 3))
    assert context.query_start_loc.tolist() == [0]
    context.check()


@pytest.mark.parametrize("kind", [list, tuple, lambda b: array("i", b), lambda b: array("q", b), torch.tensor])
def test_blocks_may_be_any_sequence(kind: Any) -> None:
    context = batch(block_tables=[kind([5, 2]), kind([7]), [], kind([3, 9])])
    assert context.block_table.tolist() == [[5, 2], [7, 0], [0, 0], [3, 9]]
    assert context.slot_mapping.tolist() == SLOTS


def test_the_table_may_be_wider_than_needed_and_not_narrower() -> None:
    assert batch(max_blocks=4).block_table.tolist() == [[5, 2, 0, 0], [7, 0, 0, 0], [0] * 4, [3, 9, 0, 0]]
    with pytest.raises(InputError, match=r"max_blocks is 1, but a request has 2 blocks; raise max_blocks"):
        batch(max_blocks=1)


@pytest.mark.parametrize("block", [-1, NUM_BLOCKS])
def test_build_refuses_blocks_that_the_cache_does_not_have(block: int) -> None:
    tables: list[list[int]] = [[5, 2], [7], [], [3, block]]
    with pytest.raises(InputError, match=rf"block_tables\[3\]\[1\]: expected a block of 0 to 11.*got {block};"):
        batch(block_tables=tables)
    batch(block_tables=[[5, 2], [7], [], [3, NUM_BLOCKS - 1]])


@pytest.mark.parametrize(("sizes", "got"), [({"block_size": 0}, "0 and 12"), ({"num_blocks": -1}, "4 and -1")])
def test_build_refuses_sizes_that_no_cache_has(sizes: dict[str, int], got: str) -> None:
    with pytest.raises(InputError, match=rf"expected a block_size of 1 or more and num_blocks of 0.*got {got};"):
        batch(**sizes)


@given(data=st.data())
def test_slots_are_those_of_the_block_table(data: st.DataObject) -> None:
    """Against the definition: `block * block_size + offset`, token by token."""
    block_size = data.draw(st.sampled_from([1, 3, 16]))
    seq_lens = data.draw(st.lists(st.integers(0, 40), max_size=4))
    query_lens = [data.draw(st.integers(0, seq_len)) for seq_len in seq_lens]
    order = random.Random(0).sample(range(200), 200)
    tables = [[order.pop() for _ in range(-(-seq_len // block_size))] for seq_len in seq_lens]
    context = AttentionContext.build(
        query_lens=query_lens, seq_lens=seq_lens, block_tables=tables, block_size=block_size, num_blocks=200
    )
    expected = [
        table[position // block_size] * block_size + position % block_size
        for table, query_len, seq_len in zip(tables, query_lens, seq_lens, strict=True)
        for position in range(seq_len - query_len, seq_len)
    ]
    assert context.slot_mapping.tolist() == expected
    context.check()


# ---- scratch


def test_copies_of_a_step_share_its_scratch_and_a_static_copy_has_its_own() -> None:
    context = batch()
    context.scratch["workspace", 4] = torch.zeros(3)
    assert copy.copy(context).scratch is context.scratch
    assert dataclasses.replace(context).scratch is context.scratch
    fields = {"slot_mapping": context.slot_mapping.clone()}
    static = context.as_static(fields)
    assert static.scratch == {}
    assert static.scratch is not context.scratch
    assert (static.num_blocks, static.block_size) == (12, 4), "captured layers check them too"
    assert batch().scratch is not context.scratch
    assert "scratch" not in repr(context)


def test_scratch_full_of_tensors_troubles_no_copy_of_the_runtime() -> None:
    contract = InputContract({"x": {0: "tokens"}})
    static = StaticContext(contract, {"requests": 8, "blocks": 4}, 8)
    bound = contract.bind({"x": torch.zeros(4)})
    context = batch()
    context.scratch["workspace"] = torch.zeros(3)
    first = static.fill(context, bound, 8)
    workspace = first.scratch["workspace"] = torch.ones(2)
    again = batch()
    second = static.fill(again, bound, 8)
    # The copy that a capture reads, and with it the memory whose address the capture may hold.
    assert second is first
    assert second.scratch["workspace"] is workspace
    assert again.scratch == {}
    assert pad_context(context, bound, 8, contract, pytest.fail).scratch is context.scratch
    assert static.fill_tokens_only(context, bound, 8).scratch is context.scratch
    assert problems(context) == []
    assert plain_values(context) == plain_values(again)
    # A captured segment that reads a step's own workspace would read it for ever.
    assert any(tensor is context.scratch["workspace"] for tensor in moving_tensors(context).values())


# ---- check


def test_check_accepts_what_is_right() -> None:
    batch().check()
    batch(max_blocks=5).check()
    not_written = with_values(batch(), "slot_mapping", {0: -1})
    not_written.check()
    padded = dataclasses.replace(batch(), slot_mapping=torch.tensor([*SLOTS, -1, -1]))
    padded.check()


def test_check_accepts_a_static_copy_with_empty_slots() -> None:
    contract = InputContract({"x": {0: "tokens"}})
    static = StaticContext(contract, {"requests": 8, "blocks": 4}, 8)
    copied = static.fill(batch(), contract.bind({"x": torch.zeros(4)}), 8)
    assert copied.is_static
    copied.check()
    copied.slot_mapping[1] = 23
    with pytest.raises(InputError, match=r"slot_mapping\[1\]: expected a slot of its own"):
        copied.check()


WRONG: list[tuple[str, dict[Any, int], str]] = [
    ("slot_mapping", {1: -2}, r"slot_mapping\[1\]: expected -1 to 47, as the cache has 12 blocks of 4; got -2"),
    ("slot_mapping", {3: 48}, r"slot_mapping\[3\]: expected -1 to 47.*got 48; build the context with"),
    ("slot_mapping", {2: 23}, r"slot_mapping\[2\]: expected a slot of its own, as token 0 is written.*got 23"),
    ("slot_mapping", {1: 9}, r"slot_mapping\[1\]: expected 8, where the block table has position 4 of request 0"),
    ("block_table", {(3, 1): 12}, r"block_table\[3, 1\]: expected a block of 0 to 11, of which request 3 uses 2 b.*12"),
    ("block_table", {(0, 0): -1}, r"block_table\[0, 0\]: expected a block of 0 to 11.*got -1; give the request"),
    ("block_table", {(1, 1): 99}, r"block_table\[1, 1\].*uses 1 blocks; got 99.*0 past its length"),
    ("block_table", {(3, 1): 8}, r"slot_mapping\[3\]: expected 35, where the block table has position 7 of request 3"),
    ("seq_lens", {1: -1}, r"seq_lens\[1\]: expected at least its 1 new tokens; got -1"),
    ("seq_lens", {2: -1}, r"seq_lens\[2\]: expected at least its 0 new tokens; got -1"),
    ("seq_lens", {3: 9}, r"seq_lens\[3\]: expected at most 8, the room of 2 blocks of 4 in block_table; got 9"),
    ("seq_lens", {3: 7}, r"seq_lens_host\[3\]: expected 7, what the device tensors say; got 8; leave the host fields"),
    ("query_start_loc", {0: 1}, r"query_start_loc\[0\]: expected 0.*got 1"),
    ("query_start_loc", {2: 1}, r"query_start_loc\[2\]: expected at least 2, where request 1 begins; got 1"),
    ("query_start_loc", {4: 5}, r"query_start_loc\[4\]: expected at most 4, the tokens of slot_mapping; got 5"),
    ("query_start_loc", {1: 1}, r"query_lens_host\[0\]: expected 1, what the device tensors say; got 2"),
]


@pytest.mark.parametrize(("field", "values", "message"), WRONG)
def test_check_names_the_first_bad_element(field: str, values: dict[Any, int], message: str) -> None:
    context = batch()
    if message.startswith("query_lens_host"):  # one token more for request 1, which has to be longer for it
        context = with_values(context, "seq_lens", {1: 2})
    with pytest.raises(InputError, match=rf"^AttentionContext\.{message}"):
        with_values(context, field, values).check()


def test_check_refuses_padding_that_is_written() -> None:
    padded = dataclasses.replace(batch(), slot_mapping=torch.tensor([*SLOTS, -1, 0]))
    with pytest.raises(InputError, match=r"slot_mapping\[5\]: expected -1, as the requests have 4 tokens .*got 0"):
        padded.check()


def test_what_is_not_known_is_not_checked() -> None:
    no_blocks = dataclasses.replace(batch(), num_blocks=0)
    with_values(no_blocks, "block_table", {(1, 1): 99}).check()
    with pytest.raises(InputError, match=r"block_table\[0, 0\]: expected a block of 0 or more, of which.*got -1"):
        with_values(no_blocks, "block_table", {(0, 0): -1}).check()
    with pytest.raises(InputError, match=r"slot_mapping\[1\]: expected -1 or more; got -2"):
        with_values(no_blocks, "slot_mapping", {1: -2}).check()
    no_size = dataclasses.replace(batch(), block_size=0)
    with_values(no_size, "slot_mapping", {1: 9}).check()
    with_values(no_size, "slot_mapping", {1: 4000}).check()
    with pytest.raises(InputError, match=r"block_table\[1, 1\]: expected a block of 0 to 11; got 99"):
        with_values(no_size, "block_table", {(1, 1): 99}).check()


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("slot_mapping", torch.Tensor.float, r"slot_mapping: expected int32 or int64 of 1 dims; got torch.float32 of"),
        ("block_table", torch.Tensor.flatten, r"block_table: expected int32 or int64 of 2 dims; got torch.int32 of"),
    ],
)
def test_check_refuses_tensors_of_another_kind(field: str, change: Any, message: str) -> None:
    context = batch()
    object.__setattr__(context, field, change(getattr(context, field)))
    with pytest.raises(InputError, match=message):
        context.check()
