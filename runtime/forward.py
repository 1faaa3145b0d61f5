"""What a model's forward takes, and the checks of what it is given: inputs go by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..errors import ConfigError, InputError
from ..phases import GraphConfig

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardParameters:
    """The parameters of a forward, as far as they can be passed by name."""

    where: str
    """The forward's name, for messages."""
    names: tuple[str, ...]
    """Parameters that can be passed by name."""
    required: tuple[str, ...]
    """Those of `names` without a default."""
    open: bool
    """Whether any further name is accepted: there is a `**kwargs`, or the signature is not known."""

    @classmethod
    def of(cls, where: str, forward: Callable[..., Any], *, skip: int = 0) -> ForwardParameters:
        """Reads a signature without its first `skip` parameters."""
        try:
            parameters = list(inspect.signature(forward).parameters.values())[skip:]
        except (TypeError, ValueError):
            return cls(where=where, names=(), required=(), open=True)
        named = [p for p in parameters if p.kind in _BY_NAME]
        return cls(
            where=where,
            names=tuple(p.name for p in named),
            required=tuple(p.name for p in named if p.default is p.empty),
            open=any(p.kind is p.VAR_KEYWORD for p in parameters),
        )

    def check_names(self, what: str, names: Iterable[str]) -> None:
        """Raises InputError when forward has no parameter of one of the names; `what` says who names them."""
        strangers = [name for name in names if name not in self.names]
        if strangers and not self.open:
            raise InputError(
                f"{what}: expected names of parameters of {self.where}, which are "
                f"{', '.join(self.names) or 'none that can be passed by name'}; got {', '.join(map(repr, strangers))}; "
                f"correct the name, or give forward such a parameter"
            )

    def check_inputs(self, names: Iterable[str]) -> None:
        """Raises InputError when a call with inputs of these names would not fit."""
        given = set(names)
        self.check_names("inputs", sorted(given))
        missing = [name for name in self.required if name not in given]
        if missing:
            raise InputError(
                f"inputs: {self.where} also needs {', '.join(missing)}, got {', '.join(sorted(given))}; pass what is "
                f"missing, or give the parameter a default"
            )


def check_arguments(model: object, config: object, mappings: Mapping[str, object]) -> ForwardParameters:
    """Checks the kinds of a runtime's arguments, and the names in `mappings` (argument -> what was passed) that the
    model's forward must have.

    Raises:
        InputError: the model is no module, or an argument is no mapping, or it names what forward does not take.
        ConfigError: the config is no GraphConfig.
    """
    if not isinstance(model, torch.nn.Module):
        got = f"the class {model.__name__}; write {model.__name__}(...)" if isinstance(model, type) else _kind(model)
        raise InputError(f"Runtime: model: expected an instance of torch.nn.Module, got {got}")
    if not isinstance(config, GraphConfig):
        raise ConfigError(
            f"Runtime: config: expected a GraphConfig, got {_kind(config)}; write GraphConfig(prefill=PhaseConfig(...))"
        )
    parameters = ForwardParameters.of(f"{type(model).__name__}.forward", model.forward)
    for what, mapping in mappings.items():
        parameters.check_names(what, check_mapping(what, mapping))
    return parameters


def check_mapping(what: str, value: object) -> Mapping[str, Any]:
    """Returns `value`. Raises: InputError when it is no mapping of names."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise InputError(f"{what}: expected a mapping from input names, got {_kind(value)}; write {{name: ...}}")
    return value


def check_written(written: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises InputError when the model writes into one of the inputs `written` and another one starts at its memory.

    A compiler takes inputs for apart: the other one would hold old values. That views overlap in another way is not
    noticed.
    """
    for name in written:
        own = tensors[name]
        for other, tensor in tensors.items():
            if other != name and tensor.numel() and own.numel() and tensor.data_ptr() == own.data_ptr():
                raise InputError(
                    f"inputs: the model writes into {name!r}, which shares memory with {other!r}; pass a copy of one "
                    f"({other}.clone()), or use compiler='eager' with backend='disabled'"
                )


def training_modules(model: torch.nn.Module) -> str | None:
    """What in the model does something else in training mode, in words; None when nothing does."""
    found = [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if module.training and isinstance(module, _TRAINING) and getattr(module, "p", 1) > 0
    ]
    if not found:
        return None
    return (
        f"the model is in training mode, where {found[0]}{f' and {len(found) - 1} more' if found[1:] else ''} drops "
        f"values or changes its statistics in each step; call model.eval() before the first step"
    )


_TRAINING = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm)


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with the keys {', '.join(map(repr, value))}"
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
