"""How another process makes the model again, without memory for it, and traces it there.

Note [A model made of nothing]
A worker builds the model under `FakeTensorMode`: tensors with shapes, dtypes, devices and memory that they share, and
without values. Dynamo takes them like real ones, so the trace is that of the live model, and is bound to it by the
names of its tensors. Inputs are real, on the target device: torch 2.13 and 2.14 lose a mark of `mark_unbacked` on a
fake tensor, and would make a program for one size. A device `meta` would be baked into the graph, and is refused.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from ..errors import ConfigError, PieceworkError, TraceError
from ..graphs.ambient import ambient_settings, default_dtype_of
from ..graphs.dynamo import COMPILE_LOCK
from ..graphs.inputs import ambient_state
from ..graphs.portable import PortableProgram
from ..graphs.remarks import remarks_on
from ..graphs.rows import check_token_rows
from ..graphs.stitched import PiecewiseGraph
from ..graphs.trace import Traced, trace
from ..ops import registry
from ..ops.fused import tracing_with
from .trace_request import TraceRequest, training_modules

__all__ = ["ModelFactory", "TraceRequest", "trace_from_factory"]

JSON = Any
"""What JSON can hold."""

_ELSE = "or give no factory: the model is then traced in a thread of the server"
_MAX_LISTED = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelFactory:
    """A function that makes the model, by name, and its arguments: all that another process needs to make it again.

    What it returns must be like the model that the `Runtime` runs: the same modules, names, shapes, dtypes, strides,
    devices (a model that it leaves on the CPU is moved to the runtime's device), ties and plain attributes, and in the
    same mode of `train()` or `eval()`. Values are of no account, and are not there when a worker calls it.

    Raises:
        ConfigError: the target cannot be imported, is no function or does not take the arguments; or the arguments
            are no JSON.
    """

    target: str
    """`package.module:function`, importable by another process."""
    arguments: Mapping[str, JSON] = dataclasses.field(default_factory=dict, compare=False)
    """Keyword arguments; a copy is held, with lists in place of tuples."""
    _text: str = dataclasses.field(init=False, repr=False)
    """The arguments as JSON: what is compared, and what the function gets."""

    def __post_init__(self) -> None:
        arguments: Any = self.arguments
        if not isinstance(arguments, Mapping):
            raise ConfigError(
                f"model factory: arguments: expected {{name: value}}, got {type(arguments).__name__}; pass a dict"
            )
        plain = _plain(dict(arguments), "arguments")
        object.__setattr__(self, "arguments", plain)
        object.__setattr__(self, "_text", json.dumps(plain))
        _check_call(self.target, _resolve(self.target), plain)

    def build(self) -> torch.nn.Module:
        """Makes the model.

        Raises:
            ConfigError: the function returned something else than a module.
            Whatever the function raises.
        """
        model = _resolve(self.target)(**json.loads(self._text))
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"model factory: {self.target}: expected it to return a torch.nn.Module, got {type(model).__name__}; "
                f"return the model that the Runtime was given"
            )
        return model

    def to_json(self) -> JSON:
        """The factory as plain JSON data."""
        return {"target": self.target, "arguments": json.loads(self._text)}

    @classmethod
    def from_json(cls, data: JSON) -> ModelFactory:
        """The factory that `to_json` wrote down. Raises: ConfigError, as the constructor, or for other data."""
        if not isinstance(data, Mapping) or set(data) != {"target", "arguments"}:
            got = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise ConfigError(f"model factory: expected target and arguments, got {got}; write it with to_json")
        return cls(target=data["target"], arguments=data["arguments"])


def trace_from_factory(factory: ModelFactory, request: TraceRequest, device: torch.device) -> bytes:
    """Makes the model without memory or values, traces it, and returns the bytes of its `PortableProgram`.

    It is the program that a trace of the live model gives, with the same fingerprints. For a process of its own: the
    trace holds the GIL and sets what is global in torch. See Note [A model made of nothing].

    Args:
        device: where the live model is; a model that the factory leaves on the CPU is moved there.

    Raises:
        TraceError: the factory needs values, or made another kind of model; or the model cannot become one graph.
        InputError: an output has no token rows; see `check_token_rows`.
        PortableError: the program holds something that cannot leave the process.
    """
    registry.load_entry_points()
    try:
        with default_dtype_of(request.signature.ambient):
            model = _build_fake(factory, device)
        _check_model(factory, request, model)
        contract = request.contract()
        with COMPILE_LOCK, ambient_settings(request.signature.ambient), tracing_with(request.fused()):
            _check_ambient(request)
            traced = trace(model, request.signature, contract, sizes=request.sizes, backed=request.backed)
            _check_traced(factory, request, traced)
            graph = PiecewiseGraph.from_trace(traced, contract, ambient=request.signature.ambient)
            check_token_rows(graph.reduced, request.outputs())
        portable = PortableProgram.from_graph(
            graph, request.signature, kernels=request.kernels, remarks=remarks_on(traced, contract)
        )
    except PieceworkError:
        raise
    except Exception as error:  # torch's own, of any kind
        raise TraceError(
            f"model factory: {factory.target}: the model that it made cannot be traced ({_first_line(error)}); mend "
            f"it, {_ELSE}"
        ) from error
    return portable.to_bytes()


def _build_fake(factory: ModelFactory, device: torch.device) -> torch.nn.Module:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Not torch's weak table: Module.to() swaps parameters, and refuses one that has a weak reference.
    mode.fake_tensor_converter.meta_converter.tensor_memo = {}  # type: ignore[assignment]
    try:
        with mode:
            model = factory.build()
            tensors = [*model.parameters(), *model.buffers()]
            if device.type != "cpu" and all(tensor.device.type == "cpu" for tensor in tensors):
                model.to(device)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TraceError(
            f"model factory: {factory.target}: expected a function that looks at no tensor's values, since a worker "
            f"makes the model without any, got one that does ({_first_line(error)}); keep .item(), bool() and "
            f"nonzero() out of it, {_ELSE}"
        ) from error
    except ConfigError:
        raise
    except Exception as error:
        raise TraceError(
            f"model factory: {factory.target}: it failed in a worker, where tensors have no values "
            f"({_first_line(error)}); let it make the model and load nothing, {_ELSE}"
        ) from error
    return model


def _check_model(factory: ModelFactory, request: TraceRequest, model: torch.nn.Module) -> None:
    """Raises TraceError for what a trace would bake in, and nobody would notice later."""
    named = [*model.named_parameters(), *model.named_buffers()]
    if meta := [name for name, tensor in named if tensor.device.type == "meta"]:
        raise TraceError(
            f"model factory: {factory.target}: expected tensors on the device of the live model, got {_listed(meta)} "
            f"on meta, for which the program would be made; give them memory (to_empty(device=...)), {_ELSE}"
        )
    if request.training is not None:
        expected, got = set(request.training), set(training_modules(model))
        if expected != got:
            differ = [name or "the model" for name in sorted(expected ^ got)]
            raise TraceError(
                f"model factory: {factory.target}: expected modules in the mode of the live model, got another one of "
                f"{_listed(differ)}; call train() or eval() in the factory as for the live model"
            )


def _check_ambient(request: TraceRequest) -> None:
    here = ambient_state(device for _, _, device, _ in request.signature.tensors)
    if here != request.signature.ambient:
        raise TraceError(
            f"trace: expected torch under {', '.join(request.signature.ambient) or 'its defaults'}, as in the server, "
            f"got {', '.join(here) or 'its defaults'}; call it outside of such settings"
        )


def _check_traced(factory: ModelFactory, request: TraceRequest, traced: Traced) -> None:
    if any(isinstance(tensor, FakeTensor) for tensor in traced.bindings.frozen_tensors):
        raise TraceError(
            f"model factory: {factory.target}: the model reads a tensor that the factory made and that is no attribute "
            f"of a module (a closure, an object that a module holds), so that its values are needed; register it as a "
            f"buffer, {_ELSE}"
        )
    ours, theirs = request.split_differences(traced.graph_module)
    if ours or theirs:
        where, names = ("in this process", ours) if ours else ("in the server", theirs)
        raise TraceError(
            f"model factory: {factory.target}: the model calls {_listed(names)}, which is a split op only {where}; "
            f"import the module that registers it in the factory's module, so that both processes have it"
        )


def _resolve(target: str) -> Callable[..., Any]:
    """The function that a target names. Raises: ConfigError."""
    form = "model factory: target: expected 'package.module:function'"
    module_name, colon, path = target.partition(":") if isinstance(target, str) else ("", "", "")
    if not (colon and path and all(part.isidentifier() for part in (*module_name.split("."), *path.split(".")))):
        raise ConfigError(f"{form}, got {target!r}; name a function at the top of a module")
    if module_name == "__main__":
        raise ConfigError(
            f"{form}, got {target!r}, and __main__ is another module in a worker; move the function to a module of its "
            f"own"
        )
    try:
        value: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does
        raise ConfigError(
            f"{form} that can be imported, got {target!r} ({_first_line(error)}); install it, or put its folder on "
            f"PYTHONPATH, which workers inherit"
        ) from error
    for part in path.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        got = "nothing" if value is None else f"a {type(value).__name__}"
        raise ConfigError(f"{form}, got {target!r}, and there is {got} of that name; name a function that is there")
    return value  # type: ignore[no-any-return]


def _check_call(target: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin that does not tell
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"model factory: arguments: expected those of {target}{signature}, got {', '.join(arguments) or 'none'} "
            f"({error}); correct them"
        ) from None


def _plain(value: Any, where: str) -> JSON:
    """A copy of JSON data. Raises: ConfigError at what is none."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return copy.copy(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    got = f"a dict with keys {list(value)[:3]}" if isinstance(value, dict) else repr(value)[:80]
    raise ConfigError(
        f"model factory: {where}: expected what JSON can hold (finite numbers, texts, true, false, null, lists, dicts "
        f"with texts as keys), got {got}, {type(value).__name__}; pass plain data and make the object in the function"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
