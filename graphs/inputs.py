"""What a call's inputs look like: which dims are dynamic, what a program was traced for, how a bucket is padded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import InputError

TOKENS = "tokens"
"""The name of the size that buckets pad."""

Constant = bool | int | float | str | None

Layout = tuple[str, torch.dtype, torch.device, tuple[int | str, ...]]
"""Name, dtype, device and sizes of a tensor input; a dynamic size is the name of its dim."""


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """What a program is traced for: which inputs are present, and everything about them but the dynamic sizes."""

    tensors: tuple[Layout, ...]
    constants: tuple[tuple[str, Constant], ...] = dataclasses.field(compare=False)
    strides: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Of tensor inputs without dynamic dims that are not contiguous."""
    ambient: tuple[str, ...] = ()
    """Settings of torch that change what operators compute; see `ambient_state`."""
    _constants_text: str = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Compared as text: 1, True and 1.0 are equal, and not the same program.
        object.__setattr__(self, "_constants_text", repr(self.constants))

    def __str__(self) -> str:
        parts = [
            f"{name}: {str(dtype).removeprefix('torch.')}[{', '.join(map(str, sizes))}]"
            for name, dtype, _, sizes in self.tensors
        ]
        return ", ".join([*parts, *(f"{name}={value!r}" for name, value in self.constants), *self.ambient])


@dataclasses.dataclass(frozen=True, slots=True)
class BoundInputs:
    """One call's inputs after the checks: the tensors by name, the signature, and the dynamic sizes by name."""

    tensors: Mapping[str, torch.Tensor]
    signature: Signature
    sizes: Mapping[str, int]

    @property
    def num_tokens(self) -> int:
        """The size called `tokens`."""
        return self.sizes[TOKENS]


class InputContract:
    """The declared dynamic dims and pad values of a runtime's inputs, and the checks that each call must pass."""

    def __init__(
        self,
        dynamic_dims: Mapping[str, Mapping[int, str] | int],
        pad: Mapping[str, int | float] | None = None,
    ) -> None:
        self.dynamic_dims = {name: _named_dims(name, dims) for name, dims in dynamic_dims.items()}
        self.dim_names = frozenset(name for dims in self.dynamic_dims.values() for name in dims.values())
        self.pad = dict(pad or {})
        if not any(TOKENS in dims.values() for dims in self.dynamic_dims.values()):
            raise InputError(
                f"dynamic_dims: expected one dim called {TOKENS!r}, the size that buckets pad, got "
                f'{self.dynamic_dims}; write {{"input_ids": {{0: "{TOKENS}"}}}}'
            )
        strangers = sorted(set(self.pad) - {n for n, dims in self.dynamic_dims.items() if TOKENS in dims.values()})
        if strangers:
            raise InputError(
                f"pad: {', '.join(strangers)} {'has' if len(strangers) == 1 else 'have'} no dim called {TOKENS!r} in "
                f"dynamic_dims, so there is nothing to pad; remove it or declare the dim"
            )

    def bind(self, inputs: Mapping[str, Any]) -> BoundInputs:
        """Checks a call's inputs and reads its sizes.

        Raises:
            InputError: a dynamic input is no tensor, a declared dim does not exist, two dims of one name differ in
                size, the dim `tokens` is on none of the inputs, or a value is neither a tensor nor a plain constant.
        """
        sizes: dict[str, tuple[int, str]] = {}
        tensors: dict[str, torch.Tensor] = {}
        layouts: list[Layout] = []
        constants: list[tuple[str, Constant]] = []
        strides: list[tuple[str, tuple[int, ...]]] = []
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                dims = self._read_dims(name, value, sizes)
                shape: list[int | str] = list(value.shape)
                for dim, dim_name in dims.items():
                    shape[dim] = dim_name
                tensors[name] = value
                layouts.append((name, value.dtype, value.device, tuple(shape)))
                if not dims and not value.is_contiguous():
                    strides.append((name, value.stride()))
            elif value is not None and name in self.dynamic_dims:
                raise InputError(
                    f"input {name!r}: expected a tensor, since dynamic_dims declares {self.dynamic_dims[name]}, got "
                    f"{type(value).__name__}; pass a tensor, or take {name!r} out of dynamic_dims"
                )
            elif value is None or isinstance(value, (bool, int, float, str)):
                constants.append((name, value))
            else:
                raise InputError(
                    f"input {name!r}: expected a tensor, None, bool, int, float or str, got {type(value).__name__}; "
                    f"pass tensors as inputs of their own, and what split ops read as the context"
                )
        if TOKENS not in sizes:
            declared = ", ".join(name for name, dims in self.dynamic_dims.items() if TOKENS in dims.values())
            raise InputError(
                f"inputs: expected at least one of {declared}, which carry the dim {TOKENS!r}, got "
                f"{', '.join(inputs) or 'nothing'}"
            )
        # In one order, since inputs are passed by name.
        signature = Signature(
            tuple(sorted(layouts, key=lambda layout: layout[0])),
            tuple(sorted(constants, key=lambda constant: constant[0])),
            tuple(sorted(strides)),
            ambient_state(tensor.device for tensor in tensors.values()),
        )
        return BoundInputs(tensors, signature, {name: size for name, (size, _) in sizes.items()})

    def _read_dims(self, name: str, tensor: torch.Tensor, sizes: dict[str, tuple[int, str]]) -> Mapping[int, str]:
        dims = self.dynamic_dims.get(name, {})
        for dim, dim_name in dims.items():
            if dim >= tensor.dim():
                raise InputError(
                    f"input {name!r}: dynamic_dims declares dim {dim} ({dim_name!r}), got a tensor of shape "
                    f"{list(tensor.shape)}; pass {dim + 1} dims or more, or correct dynamic_dims"
                )
            size, where = sizes.setdefault(dim_name, (tensor.shape[dim], f"{name!r} dim {dim}"))
            if size != tensor.shape[dim]:
                raise InputError(
                    f"input {name!r}: dim {dim} ({dim_name!r}) is {tensor.shape[dim]}, but {where} with the same name "
                    f"is {size}; dims of one name must be one size"
                )
        return dims

    def pad_to_bucket(self, bound: BoundInputs, bucket: int) -> dict[str, torch.Tensor]:
        """The tensors with every `tokens` dim grown to `bucket` rows; the tail holds the input's pad value.

        Inputs with dynamic dims are contiguous afterwards, which is what programs are compiled for.
        """
        padded = {}
        for name, tensor in bound.tensors.items():
            dims = self.dynamic_dims.get(name, {})
            check_pad(name, tensor, self.pad.get(name, 0))
            padded[name] = pad_tensor(tensor, dims, bucket, self.pad.get(name, 0)).contiguous() if dims else tensor
        return padded

    def copy_back(self, name: str, tensor: torch.Tensor, padded: torch.Tensor) -> None:
        """Writes the rows of a padded copy that are no padding into the caller's tensor."""
        if padded is tensor:
            return
        for dim, size in enumerate(tensor.shape):
            padded = padded.narrow(dim, 0, size)
        tensor.copy_(padded)


