"""Near misses: what there is that is close to a request which nothing answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from heapq import nsmallest
from itertools import islice
from typing import TypeAlias

from kiwi_mcp.search.port import Card, Floats
from kiwi_mcp.search.request import Pool, Request
from kiwi_mcp.search.segment import Segment
from kiwi_mcp.search.words import words

_NEAR, _ALIKE = 0.1, 0.3
"""How near in meaning, or alike in letters, something has to be at least."""
_MOST_NAMES = 20_000
"""How many names are compared letter by letter."""

Keeps: TypeAlias = Callable[[Card], bool]


def nearest(request: Request, pools: Sequence[Pool], *, limit: int, keeps: Keeps) -> Sequence[Card]:
    """Return the cards that are closest to a request, by meaning where that can be told, else by their names."""
    segments = [segment for pool in pools for segment in pool.segments]
    found: list[tuple[float, Card]] = []
    if request.vectors is not None:
        found = [one for segment in segments for one in islice(_by_meaning(request.vectors, segment, keeps), limit)]
    best = found or [*_by_name([*request.counted[0]], segments, keeps)]
    return [card for _, card in nsmallest(limit, best, key=lambda one: (-one[0], one[1].tool_id, one[1].identity))]


def _by_meaning(vectors: Floats, segment: Segment, keeps: Keeps) -> Iterator[tuple[float, Card]]:
    """Give what is at all near, nearest first."""
    near = segment.nearness(vectors).max(axis=0)
    near[~(segment.is_alive & segment.is_encoded)] = 0
    (slots,) = (near >= _NEAR).nonzero()
    for slot in slots[(-near[slots]).argsort(kind="stable")].tolist():
        if keeps(segment.cards[slot]):
            yield float(near[slot]), segment.cards[slot]


def _by_name(asked: Sequence[str], segments: Sequence[Segment], keeps: Keeps) -> Iterator[tuple[float, Card]]:
    letters = [_pairs(word) for word in asked]
    living = (one.cards[slot] for one in segments for slot in one.is_alive.nonzero()[0].tolist())
    for card in islice(living, _MOST_NAMES):
        own = [_pairs(word) for word in words(card.tool_id)]
        alike = max((len(one & other) / len(one | other) for one in letters for other in own), default=0.0)
        if alike >= _ALIKE and keeps(card):
            yield alike, card


def _pairs(word: str) -> AbstractSet[str]:
    """Return the pairs of letters of a word, its edges included."""
    framed = f" {word} "
    return {framed[at : at + 2] for at in range(len(framed) - 1)}
