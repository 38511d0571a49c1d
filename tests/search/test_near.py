"""Near misses: what is closest where nothing answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kiwi_mcp.search.index import Index
from kiwi_mcp.search.near import nearest
from kiwi_mcp.search.port import Card, Encoder, Floats
from kiwi_mcp.search.request import read_request


class Angles:
    """An encoder that gives each text the angle that it is named by."""

    name, dimension = "angles", 384

    def encode(self, texts: Sequence[str]) -> Floats:
        rows = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in zip(rows, texts, strict=True):
            angle = next(value for word, value in ANGLES.items() if word in text)
            row[:2] = np.cos(angle), np.sin(angle)
        return rows


ANGLES = {"birds": 0.0, "planes": 1.35, "clouds": 1.4, "stones": 2.0}
CARDS = tuple(Card(f"project/local/{name}@1", name, name, name) for name in ("planes", "clouds", "stones"))


def near(query: str, *, encoder: Encoder | None = None, limit: int = 5, without: str = "") -> list[str]:
    index = Index(encoder.name if encoder else "")
    index.follow(CARDS)
    index.catch_up(None, encoder, seconds=10)
    found = nearest(read_request(query, encoder), [index], limit=limit, keeps=lambda card: card.tool_id != without)
    return [card.tool_id for card in found]


def test_what_is_a_little_near_in_meaning_comes_nearest_first_and_what_is_not_is_left_out() -> None:
    assert near("birds", encoder=Angles()) == ["planes", "clouds"]
    assert near("birds", encoder=Angles(), limit=1) == ["planes"]
    assert near("birds", encoder=Angles(), limit=1, without="planes") == ["clouds"]


def test_without_meaning_names_that_look_alike_are_near() -> None:
    assert near("plaines") == ["planes"]
    assert near("cloudy stone") == ["stones", "clouds"]
    assert near("xyz") == []
    assert near("") == []
