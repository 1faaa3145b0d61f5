"""What a traced graph's placeholders are: inputs and sizes by name, the model's tensors by where they live.

Note [Bindings are looked up on each call]
A parameter, a buffer or a KV cache may be rebound (`module.weight = other`) between two steps. A binding keeps the
container and the key, not the tensor, so a program always reads what the model holds now; `Bindings.tensors` compares
identities with the last call and checks layouts again when one changed.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import InputError


@dataclasses.dataclass(frozen=True, slots=True)
class InputBinding:
    """An input of the call, by name."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class SizeBinding:
    """The size of a dynamic dim, by name."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ModelTensor:
    """A parameter, a buffer or a plain tensor attribute of the model."""

    path: str
    """Dotted name in the model."""
    container: Any
    """The dict or list that holds it."""
    key: Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FrozenTensor:
    """A tensor that the model reads from elsewhere (a global, a closure); kept as it was at the trace."""

    tensor: torch.Tensor


PlaceholderBinding = InputBinding | SizeBinding | ModelTensor | FrozenTensor


class TensorIndex:
    """Finds where a tensor lives, by identity."""

    def __init__(self, model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
        self._owners: dict[int, PlaceholderBinding] = {}
        for prefix, module in model.named_modules():
            for table in (module._parameters, module._buffers, module.__dict__):
                for path, container, key, tensor in _tensors_in(table, prefix):
                    self._owners.setdefault(id(tensor), ModelTensor(path, container, key))
        self._owners.update({id(tensor): InputBinding(name) for name, tensor in inputs.items()})

    def find(self, tensor: torch.Tensor) -> PlaceholderBinding:
        """The input or model tensor that this is, or a `FrozenTensor`."""
        return self._owners.get(id(tensor)) or FrozenTensor(tensor)


def _tensors_in(container: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any, Any, torch.Tensor]]:
    """Tensors in a module's table, also in lists and dicts that are its attributes."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in items:
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, torch.Tensor):
            yield name, container, key, value
        elif isinstance(value, (list, tuple, dict)) and depth < 3 and not (depth == 0 and str(key).startswith("_")):
            yield from _tensors_in(value, name, depth + 1)


class Bindings:
    """The placeholders of one traced graph, in order."""

    def __init__(self, placeholders: tuple[PlaceholderBinding, ...]) -> None:
        self.placeholders = placeholders
        self._sources = [(b.container, b.key) for b in placeholders if isinstance(b, ModelTensor)]
        self._paths = [b.path for b in placeholders if isinstance(b, ModelTensor)]
        self._last = [container[key] for container, key in self._sources]
        self._layouts = [_layout(tensor) for tensor in self._last]

    @property
    def model_paths(self) -> tuple[str, ...]:
        """Dotted names of the model's tensors, in the order of `model_tensors`."""
        return tuple(self._paths)

    def model_tensors(self) -> list[torch.Tensor]:
        """The model's tensors as they are now. See Note [Bindings are looked up on each call].

        Raises:
            InputError: one was replaced by a tensor of another shape, dtype, device or stride.
        """
        current = [container[key] for container, key in self._sources]
        if any(map(operator.is_not, current, self._last)):
            for path, tensor, layout in zip(self._paths, current, self._layouts, strict=True):
                if _layout(tensor) != layout:
                    raise InputError(
                        f"model tensor {path!r}: the program was traced with {_describe(layout)}, got "
                        f"{_describe(_layout(tensor))}; put back a tensor like the first, or make a new Runtime"
                    )
            self._last = current
        return current

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


_TensorLayout = tuple[tuple[int, ...], torch.dtype, torch.device, tuple[int, ...]]


def _layout(tensor: torch.Tensor) -> _TensorLayout:
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.stride()


def _describe(layout: _TensorLayout) -> str:
    shape, dtype, device, stride = layout
    return f"{dtype}{list(shape)} on {device} with strides {list(stride)}"
