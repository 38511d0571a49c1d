"""Homes: where items are, told in few words to whoever found nothing that fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_

from kiwi_mcp.search.port import Card

_NAMED = 12
"""How many words of a kind are told of."""


class Homes:
    """What was last told of the homes of some cards; it is not found out again as long as they are the same."""

    def __init__(self) -> None:
        self._told: tuple[Sequence[Sequence[Card]], str] = ((), "")

    def of(self, groups: Sequence[Sequence[Card]]) -> str:
        """Return where the cards of some groups are at home; a group that never changes is the same object again."""
        known, told = self._told
        if len(known) != len(groups) or not all(map(is_, known, groups)):
            told = homes_of([*chain.from_iterable(groups)])
            self._told = (groups, told)
        return told


def homes_of(known: Sequence[Card]) -> str:
    """Return where items are at home here, or their names where they have no home."""
    servers = Counter(card.server for card in known if card.server)
    # An item of a server's own name says how it is reached, which is no use to whoever looks for a tool.
    others = (card for card in known if card.category and not card.server and card.tool_id not in servers)
    kinds = {"servers": most(servers), "categories": most(card.category for card in others)}
    homes = [f"{kind} {names}" for kind, names in kinds.items() if names]
    there = "; ".join(homes) or most(card.tool_id for card in known)
    return f" Here: {there}." if there else ""


def most(names: Iterable[str] | Counter[str]) -> str:
    """Return names, those of most first, and how many more there are."""
    counted = names if isinstance(names, Counter) else Counter(names)
    ordered = sorted(counted, key=lambda name: (-counted[name], name))
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return ", ".join(f"`{name[:60]}`" for name in ordered[:_NAMED]) + more
