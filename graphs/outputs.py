"""The nested structure that a model returns: flattened to leaves with paths, rebuilt, and cut back to size.

A leaf's path is what a user writes in `output_dims`: `""` for a lone tensor, `"hidden"`, `"1"`, `"layers.0"`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError

Leaf = Callable[[str, Any], Any]


def map_leaves(value: Any, leaf: Leaf, path: str = "") -> Any:
    """Rebuilds tuples, named tuples, lists, dicts and dataclasses with `leaf(path, value)` at everything else."""
    if isinstance(value, torch.Tensor):
        return leaf(path, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, leaf, path)
    if isinstance(value, dict):
        items = {key: map_leaves(item, leaf, _join(path, str(key))) for key, item in value.items()}
        if type(value) is dict:
            return items
        rebuilt = copy.copy(value)  # a defaultdict is not made from its items
        rebuilt.update(items)
        return rebuilt
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        elements = [map_leaves(item, leaf, _join(path, str(i))) for i, item in enumerate(value)]
        return type(value)(*elements) if hasattr(value, "_fields") else type(value)(elements)
    return leaf(path, value)


def _map_dataclass(value: Any, leaf: Leaf, path: str) -> Any:
    """Not through `__init__`: a `__post_init__` need not understand what the leaves become."""
    rebuilt = copy.copy(value)
    for field in dataclasses.fields(value):
        item = map_leaves(getattr(value, field.name), leaf, _join(path, field.name))
        object.__setattr__(rebuilt, field.name, item)
        if isinstance(value, dict) and field.name in value:  # a transformers ModelOutput is a dict of its fields too
            dict.__setitem__(rebuilt, field.name, item)
    return rebuilt


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


Rows = Mapping[int, int]
"""Dim -> how many rows a token has there, for the dims of an output that grow with `tokens`."""

OutputDims = int | None | Mapping[str | int, int | None]
"""Which dim of which output carries `tokens`: one for every output, or by path; None leaves an output alone."""


class OutputContract:
    """Says how each output is cut back from the padded size to the size that was asked for."""

    def __init__(self, output_dims: OutputDims = 0) -> None:
        dims = output_dims.values() if isinstance(output_dims, Mapping) else (output_dims,)
        if not all(dim is None or (isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0) for dim in dims):
            raise InputError(
                f"output_dims: expected a dim counted from 0 or None, or these by path, got {output_dims!r}"
            )
        self._default = output_dims if isinstance(output_dims, int) or output_dims is None else 0
        self._by_path = {str(k): v for k, v in output_dims.items()} if isinstance(output_dims, Mapping) else {}

    @property
    def dims(self) -> OutputDims:
        """What it was made from, with paths as text."""
        by_path: dict[str | int, int | None] = {}
        by_path.update(self._by_path)
        return by_path or self._default

    def leaves_alone(self, path: str) -> bool:
        """Whether an output was declared to have no padded rows."""
        return self._by_path.get(path, self._default) is None

    def declared_dim(self, path: str) -> int | None:
        """The dim that was named for just this output; None if none was."""
        return self._by_path.get(path)

    def likely_rows(self, path: str, shape: Sequence[int], padded: int) -> Rows:
        """The token rows of an output of which only the shape is known: its dim of the padded size, or all of them."""
        dim = self._by_path.get(path, self._default)
        if dim is not None and dim < len(shape) and shape[dim] == padded:
            return {dim: 1}
        return {each: 1 for each, size in enumerate(shape) if size == padded}

    def cut(self, outputs: Any, *, padded: int, num_tokens: int, rows: Mapping[str, Rows] | None = None) -> Any:
        """The outputs without their padded rows: views, of the same structure.

        Args:
            rows: the dims of each output that are a multiple of `tokens`, where that is known. Elsewhere a dim of the
                padded size is taken to be one.

        Raises:
            InputError: an output's padded rows are on another dim than the declared one, or `output_dims` names no
                such output.
        """
        seen: set[str] = set()

        def leaf(path: str, value: Any) -> Any:
            seen.add(path)
            if not isinstance(value, torch.Tensor) or padded == num_tokens:
                return value
            known = rows.get(path) if rows is not None else None
            guessed = {d: 1 for d, size in enumerate(value.shape) if size == padded}
            return self._cut_leaf(
                path, value, num_tokens, guessed if known is None else known, traced=known is not None
            )

        result = map_leaves(outputs, leaf)
        strangers = sorted(set(self._by_path) - seen)
        if strangers:
            raise InputError(
                f"output_dims: the model returns {', '.join(map(repr, sorted(seen)))}, got {strangers[0]!r}; "
                f"use one of the former"
            )
        return result

    def lone_cuts(
        self, value: torch.Tensor, *, padded: int, num_tokens: int, rows: Mapping[str, Rows] | None = None
    ) -> tuple[tuple[int, int], ...]:
        """What `cut` does to a model's only output, if it is like `value`: (dim, size that is left) for each dim.

        Raises: InputError: as `cut`.
        """
        cut = self.cut(value, padded=padded, num_tokens=num_tokens, rows=rows)
        return tuple((dim, size) for dim, size in enumerate(cut.shape) if size != value.shape[dim])

    def _cut_leaf(self, path: str, value: torch.Tensor, num_tokens: int, rows: Rows, traced: bool) -> torch.Tensor:
        dim = self._by_path.get(path, self._default)
        if dim is None:
            return value
        if dim in rows:
            # Of an output that no one spoke of, every dim that is known to grow, such as both of a mask's.
            for each in rows if traced and path not in self._by_path else (dim,):
                value = value.narrow(each, 0, rows[each] * num_tokens)
            return value
        if rows:
            raise InputError(
                f"output {path!r}: expected the padded rows on dim {dim}, got shape {list(value.shape)} with rows on "
                f'dim {min(rows)}; say output_dims={{"{path}": {min(rows)}}}, or None to leave it alone'
            )
        return value
