"""Text out of tokens that come one by one: whole characters, spaces where they belong, nothing lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from piecework.runtime.engine.detokenizer import Detokenizer
from piecework.runtime.engine.tokenizer import Tokenizer

TEXT = "naïve Ω — 東京 🌊🏳️‍🌈 e\u0301 end"


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    """Byte-level BPE: a character outside of ASCII is two tokens or more."""
    return Tokenizer(checkpoint)


@pytest.fixture(scope="module")
def sentencepiece() -> Callable[[Sequence[int]], str]:
    """Like Llama 2's: a space is part of the word after it, the first one is dropped, bytes are tokens of their own."""
    vocab = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b"]
    model = tokenizers.models.BPE(
        vocab={token: i for i, token in enumerate(vocab)},
        merges=[("▁", "a"), ("▁", "b")],
        byte_fallback=True,
        unk_token="<unk>",
    )
    decoders = tokenizers.decoders
    library: Any = tokenizers.Tokenizer(model)
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return lambda ids: library.decode(list(ids))


def test_no_half_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)[1:]
    assert len(ids) > len(TEXT)
    detokenizer = Detokenizer(tokenizer.decode)
    text = ""
    for count, token in enumerate(ids, 1):
        text += detokenizer.add(token)
        # Everything that is whole is out at once.
        assert text == tokenizer.decode(ids[:count]).rstrip("\ufffd")
    assert text == TEXT
    assert detokenizer.flush() == ""


def test_whole_characters_do_not_wait_for_the_half_one_behind_them(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode("é")[1:]
    detokenizer = Detokenizer(lambda ids: tokenizer.decode(ids).replace("A", "A!"))  # a token may be many characters
    [letter] = tokenizer.encode("A")[1:]
    assert [detokenizer.add(token) for token in (first, first, letter, first, second)] == ["", "", "��A!", "", "é"]


def test_bytes_that_never_become_a_character_come_at_the_end(tokenizer: Tokenizer) -> None:
    wave = tokenizer.encode("🌊")[1:]
    detokenizer = Detokenizer(tokenizer.decode)
    assert [detokenizer.add(token) for token in wave[:-1]] == [""] * (len(wave) - 1)
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@given(st.data())
def test_the_pieces_are_the_whole_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    # All of the vocabulary: bytes in any order, and special tokens between them.
    ids = data.draw(st.lists(st.integers(0, 511) | st.integers(0, 257), max_size=30))
    detokenizer = Detokenizer(tokenizer.decode)
    assert "".join(map(detokenizer.add, ids)) + detokenizer.flush() == tokenizer.decode(ids)


@given(st.text(max_size=12), st.text(max_size=12))
def test_an_answer_continues_its_prompt(tokenizer: Tokenizer, prompt: str, answer: str) -> None:
    # A prompt that ends in a replacement character ends in bytes that the answer may complete.
    prompt, ids = prompt.rstrip("\ufffd"), tokenizer.encode(answer)[1:]
    detokenizer = Detokenizer(tokenizer.decode, tokenizer.encode(prompt))
    assert "".join(map(detokenizer.add, ids)) + detokenizer.flush() == answer


@pytest.mark.parametrize("prompt", ["�", "a�", "��", "🌊�"])
@pytest.mark.parametrize("answer", ["b", "🌊", "�", "é�"])
def test_a_prompt_keeps_its_own_replacement_character(tokenizer: Tokenizer, prompt: str, answer: str) -> None:
    # The character itself in the prompt, and bytes that were cut in the middle of one.
    for ids in (tokenizer.encode(prompt)[1:], tokenizer.encode("🌊")[1:3]):
        detokenizer = Detokenizer(tokenizer.decode, ids)
        assert "".join(map(detokenizer.add, tokenizer.encode(answer)[1:])) + detokenizer.flush() == answer


def test_an_answer_completes_the_character_that_its_prompt_began(tokenizer: Tokenizer) -> None:
    wave = tokenizer.encode("🌊")[1:]
    detokenizer = Detokenizer(tokenizer.decode, wave[:2])
    assert "".join(map(detokenizer.add, wave[2:])) == "🌊"


def test_the_space_of_a_first_word_stays(sentencepiece: Callable[[Sequence[int]], str]) -> None:
    a, b, euro = 260, 261, [1 + byte for byte in "€".encode()]
    assert sentencepiece([a, b]) == "a b"  # the library drops the first space
    detokenizer = Detokenizer(sentencepiece, [a])
    assert [detokenizer.add(token) for token in [b, *euro, a]] == [" b", "", "", "€", " a"]


def test_tokens_without_text_do_not_fill_the_window(sentencepiece: Callable[[Sequence[int]], str]) -> None:
    a, special, byte, lengths = 260, 999, 1 + 0xE2, []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return sentencepiece(ids)

    for prompt, before in (((a,), []), ((), []), ((a,), [byte]), ((), [259])):  # 259 is a space
        detokenizer = Detokenizer(decode, prompt)
        added = [detokenizer.add(token) for token in [*before, *[special] * 100, a]]
        assert "".join(added) == sentencepiece([*prompt, *before, a])[len(prompt) :]
    assert max(lengths) == 3


def test_a_window_of_special_tokens_does_not_hide_a_space(sentencepiece: Callable[[Sequence[int]], str]) -> None:
    a, special = 260, 999  # decoded to nothing
    detokenizer = Detokenizer(sentencepiece, [a])
    assert [detokenizer.add(token) for token in [a, special, special, a]] == [" a", "", "", " a"]
