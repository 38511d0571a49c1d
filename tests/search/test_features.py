"""Features of a card: computed from its text only, and preserved by packing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kiwi_mcp.domain.cards import Card, CardFeatures
from kiwi_mcp.search.index import (
    SIZE,
    digest_of,
    is_sound,
    pack_vectors,
    passage_of,
    unpack_vectors,
    unpack_words,
    words_of,
)
from kiwi_mcp.search.tokens import stem

CARD = Card(
    "mcp", "outbox", "sendLetter", "1", "x", tool_type="mcp_tool", name="sendLetter", server="outbox", modified=1.0,
    description="Puts a letter into the box", parameters=(("toReader", "Who gets it"),),
)  # fmt: skip


def counted(card: Card) -> dict[str, list[int]]:
    stems, rows = unpack_words(words_of(card))
    return dict(zip(stems, rows.tolist(), strict=True))


@pytest.mark.parametrize("word", ["send", "letter", "box", "outbox", "reader", "gets"])
def test_every_part_of_a_card_is_searched(word: str) -> None:
    assert sum(counted(CARD)[stem(word)]) > 0


@pytest.mark.parametrize("word", ["post", "mail", "out"])
def test_tags_and_category_of_an_own_item_are_searched(word: str) -> None:
    own = replace(CARD, server="", namespace="local", tags=("post",), category="mail/out")
    assert counted(own)[stem(word)][1] == 1


def test_words_are_counted_by_field() -> None:
    counts = counted(CARD)
    assert counts[stem("letter")] == [1, 0, 1, 0, 0]
    assert counts[stem("outbox")][1] == 1
    assert counts[stem("reader")][3] == 1
    assert "the" not in counts
    assert counted(Card("project", "local", "x", description="again " * 400))[stem("again")] == [0, 0, 255, 0, 0]


def test_the_digest_depends_only_on_the_text_and_the_encoder() -> None:
    known = digest_of(CARD, "one")
    for other in (
        replace(CARD, description="Other"),
        replace(CARD, parameters=()),
        replace(CARD, server="inbox"),
    ):
        assert digest_of(other, "one") != known
    assert digest_of(CARD, "two") != known
    assert digest_of(replace(CARD, path="y", modified=9.0, version="2"), "one") == known


def test_the_encoded_text_contains_source_item_and_parameters() -> None:
    passage = passage_of(CARD)
    assert all(word in passage for word in ("outbox", "send Letter", "Puts a letter", "to Reader"))


@given(st.text(max_size=200))
@settings(max_examples=30)
def test_any_text_has_features(text: str) -> None:
    made = Card("project", "local", text, "1", name=text, description=text, parameters=((text, text),))
    assert all(sum(row) > 0 for row in counted(made).values())
    assert len(digest_of(made, "")) == 16
    assert isinstance(passage_of(made), str)


def test_packed_vectors_are_nearly_equal() -> None:
    rows = np.random.default_rng(7).normal(size=(20, 384)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    packed = pack_vectors(rows)

    assert {len(one) for one in packed} == {388}
    assert np.abs(unpack_vectors(b"".join(packed)) - rows).max() < 0.002


@given(st.text(max_size=200))
@settings(max_examples=30)
def test_computed_features_are_valid(text: str) -> None:
    made = Card("project", "local", text, "1", name=text, description=text, parameters=((text, text),))
    vector = pack_vectors(np.full((1, 384), 0.05, np.float32))[0]
    assert is_sound(CardFeatures(words_of(made), b""))
    assert is_sound(CardFeatures(words_of(made), vector))


def scaled(scale: float) -> bytes:
    return bytes(SIZE - 4) + np.array([scale], "<f4").tobytes()


WORDS = words_of(CARD)
DAMAGED = [
    CardFeatures(b"\xff\x00abc", b""), CardFeatures(b"", b""), CardFeatures(b"one two\0" + bytes(5), b""),
    CardFeatures(WORDS[:-1], b""),
    CardFeatures(WORDS + b"\0", b""), CardFeatures(b"\0" + bytes(5), b""),
    CardFeatures(WORDS, bytes(SIZE - 1)), CardFeatures(WORDS, bytes(SIZE + 1)),
    *(CardFeatures(WORDS, scaled(scale)) for scale in (0.0, -1.0, 2.0, np.inf, -np.inf, np.nan)),
]  # fmt: skip


@pytest.mark.parametrize("kept", DAMAGED)
def test_unsearchable_features_are_invalid(kept: CardFeatures) -> None:
    assert not is_sound(kept)


@given(st.binary(max_size=60), st.binary(min_size=SIZE, max_size=SIZE))
@settings(max_examples=60)
def test_valid_features_are_readable(words: bytes, vector: bytes) -> None:
    if is_sound(CardFeatures(words, vector)):
        stems, counts = unpack_words(words)
        assert len(stems) == len(counts)
        assert np.isfinite(unpack_vectors(vector)).all()


def test_an_invalid_vector_is_packed_as_one_near_nothing() -> None:
    rows = np.full((2, 384), np.nan, np.float32)
    rows[1] = np.inf
    for packed in pack_vectors(rows):
        assert is_sound(CardFeatures(WORDS, packed))
        assert not unpack_vectors(packed).any()
