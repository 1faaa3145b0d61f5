"""A runtime's captures: made at a bucket's first appearance, replayed from then on, dropped when stale or for room.

Everything here happens under one lock: captures of one pool are replayed one at a time, and a phase's static inputs
belong to one step. What a step returns lies in the phase's output buffers, for the next step of the phase to overwrite.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import CaptureError, RuntimeClosedError
from ..graphs import breakable, full, piecewise
from ..graphs.addresses import Addresses
from ..graphs.buffers import Buffers, StaticInputs
from ..graphs.capture import Capture, Forward, Observed, Work
from ..graphs.device import GraphDevice, Pool
from ..graphs.dynamo import unchanged
from ..graphs.inputs import TOKENS, BoundInputs, InputContract, Signature
from ..graphs.outputs import OutputContract, map_leaves
from ..graphs.program import SizesByName, assemble
from ..graphs.split_calls import memory_address
from ..ops.context import noting_reads, use_context
from ..phases import Backend, GraphConfig, Phase
from .capture_checks import (
    check_eager_outputs,
    check_no_nan,
    check_static_inputs,
    counted_writes,
    plain_attributes,
    written_by,
)
from .context_values import moving_tensors, plain_values, problems
from .entries import Entry
from .events import Recorder
from .forward import check_written
from .memory import CaptureBudget
from .programs import AnyProgram, EagerProgram
from .static_context import AddressKey, ContextDoesNotFit, StaticContext, has_grown
from .step import inside_step
from .step_context import pad_context, warn_of_forgotten

MAX_SLOTS = 4
"""Captures of one entry, for models with dynamic dims beside `tokens`: one for each set of their sizes."""
MAX_TABLES = 8
"""Sets of inputs that a phase is captured for; each has buffers of its own."""
MAX_STALE = 4
"""Times in a row that a capture may go stale early before its bucket is captured no more."""
EARLY_REPLAYS = 16
"""A capture that was replayed as often was worth its time, even if it goes stale."""

_BACKENDS = {Backend.FULL: full, Backend.BREAKABLE: breakable, Backend.TC_PIECEWISE: piecewise}


class NotCaptured:
    """What `Captures.run` returns for a step that has to run uncaptured; nothing of it ran."""


NOT_CAPTURED = NotCaptured()


@dataclasses.dataclass(slots=True, eq=False)
class Slot:
    """The place of one capture: of an entry, at certain sizes of the dims beside `tokens`."""

    entry: Entry
    backend: Backend
    capture: Capture | None = None
    work: Work | None = None
    """What it was made of; kept to make it again in another pool."""
    observed: Observed | None = None
    context: object = None
    """The context that it was made with: the static copy, where the backend reads one."""
    plain: tuple[Any, ...] = ()
    """What else of the context it has frozen: its class, and its values that are no tensors."""
    reads_context: bool = False
    """Whether what is captured has read the context itself, and not only its split ops."""
    address_key: AddressKey = ()
    attributes: Mapping[str, Any] | None = None
    """The debug mode: plain attributes of the model's modules that it has frozen."""
    refused: str | None = None
    """Why there will be no capture any more."""
    num_bytes: int = 0
    """What it added to the pool."""
    seconds: float = 0.0
    num_replays: int = 0
    num_stale: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    """What the captures of one phase and set of inputs share."""

    buffers: Buffers
    inputs: StaticInputs
    context: StaticContext


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step: what runs, at which sizes, on what."""

    entry: Entry
    program: AnyProgram
    bound: BoundInputs
    sizes: SizesByName
    """By name, `tokens` being the bucket."""
    context: object
    recorder: Recorder


class Captures:
    """See this file's docstring."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: GraphConfig,
        device: GraphDevice,
        contract: InputContract,
        outputs: OutputContract,
        *,
        max_num_tokens: Mapping[Phase, int],
        context_sizes: Mapping[str, int],
    ) -> None:
        self._model = model
        self._config = config
        self._device = device
        self._contract = contract
        self._outputs = outputs
        self._max_num_tokens = max_num_tokens
        self._context_sizes = context_sizes
        self._debug = config.debug_captures
        self._closed = False
        self._lock = threading.RLock()
        self._pool: Pool = device.open_pool()
        self._tables: dict[tuple[Phase, Signature], _Table] = {}
        self._slots: dict[tuple[Entry, frozenset[tuple[str, int]]], Slot] = {}
        self._budget: CaptureBudget[Slot] = CaptureBudget(config.cuda_graph_memory_budget, config.max_captures)

    def run(self, step: Step, *, copy: bool = False, is_padding: bool = False) -> Any:
        """Runs a step: replays its capture, or runs the program once and captures it.

        Args:
            copy: whether the outputs are to be copied out of the phase's buffers.
            is_padding: the step has no tokens and nobody wants its outputs; an existing capture is not replayed.

        Returns:
            The outputs without padded rows, or `NOT_CAPTURED`.

        Raises:
            InputError: as `Runtime.run`.
            CaptureError: a split op returned something else than when the bucket was captured.
            RuntimeClosedError: another thread has closed the runtime.
            Whatever the program raises.
        """
        entry, recorder = step.entry, step.recorder
        slot = self._slot(step)
        if is_padding and slot.capture is not None:
            return None
        if slot.refused is not None:
            recorder.fallback(slot.refused)
            return NOT_CAPTURED
        with self._lock, self._device.exclusive():
            if self._closed:
                raise RuntimeClosedError("run: this Runtime was closed by another thread; make a new one")
            table = self._table(entry)
            try:
                context = self._context(table, slot, step)
            except ContextDoesNotFit as error:
                recorder.fallback(error.reason)
                return NOT_CAPTURED
            table.inputs.by_address |= self._written_in_place(step)
            tensors = table.inputs.fill(step.bound, step.sizes[TOKENS])
            self._budget.used(slot)
            with torch.inference_mode(), use_context(context), inside_step():
                outputs, structure = self._outputs_of(slot, table, step, tensors, context)
                result = assemble(structure, outputs, tensors, step.sizes, step.bound.sizes)
            for name in entry.written_inputs:
                with torch.inference_mode():
                    self._contract.copy_back(name, step.bound.tensors[name], tensors[name])
            result = self._outputs.cut(
                result, padded=step.sizes[TOKENS], num_tokens=step.bound.num_tokens, rows=step.program.rows
            )
            if is_padding:
                return None
            if self._debug:
                check_no_nan(result, step.bound)
            return map_leaves(result, _copied) if copy else result

    def wants_largest(self, entry: Entry) -> bool:
        """Whether the largest bucket of the entry's phase and inputs is to be captured before the entry."""
        known = (entry.phase, entry.signature) in self._tables
        return self._device.wants_largest_first and not known and self._has_table(entry)

    def state_of(self, entry: Entry) -> list[Slot]:
        """The slots of an entry."""
        return [slot for (known, _), slot in list(self._slots.items()) if known is entry]

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pool holds of the device."""
        return self._pool.num_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of static inputs, contexts, outputs and of what crosses between captures and split ops."""
        # A list, since another thread may ask.
        return sum(table.buffers.num_bytes + table.context.num_bytes for table in list(self._tables.values()))

    def compact(self, recorder: Recorder) -> None:
        """Makes every capture again in a new pool, the largest bucket first, and gives the old one back."""
        with self._lock, self._device.exclusive():
            if not self._closed:
                self._compact(recorder)

    def close(self) -> None:
        """Releases everything."""
        with self._lock:
            self._closed = True
            for slot in self._slots.values():
                if slot.capture is not None:
                    slot.capture.release()
            self._slots.clear()
            self._tables.clear()
            self._device.give_back()

    def _slot(self, step: Step) -> Slot:
        others = frozenset(item for item in step.bound.sizes.items() if item[0] != TOKENS)
        key = (step.entry, others)
        slot = self._slots.get(key)
        if slot is None:
            with self._lock:
                slot = Slot(step.entry, self._config.phase(step.entry.phase).backend)
                if len(self.state_of(step.entry)) >= MAX_SLOTS:
                    slot.refused = "too many sizes of the dims beside tokens: not captured"
                    return slot
                if not self._has_table(step.entry):
                    slot.refused = "too many different sets of inputs: not captured"
                    return slot
                slot = self._slots.setdefault(key, slot)
        return slot

    def _has_table(self, entry: Entry) -> bool:
        """Whether there are buffers for an entry's inputs, or room for them."""
        of_phase = {known.signature for known, _ in list(self._slots) if known.phase is entry.phase}
        return entry.signature in of_phase or len(of_phase) < MAX_TABLES

    def _table(self, entry: Entry) -> _Table:
        key = (entry.phase, entry.signature)
        if key not in self._tables:
            most = self._max_num_tokens[entry.phase]
            buffers = Buffers(most)
            self._tables[key] = _Table(
                buffers=buffers,
                inputs=StaticInputs(self._contract, buffers, poison_padding=self._debug),
                context=StaticContext(self._contract, self._context_sizes, most),
            )
        return self._tables[key]

    def _context(self, table: _Table, slot: Slot, step: Step) -> object:
        """What the split ops of the step read; where captured code may read it too, at fixed addresses."""
        size = step.sizes[TOKENS]
        if slot.backend is Backend.FULL:
            return table.context.fill(step.context, step.bound, size)
        if slot.backend is Backend.BREAKABLE:
            warn_of_forgotten(step.context, step.bound, size, step.recorder.warn)
            return table.context.fill_tokens_only(step.context, step.bound, size)
        return pad_context(step.context, step.bound, size, self._contract, step.recorder.warn)

    def _written_in_place(self, step: Step) -> set[str]:
        """Inputs without dynamic dims that the program writes: the caller's own tensors are captured."""
        written = {*step.program.written_inputs, *step.entry.written_inputs}
        return {name for name in written if not self._contract.dynamic_dims.get(name)}

    def _outputs_of(
        self, slot: Slot, table: _Table, step: Step, tensors: Mapping[str, torch.Tensor], context: object
    ) -> tuple[Sequence[Any], Any]:
        """The flat outputs of the step and their structure."""
        if slot.capture is not None and (why := self._stale(slot, table, step, tensors, context)) is not None:
            self._drop_stale(slot, why, step.recorder)
        if slot.capture is not None:
            assert slot.observed is not None
            if slot.work is not None and self._debug:
                check_static_inputs(slot.work.tensors, tensors, step.bound)
            slot.capture.replay()
            slot.num_replays += 1
            step.recorder.counters.add("replays", scope=step.recorder.scope)
            return slot.capture.outputs, slot.observed.structure
        if slot.refused is not None or not self._budget.may_try(slot):
            step.recorder.fallback(slot.refused or "no room for a capture: other buckets are more useful")
            if not step.entry.was_watched:
                _, outputs, observed = self._watched_run(slot, table, step, tensors, context)
                return outputs, observed.structure
            with counted_writes(tensors) as written:
                result = step.program.flat(tensors, step.sizes)
            step.entry.written_inputs |= written
            check_written(step.entry.written_inputs, step.bound.tensors)
            return result
        return self._first_run(slot, table, step, tensors, context)

    def _watched_run(
        self, slot: Slot, table: _Table, step: Step, tensors: Mapping[str, torch.Tensor], context: object
    ) -> tuple[Work, Sequence[Any], Observed]:
        """Runs the program uncaptured, and finds out what it writes and returns."""
        work = self._work(slot, table, step, tensors, context)
        with written_by(step.program, tensors) as written:
            outputs, observed = _BACKENDS[slot.backend].observe(work)
        written |= {name for name, tensor in tensors.items() if memory_address(tensor) in observed.written - {0}}
        step.entry.written_inputs |= written
        step.entry.was_watched = True
        check_written(step.entry.written_inputs, step.bound.tensors)
        if step.program.rows is None:
            check_eager_outputs(observed.structure, outputs, self._outputs, step.sizes[TOKENS])
        return work, outputs, observed

    def _first_run(
        self, slot: Slot, table: _Table, step: Step, tensors: Mapping[str, torch.Tensor], context: object
    ) -> tuple[Sequence[Any], Any]:
        """Runs the program for this step's outputs, then captures it."""
        work, outputs, observed = self._watched_run(slot, table, step, tensors, context)
        table.inputs.by_address |= self._written_in_place(step)
        at_home = {name: step.bound.tensors[name] for name in table.inputs.by_address & work.tensors.keys()}
        work = dataclasses.replace(work, tensors={**work.tensors, **at_home})
        slot.work, slot.observed = work, observed
        slot.context, slot.plain = context, (type(context), *plain_values(context))
        whole = slot.backend is Backend.FULL
        if whole and (reasons := problems(step.context)):
            self._refuse(slot, reasons[0], step.recorder)
            return outputs, observed.structure
        slot.address_key = table.context.address_key(context, tokens_only=not whole)
        self._make_room(slot, step.recorder)
        if self._capture(slot, step.recorder):
            self._settle(slot, step.recorder)
        return outputs, observed.structure

    def _work(
        self, slot: Slot, table: _Table, step: Step, tensors: Mapping[str, torch.Tensor], context: object
    ) -> Work:
        if isinstance(step.program, EagerProgram):
            step.program.look_again()
        moving: dict[int, str] = {}
        owned: set[int] = set()
        if slot.backend is Backend.BREAKABLE:
            kind = type(context).__name__
            moving = {memory_address(t): f"{kind}.{name}" for name, t in moving_tensors(context).items() if t.numel()}
            owned = {address for _, address, *_ in table.context.address_key(context, tokens_only=True)}
        return Work(
            forward=step.program,
            tensors=tensors,
            sizes=step.sizes,
            bucket=step.sizes[TOKENS],
            buffers=table.buffers,
            owned=frozenset(owned),
            moving=moving,
        )

    def _capture(self, slot: Slot, recorder: Recorder) -> bool:
        """Makes the capture; whether that went well."""
        assert slot.work is not None
        assert slot.observed is not None
        started = time.perf_counter()
        before = self._pool.num_bytes
        try:
            with (
                noting_reads() as reads,
                self._unchanged(slot.work.forward),
                self._device.session(self._pool) as session,
            ):
                steps, outputs = _BACKENDS[slot.backend].capture(session, slot.work, slot.observed)
        except Exception as error:  # whatever a model does: the step itself has run
            self._refuse(slot, f"the capture failed: {_in_words(error)}", recorder)
            return False
        slot.capture = Capture(steps, outputs)
        slot.reads_context = bool(reads)
        held = {name: t for name, t in slot.work.tensors.items() if name in self._table(slot.entry).inputs.by_address}
        slot.capture.addresses = Addresses(slot.work.forward.bindings, held, with_layouts=self._debug)
        slot.attributes = plain_attributes(self._model) if self._debug else None
        slot.num_replays = 0
        slot.num_bytes = max(0, self._pool.num_bytes - before)
        slot.seconds = time.perf_counter() - started
        self._budget.admit(slot, slot.num_bytes)
        recorder.record(
            "capture",
            seconds=slot.seconds,
            backend=str(slot.backend),
            segments=slot.capture.num_segments,
            split_calls=slot.capture.num_split_calls,
            bytes=slot.num_bytes,
        )
        return True

    @contextlib.contextmanager
    def _unchanged(self, forward: Forward) -> Iterator[None]:
        """Refuses an eager forward that sets attributes of the model."""
        if getattr(forward, "kind", None) != "eager":
            yield
            return
        with unchanged(self._model, error=CaptureError, where="capture", who="a replay"):
            yield

    def _stale(
        self, slot: Slot, table: _Table, step: Step, tensors: Mapping[str, torch.Tensor], context: object
    ) -> str | None:
        """Why the capture does not fit the step any more, or None."""
        assert slot.capture is not None
        assert slot.capture.addresses is not None
        assert slot.work is not None
        if slot.work.forward is not step.program:
            return "the entry has another program"
        if (why := slot.capture.addresses.moved(step.bound.tensors)) is not None:
            return why
        for name in table.inputs.by_address & tensors.keys():
            if slot.work.tensors[name] is not tensors[name] and not slot.capture.addresses.has_input(name):
                return f"another bucket writes the input {name}, which is captured where it is from now on"
        whole = slot.backend is Backend.FULL
        if (whole or slot.reads_context) and (type(context), *plain_values(context)) != slot.plain:
            return f"a value of the context {type(context).__name__} that is no tensor changed"
        if whole or slot.backend is Backend.BREAKABLE:
            address_key = table.context.address_key(context, tokens_only=not whole)
            if address_key != slot.address_key:
                if has_grown(slot.address_key, address_key):
                    return _GREW
                return f"the static tensors of the context {type(context).__name__} moved"
        if slot.attributes is not None and plain_attributes(self._model) != slot.attributes:
            return "an attribute of a module that is no tensor changed"
        return None

    def _drop_stale(self, slot: Slot, why: str, recorder: Recorder) -> None:
        recorder.fallback(f"a capture was dropped: {why}", bucket=slot.entry.bucket)
        if why != _GREW:  # by powers of two, so it comes to an end
            slot.num_stale = slot.num_stale + 1 if slot.num_replays < EARLY_REPLAYS else 1
        self._release(slot)
        if slot.num_stale >= MAX_STALE:
            slot.refused = f"not captured any more, since captures of it go stale at once: {why}"

    def _refuse(self, slot: Slot, reason: str, recorder: Recorder) -> None:
        slot.refused = reason
        slot.work = slot.observed = slot.context = None
        recorder.fallback(reason)

    def _release(self, slot: Slot) -> None:
        if slot.capture is not None:
            slot.capture.release()
        slot.capture = None
        self._budget.released(slot)

    def _evict(self, slot: Slot, recorder: Recorder) -> None:
        self._release(slot)
        recorder.record("evict", bucket_evicted=slot.entry.bucket, phase_evicted=str(slot.entry.phase))

    def _make_room(self, slot: Slot, recorder: Recorder) -> None:
        """Before a capture: evicts what it is worth more than."""
        for victim in self._budget.victims(slot, self._pool.num_bytes) or ():
            self._evict(victim, recorder)

    def _settle(self, slot: Slot, recorder: Recorder) -> None:
        """After a capture: keeps to the budget, now that it is known what the capture needs."""
        pool_bytes = self._pool.num_bytes
        budget = self._budget.budget_bytes
        if budget is not None and slot.num_bytes > budget:
            self._release(slot)
            self._refuse(
                slot,
                f"cuda_graph_memory_budget: expected at least {slot.num_bytes} bytes for the bucket "
                f"{slot.entry.bucket} of {slot.entry.phase}, got {budget}; raise it, or leave the bucket out",
                recorder,
            )
            return
        if self._budget.over(pool_bytes):
            victims = self._budget.victims(slot, pool_bytes)
            if victims is None:
                self._release(slot)
                self._budget.refused(slot, slot.num_bytes)
                recorder.fallback("no room for a capture: other buckets are more useful")
            for victim in victims or ():
                self._evict(victim, recorder)
        if self._budget.wants_compaction(self._pool.num_bytes):
            self._compact(recorder)

    def _compact(self, recorder: Recorder) -> None:
        started = time.perf_counter()
        before = self._pool.num_bytes
        live = [slot for slot in self._slots.values() if slot.capture is not None]
        for slot in live:
            self._release(slot)
        self._device.give_back()
        self._pool = self._device.open_pool()
        for slot in sorted(live, key=lambda slot: -(slot.entry.bucket or 0)):
            with torch.inference_mode(), use_context(slot.context), inside_step():
                self._capture(slot, recorder)
        self._budget.compacted()
        recorder.record(
            "compact", seconds=time.perf_counter() - started, bytes_before=before, bytes_after=self._pool.num_bytes
        )


