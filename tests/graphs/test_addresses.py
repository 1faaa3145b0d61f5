"""What a capture holds by address: every way in which a model's tensors or modules can become others is noticed."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import nn

from piecework.graphs.addresses import Addresses, ModelBindings, Vacancies


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.steps = nn.Sequential(nn.Tanh(), nn.ReLU())
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("later", None)
        self.adapter: Any = None
        self.number: Any = None
        self.caches: list[Any] = [(torch.zeros(2), torch.zeros(2))]
        self.tensors: list[Any] = [torch.zeros(2)]
        self.by_name: dict[str, Any] = {}
        self.counts: Any = collections.Counter()
        self.scale = torch.ones(1)


def addresses_of(model: nn.Module, *, is_eager: bool = True, **options: Any) -> Addresses:
    bindings = ModelBindings(model)
    vacancies = bindings.vacancies() if is_eager else None
    return Addresses(bindings.current(), {}, vacancies=vacancies, **options)


def agree(addresses: Addresses) -> str | None:
    """What `moved` says; the quick question must not hold when it says something."""
    holds = addresses.hold()
    said = addresses.moved({})
    assert not (holds and said is not None), said
    return said


def _set(path: str, value: Any) -> Any:
    def change(model: nn.Module) -> None:
        where, _, name = path.rpartition(".")
        setattr(model.get_submodule(where), name, value(model) if callable(value) else value)

    return change


def _same_parameters_other_module(model: Any) -> None:
    other = nn.Linear(2, 2, bias=False)
    other.weight, model.second = model.second.weight, other


def _one_more_one_less(model: Any) -> None:
    model.first.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    del model.second._parameters["bias"]


def _another_order(model: Any) -> None:
    first = model.steps._modules.pop("0")
    model.steps._modules["0"] = first


def _renamed(model: Any) -> None:
    model.first._parameters["gain"] = model.first._parameters.pop("weight")


def _pointer(model: Any) -> None:
    model.first.weight.data = model.first.weight.data.clone()


CHANGES = {
    "parameter": _set("first.weight", lambda m: nn.Parameter(m.first.weight.detach().clone())),
    "parameter of another shape": _set("first.weight", lambda m: nn.Parameter(torch.zeros(3, 2))),
    "the same memory, turned": _set("first.weight", lambda m: nn.Parameter(m.first.weight.detach().t())),
    "data": _pointer,
    "buffer": _set("kept", lambda m: torch.zeros(3)),
    "buffer gone": _set("kept", None),
    "attribute": _set("scale", lambda m: torch.ones(1)),
    "attribute gone": lambda m: delattr(m, "scale"),
    "bias appears": _set("second.bias", lambda m: nn.Parameter(torch.zeros(2))),
    "buffer appears": _set("later", lambda m: torch.zeros(1)),
    "module appears": _set("adapter", lambda m: nn.Tanh()),
    "tensor appears": _set("number", lambda m: torch.zeros(1)),
    "module": _set("second", lambda m: nn.Linear(2, 2, bias=False)),
    "module with the same tensors": _same_parameters_other_module,
    "module without tensors": lambda m: m.steps.__setitem__(0, nn.Sigmoid()),
    "module gone": lambda m: m.steps.__delitem__(1),
    "module more": lambda m: m.steps.append(nn.Tanh()),
    "module in a bare place": lambda m: m.first.add_module("hidden", nn.Tanh()),
    "order of modules": _another_order,
    "list longer": lambda m: m.tensors.append(torch.zeros(1)),
    "list shorter": lambda m: m.tensors.clear(),
    "in a list": lambda m: m.tensors.__setitem__(0, torch.zeros(2)),
    "in a tuple of a list": lambda m: m.caches.__setitem__(0, (torch.zeros(2), torch.zeros(2))),
    "dict longer": lambda m: m.by_name.__setitem__("a", torch.zeros(1)),
    "container of another kind longer": lambda m: m.counts.__setitem__("a", 1),
    "one more, one less": _one_more_one_less,
    "another name": _renamed,
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed(change: str) -> None:
    model = Model()
    addresses = addresses_of(model)
    assert addresses.hold()
    assert agree(addresses) is None
    CHANGES[change](model)
    assert agree(addresses) is not None, change
    assert addresses_of(model).hold()


def test_a_trace_asks_for_its_own_tensors_only() -> None:
    model = Model()
    addresses = addresses_of(model, is_eager=False)
    model.second.bias = nn.Parameter(torch.zeros(2))
    model.steps[0] = nn.Sigmoid()
    assert addresses.hold()
    model.first.bias = nn.Parameter(torch.zeros(2))
    assert agree(addresses) == "the model's tensor first.bias was replaced or moved"


def test_what_is_no_tensor_may_appear() -> None:
    model = Model()
    addresses = addresses_of(model)
    model.number = 5
    model.first.train(False)
    assert addresses.hold()
    assert agree(addresses) is None
    del model.number
    assert addresses.hold()
    model.number = torch.zeros(1)
    assert agree(addresses) == "the model has a number where it had none"


def test_another_object_over_the_same_memory_takes_a_closer_look_once() -> None:
    model = Model()
    bindings = ModelBindings(model)
    first, second = (Addresses(bindings.current(), {}, vacancies=bindings.vacancies()) for _ in range(2))
    model.first.weight = nn.Parameter(model.first.weight.detach())
    assert not first.hold()
    assert first.moved({}) is None
    assert first.hold()
    assert not second.hold()  # another capture of the same model looks for itself
    assert second.moved({}) is None
    assert second.hold()


def test_tied_weights_that_part_are_noticed() -> None:
    model = Model()
    model.second.weight = model.first.weight
    addresses = addresses_of(model)
    assert addresses.hold()
    model.second.weight = nn.Parameter(model.first.weight.detach())
    assert agree(addresses) is not None


class Own(torch.Tensor):
    """A tensor that says by itself where it lies."""

    where = 0

    def data_ptr(self) -> int:
        return self.where


def test_a_subclass_is_asked_in_its_own_way() -> None:
    model = Model()
    model.scale = torch.zeros(1).as_subclass(Own)
    addresses = addresses_of(model)
    assert addresses.hold()
    model.scale.where = 8
    assert agree(addresses) == "the model's tensor scale was replaced or moved"


def test_layouts_and_inputs_are_for_the_closer_look() -> None:
    model = Model()
    assert not addresses_of(model, is_eager=False, with_layouts=True).hold()
    state = torch.zeros(2)
    held = Addresses(ModelBindings(model).current(), {"state": state})
    assert not held.hold()
    assert held.moved({"state": state}) is None
    assert "the input state" in str(held.moved({"state": torch.zeros(2)}))


def test_vacancies_are_the_same_object_until_something_is_there() -> None:
    model = Model()
    bindings = ModelBindings(model)
    known = bindings.vacancies()
    assert bindings.vacancies() is known
    assert known.filled() is None
    model.second.bias = nn.Parameter(torch.zeros(2))
    assert known.filled() == "the model has a bias where it had none"
    assert bindings.vacancies() is not known
    assert Vacancies(model).filled() is None
