"""What a traced graph's placeholders are: inputs and sizes by name, the model's tensors by where they live.

Note [Bindings are looked up on each call]
A parameter, a buffer or a KV cache may be rebound (`module.weight = other`, `module.kv = (k, v)`) between two steps. A
binding keeps the way from the model to the tensor, not the tensor, so a program always reads what the model holds now:
`Bindings.model_tensors` compares every link of every way with the last call, and goes the ways again when one changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import InputError
from .links import Link, links_unchanged


@dataclasses.dataclass(frozen=True, slots=True)
class InputBinding:
    """An input of the call, by name."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class SizeBinding:
    """The size of a dynamic dim, by name."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step on the way from the model to a tensor."""

    table: str | None
    """For a step out of a module: `_modules`, `_parameters`, `_buffers` or `__dict__`. None: out of a list or dict."""
    key: Any

    @property
    def is_in_table(self) -> bool:
        """Whether it is out of one of the tables that modules have for parameters, buffers and modules."""
        return self.table is not None and self.table != "__dict__"

    def container(self, value: Any) -> Any:
        """Where the step's key is looked up."""
        if self.table is None:
            return value
        return value.__dict__ if self.table == "__dict__" else value.__dict__[self.table]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ModelTensor:
    """A parameter, a buffer or a plain tensor attribute of the model."""

    path: str
    """Dotted name in the model."""
    model: torch.nn.Module
    steps: tuple[Step, ...]
    """The way to it from the model."""
    ties: tuple[ModelTensor, ...] = ()
    """Where else the model holds the same tensor (tied weights)."""

    def current(self) -> torch.Tensor:
        """The tensor that is there now.

        Raises:
            InputError: there is none.
        """
        value: Any = self.model
        try:
            for step in self.steps:
                value = step.container(value)[step.key]
        except (AttributeError, KeyError, IndexError, TypeError):
            value = None
        if not isinstance(value, torch.Tensor):
            raise InputError(
                f"model tensor {self.path!r}: the program was traced with a tensor there, and now there is "
                f"{'none' if value is None else 'a ' + type(value).__name__}; put it back, or make a new Runtime"
            )
        return value

    def links(self) -> Iterator[tuple[Step, Any, Any]]:
        """The steps of the way, each with its container and what is there."""
        value: Any = self.model
        for step in self.steps:
            container = step.container(value)
            value = container[step.key]
            yield step, container, value


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FrozenTensor:
    """A tensor that the model reads from elsewhere (a global, a closure); kept as it was at the trace."""

    tensor: torch.Tensor


PlaceholderBinding = InputBinding | SizeBinding | ModelTensor | FrozenTensor


class TensorIndex:
    """Finds where a tensor lives, by identity."""

    def __init__(self, model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
        self._inputs = {id(tensor): InputBinding(name) for name, tensor in inputs.items()}
        self._owners: dict[int, list[ModelTensor]] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            way = tuple(Step("_modules", part) for part in prefix.split(".") if prefix)
            for table in ("_parameters", "_buffers", "__dict__"):
                container = module.__dict__ if table == "__dict__" else module.__dict__[table]
                for steps, tensor in _tensors_in(container, table):
                    path = ".".join([part for part in (prefix, *(str(step.key) for step in steps)) if part])
                    self._owners.setdefault(id(tensor), []).append(ModelTensor(path, model, way + steps))

    def find(self, tensor: torch.Tensor) -> PlaceholderBinding:
        """The input or model tensor that this is, or a `FrozenTensor`."""
        if id(tensor) in self._inputs:
            return self._inputs[id(tensor)]
        if id(tensor) not in self._owners:
            return FrozenTensor(tensor)
        return self._owned(id(tensor))

    def everything(self) -> tuple[ModelTensor, ...]:
        """Every tensor of the model, once."""
        return tuple(self._owned(key) for key in self._owners)

    def _owned(self, key: int) -> ModelTensor:
        first, *others = self._owners[key]
        return dataclasses.replace(first, ties=tuple(others))


_MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__)
"""Tables of nn.Module itself: its tensors are looked up there, and its hooks are none."""


