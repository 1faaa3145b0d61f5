"""A step's context beside its inputs: what is padded with them, and what was forgotten."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from ..errors import InputError
from ..graphs.buffers import fill_padded
from ..graphs.inputs import TOKENS, BoundInputs, InputContract
from ..graphs.tails import constant_value, corner, repeat_last
from ..ops.context import Padding, padded_fields, plain_fields

T = TypeVar("T")

Warn = Callable[[str], None]


def pad_context(context: object, bound: BoundInputs, bucket: int, contract: InputContract, warn: Warn) -> object:
    """A copy of the context with its declared fields grown to the bucket; the context itself when there are none.

    Dims in `slots` keep their sizes: those grow in a static copy only, see static_context.py.

    Args:
        warn: called, when a bucket pads, with a text for each tensor that looks like one of a row a token and was not
            made with `context_field`.

    Raises:
        InputError: a field's dim has a name that no input has, or not the size that the inputs have under that name,
            or the field's dtype cannot hold its pad value.
    """
    grown = {}
    for name, (tensor, padding) in declared_tensors(context, bound, contract).items():
        shape = bucket_shape(tensor, padding, bucket)
        if shape != tensor.shape:
            grown[name] = fill_field(tensor.new_empty(shape), tensor, padding)
    warn_of_forgotten(context, bound, bucket, warn)
    return with_fields(context, grown) if grown else context


def check_context(context: object) -> None:
    """The debug mode: calls the context's own `check()`, if it has one. Raises: whatever that raises."""
    check = getattr(context, "check", None)
    if callable(check):
        check()


def warn_of_forgotten(context: object, bound: BoundInputs, bucket: int, warn: Warn) -> None:
    """Calls `warn` as `pad_context` does."""
    # A lone token says nothing: many a tensor has one row.
    if bucket > bound.num_tokens > 1:
        for name in plain_fields(context):
            value = getattr(context, name)
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == bound.num_tokens:
                warn(
                    f"context {type(context).__name__}.{name}: has a row a token and is not padded to the bucket; make "
                    f"it with context_field(pad=...), or with context_field(pad=0, dims={{}}) if it is not to grow"
                )


def declared_tensors(
    context: object, bound: BoundInputs, contract: InputContract
) -> dict[str, tuple[torch.Tensor, Padding]]:
    """The tensors in fields made with `context_field`, by name, after the checks.

    Raises: InputError: as `pad_context`.
    """
    found = {}
    for name, padding in padded_fields(context).items():
        where = f"context {type(context).__name__}.{name}"
        _check_names(where, padding, contract)
        tensor = getattr(context, name)
        if isinstance(tensor, torch.Tensor):
            _check_tensor(where, tensor, padding, bound.sizes)
            found[name] = (tensor, padding)
    return found


def bucket_shape(tensor: torch.Tensor, padding: Padding, bucket: int) -> tuple[int, ...]:
    """The shape of a field's tensor with its `tokens` dims grown to the bucket."""
    shape = list(tensor.shape)
    for dim, name in padding.dims.items():
        if name == TOKENS:
            shape[dim] = bucket + padding.plus.get(dim, 0)
    return tuple(shape)


def fill_field(target: torch.Tensor, tensor: torch.Tensor, padding: Padding) -> torch.Tensor:
    """Writes a field's tensor to the start of `target` along each dim, and the tail as declared; returns `target`."""
    value = constant_value(padding.value, tensor.shape)
    if value is not None:
        return fill_padded(target, tensor, value)
    corner(target, tensor.shape).copy_(tensor)
    for view, last in repeat_last(target, tensor.shape):
        view.copy_(last)
    return target


def with_fields(context: T, fields: Mapping[str, object]) -> T:
    """A copy of the context, made without its `__init__`, with other values in some of its fields."""
    copied = copy.copy(context)
    for name, value in fields.items():
        object.__setattr__(copied, name, value)
    return copied


def _check_names(where: str, padding: Padding, contract: InputContract) -> None:
    for dim, name in padding.dims.items():
        if name not in contract.dim_names:
            raise InputError(
                f"{where}: dims: expected names of dynamic_dims, which are "
                f"{', '.join(map(repr, sorted(contract.dim_names)))}, got {name!r} for dim {dim}; correct the name in "
                f"context_field, put the dim into slots if only contexts have that size, or leave it out if it does "
                f"not grow"
            )
    for dim, name in padding.slots.items():
        if name in contract.dim_names:
            raise InputError(
                f"{where}: slots: expected names that no input has, got {name!r} for dim {dim}, which is in "
                f"dynamic_dims; put it into dims, where it grows with the inputs"
            )


def _check_tensor(where: str, tensor: torch.Tensor, padding: Padding, sizes: Mapping[str, int]) -> None:
    for dim, name in padding.dims.items():
        size = sizes.get(name)
        plus = padding.plus.get(dim, 0)
        if dim >= tensor.dim() or (size is not None and tensor.shape[dim] != size + plus):
            rows = f"{size} rows" if not plus or size is None else f"{size} + {plus} rows"
            raise InputError(
                f"{where}: expected {rows} on dim {dim} ({name!r}), like the inputs, got shape "
                f"{list(tensor.shape)}; build the context for this step's inputs"
            )
    for dim, name in padding.slots.items():
        least = padding.plus.get(dim, 0)
        if dim >= tensor.dim() or tensor.shape[dim] < least:
            raise InputError(
                f"{where}: expected a dim {dim} ({name!r}) of {least} or more, got shape {list(tensor.shape)}; build "
                f"the context with it, or correct slots in context_field"
            )
    value = padding.value
    if isinstance(value, float) and not value.is_integer() and not tensor.dtype.is_floating_point:
        raise InputError(
            f"{where}: pad: expected a value that {tensor.dtype} can hold, got {value!r}; pad with an integer"
        )
