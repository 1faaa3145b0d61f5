"""What lies in a static buffer behind a step's rows: known, so that a padded tail is not written again each step.

All buckets and widths of a phase share the start of a buffer. So what is known is kept for the buffer, not for a bucket
or a tensor over it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

import torch

PadValue = int | float | Literal["last"]

TailKind = tuple[torch.dtype, tuple[int, ...], str]
"""What makes two fills of a buffer alike: dtype, sizes of a row, and the pad value as text (1, True and 1.0 differ)."""


def tail_kind(static: torch.Tensor, value: PadValue) -> TailKind | None:
    """The kind of a contiguous static tensor; None where nothing can be known: `last` depends on the step's values."""
    return None if value == "last" or not static.dim() else (static.dtype, tuple(static.shape[1:]), repr(value))


class Tail:
    """Of one buffer: outside of `extents`, its first `rows` rows hold the pad value of `kind`."""

    __slots__ = ("extents", "kind", "rows")

    def __init__(self) -> None:
        self.kind: TailKind | None = None
        """None: nothing is known."""
        self.extents: tuple[int, ...] = ()
        self.rows = 0

    def holds(self, kind: TailKind | None, extents: tuple[int, ...], rows: int) -> bool:
        """Whether `rows` rows hold the pad value wherever a tensor with the sizes `extents` does not reach."""
        return (
            kind is not None
            and kind == self.kind
            and rows <= self.rows
            and (extents == self.extents or all(map(operator.le, self.extents, extents)))
        )

    def written(self, kind: TailKind | None, extents: Sequence[int], rows: int) -> None:
        """Notes that a tensor was written to the start, and the pad value to all the rest of `rows` rows."""
        # Rows that a larger bucket has filled are as they were, unless a step reached into them.
        keeps = kind is not None and kind == self.kind and self.extents[0] <= rows
        self.rows = max(rows, self.rows) if keeps else rows
        self.kind, self.extents = kind, tuple(extents)

    def forget(self) -> None:
        """Something else may have been written."""
        self.kind = None


def tail_views(static: torch.Tensor, extents: Sequence[int]) -> list[torch.Tensor]:
    """The parts of `static` that a tensor of the sizes `extents` at its start does not reach; they do not overlap."""
    views: list[torch.Tensor] = []
    head = static
    for dim, size in enumerate(extents):
        if size < static.shape[dim]:
            views.append(head.narrow(dim, size, static.shape[dim] - size))
            head = head.narrow(dim, 0, size)
    return views


def corner(static: torch.Tensor, extents: Sequence[int]) -> torch.Tensor:
    """The part of `static` that a tensor of the sizes `extents` at its start reaches."""
    for dim, size in enumerate(extents):
        if size < static.shape[dim]:
            static = static.narrow(dim, 0, size)
    return static


def repeat_last(static: torch.Tensor, extents: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(part of the tail, what is copied there) in order, for a tail that repeats the last element along each dim.

    `extents` has no 0. What lies in the tails of later dims is repeated undefined; those overwrite it in their turn.
    """
    return [
        (static.narrow(dim, size, room - size), static.narrow(dim, size - 1, 1))
        for dim, (size, room) in enumerate(zip(extents, static.shape, strict=True))
        if size < room
    ]


def constant_value(value: PadValue, shape: Sequence[int]) -> Any:
    """The number that a tail holds; None for one that repeats the last element. Where there is none it is 0."""
    if value != "last":
        return value
    return 0 if 0 in shape else None
