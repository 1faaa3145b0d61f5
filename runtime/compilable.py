"""`@compilable`: a module class whose instances run through a `Runtime` of their own when they are called."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from ..errors import ConfigError, InputError
from ..graphs.inputs import InputContract
from ..graphs.outputs import OutputContract, OutputDims, map_leaves
from ..ops.context import get_context
from ..phases import GraphConfig, Phase
from .forward import ForwardParameters, check_mapping
from .runtime import Runtime
from .step import is_inside_step

M = TypeVar("M", bound=torch.nn.Module)

PhaseChoice = Phase | str | Callable[[Mapping[str, Any]], Phase | str]
"""A phase, or what chooses it from a call's inputs by name."""

_SPEC = "_piecework_compilable"
"""Class attribute: what the nearest decorated class was decorated with."""
_SLOT = "_piecework_runtime"
"""Instance attribute: where the instance's Runtime is."""
_PLAIN = "grad is enabled: the plain forward"
_NOT_BY_NAME = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
_LOCK = threading.RLock()
"""Held while a Runtime is made, so that threads that meet at the first call get one."""


def compilable(
    *,
    dynamic_dims: Mapping[str, Mapping[int, str] | int],
    config: GraphConfig | None = None,
    pad: Mapping[str, int | float] | None = None,
    output_dims: OutputDims = 0,
    phase: PhaseChoice = "prefill",
) -> Callable[[type[M]], type[M]]:
    """Lets a module class run compiled when it is called; the short form of `Runtime`.

    Calling an instance in evaluation mode without grad (`inference_mode` or `no_grad`) runs a step of the instance's
    own `Runtime`, which `instance.runtime` gives, and returns tensors of the caller's own. Arguments are bound by
    forward's signature; those that equal their default count as left out. Split ops see the context of the surrounding
    `piecework.use_context(...)`.

    The plain forward runs in training mode; with grad enabled, which is counted as a fallback; inside a step or a trace
    of any Runtime, so that compilable modules nest; and when `forward` is called by name, as by `super().forward(...)`.

    The class is changed in place (`__call__`, `_apply`, `runtime`) and returned. Subclasses inherit all of it and may
    be decorated again. Copies and pickles of an instance start without a Runtime, and so does an instance after a
    change of dtype or device (`.to(...)`, `.half()`). Python state that forward reads, hooks below the instance too, is
    as at the first call, as in `Runtime`; hooks of the instance itself get the inputs as keyword arguments. With
    `startup="eager"` the first call's inputs are the examples.

    Args:
        phase: the phase of every step, or a function that chooses it from the inputs by name.
        dynamic_dims, config, pad, output_dims: as of `Runtime`.

    Raises:
        InputError: `dynamic_dims` or `pad` name no parameter of forward, or forward takes some that have no name.
        ConfigError: the phase does not exist, or what is decorated is no module class or has a `runtime` already.
    """
    spec = _Spec(dynamic_dims=dynamic_dims, config=config, pad=pad, output_dims=output_dims, phase=phase)

    def decorate(cls: type[M]) -> type[M]:
        spec.check(cls)
        inherited = hasattr(cls, _SPEC)
        if _SPEC in vars(cls) or (hasattr(cls, "runtime") and not inherited):
            taken = "is compilable already" if _SPEC in vars(cls) else "has an attribute `runtime`"
            raise ConfigError(
                f"compilable: {cls.__name__} {taken}; expected a class that is decorated once and leaves the name "
                f"`runtime` free; take one of the two away"
            )
        setattr(cls, _SPEC, spec)
        if not inherited or "__call__" in vars(cls):
            cls.__call__ = _calling(cls.__call__)  # type: ignore[method-assign]
        if not inherited:
            cls._apply = _applying(cls._apply)  # type: ignore[method-assign]
            setattr(cls, "runtime", property(_runtime, doc="The instance's own Runtime."))  # noqa: B010 (mypy)
        return cls

    return decorate


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Spec:
    """The decorator's arguments."""

    dynamic_dims: Mapping[str, Mapping[int, str] | int]
    config: GraphConfig | None
    pad: Mapping[str, int | float] | None
    output_dims: OutputDims
    phase: PhaseChoice

    def check(self, cls: type[torch.nn.Module]) -> None:
        """Raises what the first call would raise, where the class is written."""
        if not isinstance(cls, type) or not issubclass(cls, torch.nn.Module):
            got = cls.__name__ if isinstance(cls, type) else f"a {type(cls).__name__}"
            raise ConfigError(f"compilable: expected a subclass of torch.nn.Module, got {got}; decorate a module class")
        where = f"{cls.__name__}.forward"
        _check_by_name(where, cls.forward)
        parameters = ForwardParameters.of(where, cls.forward, skip=1)
        for name, value in (("dynamic_dims", self.dynamic_dims), ("pad", self.pad if self.pad is not None else {})):
            parameters.check_names(f"compilable: {name}", check_mapping(f"compilable: {name}", value))
        InputContract(self.dynamic_dims, self.pad)
        OutputContract(self.output_dims)
        if not callable(self.phase):
            _known_phase(self.phase)

    def make_runtime(self, module: torch.nn.Module, example_inputs: Mapping[str, Any] | None) -> Runtime:
        return Runtime(
            module,
            self.config,
            dynamic_dims=self.dynamic_dims,
            pad=self.pad,
            output_dims=self.output_dims,
            example_inputs=example_inputs,
        )


