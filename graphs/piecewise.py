"""Backend `tc_piecewise`: the compiled pieces of a program as segments, its split ops between them at each replay.

A capture walks the stitched graph: pieces are recorded, split ops are not called, glue (views and size arithmetic) is
done once, on the tensors of the capture.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from ..ops import registry
from .capture import Observed, Work, call_watched, reserve_arguments, reserve_outputs, reserve_results, store_outputs
from .copies import Pair, copy_all
from .device import Segment, Session
from .layouts import TensorLayout
from .program import Program
from .root_memory import Memories
from .split_calls import (
    Place,
    SplitCall,
    map_arguments,
    memory_address,
    results_at,
    tensor_arguments,
    written_addresses,
)
from .stitched import PiecewiseGraph


def observe(work: Work) -> tuple[Sequence[Any], Observed]:
    """Runs the program once, uncaptured; returns its flat outputs and what a capture needs to know."""
    observed = Observed()
    owned = work.owned_addresses()

    def hook(name: str, call: Any, arguments: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        op = registry.match(call)
        if op is not None:
            reserve_arguments(work, op, arguments, kwargs, lambda tensor: memory_address(tensor) not in owned)
        returned = call_watched(work, call, arguments, kwargs)
        if op is not None:
            reserve_results(work, op, returned)
        observed.note(name, arguments, returned)
        return returned

    outputs, observed.structure = work.forward.flat(work.tensors, work.sizes, hook)
    reserve_outputs(work, outputs)
    return outputs, observed


def capture(session: Session, work: Work, observed: Observed) -> tuple[list[Segment | SplitCall], list[Any]]:
    """Captures the program's pieces. Raises: CaptureError; whatever a piece raises."""
    assert isinstance(work.forward, Program)
    if (found := work.forward.graph.data_size) is not None:
        raise found.error()
    return _Walk(session, work, observed, work.forward).run()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """When values of a stitched graph are used."""

    done_at: Mapping[Node, Sequence[Node]]
    """Node -> the values that nobody uses after it."""
    memories: Mapping[Node, Memories]
    last_use: Mapping[Hashable, int]
    """Memory -> the index of the last node that takes a value in it."""
    next_call: Mapping[Node, float]
    """Split op -> the index of the operator's next call."""
    followers: Mapping[Node, Sequence[tuple[Node, OpOverload]]]
    """Split op -> the split ops that come before the next piece."""

    @classmethod
    def of(cls, root: Graph, memories: Mapping[Node, Memories]) -> _Plan:
        last_user: dict[Node, Node] = {}
        last_use: dict[Hashable, int] = {}
        next_call: dict[Node, float] = {}
        followers: dict[Node, Sequence[tuple[Node, OpOverload]]] = {}
        coming: dict[OpOverload, int] = {}
        run: list[tuple[Node, OpOverload]] = []
        nodes = list(root.nodes)
        for index, node in reversed(list(enumerate(nodes))):
            for argument in node.all_input_nodes:
                last_user.setdefault(argument, node)
                for memory in memories[argument]:
                    last_use.setdefault(memory, index)
            op = registry.match(node.target)
            if node.op == "call_module":
                run = []
            elif op is not None:
                next_call[node] = coming.get(op, float("inf"))
                coming[op] = index
                followers[node] = run
                run = [(node, op), *run]
        done_at: dict[Node, list[Node]] = {}
        for value, user in last_user.items():
            done_at.setdefault(user, []).append(value)
        return cls(done_at=done_at, memories=memories, last_use=last_use, next_call=next_call, followers=followers)

    def outlives(self, value: Node, call: Node) -> bool:
        """Whether something in the memory of `value` is in use when the operator of `call` is called again."""
        return any(self.last_use.get(memory, -1) >= self.next_call[call] for memory in self.memories[value])


_PLANS: weakref.WeakKeyDictionary[PiecewiseGraph, _Plan] = weakref.WeakKeyDictionary()
"""Not by the root: a plan's nodes hold that."""


