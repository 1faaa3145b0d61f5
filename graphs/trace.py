"""From a module to one FX graph whose placeholders, sizes and outputs are known by name.

The model is traced on samples that Piecework makes, never on the caller's tensors, and the traced graph is not
executed: Dynamo calls the backend with the real parameters, so that every placeholder is bound by identity, and the
structure that the model returns is read off from stand-ins for the graph's outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..errors import DynamicDimError, TraceError
from . import audit
from .bindings import Bindings, FrozenTensor, InputBinding, ModelTensor, PlaceholderBinding, SizeBinding, TensorIndex
from .dynamo import (
    COMPILE_LOCK,
    DYNAMO_ERRORS,
    Capture,
    GuardCheck,
    Mode,
    changes_error,
    dynamo_settings,
    equal_dims,
    example_value,
    make_samples,
    traceable_forward,
)
from .inputs import TOKENS, InputContract, Signature
from .outputs import map_leaves
from .region import Regions, find_regions, reuse_is_supported
from .region_inline import drop_unread, inline_regions
from .trace_errors import explain_failure, first_line


class OutputRef:
    """A leaf of the output structure: the graph's output at `index`. No dataclass, since those are structure."""

    def __init__(self, index: int) -> None:
        self.index = index


class SizeRef:
    """A leaf of the output structure: a number computed from the dynamic dims' sizes, padding not counted."""

    def __init__(self, expr: sympy.Expr, symbols: Mapping[str, sympy.Symbol]) -> None:
        self.expr = expr
        self.symbols = symbols
        """Dim name -> what stands for it in `expr`."""

    def at(self, sizes: Mapping[str, int]) -> int:
        """Its value for sizes by name."""
        values = {symbol: sympy.Integer(sizes[name]) for name, symbol in self.symbols.items()}
        return int(self.expr.xreplace(values))


