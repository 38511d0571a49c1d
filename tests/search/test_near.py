"""Near misses: what looks most like a request that nothing answers."""

from __future__ import annotations

from kiwi_mcp.search.index import Index
from kiwi_mcp.search.near import nearest
from kiwi_mcp.search.port import Card
from kiwi_mcp.search.request import read_request

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
