"""A step's context beside its inputs: what is padded with them, and what was forgotten."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from ..errors import InputError
from ..graphs.inputs import BoundInputs, InputContract, pad_tensor
from ..ops.context import Padding, padded_fields, plain_fields

Warn = Callable[[str], None]


def pad_context(context: object, bound: BoundInputs, bucket: int, contract: InputContract, warn: Warn) -> object:
    """A copy of the context with its declared fields grown to the bucket; the context itself when there are none.

    Args:
        warn: called, when a bucket pads, with a text for each tensor that looks like one of a row a token and was not
            made with `context_field`.

    Raises:
        InputError: a field's dim has a name that no input has, or not the size that the inputs have under that name.
    """
    grown = {}
    for name, padding in padded_fields(context).items():
        where = f"context {type(context).__name__}.{name}"
        _check_names(where, padding, contract)
        tensor = getattr(context, name)
        if not isinstance(tensor, torch.Tensor):
            continue
        for dim, dim_name in padding.dims.items():
            size = bound.sizes.get(dim_name)
            if dim >= tensor.dim() or (size is not None and tensor.shape[dim] != size):
                raise InputError(
                    f"{where}: expected {size} rows on dim {dim} ({dim_name!r}), like the inputs, got shape "
                    f"{list(tensor.shape)}; build the context for this step's inputs"
                )
        padded = pad_tensor(tensor, padding.dims, bucket, padding.value)
        if padded is not tensor:
            grown[name] = padded
    # A lone token says nothing: many a tensor has one row.
    if bucket > bound.num_tokens > 1:
        for name in plain_fields(context):
            value = getattr(context, name)
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == bound.num_tokens:
                warn(
                    f"context {type(context).__name__}.{name}: has a row a token and is not padded to the bucket; make "
                    f"it with context_field(pad=...), or with context_field(pad=0, dims={{}}) if it is not to grow"
                )
    if not grown:
        return context
    copied = copy.copy(context)
    for name, tensor in grown.items():
        object.__setattr__(copied, name, tensor)
    return copied


def _check_names(where: str, padding: Padding, contract: InputContract) -> None:
    for dim, name in padding.dims.items():
        if name not in contract.dim_names:
            raise InputError(
                f"{where}: dims: expected names of dynamic_dims, which are "
                f"{', '.join(map(repr, sorted(contract.dim_names)))}, got {name!r} for dim {dim}; correct the name in "
                f"context_field, or leave the dim out if it does not grow"
            )
