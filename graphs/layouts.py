"""How the outputs of a call lay in memory: what a capture has to know of a call that it does not make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors that do nothing of their own where operators, copies and comparisons get them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """One tensor: everything but its values and its address."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0
    """In elements, from the start of its memory."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        """The layout of a tensor, real or fake, of concrete sizes."""
        return cls(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=tensor.dtype,
            device=tensor.device,
            offset=int(tensor.storage_offset()),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it needs, from the start of that memory to its last element."""
        if 0 in self.shape:
            return 0
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def dense(self) -> TensorLayout:
        """The layout of a copy: these strides where they leave no gaps and no overlaps, else contiguous ones."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1:
                if stride != expected:
                    return TensorLayout.contiguous(self.shape, self.dtype, self.device)
                expected *= size
        return dataclasses.replace(self, offset=0)

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> TensorLayout:
        """The layout of a new tensor."""
        strides: list[int] = []
        step = 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        return cls(shape=tuple(shape), stride=tuple(reversed(strides)), dtype=dtype, device=device)

    def over(self, memory: torch.UntypedStorage) -> torch.Tensor:
        """A tensor of this layout over a memory of at least `num_bytes`."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(memory, self.offset, self.shape, self.stride)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallLayout:
    """The outputs of a call: which are tensors, which share memory, and with which argument."""

    outputs: tuple[TensorLayout | Any, ...]
    """A layout for each tensor; anything else, such as a size, is kept as it is."""
    memories: tuple[int | None, ...]
    """Of each tensor: `i` when it lies in the memory of argument `i`; `-1 - j` for the j-th new memory; else None."""
    new_bytes: tuple[int, ...]
    """Size of each new memory."""

    @classmethod
    def observe(cls, arguments: Sequence[Any], outputs: Sequence[Any]) -> CallLayout:
        """What a call that was made shows."""
        known = {
            argument.untyped_storage().data_ptr(): i
            for i, argument in reversed(list(enumerate(arguments)))
            if isinstance(argument, torch.Tensor) and argument.untyped_storage().nbytes()
        }
        memories: list[int | None] = []
        new_bytes: list[int] = []
        for output in outputs:
            if not isinstance(output, torch.Tensor):
                memories.append(None)
                continue
            storage = output.untyped_storage()
            key = storage.data_ptr() if storage.nbytes() else id(output)
            if key not in known:
                new_bytes.append(storage.nbytes())
                known[key] = -len(new_bytes)
            memories.append(known[key])
        return cls(
            outputs=tuple(TensorLayout.of(o) if isinstance(o, torch.Tensor) else o for o in outputs),
            memories=tuple(memories),
            new_bytes=tuple(new_bytes),
        )

    def build(
        self, arguments: Sequence[Any], allocate: Callable[[int, torch.device], torch.UntypedStorage]
    ) -> list[Any]:
        """Outputs of this layout for a call with `arguments`; new memories come from `allocate(bytes, device)`."""
        new: dict[int, torch.UntypedStorage] = {}
        built: list[Any] = []
        for output, memory in zip(self.outputs, self.memories, strict=True):
            if not isinstance(output, TensorLayout) or memory is None:
                built.append(output)
            elif memory >= 0:
                built.append(output.over(arguments[memory].untyped_storage()))
            else:
                if memory not in new:
                    new[memory] = allocate(self.new_bytes[-1 - memory], output.device)
                built.append(output.over(new[memory]))
        return built
