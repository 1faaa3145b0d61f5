"""A runtime's captures: made at a bucket's first appearance, replayed from then on, dropped when stale or for room.

Everything here happens under one lock: captures of one pool are replayed one at a time, and a phase's static inputs
belong to one step. What a step returns lies in the phase's output buffers, for the next step of the phase to overwrite.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from ..errors import CaptureError, KernelNotReadyError, RuntimeClosedError
from ..graphs import breakable, full, piecewise
from ..graphs.addresses import Addresses, ModelBindings
from ..graphs.ambient import autocast_of
from ..graphs.capture import Capture, Forward, Observed, Work, buffered_outputs
from ..graphs.device import GraphDevice
from ..graphs.dynamo import unchanged
from ..graphs.inputs import TOKENS, InputContract
from ..graphs.outputs import OutputContract, map_leaves
from ..graphs.program import assemble
from ..graphs.split_calls import memory_address
from ..ops.attention_choice import AttentionBackend, use_attention_backend
from ..ops.context import noting_reads, use_context
from ..ops.deferred import awaited
from ..phases import Backend, GraphConfig, Phase
from .capture_checks import (
    check_eager_outputs,
    check_no_nan,
    check_static_inputs,
    counted_writes,
    plain_attributes,
    written_by,
)
from .capture_room import NO_ROOM, CaptureRoom
from .capture_slot import NOT_CAPTURED, Slot, Step, Table
from .capture_slots import CaptureSlots
from .context_values import moving_tensors, problems
from .eager_rows import check_rows, find_rows, shapes_of
from .entries import Entry
from .events import Recorder
from .forward import check_written
from .known_layout import KnownLayout, LayoutReader
from .padding_step import under_ambient_state
from .programs import EagerProgram
from .static_context import ContextDoesNotFit, plan_key
from .step import inside_step
from .step_context import pad_context, warn_of_forgotten
from .step_plans import StepPlan, StepPlans, copied

_BACKENDS = {Backend.FULL: full, Backend.BREAKABLE: breakable, Backend.TC_PIECEWISE: piecewise}


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
        bindings: ModelBindings,
        reader: LayoutReader | None,
        deferring: Set[Phase] = frozenset(),
        attention: AttentionBackend | None = None,
    ) -> None:
        """Makes no capture yet.

        Args:
            reader: reads the layouts of steps; without one, each step goes through all checks.
            deferring: phases whose captures wait until `capture_waiting` makes them, outside of a step.
            attention: what serves attention in what is run and captured here.
        """
        self._attention = attention or AttentionBackend()
        self._deferring = deferring
        self.on_waiting: Callable[[], None] = lambda: None
        """Called when a step has left something to be captured."""
        self.plans = StepPlans(reader, outputs) if reader is not None else None
        self._model = model
        self._bindings = bindings
        self._config = config
        self._device = device
        self._contract = contract
        self._outputs = outputs
        self._debug = config.debug_captures
        self._num_moves = 0
        """Under `late_address_check`, how often a step found something moved."""
        self._closed = False
        self._lock = threading.RLock()
        self._room = CaptureRoom(config, device)
        self._slots = CaptureSlots(
            config,
            contract,
            max_num_tokens=max_num_tokens,
            context_sizes=context_sizes,
            forget=self._room.forget,
        )

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
        slot = self._slots.known(step)
        if slot is None:
            with self._lock:
                slot = self._slots.slot(step)
        if is_padding and slot.capture is not None:
            return None
        if slot.refused is not None:
            recorder.fallback(slot.refused)
            return NOT_CAPTURED
        with self._lock, self._device.exclusive():
            if self._closed:
                raise RuntimeClosedError("run: this Runtime was closed by another thread; make a new one")
            table = self._slots.table(entry)
            try:
                context = self._context(table, slot, step, step.context)
            except ContextDoesNotFit as error:
                recorder.fallback(error.reason)
                return NOT_CAPTURED
            table.inputs.by_address |= self._written_in_place(step)
            tensors = table.inputs.fill(step.bound, step.sizes[TOKENS])
            self._room.used(slot)
            slot.last_step = entry.num_steps
            replays = slot.num_replays
            try:
                with self._scope(context):
                    outputs, structure = self._outputs_of(slot, table, step, tensors, context)
                    result = assemble(structure, outputs, tensors, step.sizes, step.bound.sizes)
            finally:
                is_replay = slot.num_replays > replays
                if not is_replay or entry.written_inputs or step.program.written_inputs:
                    table.forget_tails()
            for name in entry.written_inputs:
                with torch.inference_mode():
                    self._contract.copy_back(name, step.bound.tensors[name], tensors[name])
            result = self._outputs.cut(
                result,
                padded=step.sizes[TOKENS],
                num_tokens=step.bound.num_tokens,
                rows=step.program.rows if step.program.rows is not None else table.rows,
            )
            if self.plans is not None and step.known is not None and self.plans.came_before(step.known) and is_replay:
                self.plans.add(step.known, step, slot, table, tensors, context)
            if not self._deferring and self._room.wants_compaction():
                self._compact(recorder)
            if is_padding:
                return None
            if self._debug:
                check_no_nan(result, step.bound)
            return map_leaves(result, copied) if copy else result

    def replay(self, known: KnownLayout, context: object, *, copy: bool) -> Any:
        """Runs a step of a known layout. See Note [A step of a known layout] in step_plans.py.

        Returns:
            The outputs without padded rows, or `NOT_CAPTURED`: the step has to take the way of `run`.

        Raises:
            InputError: the context's fields do not fit the inputs.
            CaptureError: a split op returned something else than when the bucket was captured; under
                `late_address_check`, a tensor of the model moved.
            Whatever a split op, `plan()` or `plan_for` of the context raises.
        """
        assert self.plans is not None
        plan = self.plans.find(known)
        if plan is None:
            return NOT_CAPTURED
        with self._lock, self._device.exclusive():
            # Late where it held since the last time that something moved: that may concern other captures as well.
            late = self._config.late_address_check and plan.num_moves == self._num_moves
            if not plan.holds(late=late):
                return NOT_CAPTURED
            slot, step = plan.slot, plan.step
            if not slot.is_whole:
                context = self._context(plan.table, slot, step, context)
                if slot.context_changed(plan.table, context) is not None:
                    return NOT_CAPTURED
            slot.last_step = step.entry.num_steps
            if not plan.replay(known.sources, context):
                return NOT_CAPTURED
            if late:
                self._check_late(plan)
            plan.num_moves = self._num_moves
            self._room.used(slot)
            plan.count()
            self.plans.num_steps += 1
            result = plan.result(self._outputs, copy=copy)
            if not self._deferring and self._room.wants_compaction():
                self._compact(step.recorder)
            return result

    def _check_late(self, plan: StepPlan) -> None:
        """Raises: CaptureError: what was just replayed is not what the model holds by now."""
        if (why := plan.moved()) is None:
            return
        self._num_moves += 1
        plan.table.forget_tails()
        raise CaptureError(
            f"late_address_check: expected what was captured to stay where it is, but {why} before this step, whose "
            f"replay used what was there; its results are void, and so is what it wrote (a KV cache). The next step "
            f"captures again; leave late_address_check off where tensors of the model are replaced between steps"
        )

    @property
    def waiting(self) -> list[Slot]:
        """What can be captured, and waits for a boundary."""
        return [slot for slot in self._slots if slot.waits and slot.refused is None]

    def capture_waiting(self, slot: Slot, recorder: Recorder) -> bool:
        """Captures what a step has left for a boundary; whether that went well. Nothing of the model runs."""
        with self._lock, self._device.exclusive():
            if self._closed or not slot.waits or slot.work is None:
                slot.waits = False
                return False
            signature = slot.entry.signature
            with autocast_of(signature.ambient):
                if under_ambient_state(signature) != signature:
                    return False  # under other settings of torch it would be another one
                slot.waits = False
                self._room.make_room(slot, recorder)
                if not self._plan_again(slot, recorder):
                    return False
                with self._scope(slot.context):
                    return self._capture_and_settle(slot, recorder)

    def can_hold(self, entry: Entry) -> bool:
        """Whether there is a place for captures of an entry."""
        return self._slots.has_table(entry)

    def drop(self, entry: Entry) -> None:
        """Releases the captures of an entry in whose place another one came."""
        with self._lock:
            self._slots.drop(entry)

    def wants_largest(self, entry: Entry) -> bool:
        """Whether the largest bucket of the entry's phase and inputs is to be captured before the entry."""
        if entry.phase in self._deferring:
            return False
        known = self._slots.has_made_table(entry)
        return self._device.wants_largest_first and not known and self._slots.has_table(entry)

    def state_of(self, entry: Entry) -> list[Slot]:
        """The slots of an entry."""
        return self._slots.of_entry(entry)

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pool holds of the device."""
        return self._room.pool.num_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of static inputs, contexts, outputs and of what crosses between captures and split ops."""
        return sum(table.buffers.num_bytes + table.context.num_bytes for table in self._slots.tables)

    def compact(self, recorder: Recorder) -> None:
        """Makes every capture again in a new pool, the largest bucket first, and gives the old one back."""
        with self._lock, self._device.exclusive():
            if not self._closed:
                self._compact(recorder)

    def compact_if_it_pays(self, recorder: Recorder) -> None:
        """What steps do now and then, where captures are deferred: it takes as long as all captures together."""
        with self._lock, self._device.exclusive():
            if not self._closed and self._room.wants_compaction(now=True):
                self._compact(recorder)

    def close(self) -> None:
        """Releases everything."""
        with self._lock:
            self._closed = True
            for slot in self._slots:
                self._room.release(slot)
            self._slots.clear()
            if self.plans is not None:
                self.plans.clear()
            self._device.give_back()

    @contextlib.contextmanager
    def _scope(self, context: object) -> Iterator[None]:
        """What the model runs and is captured in."""
        attention = use_attention_backend(self._attention)
        with torch.inference_mode(), use_context(context), attention, inside_step():
            yield

    def _plan_again(self, slot: Slot, recorder: Recorder) -> bool:
        """Has a context that was filled for an earlier step plan anew, for padding; whether that went well."""
        if not slot.is_whole:
            return True
        try:
            with use_attention_backend(self._attention):
                self._slots.table(slot.entry).context.plan_padding(slot.context)
        except Exception as error:  # whatever a context does: no step is running
            slot.refuse(f"the context cannot plan for padding: {_in_words(error)}")
            recorder.fallback(str(slot.refused))
            return False
        return True

    def _context(self, table: Table, slot: Slot, step: Step, context: object) -> object:
        """What the split ops of a step with this context read; where captured code may too, at fixed addresses."""
        size = step.sizes[TOKENS]
        if slot.backend is Backend.FULL:
            return table.context.fill(context, step.bound, size)
        if slot.backend is Backend.BREAKABLE:
            warn_of_forgotten(context, step.bound, size, step.recorder.warn)
            return table.context.fill_tokens_only(context, step.bound, size)
        return pad_context(context, step.bound, size, self._contract, step.recorder.warn)

    def _written_in_place(self, step: Step) -> set[str]:
        """Inputs without dynamic dims that the program writes: the caller's own tensors are captured."""
        written = {*step.program.written_inputs, *step.entry.written_inputs}
        return {name for name in written if not self._contract.dynamic_dims.get(name)}

    def _outputs_of(
        self, slot: Slot, table: Table, step: Step, tensors: Mapping[str, torch.Tensor], context: object
    ) -> tuple[Sequence[Any], Any]:
        """The flat outputs of the step and their structure."""
        if slot.capture is not None:
            why = slot.stale(table, step, tensors, context, self._model)
            if why is not None:
                step.recorder.fallback(f"a capture was dropped: {why}", bucket=slot.entry.bucket)
                self._room.release(slot)
                slot.went_stale(why)
        if slot.capture is not None:
            assert slot.observed is not None
            if slot.work is not None and self._debug:
                check_static_inputs(slot.work.tensors, tensors, step.bound)
            slot.capture.replay()
            slot.num_replays += 1
            step.recorder.counters.add("replays", scope=step.recorder.scope)
            return slot.capture.handed_out(), slot.observed.structure
        if slot.refused is not None or not self._room.may_capture(slot):
            step.recorder.fallback(slot.refused or NO_ROOM)
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
        self, slot: Slot, table: Table, step: Step, tensors: Mapping[str, torch.Tensor], context: object
    ) -> tuple[Work, Sequence[Any], Observed]:
        """Runs the program uncaptured, and finds out what it writes and returns."""
        work = self._work(slot, table, step, tensors, context)
        versions = table.context.versions(context)
        with written_by(step.program, tensors) as written:
            outputs, observed = _BACKENDS[slot.backend].observe(work)
        table.context.is_written |= table.context.versions(context) != versions
        written |= {name for name, tensor in tensors.items() if memory_address(tensor) in observed.written - {0}}
        step.entry.written_inputs |= written
        step.entry.was_watched = True
        check_written(step.entry.written_inputs, step.bound.tensors)
        if step.program.rows is None:
            check_eager_outputs(observed.structure)
            self._check_rows(table, step, tensors, shapes_of(observed.structure, outputs))
        return work, outputs, observed

    def _check_rows(
        self, table: Table, step: Step, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Learns where an eager forward's outputs have token rows, from the first bucket that can tell."""
        if step.sizes[TOKENS] < 2:
            return  # nothing is ever padded to one
        if table.rows is None:
            table.rows = find_rows(
                step.program, self._model, shapes, tensors, step.sizes, self._contract, self._outputs
            )
        check_rows(table.rows, shapes, step.sizes[TOKENS], self._outputs)

    def _first_run(
        self, slot: Slot, table: Table, step: Step, tensors: Mapping[str, torch.Tensor], context: object
    ) -> tuple[Sequence[Any], Any]:
        """Runs the program for this step's outputs, then captures it."""
        work, outputs, observed = self._watched_run(slot, table, step, tensors, context)
        table.inputs.by_address |= self._written_in_place(step)
        at_home = {name: step.bound.tensors[name] for name in table.inputs.by_address & work.tensors.keys()}
        work = dataclasses.replace(work, tensors={**work.tensors, **at_home})
        slot.work, slot.observed = work, observed
        slot.freeze(context, table)
        if slot.is_whole and (reasons := problems(step.context)):
            slot.refuse(reasons[0])
            step.recorder.fallback(reasons[0])
            return outputs, observed.structure
        structure = observed.structure
        if step.entry.phase in self._deferring and step.recorder.scope.in_step:
            slot.waits, slot.awaited = True, awaited()
            self.on_waiting()
            return outputs, structure
        self._room.make_room(slot, step.recorder)
        self._capture_and_settle(slot, step.recorder)
        return outputs, structure

    def _capture_and_settle(self, slot: Slot, recorder: Recorder) -> bool:
        """Makes the capture, and keeps to the budget; whether there is one then."""
        if not self._capture(slot, recorder):
            return False
        self._room.settle(slot, recorder)
        if not self._deferring and self._room.wants_compaction(now=True):
            self._compact(recorder)
        return slot.capture is not None

    def _work(self, slot: Slot, table: Table, step: Step, tensors: Mapping[str, torch.Tensor], context: object) -> Work:
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
        try:
            with (
                noting_reads() as reads,
                self._unchanged(slot.work.forward),
                self._device.session(self._room.pool) as session,
            ):
                steps, outputs = _BACKENDS[slot.backend].capture(session, slot.work, slot.observed)
        except KernelNotReadyError:
            self._room.failed()
            slot.waits, slot.awaited = True, awaited()  # not refused: a later boundary tries again
            self.on_waiting()
            return False
        except Exception as error:  # whatever a model does: the step itself has run
            self._room.failed()
            slot.refuse(f"the capture failed: {_in_words(error)}")
            recorder.fallback(str(slot.refused))
            recorder.record("capture_failed", seconds=time.perf_counter() - started, error=str(error))
            return False
        slot.capture = Capture(
            steps,
            outputs,
            tracked=slot.work.tracked_addresses(),
            buffered=buffered_outputs(slot.work, outputs),
        )
        slot.reads_context = bool(reads)
        slot.plan_key = plan_key(slot.context) if slot.is_whole else None
        by_address = self._slots.table(slot.entry).inputs.by_address
        held = {name: tensor for name, tensor in slot.work.tensors.items() if name in by_address}
        eager = isinstance(slot.work.forward, EagerProgram)
        slot.capture.addresses = Addresses(
            slot.work.forward.bindings,
            held,
            vacancies=self._bindings.vacancies() if eager else None,
            with_layouts=self._debug,
        )
        slot.attributes = plain_attributes(self._model) if self._debug else None
        slot.num_replays = 0
        self._room.admit(slot)
        slot.seconds = time.perf_counter() - started
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
        if not isinstance(forward, EagerProgram):
            yield
            return
        with unchanged(self._model, error=CaptureError, where="capture", who="a replay"):
            yield

    def _compact(self, recorder: Recorder) -> None:
        def recapture(slot: Slot, its_recorder: Recorder) -> None:
            if under_ambient_state(slot.entry.signature) != slot.entry.signature:
                return  # under the settings of torch of this thread it would be another one; its next step captures it
            if not self._plan_again(slot, its_recorder):
                return
            with self._scope(slot.context):
                self._capture(slot, its_recorder)

        self._room.compact(list(self._slots), recapture, recorder)


def _in_words(error: Exception) -> str:
    """What went wrong in one line, with the operator and the line of the model where they are known."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    if not isinstance(error, CaptureError):
        return f"{type(error).__name__}: {text}"
    op = f"{error.op}: " if error.op is not None and error.op not in text else ""
    line = f" ({error.line})" if error.line is not None and error.line not in text else ""
    return f"{op}{text}{line}"
