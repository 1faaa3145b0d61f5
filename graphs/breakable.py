"""Backend `breakable`: the eager forward in segments, without Dynamo; its split ops run between them at each replay.

A dispatch mode sees every operator of the forward. At a split op it ends the segment, notes the call, which does not
happen, and begins the next one.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CaptureError
from ..ops import registry
from .capture import Observed, Work, reserve_arguments, reserve_outputs, reserve_results, store_outputs
from .copies import Pair, copy_all
from .device import Segment, Session
from .layouts import CallLayout, TensorLayout
from .memory import tensors_in
from .model_line import calling_line
from .split_calls import (
    Place,
    SplitCall,
    map_arguments,
    memory_address,
    results_at,
    tensor_arguments,
    written_addresses,
)


def observe(work: Work) -> tuple[Sequence[Any], Observed]:
    """Runs the forward once, uncaptured; returns its flat outputs and what a capture needs to know."""
    observed = Observed()
    with _Watching(work, observed):
        outputs, observed.structure = work.forward.flat(work.tensors, work.sizes)
    reserve_outputs(work, outputs)
    return outputs, observed


def capture(session: Session, work: Work, observed: Observed) -> tuple[list[Segment | SplitCall], list[Any]]:
    """Captures the forward. Raises: CaptureError; whatever the forward raises."""
    breaks = _Breaking(work, observed, session)
    session.begin()
    with breaks:
        outputs, _ = work.forward.flat(work.tensors, work.sizes)
    breaks.check_complete()
    outputs = store_outputs(work, outputs)
    return [*breaks.steps, session.end()], outputs


class _SplitOpMode(TorchDispatchMode, abc.ABC):
    """Tells split ops from other operators, and scratch from memory that has an owner."""

    def __init__(self, work: Work, observed: Observed) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = work
        self.observed = observed
        self.num_calls = 0
        self._split_ops = {id(op) for op in registry.REGISTRY.ops}  # hashing an operator costs as much as all the rest
        self._made: set[int] = set()
        """Addresses of memory that the forward's operators allocated."""
        self._blank: set[int] = set()
        """Those of it to which nothing was written."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if id(func) in self._split_ops:
            self.num_calls += 1
            return self.split_call(f"{func._schema.name} #{self.num_calls}", func, args, kwargs)
        taken = {memory_address(t): t for value in (*args, *kwargs.values()) for t in tensors_in(value)}
        self.before(func, taken)
        returned = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._blank -= written_addresses(func, args, kwargs)
        self._note(func, taken, returned)
        return returned

    def before(self, op: OpOverload, taken: Mapping[int, torch.Tensor]) -> None:
        """Called before each operator that is no split op, with its tensors by the address of their memory."""

    @abc.abstractmethod
    def split_call(self, name: str, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called in place of a split op."""

    def is_scratch(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is the forward's own."""
        return memory_address(tensor) in self._made

    def _note(self, op: OpOverload, taken: Mapping[int, torch.Tensor], returned: Any) -> None:
        made = {memory_address(tensor) for tensor in tensors_in(returned)} - {0}
        if op is not torch.ops.aten.lift_fresh.default:  # its tensor is of Python's numbers, and nobody holds it yet
            made -= taken.keys()
        self._made |= made
        if op.overloadpacket in _EMPTY:
            self._blank |= made
        else:
            self._blank -= made


class _Watching(_SplitOpMode):
    """Makes the buffers for the split ops' arguments and results while they run."""

    def __init__(self, work: Work, observed: Observed) -> None:
        super().__init__(work, observed)
        devices = {tensor.device.type for tensor in work.tensors.values()}
        self._autocast = {
            device: torch.get_autocast_dtype(device)
            for device in devices
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        }
        """Device types for which the caller has autocast on, and to what."""

    def split_call(self, name: str, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.observed.written |= written_addresses(op, args, kwargs)
        reserve_arguments(self.work, op, args, kwargs, self.is_scratch)
        with contextlib.ExitStack() as ambient:  # a mode is below autocast, and a body at a replay is not
            for device, dtype in self._autocast.items():
                ambient.enter_context(torch.autocast(device, dtype))
            returned = op(*args, **kwargs)
        reserve_results(self.work, op, returned)
        self.observed.note(name, args, returned)
        self._made |= {memory_address(tensor) for tensor in tensors_in(returned)} - {0}
        return returned


class _Breaking(_SplitOpMode):
    """Ends the segment at each split op and begins the next."""

    def __init__(self, work: Work, observed: Observed, session: Session) -> None:
        super().__init__(work, observed)
        self.session = session
        self._owned = work.owned_addresses()
        self.steps: list[Segment | SplitCall] = []

    def before(self, op: OpOverload, taken: Mapping[int, torch.Tensor]) -> None:
        """Refuses what another step would not find; lets the session see the stream."""
        self.session.op = op._schema.name
        self.session.saw_stream()
        for address, tensor in taken.items():
            if address in self._made or address in self._owned or not address:
                continue
            what = self.work.moving.get(address)
            if what is not None:
                raise CaptureError(
                    f"{op._schema.name}: expected tensors that stay where they are, got {what}, which each step brings "
                    f"anew; read it in a split op, or declare it with context_field(pad=...)",
                    op=op._schema.name,
                    line=calling_line(),
                )
            self.work.held[address] = tensor

    def split_call(self, name: str, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layout = self._layout(name, op)
        tensors = list(tensor_arguments(op, args, kwargs))
        addresses = [memory_address(tensor) for _, tensor in tensors]
        written = {address for (place, _), address in zip(tensors, addresses, strict=True) if place.is_written}
        to_buffers: list[Pair] = []
        back: list[Pair] = []
        blank = frozenset(self._blank)
        self._blank -= written

        def bridged(place: Place, tensor: torch.Tensor) -> torch.Tensor:
            address = memory_address(tensor)
            # Arguments that share memory that is written stay as they are: copies of them would be apart.
            if not self.is_scratch(tensor) or (address in written and addresses.count(address) > 1):
                return tensor
            buffer = self.work.bridges.find(place, TensorLayout.of(tensor))
            if address not in blank:
                to_buffers.append((buffer, tensor))
            if place.is_written:
                back.append((tensor, buffer))
            return buffer

        args, kwargs = map_arguments(op, args, kwargs, bridged)
        copy_all(to_buffers)
        results = results_at(self.work.bridges, op, layout.outputs)
        self.steps += [self.session.end(), SplitCall(op, args, kwargs, results)]
        self.session.begin()
        copy_all(back)
        seen = [self._own_copy(result) for result in results]
        if not results:
            return None
        return seen[0] if name in self.observed.lone else seen

    def check_complete(self) -> None:
        """Raises: CaptureError when the forward made fewer calls of split ops than in the first run."""
        if self.num_calls != len(self.observed.calls):
            raise CaptureError(
                f"expected {len(self.observed.calls)} calls of split ops, as in the first run, got {self.num_calls}; "
                f"the forward must do the same each time at one size, or use backend disabled"
            )

    def _layout(self, name: str, op: OpOverload) -> CallLayout:
        layout = self.observed.calls.get(name)
        if layout is None:
            raise CaptureError(
                f"{op._schema.name}: expected the calls of the first run, got {name}; the forward must do the same "
                f"each time at one size, or use backend disabled",
                op=op._schema.name,
                line=calling_line(),
            )
        return layout

    def _own_copy(self, result: Any) -> Any:
        """A result in memory of the capture: who knows how long the forward keeps it."""
        if not isinstance(result, torch.Tensor):
            return result
        copied = torch.empty_like(result).copy_(result)
        self._made |= {memory_address(copied)} - {0}
        return copied


_EMPTY = frozenset(
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
