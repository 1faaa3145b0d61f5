"""The Dynamo entry: the settings, the samples, and the backend that keeps the graph and runs nothing."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import sympy
import torch
import torch._dynamo.config
import torch.fx.experimental._config
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode, ShapeEnv

from ..errors import TraceError
from .inputs import BoundInputs, InputContract, Signature

COMPILE_LOCK = compile_lock
"""Held around every trace and compile of the process: torch.compile is not re-entrant across threads.

It is Dynamo's own, since somebody else may be compiling too: torch says in a flag of the whole process that FX traces,
and refuses what another thread compiles meanwhile.
"""

Mode = Literal["unbacked", "backed"]

DYNAMO_ERRORS = (TorchDynamoException, GuardOnDataDependentSymNode, ConstraintViolationError)

_STAND_IN_INT = 7_368_787_000
"""First of the integers that stand for symbolic sizes among a traced model's outputs."""


class Capture:
    """The backend that Dynamo calls: keeps the graph, and stands in for its results."""

    def __init__(self, model: torch.nn.Module, samples: Mapping[str, torch.Tensor], keep_guards: bool) -> None:
        self.model: torch.nn.Module | None = model
        self.before_effects: ModelState | None = None
        """What the model held when the trace was over: after that Dynamo does once what the forward does to it."""
        self.samples = samples
        self.keep_guards = keep_guards
        self.sizes: dict[tuple[str, int], sympy.Expr] = {}
        """Of each input that the model looked at, its dynamic sizes by (name, dim)."""
        self.graph_module: torch.fx.GraphModule | None = None
        self.shape_env: ShapeEnv | None = None
        self.arguments: tuple[Any, ...] = ()
        self.stand_ins: tuple[Any, ...] = ()
        self.guards: list[Any] = []
        self.changed: tuple[str, ...] = ()
        """What there was before the trace and the forward changes, as Dynamo knows it; tensors do not count."""
        self.released = False

    def backend(self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        context = TracingContext.get()
        self.graph_module = graph_module
        self.changed = tuple(_changed_objects())
        self.shape_env = context.fake_mode.shape_env if context.fake_mode is not None else None
        if self.shape_env is not None:
            self.sizes = dict(self._sizes(context.tensor_to_context, self.shape_env))
        (outputs,) = graph_module.graph.output_node().args
        assert isinstance(outputs, (tuple, list))
        self.stand_ins = tuple(_stand_in(i, example_value(node)) for i, node in enumerate(outputs))

        def run(*arguments: Any) -> tuple[Any, ...]:
            # The real parameters and buffers: what identifies each placeholder.
            if not self.released and self.model is not None:
                self.arguments = arguments
                self.before_effects = ModelState(self.model)
            return self.stand_ins

        return run

    def _sizes(self, contexts: Any, shape_env: ShapeEnv) -> Iterator[tuple[tuple[str, int], sympy.Expr]]:
        """From Dynamo's own table, not from placeholders: a model may look at nothing but the size of an input."""
        for name, sample in self.samples.items():
            known = contexts[sample].shape_env_to_source_to_symbol_cache if sample in contexts else {}
            for source, symbol in known.get(id(shape_env), {}).items():
                if match := re.search(r"\.size\(\)\[(\d+)\]$", source):
                    yield (name, int(match[1])), shape_env.replace(sympy.sympify(symbol))

    def release(self) -> None:
        """Lets go of the model: Dynamo keeps every backend it has seen for the life of the process."""
        self.released = True
        self.model = self.before_effects = None
        self.graph_module = self.shape_env = None
        self.arguments = ()
        self.samples = {}
        self.guards = []

    def filter_guards(self, entries: Sequence[Any]) -> list[bool]:
        if not self.released:
            self.guards = list(entries)
        return [self.keep_guards] * len(entries)

    def placeholders(self) -> Iterator[tuple[torch.fx.Node, Any]]:
        assert self.graph_module is not None
        return zip(self.graph_module.graph.find_nodes(op="placeholder"), self.arguments, strict=True)


def _changed_objects() -> Iterator[str]:
    """Python objects that the frame being traced changes: Dynamo does it once, when the trace is over."""
    side_effects = InstructionTranslator.current_tx().output.side_effects
    for variable in side_effects._get_modified_vars():
        if isinstance(variable.mutation_type, (AttributeMutationExisting, ValueMutationExisting)):
            source = variable.source.name if variable.source is not None else type(variable).__name__
            name: str = source() if callable(source) else source  # a method before torch 2.12
            yield re.sub(r"^G\['(__import_)?(.*?)'\]", lambda match: match[2].replace("_dot_", "."), name)


def outside_state() -> tuple[Any, ...]:
    """What the frame being traced has changed so far, to be compared with the same at another place in it."""
    side_effects = InstructionTranslator.current_tx().output.side_effects
    state: list[Any] = []
    for variable in side_effects._get_modified_vars():
        if isinstance(variable.mutation_type, (AttributeMutationExisting, ValueMutationExisting)):
            stored = side_effects.store_attr_mutations.get(variable, {})
            attributes = sorted((name, _identity(value)) for name, value in stored.items())
            items = getattr(variable, "items", None)
            if isinstance(items, list):
                state.append((id(variable), *map(_identity, items)))
            else:
                # A dict or a set: no two states of it are taken for equal.
                state.append((id(variable), *attributes) if attributes else object())
    return tuple(state)


def _identity(variable: Any) -> str:
    if variable.is_python_constant():
        value = variable.as_python_constant()
        return f"{type(value)} {value!r}"
    return f"variable {id(variable)}"


def _stand_in(index: int, example: Any) -> Any:
    if not isinstance(example, torch.Tensor):
        return _STAND_IN_INT + index
    if example.dim() == 0:
        # Dynamo hands a float that was computed from sizes out of the graph as a tensor, and takes its item.
        return torch.full((), float(_STAND_IN_INT + index), dtype=torch.float64)
    return torch.empty(0)


def example_value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, torch.fx.Node) else node


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
        with COMPILE_LOCK, torch.inference_mode(), dynamo_settings(error_on_recompile=True):
            self._compiled(*make_samples(bound.signature, self._contract, bound.sizes, mode))


