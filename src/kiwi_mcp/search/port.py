"""Search as a port: cards in, hits out, best first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Card:
    """An item as a search shows it: enough to choose by, not enough to run."""

    identity: str
    tool_id: str
    name: str = ""
    description: str = ""
    tags: tuple[str, ...] = ()
    category: str = ""
    parameters: tuple[tuple[str, str], ...] = ()
    """Names and descriptions."""
    source: str = ""
    tool_type: str = ""
    path: str = ""
    modified: float = 0.0


@dataclass(frozen=True, slots=True)
class Hit:
    """A card that answers a query: how well, from 0 (excluded) to 1, and which words of the query it holds."""

    card: Card
    score: float
    why: tuple[str, ...]


class Search(Protocol):
    """Ranks cards by a need that is told in words."""

    def rank(self, query: str, cards: Sequence[Card], *, limit: int) -> Sequence[Hit]:
        """Return the cards that match, best first; those that do not match are left out."""
