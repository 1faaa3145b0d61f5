"""Repeated layers are traced once, and the program is the one that a flat trace gives."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from piecework.graphs import trace as trace_module
from piecework.graphs.inputs import InputContract
from piecework.graphs.region import MAX_VARIANTS, MIN_LAYERS, Regions, find_regions, reuse_is_supported
from piecework.graphs.stitched import PiecewiseGraph
from piecework.graphs.trace import Traced

from .toys import TOKENS_FIRST, accumulate, applied, assert_equals_model, run_eager, trace_model

needs_reuse = pytest.mark.skipif(not reuse_is_supported(), reason="torch before 2.13 traces each region again")

WIDTH = 8


class Layer(nn.Module):
    """Two linears around a split op; `scale` is Python state that a trace reads, `cache` is written."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cache", torch.zeros(WIDTH))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = self.first(x).chunk(2, -1)
        accumulate(x, self.cache)
        return x + self.second(applied(torch.cat((halves[1], halves[0]), -1).tanh())) * self.scale


class Stack(nn.Module):
    """Layers one after another, between two pieces of its own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 0.5
        for layer in self.layers:
            x = layer(x)
        return x.cos()


def stack(num_layers: int = 6, layer: type[nn.Module] = Layer) -> Stack:
    torch.manual_seed(0)
    return Stack(*(layer() for _ in range(num_layers)))


INPUTS = {"x": torch.linspace(-1, 1, 5 * WIDTH).reshape(5, WIDTH)}


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Traces without regions."""

    def trace_flat(model: nn.Module, *arguments: Any, **options: Any) -> Traced:
        with monkeypatch.context() as patched:
            patched.setattr(trace_module, "find_regions", lambda model: None)
            return trace_model(model, *arguments, **options)

    return trace_flat


def texts(traced: Traced) -> list[str]:
    graph = PiecewiseGraph.from_trace(traced, InputContract(TOKENS_FIRST))
    return [graph.texts[piece.name] for piece in graph.split.pieces]


def paths(traced: Traced) -> list[str]:
    return [getattr(binding, "path", "") for binding in traced.bindings.placeholders]


@needs_reuse
@pytest.mark.parametrize("backed", [False, True])
def test_each_layer_but_the_first_is_reused(flat: Any, backed: bool) -> None:
    model = stack()
    traced, expected = trace_model(model, INPUTS, backed=backed), flat(model, INPUTS, backed=backed)
    assert (traced.regions_reused, traced.regions_failure) == (5, None)
    assert (expected.regions_reused, expected.regions_failure) == (0, None)
    assert texts(traced) == texts(expected)
    assert paths(traced) == paths(expected)
    assert traced.intervals == expected.intervals


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("bucket", [None, 5])
def test_the_program_does_what_the_model_does(compiler: str, bucket: int | None) -> None:
    assert_equals_model(stack(), INPUTS, compiler=compiler, bucket=bucket)


def test_the_model_is_not_touched() -> None:
    """Its class is, while Dynamo traces, and only for Dynamo."""
    model = stack()
    before = {name: (type(module), dict(module.__dict__)) for name, module in model.named_modules()}
    forward = Layer.__dict__["forward"]
    regions = find_regions(model)
    assert regions is not None
    assert set(regions.layers) == {f"layers.{i}" for i in range(6)}
    assert regions.groups == (tuple(regions.layers),)
    expected = run_eager(copy.deepcopy(model), INPUTS)
    with regions.marked():
        assert Layer.__dict__["forward"] is not forward
        torch.testing.assert_close(run_eager(copy.deepcopy(model), INPUTS), expected)
    trace_model(model, INPUTS)
    assert Layer.__dict__["forward"] is forward
    assert {name: (type(module), dict(module.__dict__)) for name, module in model.named_modules()} == before
    assert not hasattr(Layer.forward, "__marked_compile_region_fn__")


def test_a_class_that_inherits_its_forward_gets_it_back() -> None:
    class Inheriting(Layer):
        pass

    trace_model(stack(layer=Inheriting), INPUTS)
    assert "forward" not in Inheriting.__dict__


