"""A view: what one search looks at."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from kiwi_mcp.domain.errors import KiwiError, Unavailable
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel.homes import Homes, homes_of
from kiwi_mcp.kernel.searching.remote import Remote
from kiwi_mcp.kernel.searching.shelf import Shelf
from kiwi_mcp.search.choose import Filter
from kiwi_mcp.search.index import Progress
from kiwi_mcp.search.likely import Likely
from kiwi_mcp.search.port import Card, Encoder
from kiwi_mcp.search.request import Pool, Request, read_request

_log = logging.getLogger("kiwi")
_SEVERAL = 2


class View:
    """Some shelves as they are now, a registry on a server, if there is one, and the encoder, where it is there."""

    def __init__(
        self,
        shelves: Sequence[Shelf],
        remote: Remote | None = None,
        encoder: Encoder | None = None,
        *,
        begun: Progress,
        homes: Homes,
        is_loading: bool = False,
    ) -> None:
        self._shelves = shelves
        self._remote = remote
        self._encoder = encoder
        # As it was before anything was ranked: what is indexed meanwhile may not be in the answer.
        self._begun = begun
        self._homes = homes
        self._is_partial = is_loading or bool(remote and remote.is_behind)
        self._likely: Likely | None = None
        self.faults: list[KiwiError] = []
        """Why the server could not be asked, and why nobody can tell what is meant, if so."""

    def read(self, query: str) -> Request:
        """Return what is asked for; what it means only where there is something to compare that with."""
        is_compared = self._remote is not None or self._begun.encoded
        if self._encoder is None or not is_compared:
            return read_request(query, None)
        try:
            return read_request(query, self._encoder)
        except Exception as error:  # noqa: BLE001 - whatever befalls the encoder, there are words to search by
            _log.warning("a request could not be encoded: %r", error)
            self.faults.append(
                Unavailable(
                    f"The encoder failed ({error!r:.200}): what is asked for was found by its words only.",
                    suggestion="`kiwi doctor` tells of the encoder.",
                )
            )
            return read_request(query, None)

    def pools(self, need: Request, wanted: Filter, remembered: Sequence[str] = ()) -> Sequence[Pool]:
        """Return what is ranked for a need: all that is on shelves, and what of a server is likely or remembered."""
        shelves = [shelf.index for shelf in self._shelves]
        if self._remote is not None:
            try:
                self._likely = self._remote.pool(need, wanted, remembered)
            except KiwiError as fault:
                self.faults.append(fault)
        return [*shelves, self._likely] if self._likely else shelves

    @property
    def is_remote(self) -> bool:
        """Whether some of what it looks at is on a server, which finds it and does not list it."""
        return self._remote is not None

    @property
    def cards(self) -> Iterator[Card]:
        """Every item that is known here, whether it can be found already or not."""
        return chain((card for shelf in self._shelves for card in shelf.cards), self._on_server)

    def homes(self, sees: Callable[[Card], bool] | None = None) -> str:
        """Return where items are at home here, of those that are seen; None where all are."""
        if sees is None and self._remote is None:
            return self._homes.of(self.glimpse)
        cards = chain(*self.glimpse, self._on_server)
        return homes_of([card for card in cards if sees is None or sees(card)])

    @property
    def glimpse(self) -> Sequence[Sequence[Card]]:
        """Enough of what is on each shelf to tell where items are at home here."""
        return [shelf.glimpse for shelf in self._shelves]

    @property
    def _on_server(self) -> Iterator[Card]:
        """The cards that a server found."""
        return (card for segment in (self._likely.segments if self._likely else ()) for card in segment.cards)

    def is_shared(self, name: str, sees: Callable[[Card], bool] | None = None) -> bool:
        """Whether several items have a name, of those that are seen; None where all are."""
        shelves = [shelf.index.named(name) for shelf in self._shelves]
        remote = self._likely.named(name) if self._likely else ()
        if len(remote) + sum(map(len, shelves)) < _SEVERAL:
            return False
        places = sum(len({card.namespace for card in cards if sees is None or sees(card)}) for cards in shelves)
        return places + len([card for card in remote if sees is None or sees(card)]) >= _SEVERAL

    @property
    def progress(self) -> Progress:
        """How many items there are, how many can be found by words, and how many by meaning."""
        return summed(self._shelves, self._remote)

    @property
    def indexing(self) -> JsonObject | None:
        """How far the index is, in numbers; None where it is complete."""
        cards, worded, encoded = self._begun
        if worded == cards and (encoded == cards or self._encoder is None) and not self._is_partial:
            return None
        return {"cards": cards, "words": worded, "meaning": encoded}


def summed(shelves: Sequence[Shelf], remote: Remote | None = None) -> Progress:
    """Return how far some shelves, and a registry on a server, are together."""
    each = [*(shelf.index.progress for shelf in shelves), *([remote.progress] if remote else ())]
    return Progress(*map(sum, zip(*each, strict=True))) if each else Progress(0, 0, 0)
