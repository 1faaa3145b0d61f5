"""What of a context a capture would freeze: plain values, and tensors that are captured where they happen to lie."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..ops.context import Padding, host_fields, is_dataclass_instance, padded_fields

Frozen = tuple[Any, ...]
"""A value with its type, so that 1, True and 1.0 differ, and a snapshot of what can change in place."""


def plain_values(context: object) -> tuple[tuple[str, Frozen], ...]:
    """The values of the context that are no tensors, to compare across steps: a captured body has read this step's.

    Lists, dicts and dataclasses are looked into; any other object is compared by its own `==`, which does not see what
    changes inside it. Fields made with `host_field` are left out. Empty for what is no dataclass.
    """
    return tuple(
        (name, frozen_value(value)) for name, value in _values(context).items() if not isinstance(value, torch.Tensor)
    )


def problems(context: object) -> list[str]:
    """Why a forward that reads this context cannot be captured whole, one text a reason; empty when it can.

    No context at all is fine.
    """
    if context is None:
        return []
    where = f"context {type(context).__name__}"
    if not is_dataclass_instance(context):
        return [
            f"{where}: expected a dataclass whose tensors are made with context_field, got "
            f"{'a class' if isinstance(context, type) else f'a {type(context).__name__}'}; make it one"
        ]
    found = []
    declared = padded_fields(context)
    for name, value in _values(context).items():
        if name in declared and isinstance(value, torch.Tensor):
            continue
        parts = list(_parts(value))
        unlike = [part for part in parts if not _is_comparable(part)]
        if any(isinstance(part, torch.Tensor) for part in parts):
            what = "is a tensor" if isinstance(value, torch.Tensor) else f"holds tensors in a {type(value).__name__}"
            found.append(
                f"{where}.{name}: {what}, which would be captured at this step's address; make it a field of its own "
                f"with context_field(pad=..., slots=...), or with host_field() if only host code reads it"
            )
        elif unlike:
            found.append(
                f"{where}.{name}: holds a {type(unlike[0]).__name__}, of which nobody can tell whether it changed "
                f"since the capture; make it host_field() if only host code reads it, or hold numbers, texts or tuples"
            )
    found += [
        f"{where}.{name}: is a cached_property, which would keep the first step's value; make it a property"
        for kind in type(context).__mro__
        for name, member in vars(kind).items()
        if isinstance(member, functools.cached_property)
    ]
    return found


def moving_tensors(context: object) -> dict[str, torch.Tensor]:
    """The tensors of a context that are this step's own after `StaticContext.fill_tokens_only`, by where they are.

    A captured segment that read one of them would read this step's address for ever.
    """
    declared = padded_fields(context)
    moving = {}
    for name, value in {**_values(context), **{f.name: getattr(context, f.name) for f in host_fields(context)}}.items():
        if isinstance(value, torch.Tensor):
            if name not in declared or not grows_with_inputs_only(declared[name]):
                moving[name] = value
            continue
        tensors = [part for part in _parts(value) if isinstance(part, torch.Tensor)]
        moving |= {f"{name}[{index}]": tensor for index, tensor in enumerate(tensors)}
    return moving


def grows_with_inputs_only(padding: Padding) -> bool:
    """Whether a field's shape follows from the inputs' sizes, so that each bucket can have a fixed tensor for it."""
    return bool(padding.dims) and not padding.slots


def _values(context: object) -> dict[str, Any]:
    """The fields of a dataclass, and what its `__post_init__` left beside them; without those of `host_field`."""
    if not is_dataclass_instance(context):
        return {}
    values = {f.name: getattr(context, f.name) for f in dataclasses.fields(context)}
    values |= getattr(context, "__dict__", {})
    for field in host_fields(context):
        del values[field.name]
    return values


def _parts(value: Any) -> Iterator[Any]:
    """The leaves of a value: what is no container and no dataclass."""
    if isinstance(value, (tuple, list, set, frozenset)):
        for part in value:
            yield from _parts(part)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _parts(key)
            yield from _parts(part)
    elif is_dataclass_instance(value):
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name))
    else:
        yield value


def frozen_value(value: Any) -> Frozen:
    """A value with its type, to compare; see `plain_values`."""
    kind = type(value)
    if isinstance(value, (tuple, list)):
        return (kind, *map(frozen_value, value))
    if isinstance(value, (set, frozenset)):
        return (kind, frozenset(map(frozen_value, value)))
    if isinstance(value, Mapping):
        return (kind, *((frozen_value(key), frozen_value(part)) for key, part in value.items()))
    if is_dataclass_instance(value):
        return (kind, *(frozen_value(getattr(value, field.name)) for field in dataclasses.fields(value)))
    if not _is_comparable(value):
        return (kind, object())  # unlike everything
    # NaN is unequal to itself, and 0.0 equals -0.0.
    return (kind, repr(value) if isinstance(value, (float, complex)) else value)


def _is_comparable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:  # it has an == and can change: an array, say
        return False
    return True