def test_the_class_is_as_before_after_an_error() -> None:
    class Breaking(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    forward = Breaking.forward
    with pytest.raises(trace_module.TraceError, match="graph break"):
        trace_model(stack(layer=Breaking), INPUTS)
    assert Breaking.forward is forward


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (stack(MIN_LAYERS - 1), "too few"),
        (nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))), "no modules below"),
        (
            Stack(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, n)) for n in (8, 9, 10, 11))),
            "shapes, and torch's class",
        ),
        (Stack(*(nn.Sequential(nn.ReLU()) for _ in range(8))), "no tensors"),
    ],
)
def test_no_regions(model: nn.Module, why: str) -> None:
    assert find_regions(model) is None, why


def test_only_the_outermost_repetition_is_a_region() -> None:
    inner = [Stack(*(Layer() for _ in range(4))) for _ in range(4)]
    regions = find_regions(Stack(*inner))
    assert regions is not None
    assert set(regions.layers) == {f"layers.{i}" for i in range(4)}


def test_a_layer_with_a_forward_of_its_own_is_not_marked() -> None:
    model = stack(8)
    model.layers[3].forward = lambda x: x
    regions = find_regions(model)
    assert regions is not None
    assert "layers.3" not in regions.groups[0]


@needs_reuse
def test_layers_that_differ_in_python_state_are_traced_apart(flat: Any) -> None:
    model = Stack(*(Layer(scale=2.0 if i % 2 else 3.0) for i in range(6)))
    traced = trace_model(model, INPUTS)
    assert traced.regions_reused == 4
    assert texts(traced) == texts(flat(model, INPUTS))
    assert_equals_model(model, INPUTS)


@needs_reuse
def test_more_variants_than_torch_allows_are_traced_flat() -> None:
    """Integers are left to torch's guards, since many models number their layers; here the number is read."""

    class Numbered(Layer):
        number = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.number

    model = Stack(*(Numbered() for _ in range(MAX_VARIANTS + 2)))
    for i, layer in enumerate(model.layers):
        layer.number = i
    traced = trace_model(model, INPUTS)
    assert traced.regions_reused == 0
    assert "max_reuse_entries" in str(traced.regions_failure)
    assert_equals_model(model, INPUTS)


@needs_reuse
def test_layers_that_are_numbered_and_do_not_read_it_are_reused() -> None:
    model = stack()
    for i, layer in enumerate(model.layers):
        layer.number = i
    assert trace_model(model, INPUTS).regions_reused == 5


@needs_reuse
def test_layers_that_all_differ_are_counted() -> None:
    model = Stack(*(Layer(scale=float(i)) for i in range(4)))
    traced = trace_model(model, INPUTS)
    assert traced.regions_reused == 0
    assert traced.regions_failure == "the layers differ in more than their tensors"


@needs_reuse
def test_a_layer_that_is_called_twice_is_traced_flat() -> None:
    class Twice(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](super().forward(x))

    model = Twice(*stack().layers)
    traced = trace_model(model, INPUTS)
    assert "more than once" in str(traced.regions_failure)
    assert_equals_model(model, INPUTS)


@needs_reuse
def test_a_layer_that_reads_another_ones_tensors_is_traced_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """See Note [A reused region is checked]: here each layer comes in as a bound method, which torch gets wrong."""
    region = torch.compiler.nested_compile_region(Layer.forward)

    @contextlib.contextmanager
    def badly_marked(self: Regions) -> Iterator[None]:
        for layer in self.layers.values():
            layer.forward = region.__get__(layer)
        yield
        for layer in self.layers.values():
            del layer.forward

    monkeypatch.setattr(Regions, "marked", badly_marked)
    model = stack()
    traced = trace_model(model, INPUTS)
    assert "RegionError" in str(traced.regions_failure)
    assert_equals_model(model, INPUTS)


def test_tied_and_shared_tensors() -> None:
    model = stack()
    for layer in model.layers[1:]:
        layer.first.weight = model.layers[0].first.weight
    model.layers[5].second.weight = model.layers[4].second.weight
    assert_equals_model(model, INPUTS)


class InPlace(Layer):
    """Writes into its buffer and its input by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.add_(x.sum(0))
        x.mul_(self.cache)
        return super().forward(x)


class Residual(Layer):
    """Takes and returns two tensors, one by keyword."""

    def forward(self, x: torch.Tensor, *, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), residual + x


class Other(nn.Module):
    """A layer of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu() + x


class ResidualStack(Stack):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(x, residual=residual)
        return x, residual


