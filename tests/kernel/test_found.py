"""A match is called weak where it mostly is, and seldom where it is not: held against the benchmarks' own corpus."""

from __future__ import annotations

import json
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import cache, partial
from pathlib import Path

import pytest

from kiwi_mcp.kernel.found import is_weak
from kiwi_mcp.search.encoder import load_encoder
from kiwi_mcp.search.index import Index
from kiwi_mcp.search.port import Card, Encoder
from kiwi_mcp.search.ranking import rank
from kiwi_mcp.search.request import read_request

CORPUS = Path(__file__).parents[2] / "benchmarks" / "corpus"


@cache
def cards() -> Sequence[Card]:
    tools = map(json.loads, (CORPUS / "tools.jsonl").read_text(encoding="utf-8").splitlines())
    return [
        Card(
            one["id"],
            one["name"],
            one["name"],
            one["description"],
            parameters=tuple(one.get("parameters", {}).items()),
            server=one["source"],
        )
        for one in tools
    ]


def is_of_others(gold: AbstractSet[str], card: Card) -> bool:
    """Whether a card is of other servers than those of the right ones."""
    return card.server not in {one.server for one in cards() if one.identity in gold}


@pytest.mark.parametrize("is_by_meaning", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_is_absent_is_mostly_called_weak_and_what_is_right_seldom(is_by_meaning: bool) -> None:
    encoder: Encoder | None = load_encoder() if is_by_meaning else None
    if is_by_meaning and encoder is None:
        pytest.skip("there is no encoder here")
    index = Index(encoder.name if encoder else "")
    index.follow(cards())
    assert not index.catch_up(None, encoder, seconds=120)
    right, absent = [], []
    for line in (CORPUS / "queries.jsonl").read_text(encoding="utf-8").splitlines():
        asked = json.loads(line)
        need, gold = read_request(asked["query"], encoder), {*asked["gold"]}
        ranked = rank(need, [index], limit=1)
        if ranked.hits and ranked.hits[0].card.identity in gold:
            right.append(is_weak(ranked, need))
        absent.append(is_weak(rank(need, [index], limit=1, keeps=partial(is_of_others, gold)), need))

    assert sum(right) < 0.2 * len(right)
    assert sum(absent) > 0.4 * len(absent)