def _tensors_in(container: Any, table: str | None, depth: int = 0) -> Iterator[tuple[tuple[Step, ...], torch.Tensor]]:
    """Tensors in a module's table, also in lists and dicts that are its attributes."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in items:
        step = Step(table, key)
        if isinstance(value, torch.Tensor):
            yield (step,), value
        elif isinstance(value, (list, tuple, dict)) and depth < 3 and key not in _MODULE_INTERNALS:
            for steps, tensor in _tensors_in(value, None, depth + 1):
                yield (step, *steps), tensor


class Bindings:
    """The placeholders of one traced graph, in order."""

    def __init__(self, placeholders: tuple[PlaceholderBinding, ...]) -> None:
        self.placeholders = placeholders
        self._model_tensors = [b for b in placeholders if isinstance(b, ModelTensor)]
        self._current = [binding.current() for binding in self._model_tensors]
        self._layouts = [layout_of(tensor) for tensor in self._current]
        self._links = self._walk()

    @property
    def model_paths(self) -> tuple[str, ...]:
        """Dotted names of the model's tensors, in the order of `model_tensors`."""
        return tuple(binding.path for binding in self._model_tensors)

    @property
    def frozen_tensors(self) -> list[torch.Tensor]:
        """The tensors that the model reads from elsewhere."""
        return [binding.tensor for binding in self.placeholders if isinstance(binding, FrozenTensor)]

    def model_tensors(self) -> list[torch.Tensor]:
        """The model's tensors as they are now. See Note [Bindings are looked up on each call].

        Raises:
            InputError: one was replaced by a tensor of another shape, dtype, device or stride, by something else, or
                apart from another one that it was tied to.
        """
        if not self.unchanged():
            current = [binding.current() for binding in self._model_tensors]
            for binding, tensor, layout in zip(self._model_tensors, current, self._layouts, strict=True):
                _check_replacement(binding, tensor, layout)
            self._current = current
            self._links = self._walk()
        return self._current

    def unchanged(self) -> bool:
        """Whether every link leads to the object that it led to at the last `model_tensors`."""
        return links_unchanged(self._links)

    @property
    def last_tensors(self) -> list[torch.Tensor]:
        """What the last `model_tensors` returned: those of now if `unchanged`."""
        return self._current

    def ways(self) -> tuple[list[dict[str, Any]], list[Link]]:
        """The modules' tables on the ways to the model's tensors, and the links in other containers."""
        tables, others = [], []
        for step, container, value in self._steps():
            if step.is_in_table:
                tables.append(container)
            else:
                others.append((container, step.key, value))
        return tables, others

    def _walk(self) -> list[Link]:
        """Every link on the ways to the model's tensors, once, and what it leads to now."""
        links = {(id(container), step.key): (container, step.key, value) for step, container, value in self._steps()}
        return list(links.values())

    def _steps(self) -> Iterator[tuple[Step, Any, Any]]:
        for binding in self._model_tensors:
            for way in (binding, *binding.ties):
                yield from way.links()

    def arguments(self, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> list[Any]:
        """The graph's arguments for one call, in the order of its placeholders."""
        model_tensors = iter(self.model_tensors())
        arguments: list[Any] = []
        for binding in self.placeholders:
            if isinstance(binding, ModelTensor):
                arguments.append(next(model_tensors))
            elif isinstance(binding, InputBinding):
                arguments.append(inputs[binding.name])
            elif isinstance(binding, SizeBinding):
                arguments.append(sizes[binding.name])
            else:
                arguments.append(binding.tensor)
        return arguments


def _check_replacement(binding: ModelTensor, tensor: torch.Tensor, layout: _TensorLayout) -> None:
    if layout_of(tensor) != layout:
        raise InputError(
            f"model tensor {binding.path!r}: the program was traced with {describe_layout(layout)}, got "
            f"{describe_layout(layout_of(tensor))}; put back a tensor like the first, or make a new Runtime"
        )
    for other in binding.ties:
        if other.current() is not tensor:
            raise InputError(
                f"model tensor {other.path!r}: the program was traced with the tensor that is {binding.path!r} too, "
                f"and now they are two; replace both by one tensor, or make a new Runtime"
            )


_TensorLayout = tuple[tuple[int, ...], torch.dtype, torch.device, tuple[int, ...]]


def layout_of(tensor: torch.Tensor) -> _TensorLayout:
    """What a replacement of a model's tensor must share with it: shape, dtype, device and strides."""
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.stride()


def describe_layout(layout: _TensorLayout) -> str:
    """A layout in words."""
    shape, dtype, device, stride = layout
    return f"{dtype}{list(shape)} on {device} with strides {list(stride)}"
