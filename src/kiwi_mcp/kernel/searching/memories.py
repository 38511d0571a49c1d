"""Memories: what is remembered of each who searches, kept in the store and up to date in the background.

Nobody waits for a request to be written down or encoded, and a store that cannot be used costs nobody a search.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.trace import Trace
from kiwi_mcp.kernel.delivery import every_value
from kiwi_mcp.kernel.recent import Wanted
from kiwi_mcp.kernel.remembering import kept_of
from kiwi_mcp.kernel.searching.worker import Worker
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.search.memory import Memory, Recall, is_known, is_same, item_of
from kiwi_mcp.search.port import Encoder
from kiwi_mcp.search.request import Request
from kiwi_mcp.search.sheet import pack_vectors
from kiwi_mcp.store.remembered import Remembered

_PATIENCE = 0.1
"""For how many seconds the first search waits for what is remembered."""
_SPARE, _END = 0.2, 1.0
_AT_ONCE = 8
_MOST_HELD = 64
_PROJECT = "project/"


class _Use(NamedTuple):
    """An item that was used after a request."""

    actor: str
    identity: str
    wanted: Wanted
    space: Space
    is_run: bool


class _Held(NamedTuple):
    """What is remembered of an actor in a project, as it was when it was last looked at."""

    stamp: int
    mark: tuple[int, int, int]
    memory: Memory | None


_Key = tuple[str, str]


class Memories:
    """What one owner's store remembers; it may be used from several threads. Without a name, the owner is meant.

    `encoder` is the name of what `load` gives: what is encoded already can be read before that is loaded.
    """

    def __init__(self, store: Store, load: Callable[[], Encoder | None] = lambda: None, encoder: str = "") -> None:
        self._store = store
        self._load = load
        self._encoder = encoder
        self._uses: deque[_Use] = deque(maxlen=1_000)
        self._held: dict[_Key, _Held] = {}
        self._wanted: deque[_Key] = deque(maxlen=_MOST_HELD)
        self._worker = Worker(self._step)

    def recall(self, actor: str, space: Space, request: Request) -> Recall | None:
        """Return what is remembered of requests like this one, as far as it is known by now."""
        key = (actor, str(space.project))
        held = self._held.get(key)
        if held is None or held.stamp != self._stamp():
            self._wanted.append(key)
            self._worker.wake()
        if held is None:
            self._worker.wait(lambda: key in self._held, _PATIENCE)
            held = self._held.get(key)
        return held.memory.recall(request) if held and held.memory else None

    def note(self, actor: str, identity: str, wanted: Wanted, space: Space, *, is_run: bool) -> None:
        """Let it be remembered, in a moment, that an item was used after a request, or for a part of it."""
        self._uses.append(_Use(actor, identity, wanted, space, is_run))
        self._worker.wake()

    def listed(self, actor: str) -> Sequence[Trace]:
        """Return what is remembered of somebody, the latest first."""
        remembered = self._remembered()
        return remembered.of(_kept_as(actor)) if remembered else ()

    def forget(self, actor: str, items: Sequence[str] | None = None) -> int:
        """Forget all that is remembered of somebody, or what is of some items; return how many requests that was."""
        meant = [
            one for one in [*self._uses] if one.actor == actor and (items is None or item_of(one.identity) in items)
        ]
        for use in meant:
            with suppress(ValueError):  # the thread in the background was quicker
                self._uses.remove(use)
        remembered = self._remembered()
        count = remembered.forget(_kept_as(actor), items) if remembered else 0
        self._held.clear()
        return count

    def settle(self, seconds: float) -> bool:
        """Wait, for so long at the most, until all is written and encoded; return whether that is so."""
        return self._worker.rest(seconds)

    def close(self) -> None:
        """Write down what was used, and end what is done in the background."""
        self._worker.close(_SPARE, _END)

    def _step(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        with suppress(KiwiError):
            while self._uses:
                self._write(self._uses.popleft())
            while self._wanted:
                self._look(self._wanted.popleft())
            return any(self._encode(key, until) for key in [*self._held])
        return False

    def _write(self, use: _Use) -> None:
        # What cannot be told from a secret is not kept: where the secrets cannot be read, nothing is.
        request = kept_of(use.wanted, every_value(use.space))
        if not request:
            return
        item, actor = item_of(use.identity), _kept_as(use.actor)
        project = str(use.space.project) if item.startswith(_PROJECT) else ""
        remembered = Remembered(self._store.registry().database, self._store.actor.name)
        same = [one for one in remembered.of_item(actor, project, item) if is_same(one.request, request)]
        is_run = use.is_run or any(one.is_run for one in same)
        trace = Trace(item, request, is_run, time.time_ns() // 1_000_000, project)
        remembered.note(actor, trace, instead=[one.request for one in same if one.request != request])
        self._wanted.extend([key for key in [*self._held] if key[0] == use.actor])

    def _look(self, key: _Key) -> None:
        """Read what is remembered, if it is another than was read before."""
        remembered, stamp = self._remembered(), self._stamp()
        actor, project = _kept_as(key[0]), key[1]
        mark = remembered.mark(actor) if remembered else (0, 0, 0)
        held = self._held.get(key)
        if held is None or held.mark != mark:
            traces = remembered.of(actor) if remembered and mark[0] else ()
            seen = [one for one in traces if one.project in {"", project}]
            held = _Held(stamp, mark, Memory(seen, self._encoder) if seen else None)
        if len(self._held) >= _MOST_HELD:
            self._held.clear()
        self._held[key] = held._replace(stamp=stamp)

    def _encode(self, key: _Key, until: float) -> bool:
        """Find out what requests mean that nobody has yet, until some moment; return whether any are left."""
        held = self._held.get(key)
        if held is None or held.memory is None or held.memory.is_complete:
            return False
        remembered, encoder = self._remembered(), self._load()
        if remembered is None or encoder is None:
            return False
        actor = _kept_as(key[0])
        missing = [one for one in remembered.of(actor) if not is_known(one, encoder.name)]
        while missing and time.monotonic() < until and not self._worker.is_closing:
            some, missing = missing[:_AT_ONCE], missing[_AT_ONCE:]
            vectors = pack_vectors(encoder.encode([one.request for one in some]))
            remembered.encode(actor, encoder.name, dict(zip(some, vectors, strict=True)))
        self._held[key] = held._replace(mark=(-1, 0, 0))
        self._look(key)
        return bool(missing)

    def _remembered(self) -> Remembered | None:
        registry = self._store.registry_if_any()
        return Remembered(registry.database, self._store.actor.name) if registry else None

    def _stamp(self) -> int:
        try:
            registry = self._store.registry_if_any()
            return registry.database.stamp() if registry else -1
        except KiwiError:
            return -1


def _kept_as(actor: str) -> str:
    """Return the word for somebody in the store; whatever others are called, none of them is the owner."""
    return f"={actor}" if actor else ""
