"""Search as a port: cards in, hits out, best first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    held: Callable[[Card], tuple[str, ...]] = field(compare=False, repr=False)
    """Finds the words of the query that a card holds, which is asked of the few hits that are shown."""

    @property
    def why(self) -> tuple[str, ...]:
        """Which words of the query the card holds."""
        return self.held(self.card)


class Search(Protocol):
    """Ranks cards by a need that is told in words."""

    def rank(self, query: str, cards: Sequence[Card], *, limit: int) -> Sequence[Hit]:
        """Return the cards that match, best first; those that do not match are left out."""
