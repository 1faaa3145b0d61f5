"""Which dims of a model's outputs grow with the tokens: what padding has to be cut off from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

from ..errors import TraceError
from .bindings import InputBinding
from .inputs import TOKENS, InputContract
from .outputs import Rows, map_leaves
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
