"""Near misses: what there is whose name looks like a request that nothing answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from heapq import nsmallest
from itertools import islice
from time import monotonic

from kiwi_mcp.search.port import Card
from kiwi_mcp.search.request import Pool, Request
from kiwi_mcp.search.words import words

_ALIKE = 0.3
"""How much of their letters two words have in common at least."""
_MOST_WORDS, _MOST_NAMES = 8, 20_000
"""How many words of a request are compared with how many names."""
_PATIENCE = 0.25
"""For how many seconds they are: this is a courtesy, and whoever asked waits for it."""


def nearest(request: Request, pools: Sequence[Pool], *, limit: int, keeps: Callable[[Card], bool]) -> Sequence[Card]:
    """Return the cards with the names that are most like a word of a request, which may be mistyped beyond a slip."""
    asked = [*map(_pairs, islice(request.counted[0], _MOST_WORDS))]
    found = _alike(asked, filter(keeps, _living(pools)), monotonic() + _PATIENCE) if asked else ()
    best = nsmallest(limit, found, key=lambda one: (-one[0], one[1].tool_id, one[1].identity))
    return [card for _, card in best]


def _living(pools: Sequence[Pool]) -> Iterator[Card]:
    segments = (segment for pool in pools for segment in pool.segments)
    living = (one.cards[slot] for one in segments for slot in one.living.tolist())
    return islice(living, _MOST_NAMES)


def _alike(asked: Sequence[AbstractSet[str]], cards: Iterator[Card], until: float) -> Iterator[tuple[float, Card]]:
    @cache  # names have words in common
    def likeness(word: str) -> float:
        own = _pairs(word)
        return max(len(one & own) / len(one | own) for one in asked)

    for card in cards:
        alike = max(map(likeness, words(card.tool_id)), default=0.0)
        if alike >= _ALIKE:
            yield alike, card
        if monotonic() > until:
            return


def _pairs(word: str) -> AbstractSet[str]:
    """Return the pairs of letters of a word, its edges included."""
    framed = f" {word} "
    return {framed[at : at + 2] for at in range(len(framed) - 1)}
