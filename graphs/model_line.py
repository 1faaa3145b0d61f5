"""Where in the model an error was raised, and by which call: for messages."""

from __future__ import annotations

import ast
import linecache
import sys
from types import FrameType, TracebackType

_ENGINE = "piecework.runtime.engine."
"""The one part of the package that is a model's code."""


def model_line(traceback: TracebackType | None) -> tuple[str | None, str | None]:
    """The innermost frame that is neither torch's, ours nor the standard library's.

    Returns:
        `file:line`, and the name of what is called there (`item` of `x.sum().item()`) where Python knows it, from
        3.11 on. None for what is not known.
    """
    found: TracebackType | None = None
    while traceback is not None:
        if is_model_frame(traceback.tb_frame):
            found = traceback
        traceback = traceback.tb_next
    if found is None:
        return None, None
    return f"{found.tb_frame.f_code.co_filename}:{found.tb_lineno}", _called(found)


def calling_line() -> str | None:
    """`file:line` of the innermost such frame of the calls that are running; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_model_frame(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else None


def is_model_frame(frame: FrameType) -> bool:
    """Whether a frame is code of the model or of its owner."""
    name = str(frame.f_globals.get("__name__", ""))
    top = name.partition(".")[0]
    if frame.f_code.co_filename.startswith("<") or top in ("torch", "triton") or top in sys.stdlib_module_names:
        return False
    return top != "piecework" or name.startswith(_ENGINE)


def _called(traceback: TracebackType) -> str | None:
    """The name of the function whose call the traceback points at."""
    code = traceback.tb_frame.f_code
    if not hasattr(code, "co_positions"):
        return None
    positions = list(code.co_positions())
    index = traceback.tb_lasti // 2
    line, end_line, start, end = positions[index] if index < len(positions) else (None,) * 4
    if line is None or line != end_line or start is None or end is None:
        return None
    text = linecache.getline(code.co_filename, line).encode()[start:end].decode(errors="replace").strip()
    try:
        expression = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(expression, ast.Call):
        return None
    function = expression.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
