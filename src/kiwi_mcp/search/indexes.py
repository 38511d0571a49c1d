"""All search indexes of a kernel. A background thread keeps them up to date with the catalogs.

A search does not wait for new items to be indexed, except for the first search after a start, when everything has to be
read once: an incomplete response is worse than a slow one. After some seconds the response says what is still missing,
and a later search finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from time import monotonic
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from kiwi_mcp.search.encoder import CancellableEncoder, EncodingCancelled, encoder_name, load_encoder
from kiwi_mcp.search.index import IndexProgress
from kiwi_mcp.search.index_file import DamagedIndex
from kiwi_mcp.search.port import CardSource, Encoder, FeatureStorage, PublishedItems
from kiwi_mcp.search.server_index import ServerIndex
from kiwi_mcp.search.source_index import SourceIndex
from kiwi_mcp.search.view import LocationSummary, SearchView, total_progress
from kiwi_mcp.search.worker import BackgroundWorker

_WAIT_MANY, _WAIT_FEW, _WAIT_FIRST = 0.25, 2.0, 5.0
"""How many seconds a search waits: for the vectors of many items, for the encoder and a few items, and for the words
of items that are read for the first time."""
_FEW = 64
_GRACE, _END = 0.3, 1.0
"""How many seconds indexing may continue when the kernel closes, and how long its end is waited for."""


class SearchIndexes:
    """The search indexes of one kernel. Several threads may use them, each with its own catalogs.

    `features` gives the storage of features, and `maintain` maintains it when there is nothing else to do. `load` gives
    the encoder. `on_registry_change` is called after the registry has changed.
    """

    def __init__(
        self,
        features: Callable[[], FeatureStorage | None] = lambda: None,
        load: Callable[[], Encoder | None] = load_encoder,
        maintain: Callable[[], None] = lambda: None,
        on_registry_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._features = features
        self._load = load
        self._maintain = maintain
        self._on_registry_change = on_registry_change
        self._is_registry_changed = False
        self._encoder: Encoder | None = None
        self._is_loaded = False
        self._is_patient = True
        self._server: ServerIndex | None = None
        self._lock = Lock()
        self._indexes: WeakValueDictionary[tuple[str, str], SourceIndex] = WeakValueDictionary()
        # An index exists as long as a catalog that uses it exists.
        self._used: WeakKeyDictionary[object, SourceIndex] = WeakKeyDictionary()
        # The indexes that were once complete for word search.
        self._read: WeakSet[SourceIndex] = WeakSet()
        self._locations = LocationSummary()
        self._worker = BackgroundWorker(self._step)

    def view(self, sources: Sequence[CardSource]) -> SearchView:
        """Return a view of some sources, up to date with them except for items that are still being indexed."""
        if not self._is_loaded:
            self._worker.wake()  # it loads the encoder while the catalog is read
        indexes, server = self._follow(sources)
        begun = total_progress(indexes)
        if self._has_work(begun, server) or any(one.is_unchecked for one in indexes):
            self._worker.wake()
            self._wait(indexes, server)
            begun = total_progress(indexes)
        if begun.worded == begun.cards:
            with self._lock:
                self._read.update(indexes)
        return SearchView(
            indexes, server, self._encoder, begun=begun, locations=self._locations, is_loading=not self._is_loaded
        )

    def forget_loaded(self) -> None:
        """Drop what was read from disk because some of it is damaged; the next view is made without it."""
        for index in self._known():
            index.forget_loaded()

    def progress(self) -> IndexProgress:
        """Return the progress of all sources that were searched here."""
        return total_progress(self._known())

    def wait_until_indexed(self, seconds: float) -> bool:
        """Wait at most `seconds` until everything is indexed; return whether it is."""
        return self._worker.wait_until_idle(seconds)

    def close(self) -> None:
        """End the background work; a little work that is left may be finished first."""
        self._worker.close(_GRACE, _END)

    def _wait(self, indexes: Sequence[SourceIndex], server: ServerIndex | None) -> None:
        """Wait for the words of new items, and for a moment for the rest; not again if that did not help."""
        if not self._is_patient:
            return
        began, unread = monotonic(), [one for one in indexes if one not in self._read]
        are_many = any(one.is_behind for one in indexes) and any(one.index.count for one in indexes)
        seconds = _WAIT_MANY if are_many else _WAIT_FEW
        is_read = self._worker.wait(lambda: not any(one.is_behind for one in unread), _WAIT_FIRST)
        left = seconds - (monotonic() - began)
        self._is_patient = self._worker.wait(lambda: self._is_ready(indexes, server), left) and is_read

    def _is_ready(self, indexes: Sequence[SourceIndex], server: ServerIndex | None) -> bool:
        """Whether all items can be found by words, and all but many by meaning."""
        cards, worded, encoded = total_progress(indexes)
        are_few = self._encoder is not None and 0 < cards - encoded <= _FEW
        return self._is_loaded and worded == cards and not are_few and not (server and server.is_unread)

    def _follow(self, sources: Sequence[CardSource]) -> tuple[Sequence[SourceIndex], ServerIndex | None]:
        indexes, server = [], None
        for source in sources:
            published = source.published()
            if published and not published.registry.database.is_embedded:
                server = self._server_index(published)
                is_new = server.follow(source.generation())
            else:
                self._server = None if published else self._server
                indexes.append(index := self._index(source))
                is_new = index.follow(source)
            self._is_registry_changed |= is_new and published is not None
        return indexes, server

    def _server_index(self, published: PublishedItems) -> ServerIndex:
        """Return the index of a registry that is on a server."""
        with self._lock:
            if self._server is None or self._server.registry is not published.registry:
                self._server = ServerIndex(published)
            return self._server

    def _index(self, source: CardSource) -> SourceIndex:
        with self._lock:
            if (used := self._used.get(source.owner)) is not None:
                return used
            key = (source.name, source.home)
            index = self._indexes.get(key) or SourceIndex(encoder_name(), source)
            self._used[source.owner] = self._indexes[key] = index
            return index

    def _known(self) -> Sequence[SourceIndex]:
        with self._lock:
            return [*self._indexes.values()]

    def _has_work(self, begun: IndexProgress, server: ServerIndex | None) -> bool:
        cards, worded, encoded = begun
        is_behind = worded < cards or (self._encoder is not None and encoded < cards)
        is_server_behind = server is not None and server.is_behind
        return not self._is_loaded or self._is_registry_changed or is_behind or is_server_behind

    def _step(self, seconds: float) -> bool:
        """Do some of the remaining work: load the encoder, then words, then vectors; return whether more is left."""
        if not self._is_loaded:
            self._encoder = self._load()
            self._is_loaded = True
            return True
        features, indexes, server = self._features(), self._known(), self._server
        encoder = CancellableEncoder(self._encoder, lambda: self._worker.is_closing) if self._encoder else None
        try:
            # All words come before any vector: they do not depend on whether the encoder works.
            if any(index.catch_up(features, None, seconds=seconds) for index in indexes):
                return True
            if server is not None and server.is_unread and server.index_words(seconds=seconds):
                return True
            self._is_patient = True
            if any(index.check(seconds=seconds) for index in indexes):
                return True
            if any(index.catch_up(features, encoder, seconds=seconds) for index in indexes):
                return True
            for index in indexes:
                index.save()
            self._maintain()
            if self._is_registry_changed:
                self._is_registry_changed = False  # before the call: what changes meanwhile is reported too
                self._on_registry_change()
            if server is None or server.is_unread or not server.is_behind:
                return False
            return server.catch_up(encoder, seconds=seconds)
        except EncodingCancelled:
            return False
        except DamagedIndex:
            self.forget_loaded()
            return False
