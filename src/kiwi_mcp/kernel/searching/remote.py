"""A registry on a server: the server finds what is likely, so that the registry is never loaded."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from kiwi_mcp.catalog.registry import entry_of_version, shown
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.registry import Listed
from kiwi_mcp.kernel.searching.cards import card_of
from kiwi_mcp.search.choose import Filter
from kiwi_mcp.search.encoder import encoder_name
from kiwi_mcp.search.index import Progress
from kiwi_mcp.search.likely import Likely, fill, likely, model_of
from kiwi_mcp.search.port import Card, Encoder
from kiwi_mcp.search.request import Request
from kiwi_mcp.store.candidates import Candidates, Wanted
from kiwi_mcp.store.embeddings import Embeddings
from kiwi_mcp.store.registry import Registry

_TENDED = 3_600.0
"""After how many seconds the server's index is looked after."""
_PUBLISHED = "registry/"
_MOST_REMEMBERED = 50
"""How many items are asked for by their names because they are remembered."""

_MOST_FRESH = 64
"""How many of the items published last are found by their words before the index has them."""


class Remote:
    """The index of one registry, which is on its server and everybody's; it is filled from one thread."""

    def __init__(self, registry: Registry) -> None:
        model = model_of(encoder_name())
        self.registry = registry
        self.is_behind = self.is_unread = True
        """Whether something was published that the index may not know, and whether not even its words."""
        self._generation: tuple[int, ...] = ()
        self._candidates = Candidates(registry.database, registry.actor, model)
        self._embeddings = Embeddings(registry.database, model)
        self._damaged: set[str] = set()
        self._tended = monotonic()

    def follow(self, generation: tuple[int, ...]) -> bool:
        """Note that the registry has changed, and return whether it has."""
        is_new = generation != self._generation
        if is_new:
            self._generation, self.is_behind, self.is_unread = generation, True, True
        return is_new

    def pool(self, need: Request, wanted: Filter, remembered: Sequence[str] = ()) -> Likely:
        """Return what may answer a need, and the items that are remembered of needs like it."""
        asked = Wanted(tool_types=wanted.types, tags=wanted.tags, categories=wanted.categories)
        names = [item.rpartition("/")[2] for item in remembered if item.startswith(_PUBLISHED)]
        fresh = self._candidates.fresh(_MOST_FRESH) if self.is_unread else ()
        found = likely(need, self._candidates, _card_shown, asked, names[:_MOST_REMEMBERED], fresh)
        if found.damaged:
            self._damaged |= {*found.damaged}
            self.is_behind = self.is_unread = True
        return found

    def read(self, *, seconds: float) -> bool:
        """Index the words of what is missing, for about so long; return whether more is to do."""
        generation = self._generation
        try:
            self._mend()
            if fill(self._embeddings, None, _card, seconds=seconds):
                return True
        except KiwiError:  # whoever searches is told that the server cannot be asked
            return False
        self.is_unread = generation != self._generation
        return self.is_unread

    def catch_up(self, encoder: Encoder | None, *, seconds: float) -> bool:
        """Index what is missing once words are read, for about so long; return whether more is to do."""
        generation = self._generation
        try:
            if fill(self._embeddings, encoder, _card, seconds=seconds):
                return True
            if monotonic() - self._tended > _TENDED:
                self._tended = monotonic()
                self._embeddings.tend()
        except KiwiError:  # as above
            return False
        self.is_behind = generation != self._generation
        return self.is_behind

    def _mend(self) -> None:
        """Let what was found damaged be made again."""
        damaged = {*self._damaged}
        if damaged:
            self._embeddings.take_out([*damaged])
            self._damaged -= damaged

    @property
    def progress(self) -> Progress:
        """How many items can be found, in all and by meaning; the server counts them, which takes a moment."""
        worded, encoded = self._embeddings.progress()
        return Progress(worded, worded, encoded)


def _card(listed: Listed) -> Card:
    return card_of(entry_of_version(listed))


def _card_shown(listed: Listed) -> Card | None:
    entry = shown(listed)
    return card_of(entry) if entry else None
