"""Which dims of a model's outputs grow with the tokens: what padding has to be cut off from.

Note [Outputs without token rows]
A step runs at its bucket, so what the model computes over the rows sees the padded ones: `x[-1]`, `x.mean(0)`. An
output that comes of the tokens and has no dim that grows with them is refused, unless `output_dims` says None for it.
Come of the tokens: computed from an input or a size that has them, or written in place with what was. A factory such
as `x.new_ones(8)` takes no data of `x`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

from ..errors import InputError, TraceError
from ..ops import registry
from .bindings import InputBinding, ModelTensor, SizeBinding
from .inputs import TOKENS, InputContract
from .memory import memories_of
from .mutation import is_mutation, mutated_arguments
from .outputs import OutputContract, Rows, map_leaves
from .trace import BindingRef, OutputRef, Traced


def output_rows(traced: Traced, contract: InputContract) -> Mapping[str, Rows]:
    """Of each output, by path, the dims that are a multiple of `tokens`, and of how many rows a token.

    Raises:
        TraceError: a dim depends on the tokens in another way.
    """
    (graph_outputs,) = traced.graph_module.graph.output_node().args
    assert isinstance(graph_outputs, (tuple, list))
    rows: dict[str, Rows] = {}

    def leaf(path: str, value: Any) -> Any:
        if isinstance(value, OutputRef):
            node = graph_outputs[value.index]
            example = node.meta.get("example_value") if isinstance(node, Node) else node
            if isinstance(example, torch.Tensor):
                counts = (_per_token(traced, path, size) for size in example.shape)
                rows[path] = {dim: count for dim, count in enumerate(counts) if count}
        elif isinstance(value, BindingRef) and isinstance(value.binding, InputBinding):
            dims = contract.dynamic_dims.get(value.binding.name, {})
            rows[path] = {dim: 1 for dim, name in dims.items() if name == TOKENS}
        elif isinstance(value, BindingRef):
            rows[path] = {}
        return value

    map_leaves(traced.output, leaf)
    return rows


def _per_token(traced: Traced, path: str, size: Any) -> int:
    symbol = traced.symbols.get(TOKENS)
    if not isinstance(size, torch.SymInt) or symbol not in size.node.expr.free_symbols:
        return 0
    ratio = size.node.expr / symbol
    interval = traced.interval
    if not ratio.is_Integer and interval.high is not None:
        # Such as Min(s, 16) for a slice of a buffer of 16 rows, where s is 16 at most.
        sizes = range(max(interval.low, 1), interval.high + 1)
        ratios = {ratio.xreplace({symbol: sympy.Integer(n)}) for n in sizes[:_MAX_TRIED]}
        ratio = ratios.pop() if len(ratios) == 1 and len(sizes) <= _MAX_TRIED else ratio
    if not ratio.is_Integer:
        raise TraceError(
            f"trace: output {path!r} has a dim of size {size.node.expr}, from which padded rows cannot be cut; "
            f"return a whole number of rows a token"
        )
    return int(ratio)


_MAX_TRIED = 1 << 12


def reduced_outputs(traced: Traced, contract: InputContract, rows: Mapping[str, Rows]) -> dict[str, str]:
    """The outputs that are computed from the tokens and have no `rows`: path -> what they are, in words."""
    graph = traced.graph_module.graph
    (graph_outputs,) = graph.output_node().args
    placeholders = dict(zip(traced.bindings.placeholders, graph.find_nodes(op="placeholder"), strict=True))
    paths = {binding.path: node for binding, node in placeholders.items() if isinstance(binding, ModelTensor)}
    from_tokens, written = _from_tokens(traced, contract)
    reduced: dict[str, str] = {}

    def leaf(path: str, value: Any) -> Any:
        node = None
        if isinstance(value, OutputRef):
            assert isinstance(graph_outputs, (tuple, list))
            node = graph_outputs[value.index]
        elif isinstance(value, BindingRef):
            binding = value.binding
            node = paths.get(binding.path) if isinstance(binding, ModelTensor) else placeholders.get(binding)
        if isinstance(node, Node) and not rows.get(path):
            if node in from_tokens or not written.isdisjoint(memories_of(node)):
                reduced[path] = _in_words(node, traced)
        return value

    map_leaves(traced.output, leaf)
    return reduced


def written_from_tokens(traced: Traced, contract: InputContract) -> tuple[str, ...]:
    """Names of the model's tensors into which the forward writes, outside of split ops, what it computes from tokens.

    A split op knows from its context which rows are padding; what is traced does not, and writes them too.
    """
    graph = traced.graph_module.graph
    from_tokens, _ = _from_tokens(traced, contract)
    written: set[int] = set()
    for node in graph.nodes:
        if is_mutation(node) and not (node.op == "call_function" and registry.match(node.target)):
            targets = list(mutated_arguments(node))
            if any(argument in from_tokens for argument in node.all_input_nodes if argument not in targets):
                written.update(memory for argument in targets for memory in memories_of(argument))
    placeholders = zip(traced.bindings.placeholders, graph.find_nodes(op="placeholder"), strict=True)
    return tuple(
        binding.path
        for binding, node in placeholders
        if isinstance(binding, ModelTensor) and not written.isdisjoint(memories_of(node))
    )


def check_token_rows(reduced: Mapping[str, str], outputs: OutputContract) -> None:
    """See Note [Outputs without token rows].

    Raises:
        InputError: `outputs` does not leave one of the `reduced_outputs` alone.
    """
    for path, got in reduced.items():
        if not outputs.leaves_alone(path):
            leave = f'output_dims={{"{path}": None}}' if path else "output_dims=None"
            raise InputError(
                f"output {path!r}: expected a dim that grows with {TOKENS!r}, since the output is computed from them "
                f"and the padded rows of a bucket would count, got {got}; return the rows and reduce outside of the "
                f"model, or say {leave} if padding cannot change it"
            )


def _from_tokens(traced: Traced, contract: InputContract) -> tuple[set[Node], set[int]]:
    """The nodes that are computed from the tokens, and the memory that such values were written into."""
    found: set[Node] = set()
    written: set[int] = set()
    bindings = iter(traced.bindings.placeholders)
    for node in traced.graph_module.graph.nodes:
        if node.op == "placeholder":
            binding = next(bindings)
            dims = contract.dynamic_dims.get(binding.name, {}) if isinstance(binding, InputBinding) else {}
            if TOKENS in dims.values() or binding == SizeBinding(TOKENS):
                found.add(node)
        elif node.op.startswith("call"):
            if any(a in found or not written.isdisjoint(memories_of(a)) for a in _read(node)):
                found.add(node)
                written.update(memory for a in mutated_arguments(node) for memory in memories_of(a))
    return found, written


def _read(node: Node) -> Iterator[Node]:
    """The arguments whose values make a node's value: all of them, but for what a factory is called on."""
    of_layout_only = node.op == "call_method" and str(node.target) in _FACTORIES
    for argument in node.all_input_nodes:
        if not (of_layout_only and argument is node.args[0]):
            yield argument


_FACTORIES = frozenset(f"new_{name}" for name in ("empty", "empty_strided", "full", "ones", "tensor", "zeros"))
"""Methods that take dtype and device of the tensor they are called on, and nothing else."""


def _in_words(node: Node, traced: Traced) -> str:
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor):
        return "a number"
    names = {symbol: sympy.Symbol(name) for name, symbol in traced.symbols.items()}
    sizes = (size.node.expr.xreplace(names) if isinstance(size, torch.SymInt) else size for size in example.shape)
    return f"shape [{', '.join(map(str, sizes))}]"
