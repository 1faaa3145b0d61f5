"""Tokens to text while they come: never half a character, and the same text in the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"
"""What a decoder puts in the place of bytes that are no character, or not yet."""
_PROMPT_TOKENS = 6
"""Tokens of the prompt that give the first new token its surroundings."""


class Detokenizer:
    """Turns the tokens of one answer into text, one at a time.

    A token cannot be decoded alone: its bytes may be half a character, and a tokenizer may drop the space in front of
    a text's first word. So a window of tokens is decoded, from `prefix` on, and what the tokens before `read` make of
    it is taken off. The window moves on when its text ends in a whole character. That is the method of text-generation
    servers (prefix and read offsets); here the whole characters in front of a half one are released at once.

    Args:
        decode: token ids to text, without special tokens.
        prompt_token_ids: what the answer continues.
    """

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt_token_ids[-_PROMPT_TOKENS:])
        self._num_read = len(self._window)
        """Tokens of the window whose text is out."""
        self._before = decode(self._window) if self._window else ""
        """The prompt's part of the window's text, until the window has moved past it."""
        self._num_chars = len(_whole(self._before))
        """Characters of the window's text that are out."""

    def add(self, token_id: int) -> str:
        """Takes a token; returns the text that is certain now, maybe none."""
        self._window.append(token_id)
        text = self._decode(self._window)
        whole = _whole(text)
        self._skip_prompt(whole)
        new, self._num_chars = whole[self._num_chars :], max(self._num_chars, len(whole))
        if not new and not self._decode([token_id, token_id]):
            # Without text whatever is beside it (a first space alone would have none either). An answer may go on with
            # end tokens for long, and a window that they filled would have to be decoded again for each.
            self._window.pop()
        # A window of special tokens alone has no text, and would make its successor a text's first word.
        if new and len(whole) == len(text):
            del self._window[: self._num_read]
            self._num_read = len(self._window)
            self._num_chars = len(self._decode(self._window))
            self._before = ""
        return new

    def flush(self) -> str:
        """The rest, when no token comes any more: bytes that never became a character, as replacement characters."""
        text = self._decode(self._window)
        self._skip_prompt(text)
        new, self._num_chars = text[self._num_chars :], max(self._num_chars, len(text))
        return new

    def _skip_prompt(self, text: str) -> None:
        """A prompt that ends in a replacement character keeps it, unless the answer completes it to a character."""
        if text.startswith(self._before):
            self._num_chars = max(self._num_chars, len(self._before))


def _whole(text: str) -> str:
    return text.rstrip(_REPLACEMENT)
