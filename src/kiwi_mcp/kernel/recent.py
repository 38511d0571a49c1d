"""Recent searches, so that what is used next is known to have been wanted by one of them."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.json import Json, as_list, as_object, as_text
from kiwi_mcp.kernel.private_file import changing

MINUTES = 10
"""For how long after a search what is used belongs to it."""

_SEARCHES = 8
"""How many of the latest searches of one who asks are held."""
_ASKERS = 256
_LARGEST = 1_000_000


class Who(NamedTuple):
    """Whoever searches and uses what was found: the actor, the program they use, and the project they are in."""

    actor: str
    client: str
    project: str


@dataclass(slots=True)
class _Search:
    request: str
    shown: frozenset[str]
    at: float
    read: set[str] = field(default_factory=set)
    ran: set[str] = field(default_factory=set)


class Recent:
    """The latest searches; with a file, those of processes that come and go, one command after the other."""

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._clock = clock
        self._lock = Lock()
        self._searches: dict[Who, deque[_Search]] = {}

    def asked(self, who: Who, request: str, shown: Iterable[str]) -> None:
        """Note a search and the identities it answered with."""
        search = _Search(request, frozenset(one.partition("@")[0] for one in shown), self._clock())
        with self._lock:
            found = self._searches.pop(who, None) or self._read(who)
            found.appendleft(search)
            self._searches[who] = found  # whoever asked last stands last
            if len(self._searches) > _ASKERS:
                del self._searches[next(iter(self._searches))]
            self._write(who, found)

    def used(self, who: Who, identity: str, *, is_run: bool) -> str:
        """Return the request that an item was found by which is used now; nothing where it was not, or is known."""
        item, now = identity.partition("@")[0], self._clock()
        with self._lock:
            searches = [*(self._searches.get(who) or self._read(who))]
        for search in searches:
            if 0 <= now - search.at <= MINUTES * 60 and item in search.shown:
                is_known = item in search.ran or (item in search.read and not is_run)
                (search.ran if is_run else search.read).add(item)
                return "" if is_known or _is_name(search.request, item) else search.request
        return ""

    def forget(self, actor: str) -> None:
        """Forget the searches of somebody."""
        with self._lock:
            self._searches = {who: found for who, found in self._searches.items() if who.actor != actor}
            if self._file is not None:
                with suppress(OSError):
                    self._file.unlink(missing_ok=True)

    def _read(self, who: Who) -> deque[_Search]:
        """Return what other processes have noted; a file that makes no sense says nothing."""
        found: deque[_Search] = deque(maxlen=_SEARCHES)
        if self._file is not None:
            with suppress(OSError, ValueError, RecursionError), self._file.open("rb") as file:
                said: Json = json.loads(file.read(_LARGEST))
                if as_list(as_object(said).get("who")) == [*who]:
                    found.extend(_searches(as_object(said).get("searches")))
        return found

    def _write(self, who: Who, searches: Iterable[_Search]) -> None:
        if self._file is not None:
            rows = [{"request": one.request, "shown": sorted(one.shown), "at": one.at} for one in searches]
            with suppress(KiwiError), changing(self._file) as put:
                put(json.dumps({"who": [*who], "searches": rows}).encode())


def _searches(said: Json) -> Iterator[_Search]:
    for one in map(as_object, as_list(said)):
        at = one.get("at")
        if isinstance(at, int | float):
            shown = frozenset(as_text(item) for item in as_list(one.get("shown")))
            yield _Search(as_text(one.get("request")), shown, float(at))


def _is_name(request: str, item: str) -> bool:
    """Whether a request is the item's own name, by which it is found first anyway."""
    return request.strip() in {item, item.rpartition("/")[2]}
