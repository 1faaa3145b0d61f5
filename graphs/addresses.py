"""What a capture holds by address, and whether it is still there."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import InputError
from .bindings import Bindings, TensorIndex, layout_of


class ModelBindings:
    """Every parameter, buffer and tensor attribute of a model: what an eager forward may use."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._ids: list[int] = []
        self._bindings: Bindings | None = None

    def current(self) -> Bindings:
        """Of the tensors that the model has now; the same object as long as they are the same."""
        ids = [
            id(value)
            for module in self._model.modules()
            for table in (module._parameters, module._buffers, module.__dict__)
            for value in table.values()
            if isinstance(value, torch.Tensor)
        ]
        if self._bindings is None or ids != self._ids:
            self._bindings = Bindings(TensorIndex(self._model, {}).everything())
            self._ids = ids
        return self._bindings


class Addresses:
    """The tensors that a capture reads or writes where they are: the model's, and inputs that are not copied.

    A tensor that was replaced or moved (`tensor.data = ...`, `model.half()`) leaves the capture with memory that nobody
    looks at any more.

    Args:
        with_layouts: compares strides and shapes too. That costs ten times as much, for one who sets a tensor's `data`
            to another view of the same memory.
    """

    def __init__(self, bindings: Bindings, inputs: Mapping[str, torch.Tensor], *, with_layouts: bool = False) -> None:
        self._bindings = bindings
        self._tensors = bindings.model_tensors()
        self._pointers = [tensor.data_ptr() for tensor in self._tensors]
        self._inputs = dict(inputs)
        self._input_pointers = {name: tensor.data_ptr() for name, tensor in inputs.items()}
        self._layouts = [layout_of(tensor) for tensor in self._tensors] if with_layouts else None

    def has_input(self, name: str) -> bool:
        """Whether an input is held where it is, and not copied."""
        return name in self._inputs

    def moved(self, inputs: Mapping[str, torch.Tensor]) -> str | None:
        """What is no longer where it was, in words; None when everything is.

        Args:
            inputs: this step's, by name.
        """
        try:
            tensors = self._bindings.model_tensors()
        except InputError as error:
            return str(error)
        pointers = [tensor.data_ptr() for tensor in tensors]
        if pointers != self._pointers:
            paths = self._bindings.model_paths
            moved = next(path for path, new, old in zip(paths, pointers, self._pointers, strict=True) if new != old)
            return f"the model's tensor {moved} was replaced or moved"
        if self._layouts is not None:
            for path, tensor, layout in zip(self._bindings.model_paths, tensors, self._layouts, strict=True):
                if layout_of(tensor) != layout:
                    return f"the model's tensor {path} has another layout than before"
        if tensors is not self._tensors:
            self._tensors = tensors  # other objects over the same memory
        for name, pointer in self._input_pointers.items():
            if inputs[name].data_ptr() != pointer:
                return (
                    f"the input {name}, which the forward writes and which has no dynamic dims, is another tensor than "
                    f"when the step was captured; keep it in one place"
                )
        return None
