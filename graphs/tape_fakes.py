"""What an operator would return, without running it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from .tape_guards import refusal
from .tape_kinds import TORCHS_OWN, functional_of, is_written, map_tensors
from .tape_steps import tensors_of

_NO_FAKE = (
    "the shapes of what it returns are known only by running it; describe them with "
    'torch.library.register_fake("{func.namespace}::{func._opname}")'
)


_DYNAMIC = "the shapes of what it returns depend on the data; let them depend on sizes only"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FakeCall:
    """What a call on fakes gave."""

    returned: Any
    """A fake for each output that is new."""
    grown: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    """`out=` tensors that the call gives another shape, each with a fake of that shape."""


class Fakes:
    """Runs operators on fake tensors, for the shapes, dtypes and strides of their outputs."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_fallback_kernels=False)
        self._known: dict[Any, torch.Tensor] = {}

    def call(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FakeCall:
        """Runs one call, if there is something to learn from it.

        Raises:
            CaptureError: the operator has no implementation on fake tensors, or it depends on data.
        """
        returns_new = any(not is_written(returned) for returned in func._schema.returns)
        has_out = func.namespace == "aten" and any(a.kwarg_only and is_written(a) for a in func._schema.arguments)
        nothing = FakeCall(returned=(None,) * len(func._schema.returns))
        if not returns_new and not has_out:
            return nothing
        if returns_new and not _has_fake(func):
            raise refusal(func.name(), _NO_FAKE.format(func=func))
        make = self._new if has_out else self._like
        with self._mode:
            fake_args, fake_kwargs = map_tensors(make, tuple(args)), map_tensors(make, dict(kwargs))
            try:
                returned = func(*fake_args, **fake_kwargs)
                grown = self._grown(func, kwargs, fake_args, fake_kwargs) if has_out else ()
                return FakeCall(returned=returned, grown=grown)
            except (UnsupportedOperatorException, NotImplementedError) as error:
                if not returns_new:
                    return nothing
                raise refusal(func.name(), _NO_FAKE.format(func=func)) from error
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise refusal(func.name(), _DYNAMIC) from error
            except RuntimeError as error:
                if "no fake impl" in str(error):
                    raise refusal(func.name(), _NO_FAKE.format(func=func)) from error
                raise

    def _grown(
        self, func: OpOverload, kwargs: Mapping[str, Any], fake_args: Sequence[Any], fake_kwargs: Mapping[str, Any]
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        names = [a.name for a in func._schema.arguments if a.kwarg_only and is_written(a)]
        reals = [real for name in names for real in tensors_of([kwargs[name]])]
        fakes = [fake for name in names for fake in tensors_of([fake_kwargs[name]])]
        if all(real.shape == fake.shape for real, fake in zip(reals, fakes, strict=True)):
            return ()
        functional = functional_of(func)
        if functional is not None:
            # On fake tensors an out= that grows becomes contiguous. Really it gets the strides of a new output.
            others = {name: value for name, value in fake_kwargs.items() if name not in names}
            made = tensors_of(functional(*fake_args, **others))
            fakes = made if len(made) == len(fakes) else fakes
        return tuple((real, fake) for real, fake in zip(reals, fakes, strict=True) if real.shape != fake.shape)

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)
        if key not in self._known:
            self._known[key] = self._new(tensor)
        return self._known[key]

    def _new(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _has_fake(func: OpOverload) -> bool:
    """Whether its outputs can be known without running it: a composite kernel alone would be the operator itself."""
    if func.namespace in TORCHS_OWN or torch._C.DispatchKey.Meta in func.py_kernels:
        return True
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta"):
        return True
    return torch._library.simple_registry.singleton.find(func.name()).fake_impl.kernel is not None
