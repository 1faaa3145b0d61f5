"""What the tests of graphs/ share: split ops whose bodies count, tiny modules, the way from a module to a program."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from piecework.graphs.inputs import InputContract
from piecework.graphs.program import Program
from piecework.graphs.recorder import NullRecorder
from piecework.graphs.stitched import PiecewiseGraph
from piecework.graphs.trace import Traced, trace
from piecework.ops.split_op import split_op
from piecework.phases import Compiler

TOKENS_FIRST: Mapping[str, Mapping[int, str]] = {"x": {0: "tokens"}}

CALLS: Counter[str] = Counter()
"""How often each split op's body ran; a test clears it first."""


@split_op(mutates_args=("out",), name="piecework_toys::double", capturable=True)
def double(x: torch.Tensor, out: torch.Tensor) -> None:
    """out = 2 x."""
    CALLS["double"] += 1
    out.copy_(x * 2)


@split_op(mutates_args=("cache",), name="piecework_toys::accumulate", capturable=True)
def accumulate(x: torch.Tensor, cache: torch.Tensor) -> None:
    """Adds the sum over the rows of x to cache."""
    CALLS["accumulate"] += 1
    cache += x.sum(0)


@split_op(
    mutates_args=(),
    name="piecework_toys::halves",
    fake=lambda x: (x.new_empty(x.shape), x.new_empty(x.shape)),
    capturable=True,
)
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x / 2 twice: a functional operator with two outputs."""
    CALLS["halves"] += 1
    return (x / 2).contiguous(), (x / 2 + 1).contiguous()  # the strides that the fake tells


def applied(x: torch.Tensor) -> torch.Tensor:
    """`double` as a model calls it: into a tensor of its own."""
    out = torch.empty_like(x)
    double(x, out)
    return out


def x_of(num_tokens: int, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """The input `x` of that many tokens, the same for the same seed."""
    return {"x": torch.randn(num_tokens, 4, generator=torch.Generator().manual_seed(seed))}


def plain(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A model's forward with one split op between two pieces."""
    out = torch.empty_like(x)
    double(x + 1, out)
    return out.relu() * 3


def assert_same(got: Any, expected: Any) -> None:
    """Same structure and types; tensors of one dtype and shape, close in value."""
    assert type(got) is type(expected)
    if dataclasses.is_dataclass(got):
        return assert_same(vars(got), vars(expected))
    got_leaves, got_spec = tree_flatten(got)
    expected_leaves, expected_spec = tree_flatten(expected)
    assert got_spec == expected_spec
    for left, right in zip(got_leaves, expected_leaves, strict=True):
        assert type(left) is type(right)
        if isinstance(left, torch.Tensor):
            torch.testing.assert_close(left, right, equal_nan=True)
        else:
            assert left == right


def assert_equals_model(
    model: nn.Module,
    inputs: Mapping[str, Any],
    dynamic_dims: Mapping[str, Mapping[int, str] | int] = TOKENS_FIRST,
    *,
    compiler: Compiler | str = Compiler.EAGER,
    bucket: int | None = None,
    also: Sequence[Mapping[str, Any]] = (),
) -> Program:
    """A program made for `inputs` does what the model does, there and for `also`: outputs, inputs and buffers."""
    reference = copy.deepcopy(model)
    program = make_program(model, inputs, dynamic_dims, compiler=compiler, bucket=bucket)
    for each in (inputs, *also):
        ours, theirs = copy.deepcopy(dict(each)), copy.deepcopy(dict(each))
        assert_same(run(program, ours, dynamic_dims), run_eager(reference, theirs))
        assert_same(ours, theirs)
        assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))
    return program


class Fn(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function: Callable[..., Any], **tensors: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def trace_model(
    model: nn.Module,
    inputs: Mapping[str, Any],
    dynamic_dims: Mapping[str, Mapping[int, str] | int] = TOKENS_FIRST,
    **options: Any,
) -> Traced:
    """Traces a model for inputs like these."""
    contract = InputContract(dynamic_dims)
    bound = contract.bind(inputs)
    return trace(model, bound.signature, contract, sizes=bound.sizes, **options)


def make_program(
    model: nn.Module,
    inputs: Mapping[str, Any],
    dynamic_dims: Mapping[str, Mapping[int, str] | int] = TOKENS_FIRST,
    *,
    compiler: Compiler | str = Compiler.EAGER,
    bucket: int | None = None,
) -> Program:
    """The general program of a model, or the one specialised for `bucket`."""
    graph = PiecewiseGraph.from_trace(trace_model(model, inputs, dynamic_dims), InputContract(dynamic_dims))
    if bucket is not None:
        return graph.compile_specialized(bucket, Compiler(compiler), {}, NullRecorder())
    return graph.compile_general(Compiler(compiler), {}, NullRecorder())


def run(
    program: Program, inputs: Mapping[str, Any], dynamic_dims: Mapping[str, Mapping[int, str] | int] = TOKENS_FIRST
) -> Any:
    """Calls a program as the runtime does, without padding."""
    contract = InputContract(dynamic_dims)
    bound = contract.bind(inputs)
    with torch.inference_mode():
        return program(contract.pad_to_bucket(bound, bound.num_tokens), bound.sizes)


def run_eager(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Calls the model as the runtime does under compiler eager."""
    with torch.inference_mode():
        return model(**inputs)
