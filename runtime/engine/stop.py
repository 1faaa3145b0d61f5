"""Stop strings: the text of an answer ends before the first of them, and no part of one is shown before."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for stop strings in a text that comes in pieces.

    What could be the beginning of a stop string is held back until it is known not to be one.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.matched: str | None = None
        """The stop string that ended the text; of several at one place the first in the list."""
        self._stop = tuple(stop)
        self._held = ""

    def add(self, text: str) -> str:
        """Takes more text; returns what may be shown now. After a match there is nothing to show any more."""
        if self.matched is not None:
            return ""
        text = self._held + text
        self._held = ""
        found = [(place, order) for order, stop in enumerate(self._stop) if (place := text.find(stop)) >= 0]
        if found:
            place, order = min(found)
            self.matched = self._stop[order]
            return text[:place]
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        shown = len(text) - num_held
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was held back, when no text comes any more."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` and is not the whole of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
