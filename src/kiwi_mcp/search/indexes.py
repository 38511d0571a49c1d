"""All search indexes of a kernel. A background thread keeps them up to date with the catalogs.

A search does not wait for new items to be indexed, except for the first search after a start, when everything has to be
read once: an incomplete response is worse than a slow one. After some seconds the response says what is still missing,
and a later search finds it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from itertools import chain
from math import log
from operator import is_
from threading import Lock
from time import monotonic
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np

from kiwi_mcp.domain.cards import Card, CardFeatures, card_of_version
from kiwi_mcp.domain.errors import KiwiError, Unavailable
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.registry import VersionInfo
from kiwi_mcp.search.encoder import CancellableEncoder, EncodingCancelled, encoder_name, load_encoder
from kiwi_mcp.search.index import (
    CandidatePool,
    CardIndex,
    CardPool,
    IndexProgress,
    Segment,
    digest_of,
    impacts_of,
    is_sound,
    pack_vectors,
    passage_of,
    unpack_words,
    words_of,
)
from kiwi_mcp.search.index_file import MAX_CARDS, MIN_CARDS, DamagedIndex, FileCheck, index_path, load_index, save_index
from kiwi_mcp.search.port import CardSource, Encoder, FeatureStorage, Filter, PublishedItems
from kiwi_mcp.search.query import ParsedQuery, parse_query
from kiwi_mcp.search.tokens import expand_terms, idf, word_weight
from kiwi_mcp.search.worker import BackgroundWorker
from kiwi_mcp.store.search_index.postgres_search import (
    EVERYTHING,
    CandidateFilter,
    Embeddings,
    IndexedVersion,
    PostgresSearch,
    TermCounts,
)

_USUAL = np.array([3, 2, 12, 3, 12], np.float32)
"""The usual lengths of the fields of a card, for when not all cards are at hand."""
_WORDED, _ENCODED = 500, 64  # how many items are taken at a time
_MAINTAINED = 3_600.0  # how many seconds pass between two times that the server's index is maintained
_PUBLISHED = "registry/"
_MAX_RECALLED = 50  # how many recalled items the server is asked for by name
_MAX_FRESH = 64  # how many of the items published last are found by their words before the index has them


class ServerIndex:
    """The index of one registry on its server, shared by all its users; one thread fills it."""

    def __init__(self, published: PublishedItems) -> None:
        registry, model = published.registry, model_of(encoder_name())
        self.registry = registry
        self.is_behind = self.is_unread = True
        """Whether the index may lack something that was published, and whether it may even lack its words."""
        self._is_listed = published.is_listed
        self._generation: tuple[int, ...] = ()
        self._candidates = PostgresSearch(registry.database, registry.actor, model)
        self._embeddings = Embeddings(registry.database, model)
        self._damaged: set[str] = set()
        self._maintained = monotonic()

    def follow(self, generation: tuple[int, ...]) -> bool:
        """Return whether the registry has changed; if so, the index is behind."""
        is_new = generation != self._generation
        if is_new:
            self._generation, self.is_behind, self.is_unread = generation, True, True
        return is_new

    def pool(self, query: ParsedQuery, wanted: Filter, recalled: Sequence[str] = ()) -> CandidatePool:
        """Return the candidates for a query, and the items that were recalled for it."""
        filters = CandidateFilter(tool_types=wanted.types, tags=wanted.tags, categories=wanted.categories)
        names = [item.rpartition("/")[2] for item in recalled if item.startswith(_PUBLISHED)]
        fresh = self._candidates.fresh(_MAX_FRESH) if self.is_unread else ()

        def card_of(version: VersionInfo) -> Card | None:
            return card_of_version(version) if self._is_listed(version) else None

        found = find_candidates(query, self._candidates, card_of, filters, names[:_MAX_RECALLED], fresh)
        if found.damaged:
            self._damaged |= {*found.damaged}
            self.is_behind = self.is_unread = True
        return found

    def index_words(self, *, seconds: float) -> bool:
        """Index the words of missing items, for about `seconds`; return whether more is left."""
        generation = self._generation
        try:
            if damaged := {*self._damaged}:  # then they are indexed again
                self._embeddings.remove([*damaged])
                self._damaged -= damaged
            if fill(self._embeddings, None, card_of_version, seconds=seconds):
                return True
        except KiwiError:  # the search itself reports that the server cannot be asked
            return False
        self.is_unread = generation != self._generation
        return self.is_unread

    def catch_up(self, encoder: Encoder | None, *, seconds: float) -> bool:
        """Index what is missing once the words are indexed, for about `seconds`; return whether more is left."""
        generation = self._generation
        try:
            if fill(self._embeddings, encoder, card_of_version, seconds=seconds):
                return True
            if monotonic() - self._maintained > _MAINTAINED:
                self._maintained = monotonic()
                self._embeddings.maintain()
        except KiwiError:  # as above
            return False
        self.is_behind = generation != self._generation
        return self.is_behind

    @property
    def progress(self) -> IndexProgress:
        """The number of items that can be found, and by meaning; the server counts them, which takes a moment."""
        worded, encoded = self._embeddings.progress()
        return IndexProgress(worded, worded, encoded)


def model_of(encoder: str) -> str:
    """Return the name of an index: it changes with the encoder and with how words are read."""
    return f"{encoder or 'words'}:{digest_of(Card('registry', '', ''), encoder).hex()}"


def find_candidates(
    query: ParsedQuery,
    candidates: PostgresSearch,
    card_of: Callable[[VersionInfo], Card | None],
    wanted: CandidateFilter = EVERYTHING,
    names: Iterable[str] = (),
    fresh: Sequence[VersionInfo] = (),
) -> CandidatePool:
    """Return cards that may match a query, those with some names, and `fresh` ones that are not indexed yet."""
    held: dict[str, int] = {}  # the words that the server was asked for
    counts = TermCounts()

    def known_stems(stems: AbstractSet[str]) -> AbstractSet[str]:
        nonlocal counts
        counts = candidates.counts([*stems])
        held.update(counts.held)
        return counts.held.keys()

    def beginning_with(word: str, most: int) -> Collection[str]:
        longer = candidates.beginning_with(word, most)
        held.update(longer)
        return longer

    # The stems that the words of a request match, and the weight of each.
    said = query.counted[0]
    shares: dict[str, float] = {}
    for word, stems in expand_terms(said, known_stems, beginning_with).items():
        for one, share in stems.items():
            shares[one] = shares.get(one, 0.0) + share * word_weight(word) * (1 + log(said[word]))
    weights = {one: share * idf(held[one], counts.total) for one, share in shares.items()}
    vectors = pack_vectors(query.vectors) if query.vectors is not None else ()
    name = query.text.strip().rpartition("/")[2].partition("@")[0]
    found = candidates.find(weights, vectors, wanted=wanted, names=[name, *names])
    new = {one.id: one for one in fresh}
    kept = {one.listed.id: CardFeatures(one.words, one.vector) for one in found if one.listed.id not in new}
    sound = {id_: sheet for id_, sheet in kept.items() if is_sound(sheet)}
    listed = {**{one.listed.id: one.listed for one in found}, **new}
    cards = {id_: card for id_, one in listed.items() if (card := card_of(one))}
    # The words of versions without stored features are computed.
    features = [sound.get(id_) or CardFeatures(words_of(card), b"") for id_, card in cards.items()]
    usual = np.maximum(np.array(counts.usual, np.float32), np.float32(1)) if counts.usual else None
    segment = Segment.from_features([*cards.values()], features, usual)
    return CandidatePool(segment, counts.total, held, [id_ for id_ in kept if id_ not in sound])


def fill(
    embeddings: Embeddings, encoder: Encoder | None, card_of: Callable[[VersionInfo], Card], *, seconds: float
) -> bool:
    """Index what the server's index lacks, words first, for about `seconds`; return whether more is left."""
    until = monotonic() + seconds
    name = encoder.name if encoder else ""
    while found := embeddings.without_words(_WORDED):
        embeddings.index(_indexed_versions(found, [card_of(one) for one in found], name))
        if monotonic() > until:
            return True
    while encoder and (found := embeddings.without_vectors(_ENCODED)):
        cards = [card_of(one) for one in found]
        vectors = pack_vectors(encoder.encode([passage_of(card) for card in cards]))
        versions = zip(_indexed_versions(found, cards, name), vectors, strict=True)
        embeddings.index([version._replace(vector=vector) for version, vector in versions])
        if monotonic() > until:
            return True
    return False


