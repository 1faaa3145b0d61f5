"""The memory of a tape: what its captures would hold of a device, counted by an exact model, and poisoned.

Note [What a tape's pool counts]
CUDA's allocator gives the memory of a tensor that died during a capture to the next tensor, of that capture or of a
later one of the same pool; only a tensor that somebody still holds keeps its bytes. A tape cannot share memory like
that, for a replay would overwrite what it reads, so a segment keeps each tensor, and the pool counts what an allocator
would have needed:

- a memory is live while anything but the tape itself (the model's tensors, whoever kept an output) holds it;
- what only a segment keeps, for its own replays, is scratch, which later captures may have;
- `num_bytes` is the most that was ever live at once, over all captures of the pool: for each capture, what others
  retained when it was made, and its own peak. The order of captures does not change it; an outside tensor does;
- releasing a capture makes its bytes free for others, and `num_bytes` stays, until no capture of the pool lives; then
  it is what outside tensors still hold, which is usually 0.

Left out: rounding to blocks, fragmentation, and the scratch of an opaque call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Block:
    """One memory that was allocated for a capture."""

    memory: StorageWeakRef
    num_bytes: int
    num_own: int
    """References to it that are the tape's own."""

    @property
    def is_live(self) -> bool:
        """Whether anything but the tape holds it."""
        num_references: int = torch._C._storage_Use_Count(self.memory.cdata)  # 0 if it is gone
        return num_references > self.num_own


class TapePool:
    """The memory that all captures of a runtime share, made one at a time. See Note [What a tape's pool counts]."""

    def __init__(self) -> None:
        self.num_captures = 0
        """Segments that are recorded or being recorded, and not released."""
        self._blocks: dict[int, Block] = {}
        """Those that were live when last looked at."""
        self._peak_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that CUDA's allocator would hold for these captures."""
        return self._peak_bytes if self.num_captures else self._live_bytes()

    def allocate(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A poisoned tensor; with strides that follow its shape where the given ones would let elements overlap."""
        if any(step == 0 and size > 1 for size, step in zip(shape, stride, strict=True)):
            tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        else:
            tensor = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)
        self._add(tensor)
        poison(tensor)
        return tensor

    def allocate_memory(self, num_bytes: int, device: torch.device) -> torch.UntypedStorage:
        """Memory for the outputs of an opaque call, all bits set: NaN in most floating point types."""
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._add(tensor)
        tensor.fill_(255)
        return tensor.untyped_storage()

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block that a tensor of the model lies in, if it was allocated here."""
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def measure(self) -> None:
        """Takes note of what is live now."""
        self._peak_bytes = max(self._peak_bytes, self._live_bytes())

    def opened(self) -> None:
        """A capture begins."""
        if not self.num_captures:
            self._peak_bytes = self._live_bytes()
        self.num_captures += 1

    def closed(self) -> None:
        """A capture was released or given up."""
        self.num_captures -= 1

    def _add(self, tensor: torch.Tensor) -> None:
        memory = StorageWeakRef(tensor.untyped_storage())
        # Python's object for a memory may count as a reference for as long as the memory lives: so only the tensor is
        # taken off here.
        num_own = torch._C._storage_Use_Count(memory.cdata) - 1
        num_bytes = tensor.untyped_storage().nbytes()
        self._blocks[memory.cdata] = Block(memory=memory, num_bytes=num_bytes, num_own=num_own)
        self.measure()

    def resized(self, tensor: torch.Tensor) -> None:
        """A tensor's memory may have grown."""
        block = self.block_of(tensor)
        if block is not None:
            block.num_bytes = tensor.untyped_storage().nbytes()
            self.measure()

    def _live_bytes(self) -> int:
        # What only the tape holds is never handed out again, so it is looked at for the last time.
        self._blocks = {key: block for key, block in list(self._blocks.items()) if block.is_live}
        return sum(block.num_bytes for block in self._blocks.values())


def poison(tensor: torch.Tensor) -> None:
    """Fills a tensor with what nobody takes for a result: NaN, the number furthest from zero, or True."""
    dtype = tensor.dtype
    if dtype is torch.bool:
        tensor.fill_(True)
    elif dtype.is_floating_point or dtype.is_complex:
        value: Any = torch.nan
        tensor.fill_(value) if dtype.itemsize > 1 else tensor.view(torch.uint8).fill_(_nan_byte(dtype))
    else:
        info = torch.iinfo(dtype)
        tensor.fill_(info.min or info.max)


def _nan_byte(dtype: torch.dtype) -> int:
    """NaN in the floating point types of one byte."""
    return 0x80 if str(dtype).endswith("fnuz") else 0xFF
