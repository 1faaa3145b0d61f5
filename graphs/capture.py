"""A forward that was captured for one bucket: what has to be known before, and what is replayed afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

import torch
from torch._ops import OpOverload

from ..errors import CaptureError
from .addresses import Addresses
from .bindings import Bindings
from .buffers import Buffers
from .copies import Pair, copy_all
from .device import Launchable, Segment
from .direct_calls import are_operators_watched
from .layouts import CallLayout, TensorLayout
from .program import Hook, SizesByName, TensorsByName
from .split_calls import Bridges, Place, SplitCall, memory_address, results_of, tensor_arguments


class Forward(Protocol):
    """What can be captured: a program, or the eager forward."""

    @property
    def bindings(self) -> Bindings:
        """The model's tensors that it uses."""

    def flat(
        self, tensors: TensorsByName, sizes: SizesByName, hook: Hook | None = None
    ) -> tuple[Sequence[Any], Any]: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is captured: a forward at one size, on inputs at fixed addresses. The step's context is set around it."""

    forward: Forward
    tensors: TensorsByName
    sizes: SizesByName
    bucket: int
    buffers: Buffers
    owned: frozenset[int] = frozenset()
    """Addresses of the memory of the context's tensors that have an owner."""
    moving: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Addresses of the memory of tensors that are another step's next time, and what they are."""
    held: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """What the forward reads from elsewhere (a global, a closure), by address: nobody else may keep it."""

    @property
    def bridges(self) -> Bridges:
        """The buffers of the split ops."""
        return Bridges(self.buffers, self.bucket)

    def owned_addresses(self) -> set[int]:
        """Addresses of memory that outlives a replay: of the inputs, the context, the model and its constants."""
        bindings = self.forward.bindings
        return self._addresses() | {memory_address(tensor) for tensor in bindings.frozen_tensors} | self.owned

    def tracked_addresses(self) -> set[int]:
        """Of these, the memory that does not move without a capture becoming stale, and that of the buffers."""
        return self._addresses() | self.owned | self.buffers.addresses()

    def _addresses(self) -> set[int]:
        tensors = [*self.tensors.values(), *self.forward.bindings.model_tensors()]
        return {memory_address(tensor) for tensor in tensors}


@dataclasses.dataclass(kw_only=True, slots=True)
class Observed:
    """What the run before a capture showed. Enough to capture again later without another run."""

    calls: dict[str, CallLayout] = dataclasses.field(default_factory=dict)
    """Name of a node in the root graph -> the outputs of its piece or split op."""
    lone: set[str] = dataclasses.field(default_factory=set)
    """Names of the nodes that returned one tensor and no list of them."""
    structure: Any = None
    """See `Program.flat`."""
    written: set[int] = dataclasses.field(default_factory=set)
    """Addresses of memory that split ops say they write, where they are seen: in another step they may."""

    def note(self, name: str, arguments: Sequence[Any], returned: Any) -> None:
        """Notes a call that was made."""
        self.calls[name] = CallLayout.observe(arguments, results_of(returned))
        if isinstance(returned, torch.Tensor):
            self.lone.add(name)