class BindingRef:
    """A leaf of the output structure: a placeholder that the model hands back as it is."""

    def __init__(self, binding: PlaceholderBinding) -> None:
        self.binding = binding


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceFacts:
    """What is known of a trace, wherever it was made."""

    bindings: Bindings
    """What each placeholder is, in order."""
    output: Any
    """The model's output structure with `OutputRef`, `BindingRef`, `SizeRef` or constants as leaves."""
    intervals: audit.Intervals
    """The sizes for which the trace is valid, of each dynamic dim that the graph depends on."""
    frozen: tuple[str, ...]
    """Guards on Python state that the trace read once: a change of that state is not seen."""
    mode: Mode = "unbacked"
    unbacked_failure: str | None = None
    """Why the trace is backed, when it is."""
    regions_reused: int = 0
    """Calls of repeated layers that took the trace of an earlier one."""
    regions_failure: str | None = None
    """Why repeated layers were traced one by one, when they were."""
    changed: tuple[str, ...] = ()
    """What the forward changes besides tensors and the model: that happened once, at the trace."""
    guards: GuardCheck | None = None
    """Under `evaluate_guards`: raises when a new trace would be needed."""

    @property
    def interval(self) -> audit.Interval:
        """The numbers of tokens for which the trace is valid."""
        return self.intervals.get(TOKENS, audit.ANY_SIZE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced(TraceFacts):
    """One trace of a model, with its graph."""

    graph_module: torch.fx.GraphModule
    """Torch-level graph; parameters, buffers and sizes are placeholders; `example_value` on every node."""
    symbols: Mapping[str, sympy.Symbol]
    """Dynamic dim name -> its symbol."""
    shape_env: ShapeEnv


def trace(
    model: torch.nn.Module,
    signature: Signature,
    contract: InputContract,
    *,
    sizes: Mapping[str, int],
    evaluate_guards: bool = False,
    backed: bool = False,
) -> Traced:
    """Traces `model(**inputs)` into one graph without running it.

    Dynamic dims are traced unbacked, which holds for every size; when the model decides on a size, backed, at `sizes`
    (at least 2, since torch takes 0 and 1 for constants). `backed` skips the first attempt. Repeated layers are traced
    once where torch can do that, and flat otherwise: the result is the same.

    Raises:
        DynamicDimError: a declared dim did not stay a symbol.
        GuardError: the trace holds only for sizes that no interval describes.
        TraceError: Dynamo cannot make one graph of the model, or its forward changes Python state.
    """
    with COMPILE_LOCK, torch.inference_mode():
        reason = None
        attempt = _Attempt(model, signature, contract, evaluate_guards)
        safe = {name: max(size, 2) for name, size in sizes.items()}
        if not backed:
            try:
                return attempt(safe, "unbacked")
            except (TraceError, *DYNAMO_ERRORS) as error:
                reason = first_line(error)
        try:
            traced = attempt(safe, "backed")
        except TraceError:
            raise
        except DYNAMO_ERRORS as error:
            raise explain_failure(error, signature, reason) from error
        return dataclasses.replace(traced, unbacked_failure=reason)


class _Attempt:
    """Traces with repeated layers as regions, or flat when there are none or they fail."""

    def __init__(
        self, model: torch.nn.Module, signature: Signature, contract: InputContract, evaluate_guards: bool
    ) -> None:
        if torch._dynamo.config.disable:
            raise TraceError(
                "trace: Dynamo is switched off (TORCHDYNAMO_DISABLE or torch._dynamo.config.disable), so there is no "
                "graph; switch it on, or use compiler='eager'"
            )
        self._model = model
        self._signature = signature
        self._contract = contract
        self._evaluate_guards = evaluate_guards
        self._regions_failure: str | None = None

    def __call__(self, sizes: Mapping[str, int], mode: Mode) -> Traced:
        regions = self._regions()
        if regions is not None:
            try:
                return self._once(sizes, mode, regions)
            except Exception as error:  # also torch's own, of a form that is not to be relied on
                self._regions_failure = f"{type(error).__name__}: {first_line(error)}"
        traced = self._once(sizes, mode, None)
        return dataclasses.replace(traced, regions_failure=self._regions_failure)

    def _regions(self) -> Regions | None:
        if self._evaluate_guards:
            return None  # Dynamo would guard on the marks
        regions = find_regions(self._model)
        if regions is None:
            return None
        if not reuse_is_supported():
            self._regions_failure = f"torch {torch.__version__} cannot reuse a region, 2.13 and later can"
            return None
        if not regions.groups:
            self._regions_failure = "the layers differ in more than their tensors"
            return None
        return regions

    def _once(self, sizes: Mapping[str, int], mode: Mode, regions: Regions | None) -> Traced:
        contract, signature = self._contract, self._signature
        model = self._model
        samples = make_samples(signature, contract, sizes, mode)
        names = [name for name, *_ in signature.tensors]
        named_samples = dict(zip(names, samples, strict=True))
        capture = Capture(model, named_samples, self._evaluate_guards)
        forward = traceable_forward(model, names, dict(signature.constants), equal_dims(names, contract))
        compiled = torch.compile(
            forward,
            backend=capture.backend,
            fullgraph=True,
            dynamic=None,
            options={"guard_filter_fn": capture.filter_guards},
        )
        try:
            with dynamo_settings(), regions.marked() if regions is not None else contextlib.nullcontext():
                try:
                    returned = compiled(*samples)
                finally:
                    # Of what the trace took, only its last moment: steps of other threads may use the model, and its
                    # tensors may be replaced meanwhile.
                    changed = capture.before_effects.restore() if capture.before_effects is not None else set()
                if changed:
                    raise changes_error(changed, TraceError, "trace", "a compiled program")
            traced = _read(capture, returned, TensorIndex(model, named_samples), contract, sizes, regions)
            guards = GuardCheck(compiled, contract) if self._evaluate_guards else None
            return dataclasses.replace(traced, mode=mode, guards=guards)
        finally:
            capture.release()


def _read(
    capture: Capture,
    returned: Any,
    index: TensorIndex,
    contract: InputContract,
    sizes: Mapping[str, int],
    regions: Regions | None,
) -> Traced:
    """Binds what Dynamo captured: placeholders, symbols, interval, outputs."""
    graph_module = capture.graph_module
    if graph_module is None or capture.shape_env is None:
        raise TraceError(
            "trace: the model computes nothing from its inputs, so there is no graph; check which inputs it gets, or "
            "use compiler='eager'"
        )
    if regions is not None:
        regions.check_states()
    symbols = _symbols(capture, contract)
    bound = {node: _bind(node, value, index, symbols) for node, value in capture.placeholders()}
    reused = inline_regions(graph_module, regions, {node: _owners(binding) for node, binding in bound.items()})
    if reused is not None:
        drop_unread(graph_module.graph)
    _sort_placeholders(graph_module.graph)
    bindings = Bindings(tuple(bound[node] for node in graph_module.graph.find_nodes(op="placeholder")))
    _rename_placeholders(graph_module, bindings)
    intervals = audit.valid_intervals(graph_module, capture.shape_env, symbols, sizes)
    names = {name: min(group, key=str) for name, group in symbols.items()}
    return Traced(
        graph_module=graph_module,
        bindings=bindings,
        output=_output_structure(returned, capture, index, names),
        symbols=names,
        intervals=intervals,
        frozen=audit.frozen_state(capture.guards, bindings),
        shape_env=capture.shape_env,
        changed=capture.changed,
        regions_reused=reused or 0,
    )


def _owners(binding: PlaceholderBinding) -> tuple[str, ...]:
    """The names in the model of what may not be another tensor in another call of a region; inputs may."""
    if isinstance(binding, ModelTensor):
        return (binding.path, *(tie.path for tie in binding.ties))
    return ("",) if isinstance(binding, FrozenTensor) else ()


def _sort_placeholders(graph: torch.fx.Graph) -> None:
    """Puts placeholders in the order of their first use, and takes out those of no use.

    Dynamo's order is another one when layers were traced once.
    """
    placeholders = list(graph.find_nodes(op="placeholder"))
    used = dict.fromkeys(a for node in graph.nodes for a in node.all_input_nodes if a.op == "placeholder")
    for node in placeholders:
        if node not in used:
            graph.erase_node(node)
    first = next(iter(graph.nodes))
    for node in used:
        if node is not first:
            first.prepend(node)


def _symbols(capture: Capture, contract: InputContract) -> dict[str, set[sympy.Symbol]]:
    """Dim name -> the symbols it has in the trace.

    Raises:
        DynamicDimError: a declared dim is a constant in the graph, or is tied to one of another name.
    """
    symbols: dict[str, set[sympy.Symbol]] = {}
    names: dict[sympy.Symbol, str] = {}
    for input_name, dims in contract.dynamic_dims.items():
        for dim, dim_name in dims.items():
            expr = capture.sizes.get((input_name, dim))
            if expr is None:
                continue  # the model did not look at this input
            if not isinstance(expr, sympy.Symbol):
                raise DynamicDimError(
                    f"trace: dim {dim} ({dim_name!r}) of input {input_name!r} was "
                    f"declared dynamic, but the model holds only for {expr}; look for an operation that ties it to a "
                    f"constant (a fixed-size buffer, an int() of a shape), or take it out of dynamic_dims"
                )
            if names.setdefault(expr, dim_name) != dim_name:
                raise DynamicDimError(
                    f"trace: dim {dim} ({dim_name!r}) of input {input_name!r} was declared apart from "
                    f"{names[expr]!r}, but the model holds only where the two are equal; give them one name in "
                    f"dynamic_dims, or make the model hold for different sizes"
                )
            symbols.setdefault(dim_name, set()).add(expr)
    return symbols


def _bind(
    node: torch.fx.Node, value: Any, index: TensorIndex, symbols: Mapping[str, set[sympy.Symbol]]
) -> PlaceholderBinding:
    if isinstance(value, torch.Tensor):
        return index.find(value)
    example = example_value(node)
    if isinstance(example, torch.SymInt):
        for name, group in symbols.items():
            if example.node.expr in group:
                return SizeBinding(name)
    raise TraceError(
        f"trace: the graph depends on {node.name} = {value!r} ({type(value).__name__}), which is neither a tensor nor "
        f"a dim declared in dynamic_dims; pass it as a tensor, or declare the dim"
    )


def _rename_placeholders(graph_module: torch.fx.GraphModule, bindings: Bindings) -> None:
    """Gives placeholders the names a person knows them by, for the generated code and for dumps."""
    graph = graph_module.graph
    for node, binding in zip(graph.find_nodes(op="placeholder"), bindings.placeholders, strict=True):
        if isinstance(binding, SizeBinding):
            name = f"num_{binding.name}"
        elif isinstance(binding, InputBinding):
            name = binding.name
        else:
            name = binding.path if isinstance(binding, ModelTensor) else "frozen"
        node.name = node.target = graph._graph_namespace.create_name(name, None)
        node.type = None
    graph_module.recompile()


def _output_structure(returned: Any, capture: Capture, index: TensorIndex, symbols: Mapping[str, sympy.Symbol]) -> Any:
    tensors = {id(t): i for i, t in enumerate(capture.stand_ins) if isinstance(t, torch.Tensor)}
    integers = {v: i for i, v in enumerate(capture.stand_ins) if isinstance(v, int)}
    floats = {v.item() for v in capture.stand_ins if isinstance(v, torch.Tensor) and v.dim() == 0}

    def leaf(path: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in tensors:
                return OutputRef(tensors[id(value)])
            binding = index.find(value)
            if not isinstance(binding, FrozenTensor):
                return BindingRef(binding)
            raise TraceError(
                f"trace: output {path or 'of the model'!r} is a tensor that is neither computed, nor an input, nor an "
                f"attribute of the model; register it as a buffer, or write an attribute of a tensor (x.T) as a call"
            )
        if isinstance(value, float) and value in floats:
            raise TraceError(
                f"trace: output {path or 'of the model'!r} is a float that is computed from a size; return a tensor, "
                f"or compute it outside of the model"
            )
        if value is None or isinstance(value, (bool, int, float, str)):
            return _size_leaf(capture, integers[value], symbols) if type(value) is int and value in integers else value
        raise TraceError(
            f"trace: output {path or 'of the model'!r} is a {type(value).__name__}; expected tensors and constants in "
            f"tuples, lists, dicts or dataclasses (for a transformers model pass use_cache=False)"
        )

    return map_leaves(returned, leaf)


def _size_leaf(capture: Capture, index: int, symbols: Mapping[str, sympy.Symbol]) -> SizeRef | OutputRef:
    assert capture.graph_module is not None
    (outputs,) = capture.graph_module.graph.output_node().args
    assert isinstance(outputs, (tuple, list))
    example = example_value(outputs[index])
    if isinstance(example, torch.SymInt) and example.node.expr.free_symbols <= set(symbols.values()):
        return SizeRef(example.node.expr, symbols)
    return OutputRef(index)  # computed from data
