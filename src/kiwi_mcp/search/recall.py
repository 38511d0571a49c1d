"""Remembered queries of each actor: how similar they are, and how they are stored in the background.

A search does not wait for a query to be stored or encoded, and works even if the store cannot be used.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from math import log
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.search.encoder import encoder_name, load_encoder
from kiwi_mcp.search.index import SIZE, pack_vectors, unpack_vectors
from kiwi_mcp.search.port import Encoder, Floats
from kiwi_mcp.search.query import ParsedQuery
from kiwi_mcp.search.recall_log import RecallAccess, SearchIntent, storable_part
from kiwi_mcp.search.tokens import COMMON, stem, words
from kiwi_mcp.search.worker import BackgroundWorker
from kiwi_mcp.store.search_index.recall import RecallEntry

_WHOLE = 0.5  # the weight of the whole query against its best clause
_MEANING, _OVERLAP = 0.9, 0.09
"""The weights of similarity in meaning, and of shared words, for the similarity of two queries."""
_WORDS = 1.8
"""The weight of shared words without vectors: two queries for the same thing share about half of their words."""
_READ = 0.75  # the weight of a use that only read an item
_LIFT, _LIFT_BY_EACH, _MOST = 0.35, 0.025, 10
"""How far an item is lifted towards the similarity: by any query, and by each; at most `_MOST` count."""
_AGAIN, _ASKED_AGAIN = 0.95, 0.9  # the similarity from which a query counts as repeated, and how far it lifts then
_BEHIND = 0.5  # how much less a query counts for its distance to the most similar one
_COUNTS, _FOUND = 0.2, 0.4
"""The minimum similarity that counts, and the one from which an item is found by recall alone."""
_SURE = 0.8  # the similarity from which an item may pass a better one that was never used
_STEP = 0.001  # the distance that other items keep behind it
_PLAIN = 0.25  # below this score, recalled items need not stay behind an item
_COARSE, _MAX_COMPARED = 32, 600
"""How many coordinates are used to choose queries for exact comparison, and how many are chosen."""
_FEW = 100  # with fewer queries than this, it is unknown which words are rare
_NOTHING = 1e-6
_SAME = 0.8  # the share of common words from which two queries are the same


class RecallMatch(NamedTuple):
    """The similarity of a query to the most similar one after which an item was used, and its effect."""

    alike: float
    pull: float  # the score that the item is lifted towards, and how far
    lift: float
    is_sure: bool  # whether the item may pass one that was never used

    def lifted(self, score: float, first: float) -> float:
        """Return the lifted score of the item, never a lower one; it passes `first` only if the match is sure."""
        lifted = score + self.lift * max(0.0, self.pull - score)
        return lifted if self.is_sure or lifted <= first else max(score, first - _STEP * (1 - lifted))


class RecallMatches(Struct, frozen=True):
    """What is remembered of queries similar to one."""

    items: Mapping[str, RecallMatch]
    used: AbstractSet[str]  # all items with any remembered query

    def to_pass(self, first: str, score: float) -> float:
        """Return the score that a recalled item passes only if sure; `first` is the best item without recall."""
        return score if first not in self.used and score >= _PLAIN else 1.0

    @property
    def found(self) -> Sequence[str]:
        """The items that are found by recall alone, the best first."""
        found = [item for item, known in self.items.items() if known.alike >= _FOUND]
        return sorted(found, key=lambda item: -self.items[item].alike)


class RecallIndex:
    """Remembered queries in arrays; it never changes, so several threads may use it."""

    def __init__(self, entries: Sequence[RecallEntry], encoder: str = "") -> None:
        self._items = [*dict.fromkeys(entry.item for entry in entries)]
        self._used = frozenset(self._items)
        places = {item: place for place, item in enumerate(self._items)}
        self._item = np.array([places[entry.item] for entry in entries], np.int32)
        self._worth = np.array([1.0 if entry.is_run else _READ for entry in entries], np.float32)
        stems = [stems_of(entry.request) for entry in entries]
        slots: dict[str, list[int]] = {}
        for slot, some in enumerate(stems):
            for one in some:
                slots.setdefault(one, []).append(slot)
        self._holding = {one: np.array(held, np.int32) for one, held in slots.items()}
        self._rarity = {one: self._rarity_of(len(held)) for one, held in slots.items()}
        self._weight = np.array([sum(self._rarity[one] for one in some) for some in stems], np.float32)
        known = [is_encoded_by(entry, encoder) for entry in entries]
        self._is_encoded = np.array(known, bool)
        vectors = (entry.vector if is_known else bytes(SIZE) for entry, is_known in zip(entries, known, strict=True))
        packed = b"".join(vectors)
        self._packed = np.frombuffer(packed, np.uint8).reshape(-1, SIZE)
        self._coarse = np.ascontiguousarray(unpack_vectors(packed)[:, :_COARSE])

    @property
    def is_complete(self) -> bool:
        """Whether all queries have vectors."""
        return bool(self._is_encoded.all())

    def recall(self, query: ParsedQuery) -> RecallMatches:
        """Return what is remembered of similar queries."""
        overlap = _joined(np.stack([self._overlap({stem(word) for word in counted}) for counted in query.counted]))
        slots = np.arange(len(overlap), dtype=np.int32)  # the queries that are compared exactly
        if len(overlap) > _MAX_COMPARED:
            rough = overlap
            if query.vectors is not None:
                seems = _joined(query.vectors[:, :_COARSE] @ self._coarse.T)
                rough = np.where(self._is_encoded, np.maximum(seems, overlap), overlap)
            slots = (rough >= _COUNTS / _WORDS).nonzero()[0].astype(np.int32)
            if len(slots) > _MAX_COMPARED:
                slots = slots[np.argpartition(rough[slots], -_MAX_COMPARED)[-_MAX_COMPARED:]]
        overlap, items, worth = overlap[slots], self._item[slots], self._worth[slots]
        alike, same = np.minimum(_WORDS * overlap, 1), overlap  # how similar they are, and how much they are the same
        if query.vectors is not None:
            near = _joined(query.vectors @ unpack_vectors(self._packed[slots].tobytes()).T)
            by_meaning = np.clip(_MEANING * near + _OVERLAP * overlap, 0, 1)
            is_encoded = self._is_encoded[slots]
            alike, same = np.where(is_encoded, by_meaning, alike), np.where(is_encoded, by_meaning, same)
        count = len(self._items)
        best, most = np.zeros(count, np.float32), np.zeros(count, np.float32)
        np.maximum.at(best, items, worth * alike)
        np.maximum.at(most, items, worth * same)
        counts = np.bincount(items[worth * alike >= _COUNTS], minlength=count)
        pull = best - _BEHIND * (best.max(initial=0) - best)
        lift = _LIFT + _LIFT_BY_EACH * np.minimum(counts, _MOST)
        lift += (_ASKED_AGAIN - lift) * np.clip((most - _SURE) / (_AGAIN - _SURE), 0, 1)
        found = (best >= _COUNTS).nonzero()[0]
        known = (each[found].tolist() for each in (best, pull, lift, most >= _SURE))
        matches = zip((self._items[one] for one in found), map(RecallMatch, *known), strict=True)
        return RecallMatches(dict(matches), self._used)

    def _overlap(self, stems: AbstractSet[str]) -> Floats:
        """Return the share of words that each remembered query has in common with others; rare words count more."""
        shared = np.zeros(len(self._item), np.float32)
        unknown = self._rarity_of(0)
        for one in stems:
            if (slots := self._holding.get(one)) is not None:
                shared[slots] += np.float32(self._rarity[one])
        asked = sum(self._rarity.get(one, unknown) for one in stems)
        return np.asarray(2 * shared / np.maximum(self._weight + asked, _NOTHING), np.float32)

    def _rarity_of(self, held: int) -> float:
        return log(1 + (max(len(self._item), _FEW) - held + 0.5) / (held + 0.5))


def stems_of(query: str) -> frozenset[str]:
    """Return the stems of a query."""
    written = words(query)
    return frozenset(stem(word) for word in written if word not in COMMON) or frozenset(map(stem, written))


def is_same(one: str, other: str) -> bool:
    """Whether two queries are so similar that one of them need not be stored."""
    mine, theirs = stems_of(one), stems_of(other)
    return len(mine & theirs) >= _SAME * len(mine | theirs)


def _joined(rows: Floats) -> Floats:
    whole, parts = rows[0], rows[1:]
    return np.asarray(_WHOLE * whole + (1 - _WHOLE) * parts.max(axis=0) if len(parts) else whole, np.float32)


def is_encoded_by(entry: RecallEntry, encoder: str) -> bool:
    """Whether an entry has an intact vector of an encoder."""
    return bool(encoder) and entry.encoder == encoder and len(entry.vector) == SIZE


_WAIT = 0.1  # how many seconds the first search waits for what is remembered
_GRACE, _END = 0.2, 1.0
_AT_ONCE = 8
_MAX_LOADED = 64
_PROJECT = "project/"


class _Use(NamedTuple):
    """An item that was used after a query."""

    actor: str
    identity: str
    intent: SearchIntent
    space: Space
    is_run: bool


class _Loaded(NamedTuple):
    """What is remembered of an actor in a project, when it was last read."""

    stamp: int
    etag: tuple[int, int, int]
    recall_index: RecallIndex | None


_Key = tuple[str, str]


class RecallWorker:
    """What one owner's store remembers; `encoder` is the name of what `load` gives. An empty actor is the owner."""

    def __init__(
        self, access: RecallAccess, load: Callable[[], Encoder | None] | None = None, encoder: str | None = None
    ) -> None:
        self._access = access
        self._load = load or load_encoder
        self._encoder = encoder_name() if encoder is None else encoder
        self._uses: deque[_Use] = deque(maxlen=1_000)
        self._loaded: dict[_Key, _Loaded] = {}
        self._wanted: deque[_Key] = deque(maxlen=_MAX_LOADED)
        self._worker = BackgroundWorker(self._step)

    def recall(self, actor: str, space: Space, query: ParsedQuery) -> RecallMatches | None:
        """Return what is remembered of queries like this one, as far as it was read."""
        key = (actor, str(space.project))
        loaded = self._loaded.get(key)
        if loaded is None or loaded.stamp != self._stamp():
            self._wanted.append(key)
            self._worker.wake()
        if loaded is None:
            self._worker.wait(lambda: key in self._loaded, _WAIT)
            loaded = self._loaded.get(key)
        return loaded.recall_index.recall(query) if loaded and loaded.recall_index else None

    def add(self, actor: str, identity: str, intent: SearchIntent, space: Space, *, is_run: bool) -> None:
        """Remember, in the background, that an item was used after a query, or after a part of it."""
        self._uses.append(_Use(actor, identity, intent, space, is_run))
        self._worker.wake()

    def entries(self, actor: str) -> Sequence[RecallEntry]:
        """Return what is remembered of an actor, the latest first."""
        store = self._access.open_store_if_any()
        return store.of(_actor_key(actor)) if store else ()

    def forget(self, actor: str, items: Sequence[str] | None = None) -> int:
        """Forget everything about an actor, or about some items; return the number of forgotten queries."""
        for use in [*self._uses]:
            if use.actor == actor and (items is None or use.identity.partition("@")[0] in items):
                with suppress(ValueError):  # the background thread was faster
                    self._uses.remove(use)
        store = self._access.open_store_if_any()
        count = store.forget(_actor_key(actor), items) if store else 0
        self._loaded.clear()
        return count

    def wait_until_stored(self, seconds: float) -> bool:
        """Wait at most `seconds` until everything is stored and encoded; return whether it is."""
        return self._worker.wait_until_idle(seconds)

    def close(self) -> None:
        """Store what is left, and end the background work."""
        self._worker.close(_GRACE, _END)

    def _step(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        with suppress(KiwiError):
            while self._uses:
                self._write(self._uses.popleft())
            while self._wanted:
                self._read(self._wanted.popleft())
            return any(self._encode(key, until) for key in [*self._loaded])
        return False

    def _write(self, use: _Use) -> None:
        # If the secrets cannot be read, this raises and nothing is stored.
        query = storable_part(use.intent, self._access.secrets(use.space))
        if not query:
            return
        item, actor = use.identity.partition("@")[0], _actor_key(use.actor)
        project = str(use.space.project) if item.startswith(_PROJECT) else ""
        store = self._access.open_store()
        same = [one for one in store.of_item(actor, project, item) if is_same(one.request, query)]
        is_run = use.is_run or any(one.is_run for one in same)
        entry = RecallEntry(item, query, is_run, time.time_ns() // 1_000_000, project)
        store.add(actor, entry, instead=[one.request for one in same if one.request != query])
        self._wanted.extend([key for key in [*self._loaded] if key[0] == use.actor])

    def _read(self, key: _Key) -> None:
        """Read what is remembered, if it changed since it was last read."""
        store, stamp = self._access.open_store_if_any(), self._stamp()
        actor, project = _actor_key(key[0]), key[1]
        etag = store.etag(actor) if store else (0, 0, 0)
        loaded = self._loaded.get(key)
        if loaded is None or loaded.etag != etag:
            entries = store.of(actor) if store and etag[0] else ()
            visible = [one for one in entries if one.project in {"", project}]
            loaded = _Loaded(stamp, etag, RecallIndex(visible, self._encoder) if visible else None)
        if len(self._loaded) >= _MAX_LOADED:
            self._loaded.clear()
        self._loaded[key] = loaded._replace(stamp=stamp)

    def _encode(self, key: _Key, until: float) -> bool:
        """Encode queries that have no vector yet, until a deadline; return whether any are left."""
        loaded = self._loaded.get(key)
        if loaded is None or loaded.recall_index is None or loaded.recall_index.is_complete:
            return False
        store, encoder = self._access.open_store_if_any(), self._load() if self._access.uses_meaning() else None
        if store is None or encoder is None:
            return False
        actor = _actor_key(key[0])
        missing = [one for one in store.of(actor) if not is_encoded_by(one, encoder.name)]
        while missing and time.monotonic() < until and not self._worker.is_closing:
            some, missing = missing[:_AT_ONCE], missing[_AT_ONCE:]
            vectors = pack_vectors(encoder.encode([one.request for one in some]))
            store.encode(actor, encoder.name, dict(zip(some, vectors, strict=True)))
        self._loaded[key] = loaded._replace(etag=(-1, 0, 0))
        self._read(key)
        return bool(missing)

    def _stamp(self) -> int:
        try:
            store = self._access.open_store_if_any()
            return store.database.stamp() if store else -1
        except KiwiError:
            return -1


def _actor_key(actor: str) -> str:
    """Return the key of an actor in the store; no other name can produce the owner's key."""
    return f"={actor}" if actor else ""
