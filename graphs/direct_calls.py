"""Calls of split ops that are made again at each replay, without the dispatcher where nobody has to see them.

The dispatcher costs about 2 us a call, at each layer of each step. It is left out where that changes nothing: a replay
runs under inference mode, so there is no autograd to record, and the arguments are known once and for all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from ..errors import PieceworkError, RegistrationError
from ..ops import registry
from ..ops.capturing import is_capturing_whole
from .layouts import PLAIN_TENSORS

_TYPES = {"int": int, "float": float, "bool": bool, "str": str}
"""What an argument of a schema's type must be for a body to see the same with and without a dispatcher."""
_DEVICES = ("cpu", "cuda")
_OTHER_KEYS = ("ADInplaceOrView", "BackendSelect", "CompositeExplicitAutogradNonFunctional")
"""Dispatch keys of no device whose kernels come before a body's."""

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


def direct_call(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], *, stays: bool = True
) -> Callable[[], Any]:
    """The cheapest way to make a call, many times over: prepared, else the body itself, else the operator.

    The operator too where the dispatcher would do more than to call the body: another kernel, tensors to be converted.

    What it returns holds the tensors strongly, and is for where `are_operators_watched` is False.

    Args:
        stays: whether the tensors' memory stays where it is; else nothing is prepared.

    Raises:
        RegistrationError: the operator's `prepare` failed, or returned something that cannot be called.
        PieceworkError: from `prepare`.
    """
    operator = functools.partial(op, *args, **kwargs)
    body = registry.REGISTRY.bodies.get(op._schema.name) if op._schema.overload_name == "" else None
    tensors = _tensors_in((*args, *kwargs.values()))
    if not all(map(_is_plain, tensors)) or (body is not None and not _is_only_kernel(op, tensors)):
        return operator
    given = _as_dispatched(op, args, kwargs)
    prepare = registry.REGISTRY.prepares.get(op) if stays else None
    if prepare is not None:
        prepared = _prepared(op, prepare, given if given is not None else (list(args), dict(kwargs)))
        if prepared is not None:
            return prepared
    return functools.partial(body, *given[0], **given[1]) if body is not None and given is not None else operator


def _prepared(op: OpOverload, prepare: Callable[..., Any], arguments: Arguments) -> Callable[[], Any] | None:
    entry = registry.REGISTRY.ops[op]
    where = f"{entry.location}: {entry.name}: prepare"
    try:
        prepared = prepare(*arguments[0], **arguments[1])
    except PieceworkError:  # it refuses the arguments, as the operator would
        raise
    except Exception as error:
        raise RegistrationError(
            f"{where}: expected a function of the operator's arguments that returns what makes the call, or None; it "
            f"raised {type(error).__name__}: {error}; correct it"
        ) from error
    if prepared is not None and not callable(prepared):
        raise RegistrationError(
            f"{where}: expected to get a function of no arguments that makes the call, or None, got {prepared!r}; "
            f"return one of these"
        )
    call: Callable[[], Any] | None = prepared
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
        type(value) in PLAIN_TENSORS
        and value.layout is torch.strided
        and value.device.type in _DEVICES
        and not value.is_conj()
        and not value.is_neg()
    )


def _tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Those among the arguments of a call, and in lists of theirs."""
    items = itertools.chain.from_iterable(value if isinstance(value, (list, tuple)) else (value,) for value in values)
    return [item for item in items if isinstance(item, torch.Tensor)]


def _is_only_kernel(op: OpOverload, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether its body is what the dispatcher would call: nobody registered another kernel for these tensors."""
    name = op._schema.name
    backends = [torch._C._dispatch_key_for_device(device) for device in {tensor.device.type for tensor in tensors}]
    keys = (*_OTHER_KEYS, *backends, *(f"Autocast{backend}" for backend in backends))
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys):
        return False
    # A kernel for the key of the body makes that an inactive one.
    return "CompositeExplicitAutograd[alias] (inactive)" not in torch._C._dispatch_dump(name)
