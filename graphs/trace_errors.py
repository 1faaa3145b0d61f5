"""The public error for a failed trace: the user's line and Dynamo's reason, then what to do, then Dynamo's text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError, GuardOnDataDependentSymNode

from ..errors import DynamicDimError, GuardError, TraceError
from ..ops.context import get_context
from .dynamo import traceable_forward
from .inputs import Signature


@dataclasses.dataclass(frozen=True, slots=True)
class _Frame:
    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}" + (f", `{self.code}`" if self.code else "")


def explain_failure(error: BaseException, signature: Signature, unbacked_reason: str | None) -> TraceError:
    """The error to raise for what Dynamo raised.

    Args:
        unbacked_reason: the first line of why the attempt with dims of any size failed, if there was one.
    """
    names = [name for name, *_ in signature.tensors]
    text = re.sub(r"L\['piecework_inputs'\]\[(\d+)\]", lambda match: names[int(match[1])], str(error).strip())
    kind: type[TraceError] = TraceError
    advice = "remove the graph break, move it into the body of a split op, or use compiler='eager'"
    if isinstance(error, ConstraintViolationError):
        kind = DynamicDimError
        advice = "make the model hold for every size of that dim, or take it out of dynamic_dims"
    elif isinstance(error, GuardOnDataDependentSymNode):
        kind = GuardError
    frames = list(_user_frames(text))
    reason = _reason(text)
    if frames and (frames[-1].file, frames[-1].function) == _GET_CONTEXT:
        frames.pop()
        reason = "forward calls get_context, and a trace would freeze the context of one step"
        advice = "call get_context in the body of a split op, or pass what is read there as an input"
    own = [frame for frame in frames if not frame.file.startswith(_TORCH)]
    where = f" at {own[-1]}" if own else ""
    message = f"trace: the model cannot be traced{where}: {reason}; {advice}. It was traced for ({signature})."
    message += f" Dynamo said:\n{text}"
    if unbacked_reason is not None and unbacked_reason != first_line(error):
        message += f"\n(with dims of any size it had said: {unbacked_reason})"
    return kind(message)


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its type when it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


_TORCH = str(Path(torch.__file__).parent / "_")[:-1]
_GET_CONTEXT = (get_context.__code__.co_filename, get_context.__name__)
_OWN = traceable_forward.__code__.co_filename
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (\S+)\n(?! *File) *(.*)$', re.MULTILINE)


def _user_frames(text: str) -> Iterator[_Frame]:
    """The frames of the traced code, outermost first, without the function around the model's forward."""
    stack = re.split(r"^(?:from user code|user stack)[^\n]*:$", text, flags=re.IGNORECASE | re.MULTILINE)
    for file, line, function, code in _FRAME.findall(stack[-1]) if len(stack) > 1 else ():
        if file != _OWN:
            yield _Frame(file, int(line), function, code.strip())


def _reason(text: str) -> str:
    """Dynamo's headline, with the line that explains it; of a violated constraint, what was violated."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    headline = lines[0].rstrip(".:;") if lines else "no reason given"
    for line in lines:
        if line.startswith("Explanation:"):
            return f"{headline}: {line.removeprefix('Explanation:').strip().rstrip('.')}"
        if line.startswith("- ") and headline.startswith("Constraints violated"):
            return line.removeprefix("- ").partition(". ")[0]
    return headline
