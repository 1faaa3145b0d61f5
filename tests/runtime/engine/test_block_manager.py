"""Blocks: whose they are, and that none is lost or given twice."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from piecework.runtime.engine.block_manager import BlockManager


def test_blocks_belong_to_one_request_until_they_are_freed() -> None:
    manager = BlockManager(num_blocks=5, block_size=4)
    assert [manager.blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    first: list[int] = []
    second: list[int] = []
    assert manager.grow(first, 9)
    assert manager.grow(second, 4)
    assert (len(first), len(second), manager.num_free_blocks) == (3, 1, 1)
    assert not set(first) & set(second)
    kept = list(second)
    assert not manager.grow(second, 13)  # three more, and one is free: nothing is taken
    assert (second, manager.num_free_blocks) == (kept, 1)
    assert manager.grow(second, 8)
    assert second[0] == kept[0]
    manager.free(first)
    assert (first, manager.num_free_blocks) == ([], 3)
    manager.free(first)
    assert manager.num_free_blocks == 3


def test_giving_a_block_back_twice_is_our_mistake() -> None:
    manager = BlockManager(num_blocks=2, block_size=4)
    blocks: list[int] = []
    manager.grow(blocks, 8)
    copy = list(blocks)
    manager.free(blocks)
    with pytest.raises(AssertionError, match="was freed twice"):
        manager.free(copy)
    assert manager.num_free_blocks == 2


class Blocks(RuleBasedStateMachine):
    """Requests grow and end in any order."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.manager = BlockManager(num_blocks=num_blocks, block_size=block_size)
        self.requests: list[list[int]] = [[] for _ in range(4)]

    @rule(request=st.integers(0, 3), num_tokens=st.integers(0, 40))
    def grow(self, request: int, num_tokens: int) -> None:
        blocks = self.requests[request]
        before, free = list(blocks), self.manager.num_free_blocks
        needed = -(-num_tokens // self.manager.block_size)
        grown = self.manager.grow(blocks, num_tokens)
        assert grown == (needed - len(before) <= free)
        assert blocks[: len(before)] == before
        assert len(blocks) == (max(needed, len(before)) if grown else len(before))

    @rule(request=st.integers(0, 3))
    def free(self, request: int) -> None:
        self.manager.free(self.requests[request])
        assert self.requests[request] == []

    @invariant()
    def every_block_is_somewhere_once(self) -> None:
        if not hasattr(self, "manager"):
            return
        held = [block for blocks in self.requests for block in blocks]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(self.manager.num_blocks))
        assert self.manager.num_free_blocks == self.manager.num_blocks - len(held)


TestBlocks = Blocks.TestCase
