"""From a module to one FX graph: the Dynamo entry.

The model is traced on samples that Piecework makes, never on the caller's tensors, and the traced graph is not
executed: Dynamo calls the backend with the real parameters, so that every placeholder is bound by identity, and the
structure that the model returns is read off from stand-ins for the graph's outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import sympy
import torch
import torch._dynamo.config
import torch.fx.experimental._config
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.exc import TorchDynamoException
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode, ShapeEnv

from ..errors import DynamicDimError, GuardError, TraceError
from . import audit
from .bindings import Bindings, FrozenTensor, InputBinding, ModelTensor, PlaceholderBinding, SizeBinding, TensorIndex
from .inputs import BoundInputs, InputContract, Signature
from .outputs import map_leaves

COMPILE_LOCK = threading.RLock()
"""Held around every trace and compile of the process: torch.compile is not re-entrant across threads."""

Mode = Literal["unbacked", "backed"]

_DYNAMO_ERRORS = (TorchDynamoException, GuardOnDataDependentSymNode, ConstraintViolationError)

_STAND_IN_INT = 7_368_787_000
"""First of the integers that stand for symbolic sizes among a traced model's outputs."""


class OutputRef:
    """A leaf of the output structure: the graph's output at `index`. No dataclass, since those are structure."""

    def __init__(self, index: int) -> None:
        self.index = index


class BindingRef:
    """A leaf of the output structure: a placeholder that the model hands back as it is."""

    def __init__(self, binding: PlaceholderBinding) -> None:
        self.binding = binding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """One trace of a model."""

    graph_module: torch.fx.GraphModule
    """Torch-level graph; parameters, buffers and sizes are placeholders; `example_value` on every node."""
    bindings: Bindings
    """What each placeholder is, in order."""
    output: Any
    """The model's output structure with `OutputRef`, `BindingRef` or constants as leaves."""
    symbols: Mapping[str, sympy.Symbol]
    """Dynamic dim name -> its symbol."""
    mode: Mode
    interval: audit.Interval
    """The numbers of tokens for which the trace is valid."""
    frozen: tuple[str, ...]
    """Guards on Python state that the trace read once: a change of that state is not seen."""
    guards: GuardCheck | None
    """Under `evaluate_guards`: raises when a new trace would be needed."""
    unbacked_failure: str | None
    """Why the trace is backed, when it is."""
    shape_env: ShapeEnv


class GuardCheck:
    """The guards of a trace, kept by the debug mode `evaluate_guards`."""

    def __init__(self, compiled: Callable[..., Any], contract: InputContract) -> None:
        self._compiled = compiled
        self._contract = contract

    def check(self, bound: BoundInputs, mode: Mode) -> None:
        """Evaluates Dynamo's guards for a call like `bound`; nothing of the model runs.

        Raises:
            torch._dynamo.exc.RecompileError: a guard does not hold.
        """
        samples = _samples(bound.signature, self._contract, bound.sizes, mode)
        with COMPILE_LOCK, torch.inference_mode(), _dynamo_settings(error_on_recompile=True):
            self._compiled(*samples)


def trace(
    model: torch.nn.Module,
    signature: Signature,
    contract: InputContract,
    *,
    sizes: Mapping[str, int],
    evaluate_guards: bool = False,
) -> Traced:
    """Traces `model(**inputs)` into one graph without running it.

    Dynamic dims are traced unbacked, which holds for every size; when the model decides on a size, backed, at `sizes`
    (at least 2, since torch takes 0 and 1 for constants).

    Raises:
        DynamicDimError: a declared dim did not stay a symbol.
        GuardError: the trace holds only for sizes that no interval describes.
        TraceError: Dynamo cannot make one graph of the model, or its forward changes Python state.
    """
    with COMPILE_LOCK, torch.inference_mode():
        try:
            return _attempt(model, signature, contract, sizes, "unbacked", evaluate_guards, failure=None)
        except (TraceError, *_DYNAMO_ERRORS) as error:
            unbacked_failure = error
        safe = {name: max(size, 2) for name, size in sizes.items()}
        reason = _first_line(unbacked_failure)
        try:
            return _attempt(model, signature, contract, safe, "backed", evaluate_guards, failure=reason)
        except TraceError:
            raise
        except _DYNAMO_ERRORS as error:
            raise _explain(error, signature, reason) from error


