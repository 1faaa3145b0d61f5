"""Whether an optional package is installed, asked without importing it: it may take seconds, or fail."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable


def missing(package: str, pip: str) -> str | None:
    """Why nothing of the top-level `package` can run here, or None where it is installed.

    `pip`: what pip calls it.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # it is in sys.modules and has no spec, as a module that was made by hand
        return None
    return None if spec is not None else f"not installed: pip install {pip}"


def needs(package: str, pip: str) -> Callable[[], str | None]:
    """`missing` with these arguments, for the `available` of a kernel: asked each time, and never an import."""
    return functools.partial(missing, package, pip)
