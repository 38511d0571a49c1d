"""What one search looks at, and a short description of where its items are."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import is_

from kiwi_mcp.domain.cards import Card
from kiwi_mcp.domain.errors import KiwiError, Unavailable
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.search.index import IndexProgress
from kiwi_mcp.search.port import Encoder, Filter
from kiwi_mcp.search.query import CardPool, ParsedQuery, parse_query
from kiwi_mcp.search.server_index import CandidatePool, ServerIndex
from kiwi_mcp.search.source_index import SourceIndex

_log = logging.getLogger("kiwi")
_SEVERAL = 2
_NAMED = 12
"""How many names of a kind are shown."""


class SearchView:
    """The indexes of some sources at one moment, the index of a registry on a server if there is one, the encoder."""

    def __init__(
        self,
        indexes: Sequence[SourceIndex],
        server: ServerIndex | None = None,
        encoder: Encoder | None = None,
        *,
        begun: IndexProgress,
        locations: LocationSummary,
        is_loading: bool = False,
    ) -> None:
        self._indexes = indexes
        self._server = server
        self._encoder = encoder
        # The progress before anything was ranked: what is indexed meanwhile may not be in the response.
        self._begun = begun
        self._locations = locations
        self._is_partial = is_loading or bool(server and server.is_behind)
        self._candidates: CandidatePool | None = None
        self.faults: list[KiwiError] = []
        """Why the server could not be asked, and why search by meaning is not available, if so."""

    def parse(self, query: str) -> ParsedQuery:
        """Return a query, parsed; it is encoded only if there is something to compare it with."""
        is_compared = self._server is not None or self._begun.encoded
        if self._encoder is None or not is_compared:
            return parse_query(query, None)
        try:
            return parse_query(query, self._encoder)
        except Exception as error:  # noqa: BLE001 - if the encoder fails in any way, words are enough to search
            _log.warning("a request could not be encoded: %r", error)
            self.faults.append(
                Unavailable(
                    f"The encoder failed ({error!r:.200}): the search used words only.",
                    suggestion="`kiwi doctor` reports on the encoder.",
                )
            )
            return parse_query(query, None)

    def pools(self, need: ParsedQuery, wanted: Filter, recalled: Sequence[str] = ()) -> Sequence[CardPool]:
        """Return what is ranked for a query: all local cards, and the candidates that a server found or recalled."""
        indexes = [one.index for one in self._indexes]
        if self._server is not None:
            try:
                self._candidates = self._server.pool(need, wanted, recalled)
            except KiwiError as fault:
                self.faults.append(fault)
        return [*indexes, self._candidates] if self._candidates else indexes

    @property
    def is_on_server(self) -> bool:
        """Whether some items are on a server, which finds items and does not list them."""
        return self._server is not None

    @property
    def cards(self) -> Iterator[Card]:
        """Every known card, indexed or not."""
        return chain((card for one in self._indexes for card in one.cards), self._from_server)

    def locations(self, sees: Callable[[Card], bool] | None = None) -> str:
        """Describe where the items are that pass `sees`; None means all items."""
        if sees is None and self._server is None:
            return self._locations.of(self.sample)
        cards = chain(*self.sample, self._from_server)
        return describe_locations([card for card in cards if sees is None or sees(card)])

    @property
    def sample(self) -> Sequence[Sequence[Card]]:
        """Enough cards of each source to describe where its items are."""
        return [one.sample for one in self._indexes]

    @property
    def _from_server(self) -> Iterator[Card]:
        """The cards that a server found."""
        return (card for segment in (self._candidates.segments if self._candidates else ()) for card in segment.cards)

    def is_shared(self, name: str, sees: Callable[[Card], bool] | None = None) -> bool:
        """Whether several items that pass `sees` have a name; None means all items."""
        local = [one.index.named(name) for one in self._indexes]
        found = self._candidates.named(name) if self._candidates else ()
        if len(found) + sum(map(len, local)) < _SEVERAL:
            return False
        places = sum(len({card.namespace for card in cards if sees is None or sees(card)}) for cards in local)
        return places + len([card for card in found if sees is None or sees(card)]) >= _SEVERAL

    @property
    def progress(self) -> IndexProgress:
        """How many items there are, how many can be found by words, and how many by meaning."""
        return total_progress(self._indexes, self._server)

    @property
    def indexing(self) -> JsonObject | None:
        """The progress of the index in numbers; None if it is complete."""
        cards, worded, encoded = self._begun
        if worded == cards and (encoded == cards or self._encoder is None) and not self._is_partial:
            return None
        return {"cards": cards, "words": worded, "meaning": encoded}


def total_progress(indexes: Sequence[SourceIndex], server: ServerIndex | None = None) -> IndexProgress:
    """Return the progress of some indexes, and of a registry on a server, together."""
    each = [*(one.index.progress for one in indexes), *([server.progress] if server else ())]
    return IndexProgress(*map(sum, zip(*each, strict=True))) if each else IndexProgress(0, 0, 0)


class LocationSummary:
    """The last description of where items are; it is reused as long as the cards are the same objects."""

    def __init__(self) -> None:
        self._last: tuple[Sequence[Sequence[Card]], str] = ((), "")

    def of(self, groups: Sequence[Sequence[Card]]) -> str:
        """Describe where the cards of some groups are."""
        known, description = self._last
        if len(known) != len(groups) or not all(map(is_, known, groups)):
            description = describe_locations([*chain.from_iterable(groups)])
            self._last = (groups, description)
        return description


def describe_locations(cards: Sequence[Card]) -> str:
    """Return the servers and categories of some cards, or their names if they have neither."""
    servers = Counter(card.server for card in cards if card.server)
    # An item with a server's own name says how to reach the server, which does not help a search for a tool.
    others = (card for card in cards if card.category and not card.server and card.tool_id not in servers)
    kinds = {"servers": list_names(servers), "categories": list_names(card.category for card in others)}
    places = [f"{kind} {names}" for kind, names in kinds.items() if names]
    listed = "; ".join(places) or list_names(card.tool_id for card in cards)
    return f" Here: {listed}." if listed else ""


def list_names(names: Iterable[str] | Counter[str]) -> str:
    """Return names, the most frequent first, and how many more there are."""
    counted = names if isinstance(names, Counter) else Counter(names)
    ordered = sorted(counted, key=lambda name: (-counted[name], name))
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return ", ".join(f"`{name[:60]}`" for name in ordered[:_NAMED]) + more