def traceable_forward(
    model: torch.nn.Module,
    piecework_names: Sequence[str],
    piecework_constants: Mapping[str, Any],
    piecework_equal: Sequence[tuple[int, int, int, int]],
) -> Callable[..., Any]:
    def forward(*piecework_inputs: torch.Tensor) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            raise TraceError(
                "trace: Dynamo would run the model instead of tracing it (inside a dispatch mode, or under "
                "torch.compiler.set_stance); trace outside of such a mode, or use compiler='eager'"
            )
        for left, left_dim, right, right_dim in piecework_equal:
            torch._check(piecework_inputs[left].size(left_dim) == piecework_inputs[right].size(right_dim))
        return model(**dict(zip(piecework_names, piecework_inputs)), **piecework_constants)  # noqa: B905

    # Dynamo keeps its cache and its recompile limit on the code object: each trace gets its own.
    code = forward.__code__.replace(co_name=f"piecework_forward_{next(_FORWARD_IDS)}")
    return types.FunctionType(code, globals(), code.co_name, None, forward.__closure__)


_FORWARD_IDS = itertools.count()


def equal_dims(names: Sequence[str], contract: InputContract) -> list[tuple[int, int, int, int]]:
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


def make_samples(
    signature: Signature, contract: InputContract, sizes: Mapping[str, int], mode: Mode
) -> list[torch.Tensor]:
    samples = []
    strides = dict(signature.strides)
    for name, dtype, device, shape in signature.tensors:
        concrete = [sizes[size] if isinstance(size, str) else size for size in shape]
        if name in strides:
            sample = torch.empty_strided(concrete, strides[name], dtype=dtype, device=device)
        else:
            sample = torch.zeros(concrete, dtype=dtype, device=device)
        for dim in contract.dynamic_dims.get(name, {}):
            if mode == "unbacked":
                mark_unbacked(sample, dim)
            else:
                torch._dynamo.mark_dynamic(sample, dim)
        samples.append(sample)
    return samples


@contextlib.contextmanager
def dynamo_settings(**extra: Any) -> Iterator[None]:
    """Set where the trace runs, since Dynamo's config is thread-local from torch 2.12 on."""
    with (
        torch._dynamo.config.patch(
            automatic_dynamic_shapes=False, suppress_errors=False, assume_static_by_default=True, **extra
        ),
        torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        contextlib.ExitStack() as quiet,
    ):
        for name in _NOISY:
            quiet.enter_context(_quiet(name))
        yield


