"""Remembering: which request a use belongs to, and what of it may be kept."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from threading import Lock
from typing import NamedTuple, Protocol

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel.memory import Listing, tell_memory
from kiwi_mcp.kernel.redaction import cleaned
from kiwi_mcp.kernel.requests import MemoryRequest
from kiwi_mcp.kernel.store import Store

MINUTES = 10
"""For how long after a search what is used belongs to it."""
LONGEST = 300
"""How many characters of a request are kept."""

_SEARCHES = 8
"""How many of the latest searches of one who asks are held."""
_ASKERS = 256
_MARK = "…"
# What looks like no word of a language helps no later search, and may be a password, a key or the number of a card.
_ODD = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])[^\s,;:()\"'?!]{9,}|[^\s]{41,}|\d[\d\s.-]{5,}\d|\S+@\S+|\w+://\S+")
_TOLD = re.compile(
    r"(?i)\b(pass(?:word|phrase|code)?|secret|token|api[ _-]?key|key|pin|credentials?)(\s+is\s+|\s*[:=]\s*)(\S+)"
)


class Memories(Listing, Protocol):
    """What the store remembers; it is loaded when it is first needed."""

    def recall(self, actor: str, space: Space, request: object) -> object:
        """Return what is remembered of requests like one."""

    def note(self, actor: str, identity: str, request: str, space: Space, *, is_run: bool) -> None:
        """Let it be remembered that an item was used after a request."""

    def close(self) -> None:
        """End what is done in the background."""


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
    """The latest searches, so that what is used next is known to have been wanted by one of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._searches: dict[Who, deque[_Search]] = {}

    def asked(self, who: Who, request: str, shown: Iterable[str]) -> None:
        """Note a search and the identities it answered with."""
        search = _Search(request, frozenset(one.partition("@")[0] for one in shown), self._clock())
        with self._lock:
            found = self._searches.pop(who, None) or deque(maxlen=_SEARCHES)
            found.appendleft(search)
            self._searches[who] = found  # whoever asked last stands last
            if len(self._searches) > _ASKERS:
                del self._searches[next(iter(self._searches))]

    def used(self, who: Who, identity: str, *, is_run: bool) -> str:
        """Return the request that an item was found by which is used now; nothing where it was not, or is known."""
        item, now = identity.partition("@")[0], self._clock()
        with self._lock:
            searches = [*self._searches.get(who, ())]
        for search in searches:
            if now - search.at <= MINUTES * 60 and item in search.shown:
                known = search.ran if is_run else search.ran | search.read
                (search.ran if is_run else search.read).add(item)
                return "" if item in known or _is_name(search.request, item) else search.request
        return ""


class Remembering:
    """What a kernel remembers of the searches it answers, unless its owner does not want that."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._recent = Recent()
        self._lock = Lock()
        self._opened: Memories | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the owner wants it."""
        try:
            return self._store.settings.remember
        except KiwiError:  # whatever needs the settings tells of it
            return False

    def recall(self, space: Space, caller: Caller) -> Callable[[object], object]:
        """Return what gives all that is remembered of requests like one."""
        return partial(self._memories().recall, caller.name, space) if self.is_wanted else lambda _: None

    def asked(self, request: str, told: JsonObject, space: Space, caller: Caller) -> None:
        """Note a search and its answer."""
        if self.is_wanted:
            shown = [as_text(as_object(one).get("identity")) for one in as_list(told.get("results"))]
            self._recent.asked(_who(space, caller), request, shown)

    def used(self, identity: str, space: Space, caller: Caller, *, is_run: bool) -> None:
        """Remember the search by which an item was found that is used now, if there was one."""
        request = self._recent.used(_who(space, caller), identity, is_run=is_run)
        if request and self.is_wanted:
            self._memories().note(caller.name, identity, request, space, is_run=is_run)

    def tell(self, request: MemoryRequest, caller: Caller, *, is_own: bool) -> JsonObject:
        """Answer a request about what is remembered of a caller."""
        return tell_memory(request, self._memories(), caller.name, is_own=is_own, is_wanted=self.is_wanted)

    def close(self) -> None:
        """Write down what was used, and end what is done in the background."""
        if self._opened is not None:
            self._opened.close()

    def _memories(self) -> Memories:
        with self._lock:
            if self._opened is None:
                make: Callable[[Store], Memories]
                make = import_module("kiwi_mcp.kernel.searching.opening").open_memories
                self._opened = make(self._store)
            return self._opened


def _who(space: Space, caller: Caller) -> Who:
    return Who(caller.name, caller.client, str(space.project))


def kept_text(request: str, secrets: Mapping[str, str]) -> str:
    """Return what is kept of a request: its words, without what is secret, looks so, or says who or where."""
    known = _TOLD.sub(rf"\1\2{_MARK}", cleaned(request[: 4 * LONGEST], secrets))
    text = " ".join(_ODD.sub(_MARK, known).split())
    if len(text) > LONGEST:
        text = text[:LONGEST].rpartition(" ")[0] or text[:LONGEST]
    return text if re.search(r"\w", text) else ""


def _is_name(request: str, item: str) -> bool:
    """Whether a request is the item's own name, by which it is found first anyway."""
    return request.strip() in {item, item.rpartition("/")[2]}