_GREW = "a size in the slots of its context grew; context_sizes gives it room from the start"


def _in_words(error: Exception) -> str:
    """What went wrong in one line, with the operator and the line of the model where they are known."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    if not isinstance(error, CaptureError):
        return f"{type(error).__name__}: {text}"
    op = f"{error.op}: " if error.op is not None and error.op not in text else ""
    line = f" ({error.line})" if error.line is not None and error.line not in text else ""
    return f"{op}{text}{line}"


def _copied(path: str, value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def step_of_padding(bound: BoundInputs, examples: BoundInputs | None, contract: InputContract) -> BoundInputs:
    """Inputs of no tokens at all, which a bucket turns into nothing but padding.

    Inputs without dynamic dims are those of the examples, if they are for this signature, else zeros.
    """
    known = examples.tensors if examples is not None and examples.signature == bound.signature else {}
    others = examples.sizes if known and examples is not None else bound.sizes
    sizes = {**others, TOKENS: 0}
    strides = dict(bound.signature.strides)
    tensors = {}
    for name, dtype, device, shape in bound.signature.tensors:
        concrete = [sizes[size] if isinstance(size, str) else size for size in shape]
        if name in known and not contract.dynamic_dims.get(name):
            tensors[name] = known[name]
        elif name in strides:
            tensors[name] = torch.empty_strided(concrete, strides[name], dtype=dtype, device=device).zero_()
        else:
            tensors[name] = torch.zeros(concrete, dtype=dtype, device=device)
    return BoundInputs(tensors, bound.signature, sizes)
