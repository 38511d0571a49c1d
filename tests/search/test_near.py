"""Near misses: what looks most like a request that nothing answers."""

from __future__ import annotations

from hashlib import sha256
from time import process_time

from kiwi_mcp.search.index import Index
from kiwi_mcp.search.near import nearest
from kiwi_mcp.search.port import Card
from kiwi_mcp.search.request import read_request, terms_of

LETTERS = str.maketrans("0123456789", "ghijklmnop")
CARDS = tuple(Card(f"project/local/{name}@1", name, name, name) for name in ("planes", "cloudAtlas", "stones"))


def near(query: str, *, limit: int = 5, without: str = "") -> list[str]:
    index = Index()
    index.follow(CARDS)
    found = nearest(read_request(query, None), [index], limit=limit, keeps=lambda card: card.tool_id != without)
    return [card.tool_id for card in found]


def test_names_that_look_alike_are_near_the_likest_first() -> None:
    assert near("plaines") == ["planes"]
    assert near("cloudy stone") == ["cloudAtlas", "stones"]
    assert near("stonnes", limit=1) == ["stones"]
    assert near("xyz") == []
    assert near("") == []


def test_what_is_not_to_be_kept_is_not_near() -> None:
    assert near("plaines", without="planes") == []


def test_a_long_request_that_nothing_answers_is_compared_in_a_moment() -> None:
    index = Index()
    index.follow([Card(f"project/local/{n}@1", f"{stone(n)}_{stone(n + 7)}") for n in range(5_000)])
    index.catch_up(None, None, seconds=60)
    asked = read_request(" ".join(f"{'qxz' * 12}{n:04}" for n in range(100)), None)
    begun = process_time()
    assert nearest(asked, [index], limit=5, keeps=lambda _: True) == []
    assert terms_of(asked, [index]).keys() == asked.counted[0].keys()
    assert process_time() - begun < 1.5  # it took four seconds where each word was compared with each name


def stone(number: int) -> str:
    """Some word."""
    return sha256(str(number).encode()).hexdigest()[:12].translate(LETTERS)
