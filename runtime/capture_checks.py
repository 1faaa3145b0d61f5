"""What is looked at around a run that is captured: what it wrote, what it returned, and whether padding leaked."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import CaptureError, InputError
from ..graphs.inputs import BoundInputs
from ..graphs.outputs import map_leaves
from ..graphs.trace import OutputRef
from .programs import AnyProgram


@contextlib.contextmanager
def written_by(program: AnyProgram, tensors: Mapping[str, torch.Tensor]) -> Iterator[set[str]]:
    """Fills the set with the names of the inputs that the body's run of `program` wrote.

    A trace knows. Of an eager forward it shows in the values, which are compared before and after.
    """
    written: set[str] = set(program.written_inputs)
    if program.kind != "eager":
        yield written
        return
    before = {name: (tensor.clone(), _version(tensor)) for name, tensor in tensors.items()}
    yield written
    for name, tensor in tensors.items():
        copied, version = before[name]
        if _version(tensor) != version or not _same_bits(copied, tensor):
            written.add(name)


@contextlib.contextmanager
def counted_writes(tensors: Mapping[str, torch.Tensor]) -> Iterator[set[str]]:
    """Fills the set with the names of the tensors whose versions the body counts up: cheap, for one run after another.

    What a forward writes may depend on the step, and that of the first run was looked at only.
    """
    before = {name: _version(tensor) for name, tensor in tensors.items()}
    written: set[str] = set()
    yield written
    written |= {name for name, tensor in tensors.items() if _version(tensor) != before[name]}


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.is_meta:
        return True
    left, right = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (left, right))
    return bool(torch.equal(left, right))


_NUMBERS = (int, float, complex)  # and bool
_CONSTANTS = (str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.layout)


def check_eager_outputs(structure: Any) -> None:
    """Refuses what an eager forward returns beside tensors, if padding could change it or a replay not make it.

    Raises:
        InputError: an output is a number, a truth value, a size, or an object that is no constant.
    """

    def leaf(path: str, value: Any) -> Any:
        if not isinstance(value, (OutputRef, torch.Size, *_NUMBERS, *_CONSTANTS)):
            raise InputError(
                f"output {path!r}: expected a tensor, since an eager forward is captured, got a "
                f"{type(value).__name__}, which a replay would return as the first step left it; return its tensors "
                f"(in tuples, lists, dicts or dataclasses), leave it out, or use backend disabled"
            )
        if isinstance(value, (torch.Size, *_NUMBERS)):
            raise InputError(
                f"output {path!r}: expected a tensor, since an eager forward is captured with padded rows, got the "
                f"{'size' if isinstance(value, torch.Size) else 'number'} {value!r}, which may be computed from them; "
                f"return a tensor, or use another compiler with backend tc_piecewise, or backend disabled"
            )
        return value

    map_leaves(structure, leaf)


def check_static_inputs(
    captured: Mapping[str, torch.Tensor], filled: Mapping[str, torch.Tensor], bound: BoundInputs
) -> None:
    """The debug mode, right before a replay: the capture reads what the step was given.

    Raises:
        CaptureError: an input is not where the capture reads it, or does not hold the step's values there.
    """
    for name, tensor in bound.tensors.items():
        static = filled[name]
        if static.data_ptr() != captured[name].data_ptr() or static.stride() != captured[name].stride():
            raise CaptureError(
                f"input {name!r}: expected it at {captured[name].data_ptr():#x}, where the capture reads it, got "
                f"{static.data_ptr():#x}; this is a fault of piecework: use backend disabled, and report it"
            )
        head = static
        for dim, size in enumerate(tensor.shape):
            head = head.narrow(dim, 0, size)
        if not _same_bits(head, tensor):
            raise CaptureError(
                f"input {name!r}: expected the step's values where the capture reads them, got others; something "
                f"writes into memory of the runtime's, or the caller's tensor changed during the step"
            )


def check_no_nan(result: Any, bound: BoundInputs) -> None:
    """The debug mode, where padded rows hold NaN: refuses outputs in which they show.

    Raises:
        CaptureError: an output has a NaN and none of the inputs.
    """
    if any(_has_nan(tensor) for tensor in bound.tensors.values()):
        return

    def leaf(path: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and _has_nan(value):
            raise CaptureError(
                f"output {path!r}: expected no NaN, since no input has one, got some; padded rows, which hold NaN "
                f"under debug_captures, leak into the others (a sum or a mean over tokens, a split op that reads "
                f"them), or the model makes NaN itself: run it with backend disabled to tell"
            )
        return value

    map_leaves(result, leaf)


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


def plain_attributes(model: torch.nn.Module) -> dict[str, Any]:
    """What captures freeze of a model's modules, by dotted name: their classes, and of their attributes the numbers,
    texts and None, and the lengths of lists and dicts."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = type(module)
        for key, value in module.__dict__.items():
            path = f"{name}.{key}" if name else key
            if value is None or isinstance(value, (bool, int, float, str)):
                found[path] = (type(value), value)
            elif isinstance(value, (list, tuple, dict, set)):
                found[path] = (type(value), len(value))
    return found
