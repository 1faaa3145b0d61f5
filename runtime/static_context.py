"""The static copy of a step's context: what captured split ops read, at the same addresses in every step.

Shapes and addresses are frozen when a forward is captured whole. So each field made with `context_field` gets a tensor
of one shape for each bucket, at the start of a buffer that is as large as the largest bucket needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from ..errors import CaptureError, ConfigError, ContextError, InputError
from ..graphs.buffers import Buffers
from ..graphs.inputs import TOKENS, BoundInputs, InputContract
from ..graphs.layouts import TensorLayout
from ..graphs.prepared_fill import Target
from ..ops.context import Padding, host_fields, is_dataclass_instance, padded_fields
from .context_values import Frozen, grows_with_inputs_only, plain_values
from .step_context import bucket_shape, declared_tensors, fill_field, with_fields

_MAX_COPIES = 512

Declared = Mapping[str, tuple[torch.Tensor, Padding]]

AddressKey = tuple[tuple[str, int, tuple[int, ...], torch.dtype], ...]


class ContextDoesNotFit(CaptureError):
    """This step's context is larger than its static copy, so the step runs uncaptured."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
        """The same text for all steps of a kind, to count them by."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Copy:
    context: Any
    fields: Mapping[str, torch.Tensor]
    """Held, since their ids are the key."""
    plain: tuple[tuple[str, Frozen], ...]


class StaticContext:
    """A phase's static copies of its contexts: one buffer for each field, one copy for each type, bucket and shape.

    A dim in `slots` of `context_field` gets this size (and its `plus`):
      - a name in `at_most_tokens`: the bucket, or its capacity if that is less, since no more of them can be in a step;
      - another name with a capacity: that capacity;
      - another name without one: the largest size seen, rounded up to a power of two. When that grows, shapes and
        maybe addresses change in all buckets: `address_key` tells, and what was captured with the old ones is stale.

    Args:
        sizes: capacities of names in `slots`, such as `{"requests": 256, "blocks": 64}`.
        max_num_tokens: the phase's largest bucket, for which buffers are sized.
        at_most_tokens: names of which a step has no more than tokens.

    Raises:
        ConfigError: a capacity is no positive number, or its name is one of `dynamic_dims`.
    """

    def __init__(
        self,
        contract: InputContract,
        sizes: Mapping[str, int],
        max_num_tokens: int,
        *,
        at_most_tokens: frozenset[str] = frozenset({"requests"}),
    ) -> None:
        check_context_sizes(contract, sizes)
        self._contract = contract
        self._capacities = dict(sizes)
        self._max_num_tokens = max_num_tokens
        self._at_most_tokens = at_most_tokens
        self._seen: dict[str, int] = {}
        self._buffers = Buffers(max_num_tokens, keeps_replaced=False)  # a name's size only grows
        self._copies: dict[tuple[type, int, tuple[int, ...]], _Copy] = {}
        self.generation = 0
        """Grows whenever contexts of known layouts may get other static tensors than before."""
        self.is_written = False
        """Whether something else than a fill writes into the static tensors: `plan()`, or an operator."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return self._buffers.num_bytes

    def fill(self, context: object, bound: BoundInputs, bucket: int) -> object:
        """Copies a step's context into the static buffers, then has the copy plan for it; see `plan_context`.

        Must not be called inside a capture.

        Returns:
            The copy: the same object with tensors at the same addresses for the same type, bucket and shapes, as long
            as plain values are equal; overwritten by the next step. Fields made with `host_field` have their defaults,
            or this step's values if they have none. What is no dataclass comes back as it is.

        Raises:
            ContextDoesNotFit: a size in `slots` is larger than the static one; nothing was changed.
            InputError: the context does not fit the inputs, or its fields disagree about a size.
            ContextError: the context's `as_static` did not return a copy with the tensors that it was given.
        """
        assert bound.num_tokens <= bucket
        declared = declared_tensors(context, bound, self._contract)
        if not is_dataclass_instance(context):
            return context
        self._make_room(context, declared, bucket)
        with torch.no_grad():
            fields = {name: self._fill(context, name, *field, bucket) for name, field in declared.items()}
        copied = self._copy(context, fields, bucket)
        self.is_written |= plan_context(copied, context)
        return copied

    def plan_padding(self, copied: object) -> None:
        """Has what `fill` returned plan for a step of nothing but padding: before a capture that no step precedes.

        Other steps have planned since it was filled, and their values lie in its tensors. Not inside a capture.

        Raises: whatever `plan()` or `plan_for` of the context raises.
        """
        if not (callable(getattr(copied, "plan", None)) or callable(getattr(copied, "plan_for", None))):
            return
        with torch.no_grad():
            for name, padding in padded_fields(copied).items():
                if isinstance(tensor := getattr(copied, name), torch.Tensor):
                    tensor.fill_(0 if padding.value == "last" else padding.value)
        self.forget_tails()
        self.is_written |= plan_context(copied, None)

    def targets(self, context: object, copied: object) -> list[Target]:
        """What `fill`, which returned `copied` for `context`, did with each tensor, in the order of the fields."""
        return [
            Target(source=tensor, static=static, value=padding.value, tail=self._buffers.tail(static))
            for name, padding in padded_fields(context).items()
            if isinstance(tensor := getattr(context, name), torch.Tensor)
            and isinstance(static := getattr(copied, name), torch.Tensor)
        ]

    def versions(self, copied: object) -> list[int]:
        """What changes when torch sees that somebody writes into the static tensors of what `fill` returned."""
        tensors = [getattr(copied, name) for name in padded_fields(copied)]
        return [tensor._version for tensor in tensors if isinstance(tensor, torch.Tensor) and not tensor.is_inference()]

    def forget_tails(self) -> None:
        """Something else than `fill` may have written into the static tensors."""
        self._buffers.forget_tails()

    def fill_tokens_only(self, context: object, bound: BoundInputs, bucket: int) -> object:
        """A copy of the context for steps whose split ops run uncaptured, between captured segments.

        Fields whose shape follows from the inputs' sizes are static, since captured segments may read them; everything
        else is this step's own (see `moving_tensors`). The context itself if there are no such fields.

        Raises: InputError: as `fill`.
        """
        assert bound.num_tokens <= bucket
        fields = {}
        with torch.no_grad():
            for name, (tensor, padding) in declared_tensors(context, bound, self._contract).items():
                shape = bucket_shape(tensor, padding, bucket)
                if grows_with_inputs_only(padding):
                    fields[name] = self._fill(context, name, tensor, padding, bucket)
                elif shape != tensor.shape:
                    fields[name] = fill_field(tensor.new_empty(shape), tensor, padding)
        return with_fields(context, fields) if fields else context

    def address_key(self, copied: object, *, tokens_only: bool = False) -> AddressKey:
        """What a capture relies on: name, address, shape and dtype of each static tensor in what `fill` returned.

        Args:
            tokens_only: the copy comes from `fill_tokens_only`.
        """
        return tuple(
            (name, tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
            for name, padding in padded_fields(copied).items()
            if isinstance(tensor := getattr(copied, name), torch.Tensor)
            and (not tokens_only or grows_with_inputs_only(padding))
        )

    def _make_room(self, context: object, declared: Declared, bucket: int) -> None:
        """Checks the sizes of `slots` against the static ones; lets those without a capacity grow."""
        sizes: dict[str, tuple[int, str]] = {}
        for field, (tensor, padding) in declared.items():
            for dim, name in padding.slots.items():
                size = tensor.shape[dim] - padding.plus.get(dim, 0)
                first, where = sizes.setdefault(name, (size, field))
                if size != first:
                    raise InputError(
                        f"context {type(context).__name__}.{field}: dim {dim} is for {size} {name}, but {where} is for "
                        f"{first}; a name has one size in a step, so correct the context or give them two names"
                    )
        for name, (size, _) in sizes.items():
            room = self._room(name, bucket)
            if room is not None and size > room:
                raise self._does_not_fit(context, name, size, bucket)
        for name, (size, _) in sizes.items():
            if self._room(name, bucket) is None:
                self._seen[name] = max(self._seen.get(name, 1), 1 << max(size - 1, 0).bit_length())

    def _room(self, name: str, bucket: int) -> int | None:
        """The static size of a name; None if that is what was seen."""
        capacity = self._capacities.get(name)
        if name not in self._at_most_tokens:
            return capacity
        return bucket if capacity is None else min(capacity, bucket)

    def _does_not_fit(self, context: object, name: str, size: int, bucket: int) -> ContextDoesNotFit:
        where = f"context {type(context).__name__}"
        capacity = self._capacities.get(name)
        if capacity is not None and size > capacity:
            return ContextDoesNotFit(
                f'{where}: context_sizes["{name}"] is {capacity}, got a step with {size}; pass a larger number to '
                f"Runtime, or the step runs uncaptured",
                reason=f"the step has more {name} than context_sizes",
            )
        return ContextDoesNotFit(
            f"{where}: expected at most as many {name} as tokens, got {size} in the bucket of {bucket} tokens; leave "
            f"out those without tokens, or the step runs uncaptured",
            reason=f"the step has more {name} than its bucket has tokens",
        )

    def _fill(self, context: object, name: str, tensor: torch.Tensor, padding: Padding, bucket: int) -> torch.Tensor:
        key = (type(context), name)
        layout = _layout(tensor, self._shape(tensor, padding, bucket))
        static = self._buffers.find(key, layout)
        if static is None:
            largest = max(bucket, self._max_num_tokens)
            # Sizes the buffer.
            self._buffers.tensor(key, _layout(tensor, self._shape(tensor, padding, largest)), largest)
            static = self._buffers.tensor(key, layout, bucket)
            self._forget_moved()
            self.generation += 1  # also where a size in `slots` grew: that makes tensors of other shapes
        fill_field(static, tensor, padding)
        self._buffers.note_fill(static, tensor.shape, padding.value)
        return static

    def _forget_moved(self) -> None:
        """Lets go of the copies whose buffers were replaced by larger ones."""
        self._copies = {
            key: copied
            for key, copied in self._copies.items()
            if all(
                self._buffers.find((key[0], name), TensorLayout.of(tensor)) is tensor
                for name, tensor in copied.fields.items()
            )
        }

    def _shape(self, tensor: torch.Tensor, padding: Padding, bucket: int) -> tuple[int, ...]:
        shape = list(bucket_shape(tensor, padding, bucket))
        for dim, name in padding.slots.items():
            room = self._room(name, bucket)
            shape[dim] = (self._seen[name] if room is None else room) + padding.plus.get(dim, 0)
        return tuple(shape)

    def _copy(self, context: Any, fields: Mapping[str, torch.Tensor], bucket: int) -> Any:
        key = (type(context), bucket, tuple(map(id, fields.values())))
        plain = plain_values(context)
        known = self._copies.get(key)
        if known is None or known.plain != plain:
            self._copies.pop(key, None)
            if len(self._copies) >= _MAX_COPIES:
                del self._copies[next(iter(self._copies))]
            known = _Copy(context=_static_copy(context, fields), fields=fields, plain=plain)
            self._copies[key] = known
        for field in host_fields(context):
            if not has_default(field) and type(known.context) is type(context):
                object.__setattr__(known.context, field.name, getattr(context, field.name))
        return known.context


def plan_context(copied: object, step: object) -> bool:
    """Calls `plan()` and `plan_for(step)` of a static copy, as far as it has them; whether it may have been written.

    Args:
        step: the context that it was filled from; None: padding. `plan_for` reads its host values, and does not write
            what was filled; `plan()` may.
    """
    plan, plan_for = getattr(copied, "plan", None), getattr(copied, "plan_for", None)
    if callable(plan):
        plan()
    if callable(plan_for):
        plan_for(step)
    return callable(plan)


def plan_key(copied: object) -> Hashable:
    """What a capture with a static copy has frozen of its plans: its `plan_key()`, if it has that."""
    key = getattr(copied, "plan_key", None)
    return key() if callable(key) else None


def has_grown(old: AddressKey, new: AddressKey) -> bool:
    """Whether static tensors of a context are the same ones but larger."""
    if [(name, dtype) for name, _, _, dtype in old] != [(name, dtype) for name, _, _, dtype in new]:
        return False
    shapes = [(before, after) for (_, _, before, _), (_, _, after, _) in zip(old, new, strict=True)]
    if any(len(before) != len(after) for before, after in shapes):
        return False
    sizes = [size for before, after in shapes for size in zip(before, after, strict=True)]
    return all(a <= b for a, b in sizes) and any(a < b for a, b in sizes)


def check_context_sizes(contract: InputContract, sizes: Mapping[str, int]) -> None:
    """Raises ConfigError when a capacity is no positive number, or its name is that of an input's dim."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"context_sizes[{name!r}]: expected a number of 1 or more, got {size!r}; correct it")
        if name in contract.dim_names:
            at_bucket = ", whose buckets are in the config" if name == TOKENS else ""
            raise ConfigError(
                f"context_sizes[{name!r}]: expected a name that only contexts have, got one of dynamic_dims"
                f"{at_bucket}; leave it out"
            )


def _layout(tensor: torch.Tensor, shape: tuple[int, ...]) -> TensorLayout:
    return TensorLayout.contiguous(shape, tensor.dtype, tensor.device)


def _static_copy(context: Any, fields: Mapping[str, torch.Tensor]) -> Any:
    as_static = getattr(context, "as_static", None)
    if as_static is None:
        defaults = {f.name: _default(f) for f in host_fields(context) if has_default(f)}
        return with_fields(context, {**defaults, **fields})
    copied = as_static(fields)
    wrong = [name for name, tensor in fields.items() if getattr(copied, name, None) is not tensor]
    if copied is context or wrong:
        raise ContextError(
            f"{type(context).__name__}.as_static: expected a copy with the tensors that it was given, got "
            f"{f'other ones in {wrong[0]}' if copied is not context else 'the context itself'}; return "
            f"a copy.copy(self) whose fields are set with object.__setattr__"
        )
    return copied


def has_default(field: dataclasses.Field[Any]) -> bool:
    """Whether a field made with `host_field` has that in static copies, and not the step's value."""
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
