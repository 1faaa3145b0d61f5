"""The calls that a tape holds, each of which can be made again into the memory of its capture."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch._ops import OpOverload

from ..errors import CaptureError
from .layouts import CallLayout, TensorLayout


class Step(Protocol):
    """One recorded call."""

    def run(self) -> None:
        """Makes the call again, and leaves its results where they were at the capture."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpStep:
    """An operator: below autograd and autocast, so that nothing around a replay changes what it does."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[torch.Tensor | None, ...]
    """Where each result goes; None for one that was written in place, and for what is no tensor."""

    def run(self) -> None:
        """Runs the operator.

        Raises:
            CaptureError: it returned another shape or dtype than its fake implementation said.
        """
        results = tensors_of(self.op(*self.args, **self.kwargs))
        for index, (output, result) in enumerate(zip(self.outputs, results, strict=True)):
            if output is not None:
                _copy_result(self.op.name(), index, result, output)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallStep:
    """A compiled callable, called as a whole under the modes of its capture."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    layout: CallLayout
    outputs: tuple[torch.Tensor | None, ...]
    """As in OpStep; None also for what lies in an argument's memory."""
    ambient: Ambient

    def run(self) -> None:
        """Calls it.

        Raises:
            CaptureError: its outputs do not lay as those of the call that was observed.
        """
        with self.ambient.restored():
            results = self.function(*self.arguments)
        results = (results,) if isinstance(results, torch.Tensor) else tuple(results)
        name = getattr(self.function, "__qualname__", None) or type(self.function).__qualname__
        if len(results) != len(self.layout.outputs):
            raise CaptureError(
                f"replay: expected {len(self.layout.outputs)} outputs of {name}, as when it was captured, got "
                f"{len(results)}; capture it again",
                op=name,
            )
        for index, (result, expected) in enumerate(zip(results, self.layout.outputs, strict=True)):
            if isinstance(expected, TensorLayout):
                _check_result(name, index, result, expected.shape, expected.dtype)
        for output, result in zip(self.outputs, results, strict=True):
            if output is not None:
                _copy(result, output)


def _copy(result: torch.Tensor, output: torch.Tensor) -> None:
    """Copies into an output that may be expanded: of elements that share memory, one."""
    for dim, (size, stride) in enumerate(zip(output.shape, output.stride(), strict=True)):
        if stride == 0 and size > 1:
            result, output = result.narrow(dim, 0, 1), output.narrow(dim, 0, 1)
    output.copy_(result)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ambient:
    """The modes of a thread that a compiled callable looks at."""

    inference: bool
    grad: bool
    autocast: bool
    autocast_dtype: torch.dtype

    @classmethod
    def now(cls) -> Ambient:
        """Those of this thread."""
        return cls(
            inference=torch.is_inference_mode_enabled(),
            grad=torch.is_grad_enabled(),
            autocast=torch.is_autocast_enabled("cpu"),
            autocast_dtype=torch.get_autocast_dtype("cpu"),
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Puts them in place for a while."""
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
            with torch.autocast("cpu", dtype=self.autocast_dtype, enabled=self.autocast):
                yield


@contextlib.contextmanager
def replay_modes(default_dtype: torch.dtype) -> Iterator[None]:
    """What recorded operators run under: no autograd, no autocast, and the default dtype of the capture.

    The default dtype belongs to the process; it is changed only when it is another one.
    """
    before = torch.get_default_dtype()
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        try:
            if before is not default_dtype:
                torch.set_default_dtype(default_dtype)
            yield
        finally:
            if before is not default_dtype:
                torch.set_default_dtype(before)


def tensors_of(returned: Any) -> list[Any]:
    """What an operator returned, flat: tensors, and other things as they are."""
    if returned is None:
        return []
    if not isinstance(returned, (tuple, list)):
        return [returned]
    flat: list[Any] = []
    for value in returned:
        flat.extend(value if isinstance(value, (tuple, list)) else (value,))
    return flat


def _copy_result(name: str, index: int, result: Any, output: torch.Tensor) -> None:
    _check_result(name, index, result, tuple(output.shape), output.dtype)
    output.copy_(result)


def _check_result(name: str, index: int, result: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
    if isinstance(result, torch.Tensor) and tuple(result.shape) == tuple(shape) and result.dtype is dtype:
        return
    got = (
        f"{result.dtype}{list(result.shape)}" if isinstance(result, torch.Tensor) else f"a {type(result).__qualname__}"
    )
    raise CaptureError(
        f"replay: expected {dtype}{list(shape)} as output {index} of {name}, as when it was captured, got {got}; make "
        f"what it returns independent of the data, and its fake implementation say the same",
        op=name,
    )
