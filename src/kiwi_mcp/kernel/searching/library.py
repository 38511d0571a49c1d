"""The library: every shelf of a kernel, which a thread in the background keeps up with the catalogs.

Nobody who searches waits for an item to be indexed, but at the first search after a start, when all that is known has
to be read once: an answer from a part of it is worse than one that takes longer. What is not there after some seconds
is told in the answer, and found later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from time import monotonic
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.source import ItemSource
from kiwi_mcp.domain.items import Source
from kiwi_mcp.kernel.homes import Homes
from kiwi_mcp.kernel.searching.remote import Remote
from kiwi_mcp.kernel.searching.saved import place_for
from kiwi_mcp.kernel.searching.shelf import Shelf
from kiwi_mcp.kernel.searching.view import View, summed
from kiwi_mcp.kernel.searching.worker import Worker
from kiwi_mcp.search.encoder import encoder_name, load_encoder
from kiwi_mcp.search.frozen import DamagedIndex
from kiwi_mcp.search.index import Progress
from kiwi_mcp.search.interruptible import Interruptible, Stopped
from kiwi_mcp.search.port import Encoder, Keep
from kiwi_mcp.store.registry import Registry

_PATIENCE, _MOST_PATIENCE, _FIRST_PATIENCE = 0.25, 2.0, 5.0
"""For how many seconds a search waits: for the meaning of many items, for the encoder and a few items, and for the
words of what is read for the first time."""
_FEW = 64
_SPARE, _END = 0.3, 1.0
"""For how many seconds what is being indexed may go on at the end, and how long its end is waited for."""


class Library:
    """What one kernel has indexed. It may be used from several threads, each with catalogs of its own.

    `keep` gives where sheets are kept, `load` the encoder, and `server` the registry that is on a server, if it is;
    `tend` looks after what is kept, once there is nothing else to do, and `note` is told that the registry is another.
    """

    def __init__(
        self,
        keep: Callable[[], Keep | None] = lambda: None,
        load: Callable[[], Encoder | None] = load_encoder,
        server: Callable[[], Registry | None] = lambda: None,
        tend: Callable[[], None] = lambda: None,
        note: Callable[[], None] = lambda: None,
    ) -> None:
        self._keep = keep
        self._load = load
        self._server = server
        self._tend = tend
        self._note = note
        self._is_noted = True
        self._encoder: Encoder | None = None
        self._is_loaded = False
        self._is_patient = True
        self._remote: Remote | None = None
        self._lock = Lock()
        self._shelves: WeakValueDictionary[tuple[Source, str], Shelf] = WeakValueDictionary()
        # A shelf is there as long as somebody has a catalog that looks at it.
        self._used: WeakKeyDictionary[ItemSource, Shelf] = WeakKeyDictionary()
        # Those whose items could all be found by words at some time.
        self._read: WeakSet[Shelf] = WeakSet()
        self._homes = Homes()
        self._worker = Worker(self._step)

    def view(self, catalog: Catalog, sources: Collection[Source]) -> View:
        """Return what is known of some sources of a catalog, up to date with them but for what is still indexed."""
        if not self._is_loaded:
            self._worker.wake()  # it loads the encoder while the catalog is read
        shelves, remote = self._followed(catalog, sources)
        begun = summed(shelves)
        if self._has_work(begun, remote):
            self._worker.wake()
            self._wait(shelves, remote)
            begun = summed(shelves)
        if begun.worded == begun.cards:
            with self._lock:
                self._read.update(shelves)
        return View(shelves, remote, self._encoder, begun=begun, homes=self._homes, is_loading=not self._is_loaded)

    def forget_loaded(self) -> None:
        """Forget what was read from disk, since some of it is damaged; the next view is made without it."""
        for shelf in self._known():
            shelf.forget_loaded()

    def progress(self) -> Progress:
        """Return how far everything is that was searched here."""
        return summed(self._known())

    def settle(self, seconds: float) -> bool:
        """Wait, for so long at the most, until nothing is left to be indexed; return whether that is so."""
        return self._worker.rest(seconds)

    def close(self) -> None:
        """End what is done in the background; a little that is left may be finished, so that it need not be again."""
        self._worker.close(_SPARE, _END)

    def _wait(self, shelves: Sequence[Shelf], remote: Remote | None) -> None:
        """Wait for the words of what is new here, and for a moment for the rest; not again, if that was in vain."""
        if not self._is_patient:
            return
        began, unread = monotonic(), [one for one in shelves if one not in self._read]
        are_many = any(one.is_behind for one in shelves) and any(one.index.count for one in shelves)
        patience = _PATIENCE if are_many else _MOST_PATIENCE
        is_read = self._worker.wait(lambda: not any(one.is_behind for one in unread), _FIRST_PATIENCE)
        left = patience - (monotonic() - began)
        self._is_patient = self._worker.wait(lambda: self._is_ready(shelves, remote), left) and is_read

    def _is_ready(self, shelves: Sequence[Shelf], remote: Remote | None) -> bool:
        """Whether all can be found by words, and all but many by meaning."""
        cards, worded, encoded = summed(shelves)
        are_few = self._encoder is not None and 0 < cards - encoded <= _FEW
        return self._is_loaded and worded == cards and not are_few and not (remote and remote.is_unread)

    def _followed(self, catalog: Catalog, names: Collection[Source]) -> tuple[Sequence[Shelf], Remote | None]:
        shelves, remote = [], None
        for source in catalog.sources(names):
            if source.name == "registry" and (remote := self._reached()):
                self._notice(source, is_new=remote.follow(catalog.generation((source.name,))))
                continue
            shelf = self._shelf(source, catalog.space.cache)
            if source.mark:
                catalog.generation((source.name,))  # so that it is the mark of now
            self._notice(source, is_new=shelf.follow(source, partial(catalog.all, (source.name,))))
            shelves.append(shelf)
        return shelves, remote

    def _notice(self, source: ItemSource, *, is_new: bool) -> None:
        if is_new and source.name == "registry":
            self._is_noted = False

    def _reached(self) -> Remote | None:
        """Return the index of the registry that is on a server, if it is, and can be reached."""
        registry = self._server()
        with self._lock:
            if registry is None:
                self._remote = None
            elif self._remote is None or self._remote.registry is not registry:
                self._remote = Remote(registry)
            return self._remote

    def _shelf(self, source: ItemSource, cache: Path) -> Shelf:
        with self._lock:
            if (used := self._used.get(source)) is not None:
                return used
            known = self._shelves.get((source.name, source.home))
            shelf = known or Shelf(encoder_name(), place_for(cache, source.name, source.home))
            self._used[source] = self._shelves[source.name, source.home] = shelf
            return shelf

    def _known(self) -> Sequence[Shelf]:
        with self._lock:
            return [*self._shelves.values()]

    def _has_work(self, begun: Progress, remote: Remote | None) -> bool:
        cards, worded, encoded = begun
        is_behind = worded < cards or (self._encoder is not None and encoded < cards)
        return not (self._is_loaded and self._is_noted) or is_behind or (remote is not None and remote.is_behind)

    def _step(self, seconds: float) -> bool:
        """Do some of what is left: load the encoder, then words, then meanings; say whether that was not all."""
        if not self._is_loaded:
            self._encoder = self._load()
            self._is_loaded = True
            return True
        keep, shelves, remote = self._keep(), self._known(), self._remote
        encoder = Interruptible(self._encoder, lambda: self._worker.is_closing) if self._encoder else None
        try:
            # All words come before any meaning: they do not depend on whether the encoder works.
            if any(shelf.catch_up(keep, None, seconds=seconds) for shelf in shelves):
                return True
            if remote is not None and remote.is_unread and remote.read(seconds=seconds):
                return True
            self._is_patient = True
            if any(shelf.catch_up(keep, encoder, seconds=seconds) for shelf in shelves):
                return True
            self._is_patient = True
            for shelf in shelves:
                shelf.save()
            self._tend()
            if not self._is_noted:
                self._is_noted = True  # before: whatever changes meanwhile is noted, too
                self._note()
            if remote is None or remote.is_unread or not remote.is_behind:
                return False
            return remote.catch_up(encoder, seconds=seconds)
        except Stopped:
            return False
        except DamagedIndex:
            self.forget_loaded()
            return False
