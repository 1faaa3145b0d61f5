"""The debug mode's witness of split ops: which declared mutations really happen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from ..ops.registry import mutated_arguments


class MutationWitness:
    """Compares every declared-mutated argument of a split op before and after each call. Copies them: slow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[OpOverload, int] = {}
        self._written: dict[OpOverload, set[str]] = {}

    def watch(self, op: Callable[..., Any]) -> Callable[..., Any]:
        """The operator with the comparison around it."""
        assert isinstance(op, OpOverload)
        names = [argument.name for argument in op._schema.arguments]
        declared = set(mutated_arguments(op))

        def watched(*args: Any, **kwargs: Any) -> Any:
            tensors = {n: v for n, v in {**dict(zip(names, args, strict=False)), **kwargs}.items() if n in declared}
            before = {name: _bytes_of(value) for name, value in tensors.items()}
            result = op(*args, **kwargs)
            after = {name: _bytes_of(value) for name, value in tensors.items()}
            changed = {n for n in before if not all(map(torch.equal, before[n], after[n]))}
            with self._lock:
                self._calls[op] = self._calls.get(op, 0) + 1
                self._written.setdefault(op, set()).update(changed)
            return result

        return watched

    def never_written(self) -> dict[str, tuple[str, ...]]:
        """Operator name -> the arguments it declares mutated and has not changed in any call so far."""
        with self._lock:
            unwritten = {
                op._schema.name: tuple(n for n in mutated_arguments(op) if n not in self._written[op])
                for op in self._calls
            }
        return {name: arguments for name, arguments in unwritten.items() if arguments}


def _bytes_of(value: Any) -> list[torch.Tensor]:
    """Copies of an argument's tensors as bytes, so that NaN equals itself; an argument may be a list, or None."""
    tensors = value if isinstance(value, (list, tuple)) else [value]
    contiguous = [t.detach().clone(memory_format=torch.contiguous_format) for t in tensors if t is not None]
    return [t.view(-1).view(torch.uint8) for t in contiguous]