def _attempt(
    model: torch.nn.Module,
    signature: Signature,
    contract: InputContract,
    sizes: Mapping[str, int],
    mode: Mode,
    evaluate_guards: bool,
    *,
    failure: str | None,
) -> Traced:
    if torch._dynamo.config.disable:
        raise TraceError(
            "trace: Dynamo is switched off (TORCHDYNAMO_DISABLE or torch._dynamo.config.disable), so there is no "
            "graph; switch it on, or use compiler='eager'"
        )
    samples = _samples(signature, contract, sizes, mode)
    names = [name for name, *_ in signature.tensors]
    capture = _Capture(evaluate_guards)
    forward = _forward_of(model, names, dict(signature.constants), _equal_dims(names, contract))
    compiled = torch.compile(
        forward,
        backend=capture.backend,
        fullgraph=True,
        dynamic=None,
        options={"guard_filter_fn": capture.filter_guards},
    )
    with _dynamo_settings(), _unchanged(model):
        returned = compiled(*samples)
    if capture.graph_module is None or capture.shape_env is None:
        raise TraceError(
            "trace: Dynamo ran the model without tracing it (a compile inside a dispatch mode, or a disabled frame); "
            "trace outside of such a mode, or use compiler='eager'"
        )
    index = TensorIndex(model, dict(zip(names, samples, strict=True)))
    symbols = _symbols(capture, index, signature, contract)
    bindings = Bindings(tuple(_bind(p, v, index, symbols) for p, v in capture.placeholders()))
    _rename_placeholders(capture.graph_module, bindings)
    interval = audit.valid_interval(capture.graph_module, capture.shape_env, symbols, sizes)
    return Traced(
        graph_module=capture.graph_module,
        bindings=bindings,
        output=_output_structure(returned, capture, index),
        symbols={name: min(group, key=str) for name, group in symbols.items()},
        mode=mode,
        interval=interval,
        frozen=audit.frozen_state(capture.guards, bindings),
        guards=GuardCheck(compiled, contract) if evaluate_guards else None,
        unbacked_failure=failure,
        shape_env=capture.shape_env,
    )


