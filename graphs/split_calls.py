"""Split ops between captured segments: their arguments and results at fixed addresses, and the call at a replay.

What a split op gets from a segment is copied to a bridge buffer at the segment's end, and what it returns or writes is
copied from one at the start of the next: see Note [Who owns captured memory] in device.py. Its other arguments (the
model's tensors, the KV cache, inputs) have owners and stay where they are. Layers share the buffers: a split op is done
with them before the next call of the same operator.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch._ops import OpOverload

from ..errors import CaptureError
from .buffers import Buffers
from .direct_calls import direct_call
from .layouts import TensorLayout

Replace = Callable[["Place", torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a split op takes or leaves a tensor."""

    op: str
    """Qualified name."""
    name: str
    """Of the argument, or `result`."""
    index: int = 0
    """Within an argument that is a list, or among the results."""
    is_written: bool = dataclasses.field(default=False, compare=False)
    """Whether the operator writes the argument."""


def map_arguments(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], replace: Replace
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with `replace(place, tensor)` for each tensor, also for those in lists."""
    schema = {argument.name: argument for argument in op._schema.arguments}
    names = list(schema)

    def mapped(name: str, value: Any) -> Any:
        info = schema[name].alias_info
        is_written = info is not None and info.is_write
        if isinstance(value, torch.Tensor):
            return replace(Place(op._schema.name, name, 0, is_written), value)
        if isinstance(value, (list, tuple)):
            return [
                replace(Place(op._schema.name, name, i, is_written), item) if isinstance(item, torch.Tensor) else item
                for i, item in enumerate(value)
            ]
        return value

    new_args = tuple(mapped(names[i], value) for i, value in enumerate(args))
    return new_args, {name: mapped(name, value) for name, value in kwargs.items()}


def tensor_arguments(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Place, torch.Tensor]]:
    """Every tensor among the arguments of a call, and where it is."""
    found: list[tuple[Place, torch.Tensor]] = []

    def note(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        found.append((place, tensor))
        return tensor

    map_arguments(op, args, kwargs, note)
    yield from found


def results_of(returned: Any) -> list[Any]:
    """What an operator returned, as a list."""
    if returned is None:
        return []
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def written_addresses(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """The addresses of the memory that a call writes."""
    return {memory_address(tensor) for place, tensor in tensor_arguments(op, args, kwargs) if place.is_written}


def memory_address(tensor: torch.Tensor) -> int:
    """The address of the memory that a tensor lies in; 0 for an empty one."""
    return tensor.untyped_storage().data_ptr()


class Bridges:
    """The bridge buffers of a phase's split ops, for one bucket."""

    def __init__(self, buffers: Buffers, bucket: int) -> None:
        self._buffers = buffers
        self._bucket = bucket

    def reserve(self, place: Place, tensor: torch.Tensor) -> None:
        """Makes the buffer for tensors like this one, outside of any capture."""
        self._buffers.tensor(place, TensorLayout.of(tensor).dense(), self._bucket)

    def find(self, place: Place, layout: TensorLayout) -> torch.Tensor:
        """The buffer for tensors of a layout. Raises: CaptureError if the first run had others there."""
        found = self._buffers.find(place, layout.dense())
        if found is None:
            raise CaptureError(
                f"{place.op}: {place.name}: expected a tensor like in the first run, got {layout}; the forward must do "
                f"the same each time at one size, or use backend disabled",
                op=place.op,
            )
        return found


def results_at(bridges: Bridges, op: OpOverload, outputs: Sequence[Any]) -> list[Any]:
    """Where the results of a split op go: a buffer for each tensor, anything else as it was.

    Args:
        outputs: as `CallLayout.outputs` has them.

    Raises:
        CaptureError: a result is a list, which stands among others.
    """
    name = op._schema.name
    results: list[Any] = []
    for i, output in enumerate(outputs):
        if isinstance(output, (list, tuple)):
            raise CaptureError(
                f"{name}: result {i}: expected tensors and numbers, got a {type(output).__name__} among them; return "
                f"its tensors one by one, or one list of all",
                op=name,
            )
        results.append(bridges.find(Place(name, "result", i), output) if isinstance(output, TensorLayout) else output)
    return results


class SplitCall:
    """One call of a split op at each replay, with the step's context."""

    def __init__(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[torch.Tensor | Any]
    ) -> None:
        self.op = op
        self.args = args
        """Tensors at fixed addresses, held strongly; everything else is as it was at the capture."""
        self.kwargs = kwargs
        self.results = tuple(results)
        """Where its results are expected."""

    def __call__(self) -> None:
        """Calls the operator. Raises: CaptureError when its results have another layout than at the first run."""
        returned = self.op(*self.args, **self.kwargs)
        if self.results:
            self._store(returned)

    def direct(self, tracked: Set[int]) -> Callable[[], Any]:
        """The same, made ready to be done many times without the dispatcher: see `direct_call`.

        Args:
            tracked: addresses of memory that does not move unseen. With other tensors (a global that a split op gets)
                nothing is prepared: their data may be elsewhere at the next replay.
        """
        addresses = {memory_address(tensor) for _, tensor in tensor_arguments(self.op, self.args, self.kwargs)}
        call = direct_call(self.op, self.args, self.kwargs, stays=addresses - {0} <= tracked)
        return functools.partial(self._call_and_store, call) if self.results else call

    def _call_and_store(self, call: Callable[[], Any]) -> None:
        self._store(call())

    def _store(self, got_back: Any) -> None:
        returned = results_of(got_back)
        if len(returned) != len(self.results):
            self._refuse(f"{len(self.results)} results", f"{len(returned)}")
        for expected, got in zip(self.results, returned, strict=True):
            if not isinstance(expected, torch.Tensor):
                if isinstance(got, torch.Tensor) or got != expected:
                    self._refuse(f"{expected!r}", f"{got!r}")
            elif (
                not isinstance(got, torch.Tensor)
                or got.shape != expected.shape
                or got.dtype != expected.dtype
                or got.device != expected.device
            ):
                shown = TensorLayout.of(got) if isinstance(got, torch.Tensor) else type(got).__name__
                self._refuse(f"{TensorLayout.of(expected)} on {expected.device}", str(shown))
            else:
                expected.copy_(got)

    def _refuse(self, expected: str, got: str) -> None:
        name = self.op._schema.name
        raise CaptureError(
            f"split op {name}: expected to return {expected}, as when this bucket was captured, got {got}; an "
            f"operator must return the same shapes, dtypes and devices at one size, or use backend disabled",
            op=name,
        )