def call_watched(work: Work, call: Callable[..., Any], arguments: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a piece or a split op in the run before a capture, as the debug mode wants to see it."""
    watch = getattr(work.forward, "watch", None)
    if watch is not None and isinstance(call, OpOverload):
        call = watch(call)
    return call(*arguments, **kwargs)


def reserve_outputs(work: Work, outputs: Sequence[Any]) -> None:
    """Makes the buffers that outputs like these are copied to."""
    for i, output in enumerate(outputs):
        if isinstance(output, torch.Tensor):
            work.buffers.tensor(("output", i), TensorLayout.of(output).dense(), work.bucket)


def reserve_arguments(
    work: Work,
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_scratch: Callable[[torch.Tensor], bool],
) -> None:
    """Makes the buffers for those arguments of a split op that are scratch."""
    for place, tensor in tensor_arguments(op, args, kwargs):
        if is_scratch(tensor):
            work.bridges.reserve(place, tensor)


def reserve_results(work: Work, op: OpOverload, returned: Any) -> None:
    """Makes the buffers for the results of a split op."""
    for i, result in enumerate(results_of(returned)):
        if isinstance(result, torch.Tensor):
            work.bridges.reserve(Place(op._schema.name, "result", i), result)


def store_outputs(work: Work, outputs: Sequence[Any]) -> list[Any]:
    """Inside a segment: copies the outputs to their buffers. The model's own tensors stay what they are.

    Raises:
        CaptureError: an output is not like in the first run.
    """
    own = {id(tensor) for tensor in work.forward.bindings.model_tensors()}
    stored: list[Any] = []
    pairs: list[Pair] = []
    for i, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor) or id(output) in own:
            stored.append(output)
            continue
        buffer = work.buffers.find(("output", i), TensorLayout.of(output).dense())
        if buffer is None:
            raise CaptureError(
                f"output {i}: expected a tensor like in the first run, got {list(output.shape)} of {output.dtype}; the "
                f"forward must return the same each time at one size, or use backend disabled"
            )
        pairs.append((buffer, output))
        stored.append(buffer)
    copy_all(pairs)
    return stored


def buffered_outputs(work: Work, outputs: Sequence[Any]) -> frozenset[int]:
    """Which of the outputs that `store_outputs` returned are buffers; the others are the model's own, or no tensors."""
    return frozenset(
        i
        for i, output in enumerate(outputs)
        if isinstance(output, torch.Tensor) and work.buffers.find(("output", i), TensorLayout.of(output)) is output
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Calls:
    """What a replay does, in order: segments and split calls alike."""

    as_operators: tuple[Callable[[], Any], ...]
    """Split ops are called through the dispatcher."""
    direct: tuple[Callable[[], Any], ...]
    """Split ops are called in the cheapest way."""


class Capture:
    """A captured forward. Replays of one pool never overlap; see Note [Who owns captured memory] in device.py.

    Args:
        tracked: addresses of memory that does not move unseen, see `Work.tracked_addresses`.
        buffered: which outputs are buffers of the phase, see `buffered_outputs`.
    """

    def __init__(
        self,
        steps: Sequence[Segment | SplitCall],
        outputs: Sequence[Any],
        *,
        tracked: Set[int] = frozenset(),
        buffered: Set[int] = frozenset(),
    ) -> None:
        self.steps = tuple(steps)
        self.tracked = tracked
        """Addresses of memory that does not move unseen."""
        self._buffered = buffered
        self.outputs = tuple(outputs)
        """Flat, at fixed addresses; overwritten by the next replay of any capture with the same buffers."""
        self._is_released = False
        self.addresses: Addresses | None = None
        """What it holds by address, once that is known."""
        self._calls: _Calls | None = None
        """Made by the first replay."""

    def is_buffered(self, index: int) -> bool:
        """Whether an output is a buffer of the phase."""
        return index in self._buffered

    def handed_out(self) -> list[Any]:
        """The outputs for a caller, who may change the shape of what he gets: buffers as views of their own."""
        return [output.view(output.shape) if i in self._buffered else output for i, output in enumerate(self.outputs)]

    @property
    def num_segments(self) -> int:
        """How many segments a replay launches."""
        return sum(not isinstance(step, SplitCall) for step in self.steps)

    @property
    def num_split_calls(self) -> int:
        """How many calls of split ops lie between them."""
        return len(self.steps) - self.num_segments

    def replay(self) -> None:
        """Runs the forward on what the static inputs hold, with the caller's step context.

        The first one prepares the calls of split ops, before anything runs.

        Raises:
            CaptureError: a split op returned something of another layout than at the capture; or it was released.
            Whatever a split op raises.
        """
        calls = self._calls
        if calls is None:
            calls = self._calls = self._prepare()
        for call in calls.as_operators if are_operators_watched() else calls.direct:
            call()

    def release(self) -> None:
        """Lets go of everything."""
        for step in self.steps:
            if not isinstance(step, SplitCall):
                step.release()
        self.steps = self.outputs = ()
        self._calls = None
        self._is_released = True

    def _prepare(self) -> _Calls:
        if self._is_released:
            raise CaptureError("replay: expected a capture, but this one was released; capture the bucket again")
        as_operators: list[Callable[[], Any]] = []
        direct: list[Callable[[], Any]] = []
        for step in self.steps:
            if isinstance(step, SplitCall):
                as_operators.append(step)
                direct.append(step.direct(self.tracked))
                continue
            launch = step.launcher() if isinstance(step, Launchable) else step.replay
            if launch is not None:
                as_operators.append(launch)
                direct.append(launch)
        return _Calls(as_operators=tuple(as_operators), direct=tuple(direct))