class AliasedStack(Stack):
    """Its first layer gets one tensor as two arguments."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x
        for layer in self.layers:
            x, residual = layer(x, residual=residual)
        return x, residual


class Collecting(Stack):
    """Every layer's output crosses into one piece: equal fake tensors would be one tensor there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x)
        return torch.stack(outputs, 1)


class Views(Layer):
    """Halves of one tensor cross split ops, are written, and leave the layer as a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        left, right = y.chunk(2, -1)
        accumulate(torch.cat((left, left), -1), self.cache)
        right.mul_(2)
        left.add_(right.contiguous())
        return applied(y + x).view(-1, WIDTH)[:, :]


class Cast(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.first(x)
        return super().forward(x) + y.float()


class Optional(Layer):
    """Returns something that is no tensor beside one."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


class OptionalStack(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


class Branching(Layer):
    """Decides on the size, so that the trace is backed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (1 if x.shape[0] > 3 else 2)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(stack(layer=InPlace), id="writes in place"),
        pytest.param(ResidualStack(*(Residual() for _ in range(5))), id="keyword, two outputs"),
        pytest.param(AliasedStack(*(Residual() for _ in range(6))), id="one tensor twice"),
        pytest.param(Collecting(*(Layer() for _ in range(5))), id="outputs collected"),
        pytest.param(stack(layer=Views), id="views"),
        pytest.param(stack(layer=Cast), id="autocast"),
        pytest.param(OptionalStack(*(Optional() for _ in range(5))), id="not only tensors out"),
        pytest.param(stack(layer=Branching), id="backed"),
        pytest.param(nn.Sequential(stack(), *(Other() for _ in range(5))), id="two"),
    ],
)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_kinds_of_layers(model: nn.Module, compiler: str) -> None:
    if isinstance(model, nn.Sequential):
        inputs, dims = {"input": INPUTS["x"]}, {"input": {0: "tokens"}}
    else:
        inputs, dims = dict(INPUTS), dict(TOKENS_FIRST)
    inputs = {name: tensor.clone() for name, tensor in inputs.items()}
    assert_equals_model(model, inputs, dims, compiler=compiler)


@needs_reuse
def test_two_stacks_are_both_reused() -> None:
    model = nn.Sequential(stack(), *(Other() for _ in range(5)))
    traced = trace_model(model, {"input": INPUTS["x"]}, {"input": {0: "tokens"}})
    assert traced.regions_reused == 5 + 4


@needs_reuse
def test_regions_that_a_user_marks_are_inlined() -> None:
    class Marked(Layer):
        @torch.compiler.nested_compile_region
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model = Stack(Marked(), Marked())
    assert trace_model(model, INPUTS).regions_reused == 1
    assert_equals_model(model, INPUTS)


def test_older_torch_traces_flat_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "reuse_is_supported", lambda: False)
    traced = trace_model(stack(), INPUTS)
    assert traced.regions_reused == 0
    assert "2.13 and later" in str(traced.regions_failure)


def test_evaluate_guards_guards_the_model_itself() -> None:
    traced = trace_model(stack(), INPUTS, evaluate_guards=True)
    assert (traced.regions_reused, traced.regions_failure) == (0, None)


def test_a_layer_that_sets_an_attribute_is_refused() -> None:
    class Setting(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = x.shape[0]
            return super().forward(x)

    model = stack(layer=Setting)
    with pytest.raises(trace_module.TraceError, match="layers.0.seen"):
        trace_model(model, INPUTS)
    assert not hasattr(model.layers[0], "seen")


@needs_reuse
def test_a_call_with_one_tensor_twice_is_no_region(flat: Any) -> None:
    """Stamps of it would take one tensor for both arguments; the other layers are reused all the same."""
    model = AliasedStack(*(Residual() for _ in range(6)))
    traced = trace_model(model, INPUTS)
    assert traced.regions_reused == 4
    assert texts(traced) == texts(flat(model, INPUTS))


@needs_reuse
def test_layers_that_make_sizes_from_data_are_traced_flat() -> None:
    """The stamps would have one symbol for the sizes of all layers."""

    class Selecting(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.nonzero(x > 0).sum()

    model = stack(layer=Selecting)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        traced = trace_model(model, INPUTS)
        assert "size comes from data" in str(traced.regions_failure)
        assert_equals_model(model, INPUTS)
