"""Remembered queries of each actor: read, written and encoded in the background.

A search does not wait for a query to be stored or encoded, and works even if the store cannot be used.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.search.encoder import encoder_name, load_encoder
from kiwi_mcp.search.features import pack_vectors
from kiwi_mcp.search.port import Encoder
from kiwi_mcp.search.query import ParsedQuery
from kiwi_mcp.search.recall_index import RecallIndex, RecallMatches, is_encoded_by, is_same, item_of
from kiwi_mcp.search.recall_log import RecallAccess, SearchIntent, storable_part
from kiwi_mcp.search.worker import BackgroundWorker
from kiwi_mcp.store.search_index.recall import RecallEntry

_WAIT = 0.1
"""How many seconds the first search waits for what is remembered."""
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
    """What one owner's store remembers; several threads may use it. An empty actor is the owner.

    `encoder` is the name of the encoder that `load` gives: stored vectors can be read before it is loaded.
    """

    def __init__(
        self,
        access: RecallAccess,
        load: Callable[[], Encoder | None] | None = None,
        encoder: str | None = None,
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
            if use.actor == actor and (items is None or item_of(use.identity) in items):
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
        item, actor = item_of(use.identity), _actor_key(use.actor)
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