class _Capture:
    """The backend that Dynamo calls: keeps the graph, and stands in for its results."""

    def __init__(self, keep_guards: bool) -> None:
        self.keep_guards = keep_guards
        self.graph_module: torch.fx.GraphModule | None = None
        self.shape_env: ShapeEnv | None = None
        self.arguments: tuple[Any, ...] = ()
        self.stand_ins: tuple[Any, ...] = ()
        self.guards: list[Any] = []

    def backend(self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        fake_mode = TracingContext.get().fake_mode
        self.graph_module = graph_module
        self.shape_env = fake_mode.shape_env if fake_mode is not None else None
        (outputs,) = graph_module.graph.output_node().args
        assert isinstance(outputs, (tuple, list))
        self.stand_ins = tuple(
            torch.empty(0) if isinstance(_example(node), torch.Tensor) else _STAND_IN_INT + i
            for i, node in enumerate(outputs)
        )

        def run(*arguments: Any) -> tuple[Any, ...]:
            # The real parameters and buffers: what identifies each placeholder.
            self.arguments = arguments
            return self.stand_ins

        return run

    def filter_guards(self, entries: Sequence[Any]) -> list[bool]:
        self.guards = list(entries)
        return [self.keep_guards] * len(entries)

    def placeholders(self) -> Iterator[tuple[torch.fx.Node, Any]]:
        assert self.graph_module is not None
        return zip(self.graph_module.graph.find_nodes(op="placeholder"), self.arguments, strict=True)


def _example(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, torch.fx.Node) else node


def _forward_of(
    model: torch.nn.Module,
    piecework_names: Sequence[str],
    piecework_constants: Mapping[str, Any],
    piecework_equal: Sequence[tuple[int, int, int, int]],
) -> Callable[..., Any]:
    def forward(*piecework_inputs: torch.Tensor) -> Any:
        for left, left_dim, right, right_dim in piecework_equal:
            torch._check(piecework_inputs[left].size(left_dim) == piecework_inputs[right].size(right_dim))
        return model(**dict(zip(piecework_names, piecework_inputs)), **piecework_constants)  # noqa: B905

    # Dynamo keeps its cache and its recompile limit on the code object: each trace gets its own.
    code = forward.__code__.replace(co_name=f"piecework_forward_{next(_FORWARD_IDS)}")
    return types.FunctionType(code, globals(), code.co_name, None, forward.__closure__)


_FORWARD_IDS = itertools.count()


def _equal_dims(names: Sequence[str], contract: InputContract) -> list[tuple[int, int, int, int]]:
    """Pairs of dims with one name, as (input, dim, input, dim): their equality is part of the contract."""
    first: dict[str, tuple[int, int]] = {}
    pairs = []
    for i, name in enumerate(names):
        for dim, dim_name in contract.dynamic_dims.get(name, {}).items():
            if dim_name in first:
                pairs.append((*first[dim_name], i, dim))
            else:
                first[dim_name] = (i, dim)
    return pairs


def _samples(signature: Signature, contract: InputContract, sizes: Mapping[str, int], mode: Mode) -> list[torch.Tensor]:
    samples = []
    for name, dtype, device, shape in signature.tensors:
        concrete = [sizes[size] if isinstance(size, str) else size for size in shape]
        sample = torch.zeros(concrete, dtype=dtype, device=device)
        for dim in contract.dynamic_dims.get(name, {}):
            if mode == "unbacked":
                mark_unbacked(sample, dim)
            else:
                torch._dynamo.mark_dynamic(sample, dim)
        samples.append(sample)
    return samples


@contextlib.contextmanager
def _dynamo_settings(**extra: Any) -> Iterator[None]:
    """Set where the trace runs, since Dynamo's config is thread-local from torch 2.12 on."""
    with (
        torch._dynamo.config.patch(
            automatic_dynamic_shapes=False, suppress_errors=False, assume_static_by_default=True, **extra
        ),
        torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        _quiet("torch._guards"),
    ):
        yield


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """A failed attempt is no error yet, and the final one is raised with the same text: torch need not log it."""
    torch_logger = logging.getLogger(name)
    level = torch_logger.level
    torch_logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        torch_logger.setLevel(level)


@contextlib.contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Refuses a forward that sets attributes: a compiled program would not, and a stand-in would be left behind."""
    before = {name: (module, _attributes(module)) for name, module in model.named_modules()}
    yield
    changed = []
    for name, (module, attributes) in before.items():
        for (table, key), value in _attributes(module).items():
            if attributes.get((table, key), _MISSING) is not value:
                changed.append(f"{name}.{key}" if name else key)
                target = module.__dict__ if table is None else module.__dict__[table]
                if (table, key) in attributes:
                    target[key] = attributes[table, key]
                else:
                    del target[key]
    if changed:
        raise TraceError(
            f"trace: the model's forward sets {', '.join(changed)}; a compiled program would not do that on each step. "
            f"Return the value, or write into a buffer in place (buffer.copy_(...))"
        )


_MISSING = object()


def _attributes(module: torch.nn.Module) -> dict[tuple[str | None, str], Any]:
    own: dict[tuple[str | None, str], Any] = {(None, key): value for key, value in module.__dict__.items()}
    for table in ("_parameters", "_buffers", "_modules"):
        own.update({(table, key): value for key, value in module.__dict__[table].items()})
    return own


def _symbols(
    capture: _Capture, index: TensorIndex, signature: Signature, contract: InputContract
) -> dict[str, set[sympy.Symbol]]:
    """Dim name -> the symbols it has in the graph.

    Raises:
        DynamicDimError: a declared dim is a constant in the graph.
    """
    symbols: dict[str, set[sympy.Symbol]] = {}
    shapes = {name: sizes for name, _, _, sizes in signature.tensors}
    for node, value in capture.placeholders():
        binding = index.find(value)
        if not isinstance(binding, InputBinding):
            continue
        for dim, dim_name in contract.dynamic_dims.get(binding.name, {}).items():
            size = _example(node).shape[dim]
            expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
            if not isinstance(expr, sympy.Symbol):
                raise DynamicDimError(
                    f"trace: dim {dim} ({dim_name!r}) of input {binding.name!r} ({list(shapes[binding.name])}) was "
                    f"declared dynamic, but the model holds only for {expr}; look for an operation that ties it to a "
                    f"constant (a fixed-size buffer, an int() of a shape), or take it out of dynamic_dims"
                )
            symbols.setdefault(dim_name, set()).add(expr)
    return symbols


def _bind(
    node: torch.fx.Node, value: Any, index: TensorIndex, symbols: Mapping[str, set[sympy.Symbol]]
) -> PlaceholderBinding:
    if isinstance(value, torch.Tensor):
        return index.find(value)
    example = _example(node)
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


def _output_structure(returned: Any, capture: _Capture, index: TensorIndex) -> Any:
    tensors = {id(t): i for i, t in enumerate(capture.stand_ins) if isinstance(t, torch.Tensor)}
    integers = {v: i for i, v in enumerate(capture.stand_ins) if isinstance(v, int)}

    def leaf(path: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in tensors:
                return OutputRef(tensors[id(value)])
            binding = index.find(value)
            if not isinstance(binding, FrozenTensor):
                return BindingRef(binding)
        elif value is None or isinstance(value, (bool, int, float, str)):
            return OutputRef(integers[value]) if type(value) is int and value in integers else value
        raise TraceError(
            f"trace: output {path or 'of the model'!r} is a {type(value).__name__}; expected tensors and constants in "
            f"tuples, lists, dicts or dataclasses (for a transformers model pass use_cache=False)"
        )

    return map_leaves(returned, leaf)


def _explain(error: BaseException, signature: Signature, unbacked_reason: str) -> TraceError:
    """The public error for a failed trace, with what Dynamo said and where."""
    text = str(error).strip()
    kind: type[TraceError] = TraceError
    advice = "remove the graph break, move it into the body of a split op, or use compiler='eager'"
    if isinstance(error, ConstraintViolationError):
        kind = DynamicDimError
        advice = "make the model hold for every size of that dim, or take it out of dynamic_dims"
    elif isinstance(error, GuardOnDataDependentSymNode):
        kind = GuardError
    return kind(
        f"trace: the model cannot be traced for ({signature}); {advice}. Dynamo said:\n{text}\n"
        f"(with dims of any size it had said: {unbacked_reason})"
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


__all__ = [
    "COMPILE_LOCK",
    "BindingRef",
    "GuardCheck",
    "ModelTensor",
    "OutputRef",
    "Traced",
    "trace",
]
