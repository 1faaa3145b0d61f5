"""Layers share a trace only if they are the same in everything that a trace reads besides tensors.

Each case here was wrong with torch's own reuse (2.13 and 2.14), or could be.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from piecework.graphs import trace as trace_module
from piecework.graphs.region import reuse_is_supported

from .toys import applied, assert_equals_model, trace_model

WIDTH = 8
X = {"x": torch.linspace(-1, 1, 5 * WIDTH).reshape(5, WIDTH)}


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Stack(nn.Module):
    def __init__(self, layer: Callable[[int], nn.Module] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer(i) for i in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return applied(x)


class Kind(enum.Enum):
    PLAIN = 1
    DOUBLE = 2


class WithState(Layer):
    """`state` decides."""

    state: Any = None
    doubles: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.state is self.doubles or (self.doubles is None and isinstance(self.state, float)):
            return y * 2
        return y


def with_state(plain: Any, double: Any, told: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Stack(WithState)
        for i, layer in enumerate(model.layers):
            layer.state = plain if i % 3 else double
            layer.doubles = told
        return model

    return make


class Config:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class Configured(Layer):
    config: Config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.config.scale


class SharedConfig(Stack):
    """One of two configs is read by the root as well."""

    def __init__(self) -> None:
        super().__init__(Configured)
        self.config, other = Config(2.0), Config(3.0)
        for i, layer in enumerate(self.layers):
            layer.config = other if i % 3 == 2 else self.config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.config.scale)


class Activated(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(super().forward(x))


class SharedModule(Stack):
    """One of two activations is called by the root as well."""

    def __init__(self) -> None:
        super().__init__(Activated)
        self.soft, hard = nn.Softplus(beta=1.0), nn.Softplus(beta=5.0)
        for i, layer in enumerate(self.layers):
            layer.activation = hard if i % 3 == 2 else self.soft

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.soft(x))


def hooked(register: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Stack()
        register(model.layers[4])
        return model

    return make


def own_forward() -> nn.Module:
    model = Stack()
    inner = model.layers[3].first
    original = inner.forward
    inner.forward = lambda x: original(x) * 5
    return model


class Now:
    """State outside of the model."""

    scale = 1.0


class ReadsNow(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * Now.scale


class SetsNow(Stack):
    def __init__(self) -> None:
        super().__init__(ReadsNow)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            Now.scale = float(i + 1)
            x = layer(x)
        return applied(x)


LEVELS = [1.0]


class ReadsList(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * LEVELS[0]


class SetsList(Stack):
    def __init__(self) -> None:
        super().__init__(ReadsList)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            LEVELS[0] = float(i + 1)
            x = layer(x)
        return applied(x)


class SetsAndResets(SetsNow):
    """Afterwards all is as it was."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        Now.scale = 1.0
        return x


class SetsOnce(Stack):
    """All layers see the same."""

    def __init__(self) -> None:
        super().__init__(ReadsNow)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Now.scale = 3.0
        for layer in self.layers:
            x = layer(x)
        Now.scale = 1.0
        return applied(x)


class Linears(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class CastSome(Stack):
    """Every second call is under autocast, and the dtype that comes out decides."""

    def __init__(self) -> None:
        super().__init__(Linears)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=i % 2 == 1):
                y = layer(x)
            x = y.float() * (2 if y.dtype == torch.bfloat16 else 1)
        return applied(x)


class ComparesModules(Stack):
    """A copy of a layer would be another one, of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.doubled = {self.layers[1]: 2.0}
        self.tripled = [self.layers[2]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.doubled.get(layer, 1.0) * (3 if layer is self.tripled[0] else 1)
            x = x if type(layer) is Layer else x * 7
        return applied(x)


CASES: dict[str, Callable[[], nn.Module]] = {
    "an enum member": with_state(Kind.PLAIN, Kind.DOUBLE, Kind.DOUBLE),
    "a class": with_state(int, float, float),
    "a function": with_state(torch.relu, torch.tanh, torch.tanh),
    "an object": with_state(object(), sentinel := object(), sentinel),
    "an integer and a float": with_state(1, 1.0, None),
    "an integer and a bool": with_state(1, True, True),
    "a config that the root reads": SharedConfig,
    "a module that the root calls": SharedModule,
    "a hook below": hooked(lambda layer: layer.first.register_forward_hook(lambda m, a, out: out * 3)),
    "a pre-hook below": hooked(lambda layer: layer.first.register_forward_pre_hook(lambda m, a: (a[0] * 3,))),
    "a hook": hooked(lambda layer: layer.register_forward_hook(lambda m, a, out: out * 3)),
    "a forward of its own below": own_forward,
    "a class attribute that changes": SetsNow,
    "a class attribute that changes and is reset": SetsAndResets,
    "a class attribute that is set once": SetsOnce,
    "a global list that changes": SetsList,
    "autocast around some": CastSome,
    "modules that are compared": ComparesModules,
}


@pytest.fixture(autouse=True)
def outside_as_before() -> Iterator[None]:
    yield
    Now.scale = LEVELS[0] = 1.0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_the_program_does_what_the_model_does(name: str, compiler: str) -> None:
    assert_equals_model(CASES[name](), X, compiler=compiler)


@pytest.mark.skipif(not reuse_is_supported(), reason="torch before 2.13 traces each region again")
@pytest.mark.parametrize(
    ("name", "reused"),
    [
        # Layers 0 and 3 are of one kind, and 1, 2, 4 and 5 of the other: two regions.
        ("an enum member", 4),
        ("an object", 4),
        ("an integer and a bool", 4),
        ("a config that the root reads", 4),
        # One layer is like no other: five share a region.
        ("a hook below", 4),
        ("a forward of its own below", 4),
        ("a hook", 5),
        ("modules that are compared", 5),
        # Calls under autocast are no regions.
        ("autocast around some", 2),
        ("a class attribute that changes", 0),
        ("a class attribute that changes and is reset", 0),
        ("a class attribute that is set once", 5),
        ("a global list that changes", 0),
    ],
)
def test_what_is_reused(name: str, reused: int) -> None:
    assert trace_model(CASES[name](), X).regions_reused == reused


def test_state_outside_of_the_model_that_changes_is_known() -> None:
    traced = trace_model(SetsNow(), X)
    assert [name.rpartition(".")[2] for name in traced.changed] == ["Now"]
    assert trace_model(Stack(), X).changed == ()


def test_a_hook_that_sets_an_attribute_of_the_model_is_refused() -> None:
    model = Stack()
    model.layers[0].register_forward_hook(lambda module, args, out: setattr(model, "last", out))
    with pytest.raises(trace_module.TraceError, match=r"forward sets last"):
        trace_model(model, X)
    assert not hasattr(model, "last")


def test_a_lazy_conjugate_out_of_a_layer() -> None:
    class Conjugating(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.real) * torch.complex(x.real, x.real).conj()

    class Conjugates(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = applied(layer(x).resolve_conj())
            return x.real

    assert_equals_model(Conjugates(Conjugating), X)
