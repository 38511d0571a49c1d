"""Weak hits, checked with the corpus of the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import cache, partial
from pathlib import Path

import pytest

from kiwi_mcp.domain.cards import Card
from kiwi_mcp.kernel.verbs.search import is_weak
from kiwi_mcp.search.encoder import load_encoder
from kiwi_mcp.search.index import CardIndex
from kiwi_mcp.search.port import Encoder
from kiwi_mcp.search.query import parse_query
from kiwi_mcp.search.ranking import rank

CORPUS = Path(__file__).parents[2] / "benchmarks" / "corpus"


@cache
def cards() -> Sequence[Card]:
    tools = map(json.loads, (CORPUS / "tools.jsonl").read_text(encoding="utf-8").splitlines())
    return [
        Card(
            "mcp",
            one["source"],
            one["name"],
            path=one["id"],
            name=one["name"],
            description=one["description"],
            parameters=tuple(one.get("parameters", {}).items()),
            server=one["source"],
        )
        for one in tools
    ]


def is_of_others(gold: AbstractSet[str], card: Card) -> bool:
    """Whether a card is of other servers than those of the right ones."""
    return card.server not in {one.server for one in cards() if one.path in gold}


@pytest.mark.parametrize("is_by_meaning", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_most_absent_items_give_weak_hits_and_few_present_ones_do(is_by_meaning: bool) -> None:
    encoder: Encoder | None = load_encoder() if is_by_meaning else None
    if is_by_meaning and encoder is None:
        pytest.skip("there is no encoder here")
    index = CardIndex(encoder.name if encoder else "")
    index.follow(cards())
    assert not index.catch_up(None, encoder, seconds=120)
    right, absent = [], []
    for line in (CORPUS / "queries.jsonl").read_text(encoding="utf-8").splitlines():
        asked = json.loads(line)
        need, gold = parse_query(asked["query"], encoder), {*asked["gold"]}
        ranked = rank(need, [index], limit=1)
        if ranked.hits and ranked.hits[0].card.path in gold:
            right.append(is_weak(ranked, need))
        absent.append(is_weak(rank(need, [index], limit=1, keeps=partial(is_of_others, gold)), need))

    assert sum(right) < 0.2 * len(right)
    assert sum(absent) > 0.4 * len(absent)
