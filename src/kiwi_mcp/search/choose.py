"""Filters over cards, and the orders in which hits can be shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.search.port import Card, Hit

SortBy = Literal["score", "date", "name"]

_ORDERS: Mapping[str, Callable[[Hit], float | tuple[str, ...]]] = MappingProxyType(
    {
        "score": lambda hit: -hit.score,
        "date": lambda hit: -hit.card.modified,
        "name": lambda hit: (hit.card.tool_id, hit.card.identity),
    }
)


@dataclass(frozen=True, slots=True)
class Filter:
    """Which cards to look at; an empty list of words lets all through."""

    types: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()

    def keeps(self, card: Card) -> bool:
        """Whether a card passes: one of the words for each kind that is named; a category covers those below it."""
        return (
            _passes(card.tool_type, self.types)
            and _passes(card.source, self.sources)
            and _passes(card.server, self.servers)
            and (not self.tags or not {*self.tags}.isdisjoint(card.tags))
            and (not self.categories or any(f"{card.category}/".startswith(f"{word}/") for word in self.categories))
        )


def arrange(hits: Sequence[Hit], sort_by: str) -> Sequence[Hit]:
    """Return hits in the order asked for; equals stay best first."""
    if sort_by not in _ORDERS:
        raise InvalidRequest(
            f"`sort_by` is {sort_by!r}, which is not an order.",
            suggestion=f"Use one of: {', '.join(get_args(SortBy))}.",
        )
    return sorted(hits, key=_ORDERS[sort_by])


def _passes(word: str, wanted: Sequence[str]) -> bool:
    return not wanted or word in wanted
