"""Search quality on the corpus of the benchmarks, so that a regression is seen."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import log2
from pathlib import Path
from statistics import mean, quantiles
from time import perf_counter

import pytest
from msgspec.structs import replace

from kiwi_mcp.domain.cards import Card
from kiwi_mcp.search.encoder import load_encoder
from kiwi_mcp.search.index import CardIndex
from kiwi_mcp.search.port import Encoder
from kiwi_mcp.search.query import parse_query
from kiwi_mcp.search.ranking import rank

CORPUS = Path(__file__).parents[2] / "benchmarks" / "corpus"
TOP = 10

Need = tuple[str, frozenset[str]]
"""A request, and the items that it is for."""


@cache
def cards() -> Sequence[Card]:
    return [card_of(json.loads(line)) for line in (CORPUS / "tools.jsonl").read_text(encoding="utf-8").splitlines()]


@cache
def needs() -> Sequence[Need]:
    lines = map(json.loads, (CORPUS / "queries.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["query"], frozenset(line["gold"])) for line in lines]


def card_of(tool: dict[str, str] | dict[str, dict[str, str]]) -> Card:
    """Return a tool of the corpus as search sees one that an MCP server offers."""
    response = {word: str(tool[word]) for word in ("id", "source", "name", "description")}
    asked = tool.get("parameters", {})
    assert isinstance(asked, dict)
    return Card(
        tool_id=response["name"],
        path=response["id"],
        name=response["name"],
        description=response["description"],
        parameters=tuple(asked.items()),
        source="mcp",
        tool_type="mcp_tool",
        category=response["source"],
        tags=("mcp", "tool"),
        namespace=response["source"],
        server=response["source"],
    )


def others(count: int) -> Iterator[Card]:
    """Give cards beside those of the corpus: the first half of one, the second half of another."""
    chance = random.Random(1)
    for number in range(count):
        first, second = chance.choice(cards()), chance.choice(cards())
        head, tail = first.description.split(), second.description.split()
        yield replace(
            second,
            path=f"other/{number}",
            tool_id=f"{first.tool_id.partition('_')[0]}_{second.tool_id.rpartition('_')[2]}",
            name="",
            description=" ".join((*head[: len(head) // 2], *tail[len(tail) // 2 :])),
        )


def indexed(found: Sequence[Card], encoder: Encoder | None) -> CardIndex:
    index = CardIndex(encoder.name if encoder else "")
    index.follow(found)
    assert not index.catch_up(None, encoder, seconds=60)
    return index


def answers(index: CardIndex, encoder: Encoder | None) -> Iterator[tuple[float, list[bool], int]]:
    """Give for each request how long the answer took, which of its hits are wanted, and how many items are."""
    for text, gold in needs():
        began = perf_counter()
        hits = rank(parse_query(text, encoder), [index], limit=TOP).hits
        yield perf_counter() - began, [hit.card.path in gold for hit in hits], len(gold)


def ndcg(hits: Sequence[bool], wanted: int) -> float:
    gained = sum(1 / log2(place + 2) for place, hit in enumerate(hits) if hit)
    return gained / sum(1 / log2(place + 2) for place in range(min(wanted, TOP)))


def quality(index: CardIndex, encoder: Encoder | None) -> tuple[float, float]:
    """Return the share of requests with something wanted among the first five, and nDCG at ten, in per cent."""
    found = [(hits, wanted) for _, hits, wanted in answers(index, encoder)]
    return 100 * mean(any(hits[:5]) for hits, _ in found), 100 * mean(ndcg(*one) for one in found)


def test_words_alone_find_the_right_tool_for_most_requests() -> None:
    hit_at_5, ndcg_at_10 = quality(indexed(cards(), None), None)

    assert hit_at_5 > 60
    assert ndcg_at_10 > 56


@pytest.mark.slow
def test_meaning_finds_requests_in_other_words() -> None:
    encoder = load_encoder()
    assert encoder is not None
    _, by_words = quality(indexed(cards(), None), None)

    hit_at_5, ndcg_at_10 = quality(indexed(cards(), encoder), encoder)

    assert hit_at_5 > 68
    assert ndcg_at_10 > max(65, by_words + 5)


@pytest.mark.req("E8")
@pytest.mark.parametrize(("count", "floor"), [(100, 56), (1_000, 48), pytest.param(10_000, 38, marks=pytest.mark.slow)])
def test_the_right_tool_is_found_among_many(
    count: int, floor: float, record_property: Callable[[str, object], None]
) -> None:
    index = indexed([*cards(), *others(count)], None)

    found = [*answers(index, None)]

    hit_at_5 = 100 * mean(any(hits[:5]) for _, hits, _ in found)
    record_property("hit@5", round(hit_at_5, 1))
    record_property("p95 ms", round(quantiles([took for took, _, _ in found], n=20)[-1] * 1_000, 2))
    assert hit_at_5 > floor