def ambient_state(devices: Iterable[torch.device]) -> tuple[str, ...]:
    """What differs from torch's defaults among the settings that a trace bakes in; empty when nothing does."""
    state = []
    for device_type in sorted({device.type for device in devices}):
        if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
            state.append(f"autocast {device_type} to {torch.get_autocast_dtype(device_type)}")
    if torch.get_default_dtype() is not torch.float32:
        state.append(f"default dtype {torch.get_default_dtype()}")
    if torch.are_deterministic_algorithms_enabled():
        state.append("deterministic algorithms")
    return tuple(state)


def ambient_key(device_type: str) -> tuple[object, ...]:
    """All that `ambient_state` looks at, for devices of the CPU and of another type; quick, and to compare only."""
    cpu, other = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled(device_type)
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_autocast_dtype("cpu") if cpu else None,
        torch.get_autocast_dtype(device_type) if other else None,
    )


def check_pad(name: str, tensor: torch.Tensor, value: int | float) -> None:
    """Raises: InputError when the input's dtype cannot hold its pad value."""
    if isinstance(value, float) and not value.is_integer() and not tensor.dtype.is_floating_point:
        raise InputError(
            f"pad[{name!r}]: expected a value that {tensor.dtype} can hold, got {value!r}; pad with an integer"
        )


def pad_tensor(tensor: torch.Tensor, dims: Mapping[int, str], bucket: int, value: int | float) -> torch.Tensor:
    """Grows the `tokens` dims of `tensor` to `bucket`, the tail filled with `value`; itself when it fits already."""
    for dim, name in dims.items():
        missing = bucket - tensor.shape[dim]
        if name == TOKENS and missing:
            tail = list(tensor.shape)
            tail[dim] = missing
            tensor = torch.cat((tensor, tensor.new_full(tail, value)), dim)
    return tensor


def _named_dims(name: str, dims: Mapping[int, str] | int) -> dict[int, str]:
    named = {dims: TOKENS} if isinstance(dims, int) and not isinstance(dims, bool) else dims
    if not isinstance(named, Mapping) or any(
        not isinstance(dim, int) or isinstance(dim, bool) or dim < 0 or not isinstance(dim_name, str)
        for dim, dim_name in named.items()
    ):
        raise InputError(
            f"dynamic_dims[{name!r}]: expected {{dim: name}} with dims counted from 0, or one such dim, got {dims!r}"
        )
    return dict(named)
