"""Recent searches, so that what is used next is known to have been wanted by one of them."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import NamedTuple

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.json import Json, as_list, as_object, as_text
from kiwi_mcp.kernel.private_file import changing

MINUTES = 10
"""For how long after a search what is used belongs to it."""

FIRST, ENOUGH = 5, 0.3
"""Among how many cards one is looked at, and from which score on it is further down as well."""
BETWEEN = 3
"""How many other searches may be made between one and the use of what it showed."""
_SEARCHES = BETWEEN + 1
_ASKERS = 256
_LARGEST = 1_000_000
_NO_PARTS: Mapping[str, str] = MappingProxyType({})


class Who(NamedTuple):
    """Whoever searches and uses what was found: the actor, the program they use, and the project they are in."""

    actor: str
    client: str
    project: str


class Wanted(NamedTuple):
    """The request that an item was found by, and the part of it that the item answers, where it has several."""

    request: str
    part: str = ""


@dataclass(slots=True)
class _Search:
    """A request, of each item that it showed whether that was where it is looked at, and the part each answers."""

    request: str
    shown: dict[str, bool]
    at: float
    parts: dict[str, str]
    read: set[str] = field(default_factory=set)
    ran: set[str] = field(default_factory=set)


class Recent:
    """The latest searches; with a file, those of processes that come and go, one command after the other."""

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._clock = clock
        self._lock = Lock()
        self._searches: dict[Who, deque[_Search]] = {}

    def asked(
        self, who: Who, request: str, shown: Sequence[tuple[str, float]], parts: Mapping[str, str] = _NO_PARTS
    ) -> None:
        """Note a search and the identities it answered with, the best first, each with its score.

        `parts` gives those that answer a part of the request, and which.
        """
        items = {
            identity.partition("@")[0]: place < FIRST or score >= ENOUGH
            for place, (identity, score) in reversed([*enumerate(shown)])  # of one with two versions, the better place
        }
        answered = {name.partition("@")[0]: parts[name] for name, _ in reversed(shown) if name in parts}
        search = _Search(request, items, self._clock(), answered)
        with self._lock:
            found = self._searches.pop(who, None) or self._read(who)
            if found and found[0].request == request:  # asked again, with other filters or for more
                found.popleft()
            found.appendleft(search)
            self._searches[who] = found  # whoever asked last stands last
            if len(self._searches) > _ASKERS:
                del self._searches[next(iter(self._searches))]
            self._write(who, found)

    def used(self, who: Who, identity: str, *, is_run: bool) -> Wanted | None:
        """Return the request that an item was found by which is used now; None where it was not, or is known.

        It was found by the latest search that showed it, if it stood there where one looks.
        """
        item, now = identity.partition("@")[0], self._clock()
        with self._lock:
            searches = [*(self._searches.get(who) or self._read(who))]
        search = next((one for one in searches if item in one.shown), None)
        if search is None or not search.shown[item] or not 0 <= now - search.at <= MINUTES * 60:
            return None
        is_known = item in search.ran or (item in search.read and not is_run)
        (search.ran if is_run else search.read).add(item)
        wanted = Wanted(search.request, search.parts.get(item, ""))
        return None if is_known or _is_name(wanted.part or wanted.request, item) else wanted

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
            rows = [{"request": one.request, "shown": one.shown, "at": one.at, "parts": one.parts} for one in searches]
            with suppress(KiwiError), changing(self._file) as put:
                put(json.dumps({"who": [*who], "searches": rows}).encode())


def _searches(said: Json) -> Iterator[_Search]:
    for one in map(as_object, as_list(said)):
        at = one.get("at")
        if isinstance(at, int | float):
            shown = {item: is_seen is True for item, is_seen in as_object(one.get("shown")).items()}
            parts = {item: as_text(part) for item, part in as_object(one.get("parts")).items()}
            yield _Search(as_text(one.get("request")), shown, float(at), parts)


def _is_name(request: str, item: str) -> bool:
    """Whether a request is the item's own name, by which it is found first anyway."""
    return request.strip() in {item, item.rpartition("/")[2]}
