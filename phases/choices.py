"""The words an operator chooses from. Every choice is a `str`, so it compares and serialises as the plain word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum
from reprlib import repr as short_repr
from typing import TypeVar

from ..errors import ConfigError

C = TypeVar("C", bound="Choice")


class Choice(str, Enum):
    """Base of the enums below."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def parse(cls: type[C], value: object, where: str) -> C:
        """The member that `value` (a member or its word) names.

        Raises: ConfigError at `where`, with the allowed words and the closest one.
        """
        try:
            return cls(value)
        except ValueError:
            raise not_one_of(where, value, cls) from None


class Phase(Choice):
    PREFILL = "prefill"
    DECODE = "decode"


class Backend(Choice):
    """How a phase executes."""

    AUTO = "auto"
    DISABLED = "disabled"
    FULL = "full"
    BREAKABLE = "breakable"
    TC_PIECEWISE = "tc_piecewise"


class Compiler(Choice):
    """What compiles a piece."""

    EAGER = "eager"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"


class Startup(Choice):
    """When programs are traced, compiled and captured."""

    EAGER = "eager"
    LAZY = "lazy"
    TIERED = "tiered"


class CaptureDevice(Choice):
    """What records a capture: CUDA graphs, or the tape that stands in for them on CPU."""

    AUTO = "auto"
    CUDA = "cuda"
    TAPE = "tape"


def not_one_of(where: str, value: object, allowed: Iterable[str], what: str = "one of") -> ConfigError:
    """The error for a word that is none of `allowed`; names the closest one if any is close."""
    words = [str(word) for word in allowed]
    closest = difflib.get_close_matches(str(value), words, n=1)
    do = f"did you mean {closest[0]!r}?" if closest else "use one of these"
    return ConfigError(f"{where}: expected {what} {', '.join(words)}, got {short_repr(value)}; {do}")


def in_words(value: object) -> str:
    """How texts show the value of a field: as an operator would write it."""
    if isinstance(value, str):
        return str(value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
