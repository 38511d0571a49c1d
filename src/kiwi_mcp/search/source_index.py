"""The index of one source. Catalogs that list the same source share it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from weakref import WeakKeyDictionary

from kiwi_mcp.domain.cards import Card
from kiwi_mcp.search.index import CardIndex
from kiwi_mcp.search.index_file import (
    MAX_CARDS,
    MIN_CARDS,
    DamagedIndex,
    FileCheck,
    index_path,
    load_index,
    save_index,
)
from kiwi_mcp.search.port import CardSource, Encoder, FeatureStorage

_SAMPLE = 1_000
"""About how many cards of an index file are read to describe where its items are."""


class SourceIndex:
    """The index of one source; several threads may use it.

    It is saved to disk if the source has an etag, so that the next process need not list the source.
    """

    def __init__(self, encoder: str, source: CardSource) -> None:
        self.index = CardIndex(encoder)
        self._encoder = encoder
        self._path = index_path(source.cache, source.name, source.home)
        self._cards: Sequence[Card] | None = None
        """The cards it was last given; None for an index from disk."""
        self._sample: tuple[CardIndex, Sequence[Card]] | None = None
        self._etag = ""
        self._saved = ("", 0)
        """The etag and the number of vectors when it was last saved."""
        self._check: FileCheck | None = None
        """What is left to check of the file that the index came from."""
        self._is_loaded = False
        """Whether the index came from disk, or what it was made of did."""
        self._changes = 0
        self._followed: WeakKeyDictionary[object, tuple[Sequence[Card], int]] = WeakKeyDictionary()
        self._lock = Lock()

    def follow(self, source: CardSource) -> bool:
        """Bring the index up to date with its source, and return whether the source has changed.

        A source with the same etag as before, in memory or on disk, is not listed.
        """
        etag = source.etag()
        with self._lock:
            if etag and etag == self._etag:
                return False
            if etag and not self._changes and (known := load_index(self._path, etag, self._encoder)):
                self.index, self._check, self._is_loaded = known.index, known.check, True
                self._etag, self._saved = etag, (etag, known.index.progress.encoded)
                return True
            try:
                is_new = self._take(source, source.cards())
            except DamagedIndex:
                self._reset()
                is_new = self._take(source, source.cards())
            self._etag = etag
            return is_new

    def _take(self, source: CardSource, cards: Sequence[Card]) -> bool:
        seen, changes = self._followed.get(source.owner, (None, -1))
        if seen is cards and changes == self._changes:
            return False
        if cards != self._cards:  # two catalogs may have read the same cards
            self._cards = cards
            self._changes += 1
            self.index.follow(cards)
        self._followed[source.owner] = (cards, self._changes)
        return True

    def forget_loaded(self) -> None:
        """Drop an index that came from disk and is damaged; its source is listed at the next search."""
        with self._lock:
            if self._is_loaded:
                self._reset()

    def _reset(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        self.index, self._check, self._is_loaded = CardIndex(self._encoder), None, False
        self._cards, self._etag, self._saved = None, "", ("", 0)
        # After a change the disk is not read again: the file may still be there.
        self._changes += 1

    def catch_up(self, features: FeatureStorage | None, encoder: Encoder | None, *, seconds: float) -> bool:
        """Index what is new, for about `seconds`; return whether more is left."""
        return self.index.catch_up(features, encoder, seconds=seconds)

    @property
    def is_unchecked(self) -> bool:
        """Whether part of the file that the index came from is not checked yet."""
        return self._check is not None

    def check(self, *, seconds: float) -> bool:
        """Check the file that the index came from, for about `seconds`; return whether more is left.

        A damaged file raises `DamagedIndex`.
        """
        check = self._check
        if check is None or check.run(seconds=seconds):
            return check is not None
        self._check = None
        return False

    def save(self) -> None:
        """Save a complete, large index for the next process, merged into one segment, which is searched faster."""
        with self._lock:
            index, etag, changes = self.index, self._etag, self._changes
        saved = (etag, index.progress.encoded)
        if not etag or saved == self._saved or not MIN_CARDS <= index.count <= MAX_CARDS:
            return
        whole = index.merged() if len(index.segments) > 1 else index
        with self._lock:
            if changes != self._changes or etag != self._etag:
                return
            self.index, self._saved = whole, saved
        save_index(self._path, etag, self._encoder, whole)

    @property
    def cards(self) -> Sequence[Card]:
        """Every card, indexed or not."""
        return self._cards if self._cards is not None else self.index.active()

    @property
    def sample(self) -> Sequence[Card]:
        """Every card; of an index from disk, about a thousand, evenly spread, since each has to be read."""
        if self._cards is not None:
            return self._cards
        if self._sample is None or self._sample[0] is not self.index:
            self._sample = (self.index, self.index.active(1 + self.index.count // _SAMPLE))
        return self._sample[1]

    @property
    def is_behind(self) -> bool:
        """Whether some cards cannot be found by their words yet."""
        cards, worded, _ = self.index.progress
        return worded < cards