def _plan_of(graph: PiecewiseGraph) -> _Plan:
    plan = _PLANS.get(graph)
    if plan is None:
        plan = _PLANS[graph] = _Plan.of(graph.split.root, graph.memories)
    return plan


class _Walk:
    """One walk over the stitched graph."""

    def __init__(self, session: Session, work: Work, observed: Observed, program: Program) -> None:
        self._session = session
        self._work = work
        self._observed = observed
        self._program = program
        self._root = program.graph.split.root
        self._plan = _plan_of(program.graph)
        self._owned = work.owned_addresses()
        self._values: dict[Node, Any] = {}
        self._captured: dict[Node, None] = {}
        """Those of them that are no placeholders, whose memory has owners."""
        self._steps: list[Segment | SplitCall] = []
        self._is_open = False
        self._bridged: dict[tuple[Node, Place], torch.Tensor] = {}
        """Arguments of split ops that are in their buffers already."""
        self._bridging: list[Pair] = []
        """(buffer, captured tensor), to be copied when the open segment ends."""
        self._to_restore: list[Pair] = []
        """(captured tensor, buffer that a split op wrote for it), to be copied when the next segment starts."""
        self._blank: set[int] = set()
        """Addresses of captured memory that nothing was written to."""

    def run(self) -> tuple[list[Segment | SplitCall], list[Any]]:
        arguments = iter(self._program.bindings.arguments(self._work.tensors, self._work.sizes))
        outputs: list[Any] = []
        for node in self._root.nodes:
            if node.op == "placeholder":
                self._values[node] = next(arguments)
            elif node.op == "call_module":
                self._values[node] = self._piece(node)
            elif node.op == "output":
                self._open()
                (leaves,) = node.args
                outputs = store_outputs(self._work, torch.fx.map_arg(leaves, self._values.__getitem__))
                self._close()
            elif (op := registry.match(node.target)) is not None:
                self._values[node] = self._split_call(node, op)
            else:
                self._values[node] = self._glue(node)
            if node.op != "placeholder":
                self._captured[node] = None
            for done in self._plan.done_at.get(node, ()):
                del self._values[done]  # the capture may have its memory again
                self._captured.pop(done, None)
        return self._steps, outputs

    def _arguments(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        return args, kwargs

    def _open(self) -> None:
        if self._is_open:
            return
        self._session.begin()
        self._is_open = True
        copy_all(self._to_restore)
        self._to_restore.clear()

    def _close(self) -> None:
        if self._is_open:
            copy_all(self._bridging)
            self._bridging.clear()
            self._steps.append(self._session.end())
            self._is_open = False

    def _piece(self, node: Node) -> Sequence[Any]:
        self._open()
        arguments, _ = self._arguments(node)
        self._blank -= {memory_address(a) for a in arguments if isinstance(a, torch.Tensor)}
        name = str(node.target)
        outputs = self._session.call(self._program.calls[name], arguments, self._observed.calls[node.name])
        made = {memory_address(output): i for i, output in enumerate(outputs) if isinstance(output, torch.Tensor)}
        self._blank -= made.keys()
        blank = self._program.graph.blank_outputs(name)
        self._blank |= {address for address, i in made.items() if i in blank} - self._owned
        return outputs

    def _glue(self, node: Node) -> Any:
        args, kwargs = self._arguments(node)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _split_call(self, node: Node, op: OpOverload) -> Any:
        self._bridge(node, op)
        args, kwargs = self._arguments(node)
        written = written_addresses(op, args, kwargs)
        self._bridge_followers(node, op, set(written))
        self._blank -= written
        self._close()
        handed: list[Pair] = []

        def bridged(place: Place, tensor: torch.Tensor) -> torch.Tensor:
            buffer = self._bridged.get((node, place), tensor)
            if place.is_written and buffer is not tensor:
                handed.append((tensor, buffer))
            return buffer

        args, kwargs = map_arguments(op, args, kwargs, bridged)
        results = results_at(self._work.bridges, op, self._observed.calls[node.name].outputs)
        self._steps.append(SplitCall(op, args, kwargs, results))
        for tensor, buffer in handed:
            self._hand_over(node, tensor, buffer)
        seen = [self._lasting(node, result) for result in results]
        if not results:
            return None
        return seen[0] if node.name in self._observed.lone else seen

    def _bridge(self, node: Node, op: OpOverload) -> None:
        """Copies what is scratch among the arguments of a split op to its buffers.

        Mostly into the open segment, which made it. Arguments that share memory which the operator writes stay what
        they are: copies of them would be apart.
        """
        for place, tensor in self._to_bridge(node, op):
            buffer = self._work.bridges.find(place, TensorLayout.of(tensor))
            if memory_address(tensor) not in self._blank:
                self._open()
                self._bridging.append((buffer, tensor))
            self._bridged[node, place] = buffer

    def _bridge_followers(self, node: Node, op: OpOverload, written: set[int]) -> None:
        """Does the same for the split ops after it that no piece precedes, but for what split ops before them write.

        Not into a buffer that is in use until then: of an operator that is called before, or with a value in it.
        """
        called = {op}
        for follower, its_op in self._plan.followers[node]:
            if not self._is_open or not all(argument in self._values for argument in follower.all_input_nodes):
                return
            for place, tensor in self._to_bridge(follower, its_op):
                buffer = self._work.bridges.find(place, TensorLayout.of(tensor))
                if memory_address(tensor) not in written and its_op not in called and not self._holds_value(buffer):
                    if memory_address(tensor) not in self._blank:
                        self._bridging.append((buffer, tensor))
                    self._bridged[follower, place] = buffer
            written |= written_addresses(its_op, *self._arguments(follower))
            called.add(its_op)

    def _holds_value(self, buffer: torch.Tensor) -> bool:
        address = memory_address(buffer)
        return any(address in _addresses(value) for value in self._values.values())

    def _to_bridge(self, node: Node, op: OpOverload) -> list[tuple[Place, torch.Tensor]]:
        args, kwargs = self._arguments(node)
        written = written_addresses(op, args, kwargs)
        tensors = list(tensor_arguments(op, args, kwargs))
        addresses = [memory_address(tensor) for _, tensor in tensors]
        return [
            (place, tensor)
            for (place, tensor), address in zip(tensors, addresses, strict=True)
            if address
            and address not in self._owned
            and (node, place) not in self._bridged
            and not (address in written and addresses.count(address) > 1)
        ]

    def _hand_over(self, node: Node, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        """Lets what comes later see what a split op writes into the buffer that stands for `tensor`."""
        address = memory_address(tensor)
        users = {key: self._values[key] for key in self._captured if address in _addresses(self._values[key])}
        same = all(isinstance(value, torch.Tensor) and _look_alike(value, buffer) for value in users.values())
        offsets = {value.data_ptr() for value in users.values() if isinstance(value, torch.Tensor)}
        if same and len(offsets) <= 1 and not any(self._plan.outlives(key, node) for key in users):
            # All look at it in one way, and are done before the operator needs its buffer again.
            self._values.update(dict.fromkeys(users, buffer))
            self._owned.add(memory_address(buffer))
        else:
            self._to_restore.append((tensor, buffer))

    def _lasting(self, node: Node, result: Any) -> Any:
        """The result; a copy in the capture's own memory if it is in use when the operator is called again."""
        if not isinstance(result, torch.Tensor):
            return result
        if not any(self._plan.outlives(value, node) for value in (node, *node.users)):
            self._owned.add(memory_address(result))
            return result
        self._open()
        return torch.empty_like(result).copy_(result)


def _addresses(value: Any) -> set[int]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return {memory_address(item) for item in values if isinstance(item, torch.Tensor)}


def _look_alike(tensor: torch.Tensor, buffer: torch.Tensor) -> bool:
    return tensor.shape == buffer.shape and tensor.stride() == buffer.stride() and tensor.dtype == buffer.dtype
