"""A shelf: the cards of one source, with the index over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from weakref import WeakKeyDictionary

from kiwi_mcp.catalog.entry import Entry
from kiwi_mcp.catalog.source import ItemSource
from kiwi_mcp.kernel.searching.cards import card_of
from kiwi_mcp.kernel.searching.saved import MANY, MOST, load_index, save_index
from kiwi_mcp.search.frozen import DamagedIndex
from kiwi_mcp.search.index import Index
from kiwi_mcp.search.port import Card, Encoder, Keep

_GLIMPSE = 1_000
"""About how many cards show where those of an index from disk are at home."""


class Shelf:
    """What is known of one source; catalogs that look at the same one share it, from several threads.

    `place` is where its index is kept between processes, if its source can tell whether it is the same.
    """

    def __init__(self, encoder: str, place: Path) -> None:
        self.index = Index(encoder)
        self._encoder = encoder
        self._place = place
        self._entries: Sequence[Entry] | None = None
        self._cards: Sequence[Card] = ()
        """What it was last said to hold; nothing was said of an index that came from disk."""
        self._glimpse: tuple[Index, Sequence[Card]] | None = None
        self._mark = ""
        self._saved = ("", 0)
        """At which mark it was kept, and with how many vectors."""
        self._is_loaded = False
        """Whether the index came from disk, or what it was made of did."""
        self._changes = 0
        self._followed: WeakKeyDictionary[ItemSource, tuple[Sequence[Entry], int]] = WeakKeyDictionary()
        self._lock = Lock()

    def follow(self, source: ItemSource, listed: Callable[[], Sequence[Entry]]) -> bool:
        """Take in what is new; a source that says it is the same as before, here or on disk, is not listed.

        Return whether it is another than when it was last followed.
        """
        with self._lock:
            if source.mark and source.mark == self._mark:
                return False
            if source.mark and not self._changes and (known := load_index(self._place, source.mark, self._encoder)):
                self.index, self._mark, self._saved = known, source.mark, (source.mark, known.progress.encoded)
                self._is_loaded = True
                return True
            try:
                is_new = self._take(source, listed())
            except DamagedIndex:
                self._begin_anew()
                is_new = self._take(source, listed())
            self._mark = source.mark
            return is_new

    def _take(self, source: ItemSource, entries: Sequence[Entry]) -> bool:
        seen, changes = self._followed.get(source, (None, -1))
        if seen is entries and changes == self._changes:
            return False
        if entries != self._entries:  # two catalogs have read the same, each for itself
            # What has not changed is the same entry, and keeps its card: the index sees at a glance that it may stay.
            made = dict(zip(map(id, self._entries or ()), self._cards, strict=True))
            self._cards = tuple(made.get(id(entry)) or card_of(entry) for entry in entries)
            self._entries = entries
            self._changes += 1
            self.index.follow(self._cards)
        self._followed[source] = (entries, self._changes)
        return True

    def forget_loaded(self) -> None:
        """Forget an index that came from disk and turned out to be damaged: its source is listed when next followed."""
        with self._lock:
            if self._is_loaded:
                self._begin_anew()

    def _begin_anew(self) -> None:
        with suppress(OSError):
            self._place.unlink(missing_ok=True)
        self.index, self._is_loaded = Index(self._encoder), False
        self._entries, self._cards, self._mark, self._saved = None, (), "", ("", 0)
        # What is counted as changed is not looked for on disk again, where the file may have stayed.
        self._changes += 1

    def catch_up(self, keep: Keep | None, encoder: Encoder | None, *, seconds: float) -> bool:
        """Index what is new, for about so long; return whether more is to do."""
        return self.index.catch_up(keep, encoder, seconds=seconds)

    def save(self) -> None:
        """Keep an index that is complete and large for the next process, and search it in one piece from now on."""
        with self._lock:
            index, mark, changes = self.index, self._mark, self._changes
        saved = (mark, index.progress.encoded)
        if not mark or saved == self._saved or not MANY <= index.count <= MOST:
            return
        whole = index.gathered() if len(index.segments) > 1 else index
        with self._lock:
            if changes != self._changes or mark != self._mark:
                return
            self.index, self._saved = whole, saved
        save_index(self._place, mark, self._encoder, whole)

    @property
    def cards(self) -> Sequence[Card]:
        """Every card, whether it can be found already or not."""
        return self._cards if self._entries is not None else self.index.living()

    @property
    def glimpse(self) -> Sequence[Card]:
        """Every card, or some of them, evenly spread, where each would have to be read from disk first."""
        if self._entries is not None:
            return self._cards
        if self._glimpse is None or self._glimpse[0] is not self.index:
            self._glimpse = (self.index, self.index.living(1 + self.index.count // _GLIMPSE))
        return self._glimpse[1]

    @property
    def is_behind(self) -> bool:
        """Whether cards cannot even be found by their words yet."""
        cards, worded, _ = self.index.progress
        return worded < cards