def _known_phase(phase: Phase | str) -> None:
    try:
        Phase(phase)
    except ValueError:
        raise ConfigError(
            f"compilable: phase: expected one of {', '.join(Phase)} or a function that returns one, got {phase!r}; "
            f"pass one of the former"
        ) from None


def _check_by_name(where: str, forward: Callable[..., Any]) -> None:
    kinds = {p.name: p.kind for p in list(inspect.signature(forward).parameters.values())[1:]}
    unnamed = [name for name, kind in kinds.items() if kind in _NOT_BY_NAME]
    if unnamed:
        raise InputError(
            f"compilable: {where}: expected parameters that can be passed by name, since inputs are known by their "
            f"names, got {', '.join(f'*{n}' if 'VAR' in kinds[n].name else f'{n}, /' for n in unnamed)}; spell them out"
        )


class _Slot:
    """Holds an instance's Runtime. Belongs to one instance, and copies and pickles as an empty slot of none."""

    def __init__(self, owner: torch.nn.Module | None = None) -> None:
        self.owner = weakref.ref(owner) if owner is not None else None
        self.signature = inspect.signature(owner.forward) if owner is not None else inspect.Signature()
        self.runtime: Runtime | None = None
        self.num_plain = 0
        """Calls with grad enabled before there was a Runtime to count them."""

    def __reduce__(self) -> tuple[type[_Slot], tuple[()]]:
        return _Slot, ()

    def close(self) -> None:
        """Closes the Runtime, if there is one: it may have threads and processes."""
        if self.runtime is not None:
            self.runtime.close()

    def count_plain(self) -> None:
        """Counts a call with grad enabled. Makes no Runtime: that is a call which may never need one."""
        if self.runtime is None:
            self.num_plain += 1
        else:
            self.runtime.counters.add_fallback(_PLAIN)


def _slot(module: torch.nn.Module) -> _Slot:
    """The module's own slot; one that a copy of the module brought along is replaced."""
    slot = module.__dict__.get(_SLOT)
    if slot is not None and slot.owner is not None and slot.owner() is module:
        return cast(_Slot, slot)
    with _LOCK:
        slot = module.__dict__.get(_SLOT)
        if slot is None or slot.owner is None or slot.owner() is not module:
            slot = module.__dict__[_SLOT] = _Slot(module)
        return cast(_Slot, slot)


def _runtime(module: torch.nn.Module, example_inputs: Mapping[str, Any] | None = None) -> Runtime:
    slot = _slot(module)
    if slot.runtime is None:
        with _LOCK:
            if slot.runtime is None:
                spec: _Spec = getattr(module, _SPEC)
                runtime = spec.make_runtime(module, example_inputs)
                for _ in range(slot.num_plain):
                    runtime.counters.add_fallback(_PLAIN)
                slot.runtime = runtime
    return slot.runtime


def _calling(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`__call__` of a compilable class, around the one that it had."""

    @functools.wraps(plain)
    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # In this order: under Dynamo the first is a constant, and nothing after it is traced.
        if torch.compiler.is_compiling() or self.training or is_inside_step():
            return plain(self, *args, **kwargs)
        if torch.is_grad_enabled():
            _slot(self).count_plain()
            return plain(self, *args, **kwargs)
        return _step(self, args, kwargs)

    return __call__


def _step(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call as a step of the module's Runtime."""
    inputs = _bind(_slot(module).signature, args, kwargs)
    phase = getattr(module, _SPEC).phase
    chosen = phase(inputs) if callable(phase) else phase
    outputs = _runtime(module, inputs).run(chosen, inputs, context=get_context(object), copy=True)
    if torch.is_inference_mode_enabled():
        return outputs
    # Under no_grad the plain forward's results can be used in autograd later, and so must these.
    return map_leaves(outputs, lambda _, v: v.clone() if isinstance(v, torch.Tensor) and v.is_inference() else v)


def _bind(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's inputs by name. Raises: TypeError, as the call itself would."""
    inputs: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_KEYWORD:
            inputs.update(value)
        elif parameter.default is parameter.empty or not _same_constant(value, parameter.default):
            inputs[name] = value
    return inputs


def _same_constant(value: object, default: object) -> bool:
    """Whether leaving the argument out is the same call. Compared as text: 1, True and 1.0 are equal otherwise."""
    if isinstance(value, torch.Tensor):
        return False
    return value is default or (isinstance(value, (bool, int, float, str)) and repr(value) == repr(default))


def _applying(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`_apply` of a compilable class, which `.to()` and its like go through for each module of a tree."""

    @functools.wraps(plain)
    def _apply(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = _layouts(self)
        result = plain(self, *args, **kwargs)
        if _SLOT in self.__dict__ and _layouts(self) != before:
            # What was traced for the old dtypes would not be noticed to be wrong.
            self.__dict__.pop(_SLOT).close()
        return result

    return _apply


def _layouts(module: torch.nn.Module) -> list[tuple[torch.dtype, torch.device]]:
    return [(t.dtype, t.device) for t in (*module.parameters(), *module.buffers())]
