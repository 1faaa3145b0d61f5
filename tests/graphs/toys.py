"""What the tests of graphs/ share: split ops whose bodies count, tiny modules, and the way from a module to a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from piecework.graphs.inputs import InputContract
from piecework.graphs.program import PiecewiseGraph, Program
from piecework.graphs.recorder import NullRecorder
from piecework.graphs.trace import Traced, trace
from piecework.ops.registry import split_op
from piecework.phases import Compiler

CALLS: Counter[str] = Counter()
"""How often each split op's body ran; a test clears it first."""


@split_op(mutates_args=("out",), name="piecework_toys::double")
def double(x: torch.Tensor, out: torch.Tensor) -> None:
    """out = 2 x."""
    CALLS["double"] += 1
    out.copy_(x * 2)


@split_op(mutates_args=("cache",), name="piecework_toys::accumulate")
def accumulate(x: torch.Tensor, cache: torch.Tensor) -> None:
    """Adds the sum over the rows of x to cache."""
    CALLS["accumulate"] += 1
    cache += x.sum(0)


@split_op(
    mutates_args=(),
    name="piecework_toys::halves",
    fake=lambda x: (x.new_empty(x.shape), x.new_empty(x.shape)),
)
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x / 2 twice: a functional operator with two outputs."""
    CALLS["halves"] += 1
    return x / 2, x / 2 + 1


class Fn(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function: Callable[..., Any], **tensors: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


TOKENS_FIRST: Mapping[str, Mapping[int, str]] = {"x": {0: "tokens"}}


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
    graph = PiecewiseGraph(trace_model(model, inputs, dynamic_dims), InputContract(dynamic_dims))
    if bucket is not None:
        return graph.compile_specialized(bucket, Compiler(compiler), {}, NullRecorder())
    return graph.compile_general(Compiler(compiler), {}, NullRecorder())


def run(
    program: Program, inputs: Mapping[str, Any], dynamic_dims: Mapping[str, Mapping[int, str] | int] = TOKENS_FIRST
) -> Any:
    """Calls a program as the runtime does."""
    bound = InputContract(dynamic_dims).bind(inputs)
    with torch.inference_mode():
        return program(bound.tensors, bound.sizes)


def run_eager(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Calls the model as the runtime does under compiler eager."""
    with torch.inference_mode():
        return model(**inputs)
