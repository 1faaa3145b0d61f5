"""The layout of a step: everything that its checks look at but the tensors' values, as one key."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from ..graphs.inputs import ambient_key
from ..ops.context import is_dataclass_instance, padded_fields, plain_fields
from ..phases import Backend, GraphConfig, Phase
from .context_values import frozen_value

_CONSTANTS = frozenset({bool, int, str, type(None)})


class KnownLayout(NamedTuple):
    """What a step is known by, and the tensors of it that have static copies."""

    key: Hashable
    sources: list[torch.Tensor]
    """Those of the inputs; where a forward is captured whole, then those of the context, in the order of its fields."""


class LayoutReader:
    """Reads steps of a runtime. Equal keys: what the checks of one step found holds for the other.

    A key has names, classes, sizes, strides, dtypes and devices of tensors, the values of constants with their types,
    torch's settings that programs depend on; and, where a forward is captured whole, the same of the context.
    """

    def __init__(self, config: GraphConfig, device_type: str) -> None:
        self._device_type = device_type
        captured = {
            phase: backend for phase in Phase if (backend := config.phase(phase).backend) is not Backend.DISABLED
        }
        self._is_whole: dict[str, bool] = {phase: backend is Backend.FULL for phase, backend in captured.items()}

    def knows(self, device: torch.device) -> bool:
        """Whether the settings for tensors of such a device are part of a key."""
        return device.type in ("cpu", self._device_type)

    def read(self, phase: object, inputs: object, context: object) -> KnownLayout | None:
        """The layout of a step; None for one that only the checks can judge. Checks nothing, and waits for nothing."""
        if not isinstance(phase, str) or type(inputs) is not dict:
            return None
        is_whole = self._is_whole.get(phase)
        if is_whole is None:
            return None
        try:
            return self._read(phase, inputs, context, is_whole)
        except RuntimeError:  # a sparse tensor has no strides
            return None

    def _read(self, phase: str, inputs: dict[Any, Any], context: object, is_whole: bool) -> KnownLayout | None:
        sources: list[torch.Tensor] = []
        key: list[object] = [phase, ambient_key(self._device_type)]
        for name, value in inputs.items():
            kind = type(value)
            if isinstance(value, torch.Tensor):
                sources.append(value)
                key += (name, kind, value.shape, value.stride(), value.dtype, value.device)
            elif kind in _CONSTANTS:
                key += (name, kind, value)
            elif kind is float:
                key += (name, kind, repr(value))  # NaN is unequal to itself, and 0.0 equals -0.0
            else:
                return None
        if is_whole and not _read_context(context, key, sources):
            return None
        return KnownLayout(tuple(key), sources)


class _Fields(NamedTuple):
    padded: tuple[str, ...]
    plain: tuple[str, ...]
    names: frozenset[str]
    """Of all fields."""


_FIELDS: weakref.WeakKeyDictionary[type, _Fields] = weakref.WeakKeyDictionary()


def _fields_of(context: Any) -> _Fields:
    kind = type(context)
    known = _FIELDS.get(kind)
    if known is None:
        known = _FIELDS[kind] = _Fields(
            padded=tuple(padded_fields(context)),
            plain=plain_fields(context),
            names=frozenset(field.name for field in dataclasses.fields(context)),
        )
    return known


def _read_context(context: object, key: list[object], sources: list[torch.Tensor]) -> bool:
    """Adds a context to the key and its tensors to the sources; whether its key says everything."""
    key.append(type(context))
    if context is None:
        return True
    if not is_dataclass_instance(context):
        return False
    fields = _fields_of(context)
    if not fields.names.issuperset(getattr(context, "__dict__", ())):
        return False  # something lies beside its fields
    for name in fields.padded:
        value = getattr(context, name)
        if isinstance(value, torch.Tensor):
            sources.append(value)
            key += (type(value), value.shape, value.stride(), value.dtype, value.device)
        else:
            key.append(frozen_value(value))
    for name in fields.plain:
        value = getattr(context, name)
        kind = type(value)
        if kind in _CONSTANTS:
            key += (kind, value)
        elif isinstance(value, torch.Tensor):
            return False
        else:
            key.append(frozen_value(value))
    return True
