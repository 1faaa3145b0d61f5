"""What placeholders are, as plain JSON data, and found again in a live model, which is checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import InputError, PortableError
from .bindings import (
    Bindings,
    FrozenTensor,
    InputBinding,
    ModelTensor,
    PlaceholderBinding,
    SizeBinding,
    Step,
    describe_layout,
    layout_of,
)
from .encode import Data, Encoder
from .memory import memory

_MAX_LISTED = 8


def encode_placeholders(bindings: Bindings, encoder: Encoder) -> Data:
    """Every placeholder in order; for the model's tensors also what they look like and which share memory."""
    memories: dict[int, int] = {}
    encoded = []
    for binding in bindings.placeholders:
        data = encode_binding(binding, encoder)
        if isinstance(binding, ModelTensor):
            tensor = binding.current()
            data["layout"] = _encode_layout(tensor)
            data["memory"] = memories.setdefault(memory(tensor), len(memories))
        encoded.append(data)
    return encoded


def encode_binding(binding: PlaceholderBinding, encoder: Encoder) -> Data:
    """One binding. Raises: PortableError."""
    if isinstance(binding, InputBinding):
        return {"input": binding.name}
    if isinstance(binding, SizeBinding):
        return {"size": binding.name}
    if isinstance(binding, FrozenTensor):
        return {"frozen": encoder.tensor(binding.tensor)}
    ways = [[tie.path, [_encode_step(step, tie.path) for step in tie.steps]] for tie in (binding, *binding.ties)]
    return {"model": ways}


def decode_binding(data: Data, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> PlaceholderBinding:
    """The binding over a live model; whether the tensor is there is not looked at."""
    if "input" in data:
        return InputBinding(data["input"])
    if "size" in data:
        return SizeBinding(data["size"])
    if "frozen" in data:
        return FrozenTensor(tensors[data["frozen"]])
    first, *ties = (
        ModelTensor(path, model, tuple(Step(table, key) for table, key in steps)) for path, steps in data["model"]
    )
    return ModelTensor(first.path, model, first.steps, tuple(ties))


def bind_placeholders(
    data: Data, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]
) -> tuple[PlaceholderBinding, ...]:
    """Every placeholder, bound to `model`.

    Raises:
        PortableError: tensors are missing, or differ in shape, dtype, device or strides, or share memory where those of
            the trace did not, or the other way around; all of them are listed.
    """
    bindings = tuple(decode_binding(each, model, tensors) for each in data)
    problems: list[str] = []
    found: dict[int, list[tuple[int, str]]] = {}
    for each, binding in zip(data, bindings, strict=True):
        if not isinstance(binding, ModelTensor):
            continue
        try:
            tensor = binding.current()
        except InputError:
            problems.append(f"{binding.path}: there is none")
            continue
        if _encode_layout(tensor) != each["layout"]:
            problems.append(
                f"{binding.path}: expected {describe(each['layout'])}, got {describe_layout(layout_of(tensor))}"
            )
        problems += _apart(binding, tensor)
        found.setdefault(memory(tensor), []).append((each["memory"], binding.path))
    problems += _shared_otherwise(found)
    if problems:
        more = f"\n  and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise PortableError(
            f"portable: the model ({type(model).__name__}) is not the one that the program was traced from; make a "
            f"program for this one:" + "".join(f"\n  {problem}" for problem in problems[:_MAX_LISTED]) + more
        )
    return bindings


def _apart(binding: ModelTensor, tensor: torch.Tensor) -> list[str]:
    """Places where the model held the same tensor when it was traced, and holds another one now."""
    problems = []
    for tie in binding.ties:
        try:
            if tie.current() is not tensor:
                problems.append(f"{tie.path}: expected the tensor that is {binding.path}, got another")
        except InputError:
            problems.append(f"{tie.path}: there is none")
    return problems


def _shared_otherwise(found: Mapping[int, list[tuple[int, str]]]) -> list[str]:
    """A compiler knew which tensors share memory: they must be the same ones here."""
    problems = []
    homes: dict[int, int] = {}
    for here, users in found.items():
        if len({there for there, _ in users}) > 1:
            problems.append(f"{', '.join(path for _, path in users)}: share memory here, and did not")
        for there, path in users:
            if homes.setdefault(there, here) != here:
                problems.append(f"{path}: shared memory with another tensor, and does not here")
    return problems


def _encode_step(step: Step, path: str) -> Data:
    if type(step.key) not in (str, int):
        raise PortableError(
            f"portable: the model tensor {path!r} is under a key that is a {type(step.key).__name__}; only strings and "
            f"integers can travel"
        )
    return [step.table, step.key]


def _encode_layout(tensor: torch.Tensor) -> Data:
    shape, dtype, device, strides = layout_of(tensor)
    return [list(shape), str(dtype).removeprefix("torch."), str(device), list(strides)]


def describe(layout: Any) -> str:
    """An encoded layout in words."""
    shape, dtype, device, strides = layout
    return describe_layout((tuple(shape), getattr(torch, dtype), torch.device(device), tuple(strides)))