_NOISY = ("torch._guards", "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """A failed attempt is no error yet, and the final one is raised with the same text: torch need not log it.

    Unless somebody asked to see more of this logger, as by TORCH_LOGS.
    """
    torch_logger = logging.getLogger(name)
    if torch_logger.isEnabledFor(logging.INFO):
        yield
        return
    level = torch_logger.level
    torch_logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        torch_logger.setLevel(level)


class ModelState:
    """What a model's modules hold at one moment: attributes, and what is in the lists and dicts among them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._tables = [
            (table, dict(table))
            for module in model.modules()
            for table in (module.__dict__, *(module.__dict__[name] for name in _MODULE_TABLES))
        ]
        containers = [
            value
            for table, _ in self._tables
            for key, value in table.items()
            if isinstance(value, (list, dict)) and key not in _MODULE_TABLES
        ]
        # Most are the hooks that a module has none of.
        self._contents = [
            (value, (list(value) if isinstance(value, list) else dict(value)) if value else None)
            for value in containers
        ]

    def restore(self) -> set[str]:
        """Puts back what has changed since, and nothing else; returns the dotted names of that."""
        moved = [(now, old) for now, old in self._tables if [*map(id, now.values())] != [*map(id, old.values())]]
        changed = [(now, old) for now, old in self._contents if (now or old) and _ids(now) != _ids(old or ())]
        names = _names_of_entries(self._model, moved) | _names_of_containers(self._model, changed)
        for now, old in moved:
            _restore_table(now, old)
        for now, before in changed:
            if isinstance(now, list):
                now[:] = before or ()
            else:
                _restore_table(now, dict(before or {}))
        return names


def _restore_table(now: dict[Any, Any], old: Mapping[Any, Any]) -> None:
    """Key by key: another thread may be looking. The order of the keys is put back only where keys are missing."""
    for key in [key for key in now if key not in old]:
        del now[key]
    if any(key not in now for key in old):
        now.clear()
    now.update(old)


def changes_error(names: set[str], error: type[Exception], where: str, who: str) -> Exception:
    """The error for a forward that sets attributes of these names."""
    return error(
        f"{where}: the model's forward sets {', '.join(sorted(names))}; {who} would not do that on each step. "
        f"Return the value, or write into a buffer in place (buffer.copy_(...))"
    )


@contextlib.contextmanager
def unchanged(
    model: torch.nn.Module,
    *,
    error: type[Exception] = TraceError,
    where: str = "trace",
    who: str = "a compiled program",
) -> Iterator[None]:
    """Refuses a forward that sets attributes: `who` would not, and a stand-in would be left behind.

    The lists and dicts that are attributes count too. What changes is put back, also when the body raises.

    Raises:
        error: the body set something.
    """
    before = ModelState(model)
    names: set[str] = set()
    try:
        yield
    finally:
        names = before.restore()
    if names:
        raise changes_error(names, error, where, who)


_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_MISSING = object()


def _ids(container: Any) -> list[int]:
    return [*map(id, container), *map(id, container.values())] if isinstance(container, dict) else [*map(id, container)]


def _names_of_entries(model: torch.nn.Module, moved: Sequence[tuple[Any, Any]]) -> set[str]:
    """Dotted names of what is another object than before in the modules' tables."""
    before = {id(table): old for table, old in moved}
    if not before:
        return set()
    names = set()
    for prefix, module in model.named_modules():
        for table in (module.__dict__, *(module.__dict__[name] for name in _MODULE_TABLES)):
            old = before.get(id(table), table)
            for key in {**old, **table}:
                if old.get(key, _MISSING) is not table.get(key, _MISSING):
                    names.add(f"{prefix}.{key}" if prefix else key)
    return names


def _names_of_containers(model: torch.nn.Module, changed: Sequence[tuple[Any, Any]]) -> set[str]:
    """Dotted names of the lists and dicts that hold something else than before."""
    containers = {id(now) for now, _ in changed}
    if not containers:
        return set()
    return {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key, value in module.__dict__.items()
        if id(value) in containers
    }
