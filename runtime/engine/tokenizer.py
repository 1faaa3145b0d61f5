"""Text to token ids and back, as a checkpoint's tokenizer.json says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import ModelError


class Tokenizer:
    """Wraps the `tokenizers` library, which is imported when the first tokenizer is made.

    Raises:
        ModelError: the library is not installed, or tokenizer.json is missing or malformed.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        try:
            import tokenizers
        except ImportError as error:
            raise ModelError(
                "tokenizer: reading tokenizer.json needs the tokenizers library, which is not installed; "
                "run: pip install 'piecework[hf]'"
            ) from error
        if not path.is_file():
            raise ModelError(f"{path}: the file is missing; download the checkpoint again, with this file")
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(f"{path}: not a tokenizer ({error}); download this file again") from error
        self._path = path
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def check_fits(self, vocab_size: int) -> None:
        """Raises: ModelError if the tokenizer has ids that a model with `vocab_size` tokens does not know.

        A model may know more: many have rows that no token uses.
        """
        num_ids = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if num_ids > vocab_size:
            raise ModelError(
                f"{self._path}: expected token ids below the model's vocab_size {vocab_size}, got ids up to "
                f"{num_ids - 1}; use the tokenizer.json that belongs to this checkpoint"
            )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds (usually one at the start)."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def token(self, token_id: int) -> str:
        """One token for a person to read: its text, or its name in the vocabulary if it has no text of its own."""
        text = self.decode([token_id])
        if text and "\ufffd" not in text:
            return text
        return self._tokenizer.id_to_token(token_id) or f"<{token_id}>"
