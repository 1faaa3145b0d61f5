"""A step's tensors into static ones, with everything that follows from their layouts done once."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .copies import SHARED_DTYPES
from .layouts import PLAIN_TENSORS
from .tails import PadValue, Tail, TailKind, constant_value, corner, repeat_last, tail_kind, tail_views


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where one of a step's tensors goes."""

    source: torch.Tensor
    """One of the layout that is copied; only its layout is looked at."""
    static: torch.Tensor
    """At a fixed address; as large in each dim or larger."""
    value: PadValue
    """What the rest of `static` holds."""
    tail: Tail
    """Of the buffer that `static` lies in."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Padding:
    """The tail of one target."""

    tail: Tail
    kind: TailKind | None
    extents: tuple[int, ...]
    rows: int
    views: tuple[torch.Tensor, ...]
    value: float

    def write(self) -> None:
        """Defines the tail, if it is not known to hold its value."""
        if self.tail.holds(self.kind, self.extents, self.rows):
            self.tail.extents = self.extents
            return
        for view in self.views:
            view.fill_(self.value)
        self.tail.written(self.kind, self.extents, self.rows)


class PreparedFill:
    """Copies tensors of known layouts into static ones; the tails hold afterwards what a fill from scratch writes.

    Those of one dtype and device that lie alike there go in one `torch._foreach_copy_`, which is one kernel on CUDA.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        """`targets[i]` is for `sources[i]` of `run`."""
        self._groups: list[tuple[list[torch.Tensor], Callable[[Any], Any]]] = []
        self._singles: list[tuple[torch.Tensor, int]] = []
        self._paddings: list[_Padding] = []
        self._repeats: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Views of no mode, as the buffers are: they are written in whatever mode a later step is.
        with torch.inference_mode(False), torch.no_grad():
            self._add_copies(targets)
            for target in targets:
                self._add_tail(target)

    def _add_copies(self, targets: Sequence[Target]) -> None:
        alike: dict[tuple[torch.dtype, torch.device], list[tuple[torch.Tensor, int]]] = {}
        for index, target in enumerate(targets):
            source, destination = target.source, corner(target.static, target.source.shape)
            if not source.numel():
                continue
            # The one kernel is for tensors that lie alike, without gaps; one that does not would slow all down.
            is_alike = destination.is_contiguous() and source.is_contiguous() and source.dtype in SHARED_DTYPES
            # Another class may know how to be copied alone, and not in a list.
            if is_alike and type(source) in PLAIN_TENSORS:
                alike.setdefault((source.dtype, source.device), []).append((destination, index))
            else:
                self._singles.append((destination, index))
        for members in alike.values():
            if len(members) == 1:
                self._singles += members
            else:
                destinations = [destination for destination, _ in members]
                self._groups.append((destinations, operator.itemgetter(*(index for _, index in members))))

    def _add_tail(self, target: Target) -> None:
        static, shape = target.static, tuple(target.source.shape)
        if not static.dim() or not static.numel():
            return
        value = constant_value(target.value, shape)
        if value is None:
            self._repeats += repeat_last(static, shape)
            return
        self._paddings.append(
            _Padding(
                tail=target.tail,
                kind=tail_kind(static, target.value),
                extents=shape,
                rows=static.shape[0],
                views=tuple(tail_views(static, shape)),
                value=value,
            )
        )

    def run(self, sources: Sequence[torch.Tensor]) -> None:
        """Copies `sources`, of the targets' layouts, and defines the tails. Without gradients, by the caller's mode."""
        for destinations, pick in self._groups:
            torch._foreach_copy_(destinations, pick(sources))
        for destination, index in self._singles:
            destination.copy_(sources[index])
        for padding in self._paddings:
            padding.write()
        for view, last in self._repeats:
            view.copy_(last)
