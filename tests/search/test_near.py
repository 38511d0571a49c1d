"""Similar names for a request without hits."""

from __future__ import annotations

from hashlib import sha256
from time import process_time

import pytest

from kiwi_mcp.domain.cards import Card
from kiwi_mcp.search.index import CardIndex
from kiwi_mcp.search.query import parse_query, terms_of
from kiwi_mcp.search.ranking import near_misses

LETTERS = str.maketrans("0123456789", "ghijklmnop")
CARDS = tuple(
    Card("project", "local", name, "1", name=name, description=name) for name in ("planes", "cloudAtlas", "stones")
)


def near(query: str, *, limit: int = 5, without: str = "") -> list[str]:
    index = CardIndex()
    index.follow(CARDS)
    found = near_misses(parse_query(query, None), [index], limit=limit, keeps=lambda card: card.tool_id != without)
    return [card.tool_id for card in found]


def test_similar_names_are_sorted_by_similarity() -> None:
    assert near("plaines") == ["planes"]
    assert near("cloudy stone") == ["cloudAtlas", "stones"]
    assert near("stonnes", limit=1) == ["stones"]
    assert near("xyz") == []
    assert near("") == []


def test_a_filtered_name_is_not_suggested() -> None:
    assert near("plaines", without="planes") == []


@pytest.mark.slow
def test_a_long_request_without_hits_is_compared_quickly() -> None:
    index = CardIndex()
    index.follow([Card("project", "local", f"{stone(n)}_{stone(n + 7)}", "1", str(n)) for n in range(5_000)])
    index.catch_up(None, None, seconds=60)
    asked = parse_query(" ".join(f"{'qxz' * 12}{n:04}" for n in range(100)), None)
    begun = process_time()
    assert near_misses(asked, [index], limit=5, keeps=lambda _: True) == []
    assert terms_of(asked, [index]).keys() == asked.counted[0].keys()
    assert process_time() - begun < 2.5  # it took four seconds where each word was compared with each name


def stone(number: int) -> str:
    """Some word."""
    return sha256(str(number).encode()).hexdigest()[:12].translate(LETTERS)
