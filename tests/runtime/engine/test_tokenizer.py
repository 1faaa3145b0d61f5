"""The tokenizer of a checkpoint, against the tokenizers library itself, and its errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tokenizers

from piecework.errors import ModelError
from piecework.runtime.engine.tokenizer import Tokenizer


def test_encodes_and_decodes_as_the_library_does(checkpoint: Path) -> None:
    text = "What is the capital of France? 🌊"
    reference = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer = Tokenizer(checkpoint)
    assert tokenizer.encode(text) == reference.encode(text).ids
    assert tokenizer.encode(text)[0] == reference.token_to_id("<|begin|>")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_padding_and_truncation_of_the_file_are_off(own_checkpoint: Path) -> None:
    path = str(own_checkpoint / "tokenizer.json")
    reference = tokenizers.Tokenizer.from_file(path)
    expected = reference.encode("A server that answers at once").ids
    reference.enable_truncation(2)
    reference.enable_padding(length=50)
    reference.save(path)
    assert Tokenizer(own_checkpoint).encode("A server that answers at once") == expected


def test_a_missing_or_malformed_file_is_named(own_checkpoint: Path) -> None:
    path = own_checkpoint / "tokenizer.json"
    path.write_text('{"model": 1}')
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer \("):
        Tokenizer(own_checkpoint)
    path.unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json: the file is missing"):
        Tokenizer(own_checkpoint)


def test_a_missing_library_says_what_to_install(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModelError, match=r"pip install 'piecework\[hf\]'"):
        Tokenizer(checkpoint)


def test_ids_that_the_model_does_not_know_are_refused_with_both_numbers(own_checkpoint: Path) -> None:
    Tokenizer(own_checkpoint).check_fits(512)
    Tokenizer(own_checkpoint).check_fits(600)  # rows that no token uses are common
    with pytest.raises(
        ModelError, match=r"below the model's vocab_size 511, got ids up to 511; use the tokenizer.json"
    ):
        Tokenizer(own_checkpoint).check_fits(511)
    path = str(own_checkpoint / "tokenizer.json")
    reference = tokenizers.Tokenizer.from_file(path)
    reference.add_tokens(["<pad>"])  # counts too
    reference.save(path)
    with pytest.raises(ModelError, match="vocab_size 512, got ids up to 512"):
        Tokenizer(own_checkpoint).check_fits(512)


def test_a_token_for_a_person_to_read(checkpoint: Path) -> None:
    tokenizer = Tokenizer(checkpoint)
    [first, *_] = tokenizer.encode("🌊")[1:]
    assert [tokenizer.token(token) for token in (0, tokenizer.encode("A")[1], 9999)] == ["<|begin|>", "A", "<9999>"]
    assert len(tokenizer.token(first)) == 1  # the vocabulary's stand-in for a byte
    assert "\ufffd" not in tokenizer.token(first)
