"""Which blocks of the KV cache are whose."""

from __future__ import annotations

from collections.abc import MutableSequence


class BlockManager:
    """Hands out the numbers of cache blocks; knows nothing of their memory.

    A block is `block_size` tokens of one request, in all layers at once. Who takes blocks keeps their list and gives
    the same list back.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = [True] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that belong to no request."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def grow(self, blocks: MutableSequence[int], num_tokens: int) -> bool:
        """Adds to a request's blocks until they hold `num_tokens`.

        Returns:
            False, with nothing taken, if fewer blocks are free than that needs.
        """
        num_missing = self.blocks_for(num_tokens) - len(blocks)
        if num_missing > len(self._free):
            return False
        for _ in range(num_missing):
            block = self._free.pop()
            self._is_free[block] = False
            blocks.append(block)
        return True

    def free(self, blocks: MutableSequence[int]) -> None:
        """Takes a request's blocks back and empties the list."""
        while blocks:
            block = blocks.pop()
            assert not self._is_free[block], f"block {block} was freed twice"
            self._is_free[block] = True
            self._free.append(block)
