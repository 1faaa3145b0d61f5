"""Reading JSON files that others wrote: whole objects, and their keys with the types that are expected."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ModelError: the file is missing, unreadable, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: the file is missing; download the checkpoint again, with this file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error}); download this file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(content).__name__}; download this file again")
    return content


class Keys:
    """Typed access to the keys of a JSON object; what is wrong is collected, so that one error lists it all.

    A method that finds something wrong notes it and returns a value of the right type, so that reading can go on.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values
        self.problems: list[str] = []

    def raise_problems(self) -> None:
        """Raises: ModelError if anything was wrong."""
        if self.problems:
            raise ModelError(
                f"{self.path}: this model cannot be run; use another checkpoint, or correct the file:"
                + "".join(f"\n  {problem}" for problem in self.problems)
            )

    def size(self, key: str, default: int | None = None) -> int:
        """The positive integer at `key`; `default` if there is none."""
        value = self.values.get(key)
        return default if value is None and default is not None else self.integer(key, value)

    def integer(self, name: str, value: Any) -> int:
        """`value`, which has to be a positive integer; `name` is what a problem calls it."""
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.problems.append(f"{name}: expected a positive integer, got {value!r}")
        return 1

    def number(self, name: str, value: Any, *, at_least: float | None = None) -> float:
        """`value`, which has to be a finite number, positive or not below `at_least`; `name` is as for `integer`."""
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            if value > 0 and (at_least is None or value >= at_least):
                return float(value)
        expected = "a positive number" if at_least is None else f"a number of at least {at_least:g}"
        self.problems.append(f"{name}: expected {expected}, got {value!r}")
        return 1.0

    def flag(self, key: str) -> bool:
        """The truth value at `key`; false if there is none."""
        return self.boolean(key, self.values.get(key), default=False)

    def boolean(self, name: str, value: Any, *, default: bool) -> bool:
        """`value`, which has to be true or false, or null for `default`; `name` is as for `integer`."""
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{name}: expected true or false, got {value!r}")
        return value if isinstance(value, bool) else default
