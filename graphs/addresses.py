"""What a capture holds by address, and whether it is still there."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError
from .bindings import Bindings, TensorIndex, layout_of
from .links import Link, Tables, links_unchanged

_MAX_SEEN = 16
"""Times that what a capture holds is taken down anew for the quick question."""


class Vacancies:
    """Where a model has no tensor or module so far, and might have one: an eager forward may look there.

    A bias that is None, an adapter that is not attached yet, the end of a list of tensors. What torch keeps in each
    module for itself is no such place.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._empty: list[tuple[dict[str, Any], str]] = []
        modules: list[dict[str, Any]] = []
        own_tables: list[dict[str, Any]] = []
        tables: list[Any] = []
        for module in model.modules():
            own: list[dict[str, Any]] = [module._parameters, module._buffers, module._modules]
            tables += own
            own_tables += own
            modules.append(module._modules)
            self._empty += [(table, key) for table in own for key, value in table.items() if value is None]
            for key, value in module.__dict__.items():
                if key in _MODULE_INTERNALS:
                    continue
                if value is None:
                    self._empty.append((module.__dict__, key))
                elif isinstance(value, (list, dict)) and _holds_tensors(value):
                    tables.append(value)
        self.tables = [table for table in own_tables if table]
        """Those of modules that hold something."""
        # Each step asks: what is true when it is not empty is asked all at once.
        self._bare = [table for table in tables if not len(table) and type(table) in (dict, list)]
        self._others = [table for table in tables if len(table) or type(table) not in (dict, list)]
        self._sizes = [*map(len, self._others)]
        known = set(map(id, own_tables))
        self._loose_others = [table for table in self._others if id(table) not in known]
        self._loose_sizes = [*map(len, self._loose_others)]
        self._loose_empty = [(table, key) for table, key in self._empty if id(table) not in known]
        self._modules = [table for table in modules if table]
        self._names = [*itertools.chain.from_iterable(self._modules)]
        self._children: list[Link] = [(table, key, child) for table in self._modules for key, child in table.items()]

    def filled(self) -> str | None:
        """What is there now, or what else is where a module was, in words; None when all is as before."""
        if (key := _filled_key(self._empty)) is not None:
            return f"the model has a {key} where it had none"
        if any(self._bare) or [*map(len, self._others)] != self._sizes:
            return "the model has more or fewer parameters, buffers, modules or tensors in a list than before"
        # A forward may go through the children in their order.
        if [*itertools.chain.from_iterable(self._modules)] != self._names or not links_unchanged(self._children):
            return "a module of the model was replaced"
        return None

    def are_empty(self) -> bool:
        """Whether `filled` has nothing to say, if `tables` hold what they held: the caller knows that."""
        return (
            not any(self._bare)
            and [*map(len, self._loose_others)] == self._loose_sizes
            and _filled_key(self._loose_empty) is None
        )


def _filled_key(empty: list[tuple[dict[str, Any], str]]) -> str | None:
    try:
        for table, key in empty:
            if (value := table[key]) is not None and isinstance(value, (torch.Tensor, torch.nn.Module)):
                return key
    except KeyError:  # an attribute was deleted, and may have been set again
        for table, key in empty:
            if isinstance(table.get(key), (torch.Tensor, torch.nn.Module)):
                return key
    return None


_MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__)


def _holds_tensors(container: list[Any] | dict[Any, Any]) -> bool:
    values = container.values() if isinstance(container, dict) else container
    return not container or any(isinstance(value, torch.Tensor) for value in values)


