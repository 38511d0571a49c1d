"""A frozen index is searched exactly as it was, and follows its cards from there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.search.frozen import DamagedIndex, freeze, thaw
from kiwi_mcp.search.index import Index
from kiwi_mcp.search.port import Card, Floats, Hit
from kiwi_mcp.search.ranking import rank
from kiwi_mcp.search.request import read_request

NOUNS = ("invoice", "weather", "branch", "calendar", "payment", "größe")


class Shapes:
    """An encoder for tests: by the letters of a text."""

    name, dimension = "shapes", 384

    def encode(self, texts: Sequence[str]) -> Floats:
        rows = np.zeros((len(texts), 384), np.float32)
        for row, text in zip(rows, texts, strict=True):
            row[[ord(letter) % 384 for letter in text] or [0]] += 1
        unit: Floats = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return unit


def card(number: int, said: str = "") -> Card:
    noun = NOUNS[number % len(NOUNS)]
    return Card(
        f"mcp/one/{noun}_{number}@1.0.0", f"{noun}_{number}", description=said or f"Does {noun} number {number}",
        tags=("a", noun), parameters=((noun, "what it is"), ("other", "")), source="mcp", path=f"mcp/{number}",
    )  # fmt: skip


def index_of(*batches: Sequence[Card]) -> Index:
    index = Index("shapes")
    cards: list[Card] = []
    for batch in batches:
        cards = [*cards, *batch]
        index.follow(cards)
        index.catch_up(None, Shapes(), seconds=60)
    return index


def hits(index: Index, query: str) -> Sequence[Hit]:
    return rank(read_request(query, Shapes()), [index], limit=10).hits


@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(0, 40), min_size=1), st.integers(0, 5), st.sampled_from([*NOUNS, "invoice_0", "nothing"]))
def test_what_was_frozen_is_searched_as_it_was(numbers: set[int], gone: int, query: str) -> None:
    cards = [card(number) for number in sorted(numbers)]
    index = index_of(cards[: len(cards) // 2], cards)
    index.follow(cards[gone:])
    thawed = thaw(memoryview(bytearray(freeze(index))), "shapes")
    assert thawed.progress == index.progress
    assert hits(thawed, query) == hits(index, query)
    assert thawed.named("invoice_0") == index.named("invoice_0")
    items = ["mcp/one/invoice_0", "mcp/one/weather_1", "mcp/one/nothing"]
    for was, now in zip(index.segments, thawed.segments, strict=True):
        assert now.of_items(items) == was.of_items(items)


def test_what_was_thawed_follows_its_cards() -> None:
    cards = [card(number) for number in range(20)]
    thawed = thaw(memoryview(bytearray(freeze(index_of(cards)))), "shapes")
    changed = [card(0, "Mows the lawn"), *cards[1:10], card(99, "Mows the lawn")]
    thawed.follow(changed)
    thawed.catch_up(None, Shapes(), seconds=60)
    assert thawed.progress == (11, 11, 11)
    assert {hit.card.tool_id for hit in hits(thawed, "lawn") if hit.why.words} == {"invoice_0", "calendar_99"}
    assert not [hit for hit in hits(thawed, "invoice_12") if hit.why.is_exact]


@pytest.mark.parametrize(
    ("was", "planted"),
    [
        (b'"Does weather number 1"', b'["oes weather number"  ]'),
        (b'"Does weather number 1"', b'"Does weather number \xff"'),
        (b'"Does weather number 1"', b'"Does weather number 1\x00'),
        (b'["a","weather"]', b'["a",[123456]]'),
        (b'["other",""]', b'["other",1 ]'),
        (b'["other",""]', b'["oth","",""]'),
    ],
)
def test_a_card_that_somebody_has_tampered_with_is_refused_by_name(was: bytes, planted: bytes) -> None:
    whole = freeze(index_of([card(number) for number in range(10)]))
    assert was in whole
    thawed = thaw(memoryview(bytearray(whole.replace(was, planted.ljust(len(was))[: len(was)], 1))), "shapes")
    with pytest.raises(DamagedIndex):
        thawed.living()


FROZEN = freeze(index_of([card(number) for number in range(10)], [card(number) for number in range(10, 20)]))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(FROZEN) - 1), st.integers(0, 255)), min_size=1, max_size=20))
def test_whatever_is_planted_is_searched_or_refused_by_name(planted: list[tuple[int, int]]) -> None:
    data = bytearray(FROZEN)
    for place, byte in planted:
        data[place] = byte
    # These are refused before anybody searches.
    with suppress(DamagedIndex, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        searched(thaw(memoryview(data), "shapes"))


def searched(index: Index) -> None:
    try:
        hits(index, "invoice number 3")
        index.follow([card(number) for number in range(5, 25)])
        index.catch_up(None, Shapes(), seconds=60)
        hits(index, "weather")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise AssertionError from error


def test_an_index_in_one_piece_holds_the_same() -> None:
    cards = [card(number) for number in range(30)]
    index = index_of(cards[:10], cards[10:20], cards[20:])
    index.follow(cards[5:])
    one = index.gathered()
    assert len(one.segments) == 1
    assert one.progress == index.progress == (25, 25, 25)
    assert next(hit.card for hit in hits(one, "invoice_12")) == cards[12]
    assert hits(thaw(memoryview(bytearray(freeze(one))), "shapes"), "weather") == hits(one, "weather")
