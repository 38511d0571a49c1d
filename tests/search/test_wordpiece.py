"""The tokenizer of the encoder, compared with the reference implementation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.search import encoder
from kiwi_mcp.search.encoder import HOME, WordPieces, pretokenize

VOCABULARY = (HOME / "vocabulary.txt").read_text(encoding="utf-8").split()
PIECES = WordPieces(VOCABULARY)
EXPECTED = Path(__file__).with_name("pieces.jsonl").read_text(encoding="utf-8").splitlines()
UNKNOWN, FIRST, LAST = (VOCABULARY.index(mark) for mark in ("[UNK]", "[CLS]", "[SEP]"))


def test_tokens_match_the_reference() -> None:
    for text, pieces in map(json.loads, EXPECTED):
        numbers = PIECES.numbers(text, most=1_000)
        assert [VOCABULARY[number] for number in numbers[1:-1]] == pieces.split(), text


def test_a_text_is_enclosed_in_special_tokens_and_cut_to_the_maximum() -> None:
    whole = PIECES.numbers("convert the document", most=100)

    assert whole[0] == FIRST
    assert whole[-1] == LAST
    assert PIECES.numbers("convert the document", most=4) == [*whole[:3], LAST]
    assert PIECES.numbers("", most=4) == [FIRST, LAST]


@pytest.mark.parametrize("mark", ["[SEP]", "[CLS]", "[PAD]", "[UNK]"])
def test_a_special_token_in_a_text_is_text(mark: str) -> None:
    assert VOCABULARY.index(mark) not in PIECES.numbers(f"a {mark} b", most=100)[1:-1]


def test_an_overlong_word_is_one_unknown_token() -> None:
    assert PIECES.numbers("a" * 101, most=100) == [FIRST, UNKNOWN, LAST]


def test_an_endless_text_costs_no_more_than_its_beginning() -> None:
    endless = "word " * 1_000_000

    assert PIECES.numbers(endless, most=128) == PIECES.numbers(endless[:1_000], most=128)


def test_the_character_cache_is_bounded() -> None:
    pretokenize("".join(map(chr, range(0x1_2000))))

    assert len(encoder._spelling) <= 65_536
    assert pretokenize("Straße, Größe") == ["straße", ",", "große"]


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters()), most=st.integers(2, 40))
def test_any_text_has_tokens(text: str, most: int) -> None:
    numbers = PIECES.numbers(text, most=most)

    assert (numbers[0], numbers[-1]) == (FIRST, LAST)
    assert len(numbers) <= most
    assert all(0 <= number < len(VOCABULARY) for number in numbers)