class ModelBindings:
    """Every parameter, buffer and tensor attribute of a model: what an eager forward may use."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._ids: list[int] = []
        self._bindings: Bindings | None = None
        self._vacancies: Vacancies | None = None

    def vacancies(self) -> Vacancies:
        """Where there is none now; the same object as long as there is none."""
        if self._vacancies is None or self._vacancies.filled() is not None:
            self._vacancies = Vacancies(self._model)
        return self._vacancies

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
        vacancies: where a tensor may appear that the capture would not read.
        with_layouts: compares strides and shapes too. That costs ten times as much, for one who sets a tensor's `data`
            to another view of the same memory.
    """

    def __init__(
        self,
        bindings: Bindings,
        inputs: Mapping[str, torch.Tensor],
        *,
        vacancies: Vacancies | None = None,
        with_layouts: bool = False,
    ) -> None:
        self._bindings = bindings
        self._vacancies = vacancies
        self._tensors = bindings.model_tensors()
        self._num_seen = 0
        self._see()
        self._pointer_of = _pointer_of(self._tensors)
        self._pointers = [*map(self._pointer_of, self._tensors)]
        self._inputs = dict(inputs)
        self._input_pointers = {name: tensor.data_ptr() for name, tensor in inputs.items()}
        self._layouts = [layout_of(tensor) for tensor in self._tensors] if with_layouts else None

    def has_input(self, name: str) -> bool:
        """Whether an input is held where it is, and not copied."""
        return name in self._inputs

    def hold(self) -> bool:
        """Whether everything is where it was, as `moved` would say; False too when that takes a closer look."""
        return (
            not self._inputs
            and self._layouts is None
            and (self._is_as_seen() or self._is_unchanged())
            and [*map(self._pointer_of, self._tensors)] == self._pointers
        )

    def _see(self) -> None:
        """Takes down how all is now, which was just looked at closely."""
        tables, self._links = self._bindings.ways()
        vacant = self._vacancies.tables if self._vacancies is not None else []
        self._tables = Tables([*tables, *vacant], in_order=self._vacancies is not None)
        self._num_seen += 1

    def _is_as_seen(self) -> bool:
        """Whether nothing changed at all near the tensors: the quick question."""
        return (
            self._tables.unchanged()
            and links_unchanged(self._links)
            and (self._vacancies is None or self._vacancies.are_empty())
        )

    def _is_unchanged(self) -> bool:
        """Whether nothing changed that counts."""
        same = (
            self._bindings.unchanged()
            and self._bindings.last_tensors is self._tensors
            and (self._vacancies is None or self._vacancies.filled() is None)
        )
        if same and self._num_seen < _MAX_SEEN:  # something beside them changes now and then
            self._see()
        return same

    def moved(self, inputs: Mapping[str, torch.Tensor]) -> str | None:
        """What is no longer where it was, in words; None when everything is.

        Args:
            inputs: this step's, by name.
        """
        try:
            tensors = self._bindings.model_tensors()
        except InputError as error:
            return str(error)
        pointer_of = self._pointer_of if tensors is self._tensors else _pointer_of(tensors)
        pointers = [*map(pointer_of, tensors)]
        if pointers != self._pointers:
            paths = self._bindings.model_paths
            moved = next(path for path, new, old in zip(paths, pointers, self._pointers, strict=True) if new != old)
            return f"the model's tensor {moved} was replaced or moved"
        if self._vacancies is not None and (filled := self._vacancies.filled()) is not None:
            return filled
        if self._layouts is not None:
            for path, tensor, layout in zip(self._bindings.model_paths, tensors, self._layouts, strict=True):
                if layout_of(tensor) != layout:
                    return f"the model's tensor {path} has another layout than before"
        if tensors is not self._tensors:
            self._tensors, self._pointer_of = tensors, pointer_of  # other objects over the same memory
            self._see()
        for name, pointer in self._input_pointers.items():
            if inputs[name].data_ptr() != pointer:
                return (
                    f"the input {name}, which the forward writes and which has no dynamic dims, is another tensor than "
                    f"when the step was captured; keep it in one place"
                )
        return None


def _pointer_of(tensors: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], int]:
    """What asks one of these tensors for its address, 40 ns each; a subclass that has its own way is asked by it."""
    own = {type(tensor).data_ptr for tensor in tensors} - {torch.Tensor.data_ptr}
    return operator.methodcaller("data_ptr") if own else torch.Tensor.data_ptr
