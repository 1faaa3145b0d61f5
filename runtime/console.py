"""What the commands share: exit codes, errors without tracebacks, aligned columns. Loads no torch."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..errors import PieceworkError

EXIT_ERROR = 2
"""As argparse's own."""
EXIT_INTERRUPTED = 128 + 2
EXIT_BROKEN_PIPE = 128 + 13
"""What a shell reports for a program that SIGPIPE ended."""


def exit_code(run: Callable[[], int]) -> int:
    """Runs a command and returns its exit code; what it raises on purpose becomes a message on stderr.

    Returns:
        What `run` returns; 2 after a PieceworkError, 130 after an interrupt, 141 when the reader of stdout has gone.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # Text of a model may hold what the terminal's encoding has no character for.
            stream.reconfigure(errors="backslashreplace")
    try:
        with _log_on_stderr():
            try:
                return run()
            finally:
                if sys.stdout is not None:  # None where the shell closed it
                    sys.stdout.flush()  # a broken pipe shows here, not when the interpreter exits
    except PieceworkError as error:
        print(f"piecework: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("piecework: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_BROKEN_PIPE


def print_json(value: Any) -> None:
    """Writes plain data to stdout, in ASCII."""
    print(json.dumps(value, indent=2))


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equal length as lines of aligned columns, two spaces apart."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def printable(text: str) -> str:
    """`text` on one line, with escapes for what a terminal would not show or would obey."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


@contextlib.contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Shows the library's warnings as one line each; restores the logger."""
    logger = logging.getLogger("piecework")
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("piecework: %(message)s"))
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def _discard_stdout() -> None:
    """Points stdout nowhere, or the interpreter's last flush would complain about the pipe again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
