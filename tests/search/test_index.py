"""The index follows its cards as they come, change and go, and keeps what it made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.sheet import Kept
from kiwi_mcp.search.index import Index
from kiwi_mcp.search.port import Card, Floats
from kiwi_mcp.search.ranking import Ranked, rank
from kiwi_mcp.search.request import read_request
from kiwi_mcp.search.sheet import SIZE


def card(name: str, description: str = "") -> Card:
    return Card(f"project/local/{name}@1.0.0", name, name, description, source="project", path=f"/{name}.yaml")


CARDS = (card("weather", "Forecast for coordinates"), card("mail", "Send a letter"), card("page", "Read a page"))


class Shelf:
    """A keep in memory."""

    def __init__(self) -> None:
        self.kept: dict[bytes, Kept] = {}

    def read(self, digests: Sequence[bytes]) -> Mapping[bytes, Kept]:
        return {digest: self.kept[digest] for digest in digests if digest in self.kept}

    def write(self, kept: Mapping[bytes, Kept]) -> None:
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


def found(index: Index, query: str) -> Ranked:
    return rank(read_request(query, None), [index], limit=20)


def followed(cards: Sequence[Card], index: Index | None = None) -> Index:
    index = index or Index()
    index.follow(cards)
    index.catch_up(None, None, seconds=60)
    return index


def test_a_changed_list_of_cards_is_followed() -> None:
    index = followed(CARDS)
    before = found(index, "forecast")

    assert found(followed(CARDS[1:], index), "forecast") == Ranked([], 0)
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


def test_few_new_cards_are_found_at_once_and_many_after_the_index_has_caught_up() -> None:
    few, many = Index(), Index()
    few.follow(CARDS)
    assert found(few, "letter").total == 1

    many.follow([card(f"mail_{number}", "Send a letter") for number in range(500)])
    assert found(many, "letter").total == 0
    assert many.progress == (500, 0, 0)
    assert not many.catch_up(None, None, seconds=60)
    assert many.progress == (500, 500, 0)
    assert found(many, "letter").total == 500


@pytest.mark.req("E1")
def test_what_is_kept_is_not_made_again_and_without_it_the_same_is_made() -> None:
    shelf, encoder = Shelf(), Counting()
    first, second, third = (Index(encoder.name) for _ in range(3))
    for index in (first, second):
        index.follow([*CARDS, *(card(f"more_{number}") for number in range(200))])
        assert not index.catch_up(shelf, encoder, seconds=60)

    assert encoder.count == len(CARDS) + 200
    assert second.progress == first.progress == (203, 203, 203)
    shelf.kept.clear()
    third.follow([*CARDS, *(card(f"more_{number}") for number in range(200))])
    third.catch_up(shelf, encoder, seconds=60)
    assert found(third, "letter page") == found(first, "letter page")


def test_another_text_or_another_encoder_is_encoded_anew() -> None:
    shelf, encoder = Shelf(), Counting()
    index = Index(encoder.name)
    index.follow(CARDS)
    index.catch_up(shelf, encoder, seconds=60)
    index.follow((replace(CARDS[0], description="Other words"), *CARDS[1:]))
    index.catch_up(shelf, encoder, seconds=60)
    assert encoder.count == len(CARDS) + 1

    other = Index("another")
    other.follow(CARDS)
    other.catch_up(shelf, encoder, seconds=60)
    assert encoder.count == 2 * len(CARDS) + 1


def spoilt(kept: Kept, number: int) -> Kept:
    """What a disk, or another program, may make of a sheet."""
    ways = (
        Kept(b"\xff\x00abc", kept.vector), Kept(kept.words[:-3], kept.vector), Kept(b"", b""),
        Kept(kept.words, b"short"), Kept(kept.words, bytes(SIZE - 4) + np.array([np.nan], "<f4").tobytes()),
    )  # fmt: skip
    return ways[number % len(ways)]


def test_what_is_damaged_is_made_again_and_the_rest_is_found_as_ever() -> None:
    cards = [card(f"mail_{number}", f"Send letter number{number}") for number in range(100)]
    shelf, encoder = Shelf(), Counting()
    whole = Index(encoder.name)
    whole.follow(cards)
    whole.catch_up(shelf, encoder, seconds=60)
    before = dict(shelf.kept)
    shelf.kept.update({digest: spoilt(shelf.kept[digest], at) for at, digest in enumerate([*before][:10])})

    again = Index(encoder.name)
    again.follow(cards)
    assert not again.catch_up(shelf, encoder, seconds=60)

    assert again.progress == (100, 100, 100)
    assert found(again, "letter") == found(whole, "letter")
    assert shelf.kept == before
    assert encoder.count == 110


def test_few_long_cards_are_not_indexed_on_the_time_of_whoever_asks() -> None:
    index = Index()
    index.follow([card(f"mail_{number}", "Send a letter. " * 10_000) for number in range(3)])
    assert index.progress == (3, 0, 0)
    assert not index.catch_up(None, None, seconds=60)
    assert found(index, "letter").total == 3


WORDS = ("mail", "send", "weather", "file", "read", "write", "search", "the", "user", "data", "city", "page")
texts = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)
lists = st.lists(st.tuples(st.sampled_from(WORDS), texts), max_size=12, unique_by=lambda pair: pair[0])


@given(steps=st.lists(lists, min_size=1, max_size=12), query=texts | st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_the_answer_depends_on_the_cards_and_not_on_what_was_indexed_before(
    steps: list[list[tuple[str, str]]], query: str
) -> None:
    index = Index()
    for step in steps:
        followed(tuple(card(*pair) for pair in step), index)

    assert _shown(found(index, query)) == _shown(found(followed([card(*pair) for pair in steps[-1]]), query))


def _shown(ranked: Ranked) -> object:
    # What is gone is still counted by how rare a word is until segments are made anew, so scores differ by a little.
    return ranked.total, {hit.card.identity for hit in ranked.hits}