def _indexed_versions(found: Sequence[VersionInfo], cards: Sequence[Card], encoder: str) -> Sequence[IndexedVersion]:
    """Return versions as the server's index takes them; how much a word says need only be nearly right there."""
    versions = []
    for listed, card in zip(found, cards, strict=True):
        packed = words_of(card)
        stems, counts = unpack_words(packed)
        impacts, _ = impacts_of(counts, np.zeros(len(stems), np.int32), 1, _USUAL)
        said = dict(zip(stems, impacts.tolist(), strict=True))
        versions.append(
            IndexedVersion(listed.id, digest_of(card, encoder), said, counts.sum(axis=0, dtype=int).tolist(), packed)
        )
    return versions


_log = logging.getLogger("kiwi")
_SEVERAL = 2
_NAMED = 12  # how many names of a kind are shown


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


_SAMPLE = 1_000  # about how many cards of an index file are read to describe where its items are


class SourceIndex:
    """The index of one source. It is saved if the source has an etag: the next process need not list it."""

    def __init__(self, encoder: str, source: CardSource) -> None:
        self.index = CardIndex(encoder)
        self._encoder = encoder
        self._path = index_path(source.cache, source.name, source.home)
        self._cards: Sequence[Card] | None = None  # the cards it was last given; None for an index from disk
        self._sample: tuple[CardIndex, Sequence[Card]] | None = None
        self._etag = ""
        self._saved = ("", 0)  # the etag and the number of vectors when it was last saved
        self.unchecked: FileCheck | None = None  # what is left to check of the file that the index came from
        self._is_loaded = False  # whether the index came from disk, or what it was made of did
        self._changes = 0
        self._followed: WeakKeyDictionary[object, tuple[Sequence[Card], int]] = WeakKeyDictionary()
        self._lock = Lock()

    def follow(self, source: CardSource) -> bool:
        """Bring the index up to date, and return whether the source changed; one with a known etag is not listed."""
        etag = source.etag()
        with self._lock:
            if etag and etag == self._etag:
                return False
            if etag and not self._changes and (known := load_index(self._path, etag, self._encoder)):
                (self.index, self.unchecked), self._is_loaded = known, True
                self._etag, self._saved = etag, (etag, self.index.progress.encoded)
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
        self.index = CardIndex(self._encoder)
        self.unchecked = None
        self._is_loaded = False
        self._cards, self._etag, self._saved = None, "", ("", 0)
        # After a change the disk is not read again: the file may still be there.
        self._changes += 1

    def check(self, *, seconds: float) -> bool:
        """Check the file of the index for about `seconds`; return whether more is left, or raise `DamagedIndex`."""
        check = self.unchecked
        if check is None or check.run(seconds=seconds):
            return check is not None
        self.unchecked = None
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
        is_behind = begun.worded < begun.cards or (self._encoder is not None and begun.encoded < begun.cards)
        has_work = not self._is_loaded or self._is_registry_changed or is_behind or bool(server and server.is_behind)
        if has_work or any(one.unchecked for one in indexes):
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

        def is_ready() -> bool:  # all items can be found by words, and all but many by meaning
            cards, worded, encoded = total_progress(indexes)
            are_few = self._encoder is not None and 0 < cards - encoded <= _FEW
            return self._is_loaded and worded == cards and not are_few and not (server and server.is_unread)

        began, unread = monotonic(), [one for one in indexes if one not in self._read]
        are_many = any(one.is_behind for one in indexes) and any(one.index.count for one in indexes)
        seconds = _WAIT_MANY if are_many else _WAIT_FEW
        is_read = self._worker.wait(lambda: not any(one.is_behind for one in unread), _WAIT_FIRST)
        self._is_patient = self._worker.wait(is_ready, seconds - (monotonic() - began)) and is_read

    def _follow(self, sources: Sequence[CardSource]) -> tuple[Sequence[SourceIndex], ServerIndex | None]:
        indexes, server = [], None
        for source in sources:
            published = source.published()
            if published and not published.registry.database.is_embedded:
                with self._lock:
                    if self._server is None or self._server.registry is not published.registry:
                        self._server = ServerIndex(published)
                    server = self._server
                is_new = server.follow(source.generation())
            else:
                self._server = None if published else self._server
                with self._lock:
                    index = self._used.get(source.owner)
                    if index is None:
                        key = (source.name, source.home)
                        index = self._indexes.get(key) or SourceIndex(encoder_name(), source)
                        self._used[source.owner] = self._indexes[key] = index
                indexes.append(index)
                is_new = index.follow(source)
            self._is_registry_changed |= is_new and published is not None
        return indexes, server

    def _known(self) -> Sequence[SourceIndex]:
        with self._lock:
            return [*self._indexes.values()]

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
            if any(one.index.catch_up(features, None, seconds=seconds) for one in indexes):
                return True
            if server is not None and server.is_unread and server.index_words(seconds=seconds):
                return True
            self._is_patient = True
            if any(index.check(seconds=seconds) for index in indexes):
                return True
            if any(one.index.catch_up(features, encoder, seconds=seconds) for one in indexes):
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
