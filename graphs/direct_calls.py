"""Calls of split ops that are made again at each replay, without the dispatcher where nobody has to see them.

The dispatcher costs about 2 us a call, at each layer of each step. It is left out where that changes nothing: a replay
runs under inference mode, so there is no autograd to record, and the arguments are known once and for all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload

from ..errors import RegistrationError
from ..ops import registry
from ..ops.capturing import is_capturing_whole

_TYPES = {"int": int, "float": float, "bool": bool, "str": str}
"""What an argument of a schema's type must be for a body to see the same with and without a dispatcher."""
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
_DEVICES = ("cpu", "cuda")

Arguments = tuple[list[Any], dict[str, Any]]


def are_operators_watched() -> bool:
    """Whether something in this thread sees operators or changes what they do: a mode, a profiler, autograd, a capture.

    Then a split op is to be called as an operator. To be asked once a replay.
    """
    return (
        not torch.is_inference_mode_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._autograd._profiler_enabled()
        or is_capturing_whole()  # operators know how to refuse
    )


def direct_call(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    """The cheapest way to make a call, many times over: prepared, else the body itself, else the operator.

    The tensors must stay where they are. What it returns holds them strongly, and is for where `are_operators_watched`
    is False.

    Raises:
        RegistrationError: the operator's `prepare` returned something that cannot be called.
        Whatever `prepare` raises.
    """
    given = _as_dispatched(op, args, kwargs)
    prepare = registry.REGISTRY.prepares.get(op)
    if prepare is not None:
        prepared = prepare(*given[0], **given[1]) if given is not None else prepare(*args, **kwargs)
        if prepared is not None:
            return _checked(op, prepared)
    body = registry.REGISTRY.bodies.get(op._schema.name)
    if body is not None and given is not None and _is_only_kernel(op, given):
        return functools.partial(body, *given[0], **given[1])
    return functools.partial(op, *args, **kwargs)


def _checked(op: OpOverload, prepared: Any) -> Callable[[], Any]:
    if not callable(prepared):
        entry = registry.REGISTRY.ops[op]
        raise RegistrationError(
            f"{entry.location}: {entry.name}: prepare: expected to get a function of no arguments that makes the call, "
            f"or None, got {prepared!r}; return one of these"
        )
    call: Callable[[], Any] = prepared
    return call


def _as_dispatched(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments | None:
    """The arguments as the dispatcher would hand them to the body, with every default; None if that is not known."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for i, argument in enumerate(op._schema.arguments):
        if i < len(args):
            value = args[i]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        elif argument.has_default_value():
            value = argument.default_value
        else:
            return None
        kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
        if kind == "float" and type(value) is int:
            value = float(value)
        if not (value is None or type(value) is _TYPES.get(kind) or (kind == "Tensor" and _is_plain(value))):
            return None
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    return positional, named


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor for which the dispatcher would do nothing but to call the kernel."""
    return (
        type(value) in _PLAIN_TENSORS
        and value.layout is torch.strided
        and value.device.type in _DEVICES
        and not value.is_conj()
        and not value.is_neg()
    )


def _is_only_kernel(op: OpOverload, given: Arguments) -> bool:
    """Whether the body is what the dispatcher would call: nobody registered another kernel for these tensors."""
    devices = {value.device.type for value in (*given[0], *given[1].values()) if isinstance(value, torch.Tensor)}
    backends = [torch._C._dispatch_key_for_device(device) for device in devices]
    keys = ("ADInplaceOrView", *backends, *(f"Autocast{backend}" for backend in backends))
    return not any(torch._C._dispatch_has_kernel_for_dispatch_key(op._schema.name, key) for key in keys)
