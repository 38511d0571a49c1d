"""The index follows its cards and reuses computed features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kiwi_mcp.domain.cards import Card, CardFeatures
from kiwi_mcp.search.index import SIZE, CardIndex
from kiwi_mcp.search.port import Floats
from kiwi_mcp.search.query import parse_query
from kiwi_mcp.search.ranking import RankedHits, rank


def card(name: str, description: str = "") -> Card:
    return Card("project", "local", name, "1.0.0", f"/{name}.yaml", name=name, description=description)


CARDS = (card("weather", "Forecast for coordinates"), card("mail", "Send a letter"), card("page", "Read a page"))


class Shelf:
    """A keep in memory."""

    def __init__(self) -> None:
        self.kept: dict[bytes, CardFeatures] = {}

    def read(self, digests: Sequence[bytes]) -> Mapping[bytes, CardFeatures]:
        return {digest: self.kept[digest] for digest in digests if digest in self.kept}

    def write(self, kept: Mapping[bytes, CardFeatures]) -> None:
        self.kept.update(kept)


class Counting:
    """An encoder that counts the texts it is given."""

    name, dimension = "counting", 384

    def __init__(self) -> None:
        self.count = 0

    def encode(self, texts: Sequence[str]) -> Floats:
        self.count += len(texts)
        rows = np.zeros((len(texts), self.dimension), np.float32)
        rows[:, 0] = 1
        return rows


def found(index: CardIndex, query: str) -> RankedHits:
    return rank(parse_query(query, None), [index], limit=20)


def followed(cards: Sequence[Card], index: CardIndex | None = None) -> CardIndex:
    index = index or CardIndex()
    index.follow(cards)
    index.catch_up(None, None, seconds=60)
    return index


def test_a_changed_list_of_cards_is_followed() -> None:
    index = followed(CARDS)
    before = found(index, "forecast")

    assert found(followed(CARDS[1:], index), "forecast") == RankedHits([], 0)
    assert found(followed(CARDS, index), "forecast") == before
    changed = tuple(replace(one, description="Speaks of penguins") for one in CARDS)
    followed(changed, index)
    assert found(index, "penguins").total == len(CARDS)
    assert found(index, "coordinates").total == 0


def test_a_list_that_grows_in_place_is_followed() -> None:
    cards = list(CARDS)
    index = followed(cards)
    assert found(index, "penguin").total == 0

    cards.append(card("penguin", "A bird"))

    assert [hit.card.tool_id for hit in found(followed(cards, index), "penguin").hits] == ["penguin"]


def test_few_new_cards_are_found_at_once_and_many_after_indexing() -> None:
    few, many = CardIndex(), CardIndex()
    few.follow(CARDS)
    assert found(few, "letter").total == 1

    many.follow([card(f"mail_{number}", "Send a letter") for number in range(500)])
    assert found(many, "letter").total == 0
    assert many.progress == (500, 0, 0)
    assert not many.catch_up(None, None, seconds=60)
    assert many.progress == (500, 500, 0)
    assert found(many, "letter").total == 500


@pytest.mark.req("E1")
def test_stored_features_are_reused_and_can_be_rebuilt() -> None:
    shelf, encoder = Shelf(), Counting()
    first, second, third = (CardIndex(encoder.name) for _ in range(3))
    for index in (first, second):
        index.follow([*CARDS, *(card(f"more_{number}") for number in range(200))])
        assert not index.catch_up(shelf, encoder, seconds=60)

    assert encoder.count == len(CARDS) + 200
    assert second.progress == first.progress == (203, 203, 203)
    shelf.kept.clear()
    third.follow([*CARDS, *(card(f"more_{number}") for number in range(200))])
    third.catch_up(shelf, encoder, seconds=60)
    assert found(third, "letter page") == found(first, "letter page")


def test_another_text_or_encoder_is_encoded_again() -> None:
    shelf, encoder = Shelf(), Counting()
    index = CardIndex(encoder.name)
    index.follow(CARDS)
    index.catch_up(shelf, encoder, seconds=60)
    index.follow((replace(CARDS[0], description="Other words"), *CARDS[1:]))
    index.catch_up(shelf, encoder, seconds=60)
    assert encoder.count == len(CARDS) + 1

    other = CardIndex("another")
    other.follow(CARDS)
    other.catch_up(shelf, encoder, seconds=60)
    assert encoder.count == 2 * len(CARDS) + 1


def spoilt(kept: CardFeatures, number: int) -> CardFeatures:
    """What a disk, or another program, may make of a sheet."""
    ways = (
        CardFeatures(b"\xff\x00abc", kept.vector), CardFeatures(kept.words[:-3], kept.vector), CardFeatures(b"", b""),
        CardFeatures(kept.words, b"short"),
        CardFeatures(kept.words, bytes(SIZE - 4) + np.array([np.nan], "<f4").tobytes()),
    )  # fmt: skip
    return ways[number % len(ways)]


def test_damaged_features_are_rebuilt_and_other_items_are_found() -> None:
    cards = [card(f"mail_{number}", f"Send letter number{number}") for number in range(100)]
    shelf, encoder = Shelf(), Counting()
    whole = CardIndex(encoder.name)
    whole.follow(cards)
    whole.catch_up(shelf, encoder, seconds=60)
    before = dict(shelf.kept)
    shelf.kept.update({digest: spoilt(shelf.kept[digest], at) for at, digest in enumerate([*before][:10])})

    again = CardIndex(encoder.name)
    again.follow(cards)
    assert not again.catch_up(shelf, encoder, seconds=60)

    assert again.progress == (100, 100, 100)
    assert found(again, "letter") == found(whole, "letter")
    assert shelf.kept == before
    assert encoder.count == 110


def test_few_long_cards_are_not_indexed_during_the_search() -> None:
    index = CardIndex()
    index.follow([card(f"mail_{number}", "Send a letter. " * 10_000) for number in range(3)])
    assert index.progress == (3, 0, 0)
    assert not index.catch_up(None, None, seconds=60)
    assert found(index, "letter").total == 3


WORDS = ("mail", "send", "weather", "file", "read", "write", "search", "the", "user", "data", "city", "page")
texts = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)
lists = st.lists(st.tuples(st.sampled_from(WORDS), texts), max_size=12, unique_by=lambda pair: pair[0])


@pytest.mark.slow
@given(steps=st.lists(lists, min_size=1, max_size=12), query=texts | st.text(max_size=40))
@settings(max_examples=40, deadline=None)
def test_the_answer_depends_on_the_cards_and_not_on_the_indexing_order(
    steps: list[list[tuple[str, str]]], query: str
) -> None:
    index = CardIndex()
    for step in steps:
        followed(tuple(card(*pair) for pair in step), index)

    assert _shown(found(index, query)) == _shown(found(followed([card(*pair) for pair in steps[-1]]), query))


def _shown(ranked: RankedHits) -> object:
    # What is gone is still counted by how rare a word is until segments are made anew, so scores differ by a little.
    return ranked.total, {hit.card.identity for hit in ranked.hits}
