"""A frozen index gives the same results and follows its cards afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.cards import Card
from kiwi_mcp.search.index import CardIndex
from kiwi_mcp.search.index_file import DamagedIndex, deserialize, serialize, split
from kiwi_mcp.search.port import Floats, Hit
from kiwi_mcp.search.query import parse_query
from kiwi_mcp.search.ranking import rank

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
        "mcp", "one", f"{noun}_{number}", "1.0.0", f"mcp/{number}", description=said or f"Does {noun} number {number}",
        tags=("a", noun), parameters=((noun, "what it is"), ("other", "")),
    )  # fmt: skip


def index_of(*batches: Sequence[Card]) -> CardIndex:
    index = CardIndex("shapes")
    cards: list[Card] = []
    for batch in batches:
        cards = [*cards, *batch]
        index.follow(cards)
        index.catch_up(None, Shapes(), seconds=60)
    return index


def joined(index: CardIndex) -> bytes:
    return b"".join(serialize(index))


def hits(index: CardIndex, query: str) -> Sequence[Hit]:
    return rank(parse_query(query, Shapes()), [index], limit=10).hits


@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(0, 40), min_size=1), st.integers(0, 5), st.sampled_from([*NOUNS, "invoice_0", "nothing"]))
def test_a_frozen_index_gives_the_same_results(numbers: set[int], gone: int, query: str) -> None:
    cards = [card(number) for number in sorted(numbers)]
    index = index_of(cards[: len(cards) // 2], cards)
    index.follow(cards[gone:])
    thawed = deserialize(split(memoryview(bytearray(joined(index))))[0], "shapes")
    assert thawed.progress == index.progress
    assert hits(thawed, query) == hits(index, query)
    assert thawed.named("invoice_0") == index.named("invoice_0")
    items = ["mcp/one/invoice_0", "mcp/one/weather_1", "mcp/one/nothing"]
    for was, now in zip(index.segments, thawed.segments, strict=True):
        assert now.of_items(items) == was.of_items(items)


def test_a_restored_index_follows_its_cards() -> None:
    cards = [card(number) for number in range(20)]
    thawed = deserialize(split(memoryview(bytearray(joined(index_of(cards)))))[0], "shapes")
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
def test_a_tampered_card_is_refused_by_name(was: bytes, planted: bytes) -> None:
    whole = joined(index_of([card(number) for number in range(10)]))
    assert was in whole
    thawed = deserialize(
        split(memoryview(bytearray(whole.replace(was, planted.ljust(len(was))[: len(was)], 1))))[0], "shapes"
    )
    with pytest.raises(DamagedIndex):
        thawed.active()


FROZEN = joined(index_of([card(number) for number in range(10)], [card(number) for number in range(10, 20)]))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(FROZEN) - 1), st.integers(0, 255)), min_size=1, max_size=20))
def test_any_planted_data_is_searched_or_refused_by_name(planted: list[tuple[int, int]]) -> None:
    data = bytearray(FROZEN)
    for place, byte in planted:
        data[place] = byte
    # These are refused before any search.
    with suppress(DamagedIndex, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        searched(deserialize(split(memoryview(data))[0], "shapes"))


def searched(index: CardIndex) -> None:
    try:
        hits(index, "invoice number 3")
        index.follow([card(number) for number in range(5, 25)])
        index.catch_up(None, Shapes(), seconds=60)
        hits(index, "weather")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise AssertionError from error


def test_an_index_in_one_buffer_has_the_same_content() -> None:
    cards = [card(number) for number in range(30)]
    index = index_of(cards[:10], cards[10:20], cards[20:])
    index.follow(cards[5:])
    one = index.merged()
    assert len(one.segments) == 1
    assert one.progress == index.progress == (25, 25, 25)
    assert next(hit.card for hit in hits(one, "invoice_12")) == cards[12]
    assert hits(deserialize(split(memoryview(bytearray(joined(one))))[0], "shapes"), "weather") == hits(one, "weather")
