"""Fake tensors from descriptions: for a piece whose sizes were filled in, and for one that came from elsewhere."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .memory import memory

Size: TypeAlias = int | sympy.Expr


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorDescription:
    """Everything that a compiler may look at of a dense tensor, except the data."""

    dtype: torch.dtype
    device: torch.device
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size
    """In elements."""
    memory: int
    """Equal for tensors that share memory."""
    memory_bytes: Size

    def at(self, values: Mapping[sympy.Symbol, Any]) -> TensorDescription:
        """With symbols replaced: by numbers, or by other symbols."""
        return dataclasses.replace(
            self,
            sizes=tuple(fill(size, values) for size in self.sizes),
            strides=tuple(fill(stride, values) for stride in self.strides),
            offset=fill(self.offset, values),
            memory_bytes=fill(self.memory_bytes, values),
        )


def describe(tensor: torch.Tensor) -> TensorDescription:
    """The description of a fake tensor."""
    return TensorDescription(
        dtype=tensor.dtype,
        device=tensor.device,
        sizes=tuple(map(size_expr, tensor.shape)),
        strides=tuple(map(size_expr, tensor.stride())),
        offset=size_expr(tensor.storage_offset()),
        memory=memory(tensor),
        memory_bytes=size_expr(tensor.untyped_storage().nbytes()),
    )


def size_expr(size: Any) -> Size:
    """A size as a plain number or an expression."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expr: sympy.Expr = size.node.expr
    return int(expr) if expr.is_Integer else expr


def fill(size: Size, values: Mapping[sympy.Symbol, Any]) -> Size:
    """A size with symbols replaced."""
    if isinstance(size, int):
        return size
    filled = size.xreplace({symbol: sympy.sympify(value) for symbol, value in values.items()})
    return int(filled) if filled.is_Integer else filled


class FakeFactory:
    """Makes the fake tensors of one piece; those that shared memory share it again."""

    def __init__(self, fake_mode: FakeTensorMode, descriptions: Iterable[TensorDescription]) -> None:
        self._fake_mode = fake_mode
        self._num_users = Counter(description.memory for description in descriptions)
        self._bases: dict[int, torch.Tensor] = {}

    def tensor(self, description: TensorDescription) -> torch.Tensor:
        """The fake tensor of a description that the factory was made for."""
        sizes, strides = [*map(self.size, description.sizes)], [*map(self.size, description.strides)]
        offset = self.size(description.offset)
        dtype, device = description.dtype, description.device
        with self._fake_mode:
            if self._num_users[description.memory] == 1 and offset == 0:
                # Not as a view of a base: AOTAutograd goes by the record of views when a piece returns a view of it.
                return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
            base = self._bases.get(description.memory)
            if base is None:
                num_elements = self.size(description.memory_bytes) // dtype.itemsize
                base = self._bases[description.memory] = torch.empty(num_elements, dtype=dtype, device=device)
            flat = base if base.dtype == dtype else base.view(dtype)
            return flat.as_strided(sizes, strides, offset)

    def size(self, size: Size) -> Any:
        """A number, or a SymInt of the fake mode's ShapeEnv."""
        if isinstance(size, int):
            return size
        assert self._fake_mode.shape_env is not None
        return self._fake_mode.shape_env.create_symintnode(size, hint=None)
