"""Which search led to a use, and what of a query may be stored. Imports no numpy: it runs on every `execute`."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec import Struct, field

from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.owner_file import changing
from kiwi_mcp.primitives.secrets.redaction import redact
from kiwi_mcp.store.search_index.recall import MAX_LENGTH, RecallEntry, RecallStore

if TYPE_CHECKING:
    from kiwi_mcp.search.query import ParsedQuery
    from kiwi_mcp.search.recall import RecallMatches, RecallWorker

_ELLIPSIS = "…"
_WORD = re.compile(r"\w")
# Text that does not look like words helps no later search, and may be a password, a key or a card number.
_UNLIKE_WORDS = lazy_pattern(
    r"(?=\S*\d)(?=\S*[A-Za-z])[^\s,;:()\"'?!]{9,}|[^\s]{41,}|\d[\d\s.-]{5,}\d|\S+@\S+|\w+://\S+"
)
_NAMES = (
    r"(?:(?:password|passwort|kennwort|passwd|passphrase|passcode|contraseña|secret|token|credential|bearer|authorization)"
    r"|(?<![^\W_])(?:pass|passe|passport|pwd|pw|pin|otp|cvv|cvc|ssn|iban)"
    r"|(?:(?<![^\W_])|api|access|private|secret|ssh|pass)key)s?(?![^\W\d_])"
)
# A secret may be any words. What follows the name of a kind of secret is not stored, nor what is called one.
_NAMED_SECRET = lazy_pattern(rf"(?i){_NAMES}(?=.*\w)")
_CALLED_SECRET = lazy_pattern(rf"(?i)(?<!\S)\S++(?=\s+(?:is|was|as|for)\s+(?:\w+\s+){{0,3}}{_NAMES})")

MINUTES = 10  # how many minutes after a search a use counts as its result

FIRST, ENOUGH = 5, 0.3  # how many hits count as noticed, and the score from which a hit further down does too
BETWEEN = 3  # how many other searches may come between a search and the use of its result
_SEARCHES = BETWEEN + 1
_MAX_SEARCHERS = 256
_MAX_BYTES = 1_000_000
_NO_PARTS: Mapping[str, str] = MappingProxyType({})


class Searcher(NamedTuple):
    """Who searches: the actor, their program, and their project."""

    actor: str
    client: str
    project: str


class SearchIntent(NamedTuple):
    """The query that found an item, and the part of it that the item matches, if it has several."""

    request: str
    part: str = ""


class _Search(Struct):
    """A query, its hits (and whether each was near the top), and the part of the query that each matches."""

    request: str
    shown: dict[str, bool]
    at: float
    parts: dict[str, str]
    read: set[str] = field(default_factory=set)
    ran: set[str] = field(default_factory=set)


class _Saved(Struct):
    """The searches of one searcher, as a file holds them."""

    who: Searcher
    searches: list[_Search]


class RecentSearches:
    """The latest searches. With a file, they are shared by processes that follow each other, such as CLI commands."""

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._clock = clock
        self._lock = Lock()
        self.searches: dict[Searcher, deque[_Search]] = {}

    def add(
        self, who: Searcher, request: str, shown: Sequence[tuple[str, float]], parts: Mapping[str, str] = _NO_PARTS
    ) -> None:
        """Note a search and the identities of its hits with their scores, the best first.

        `parts` maps an identity to the part of the query that it matches.
        """
        # Of two versions of one item, the better place counts.
        places = reversed([*enumerate(shown)])
        items = {name.partition("@")[0]: place < FIRST or score >= ENOUGH for place, (name, score) in places}
        answered = {name.partition("@")[0]: parts[name] for name, _ in reversed(shown) if name in parts}
        search = _Search(request, items, self._clock(), answered)
        with self._lock:
            found = self.searches.pop(who, None) or self._read(who)
            if found and found[0].request == request:  # repeated, with other filters or for more
                found.popleft()
            found.appendleft(search)
            self.searches[who] = found  # the latest searcher comes last
            if len(self.searches) > _MAX_SEARCHERS:
                del self.searches[next(iter(self.searches))]
            self._write(who, found)

    def used(self, who: Searcher, identity: str, *, is_run: bool) -> SearchIntent | None:
        """Return the latest query that showed the item near the top, unless this use of it is known."""
        item, now = identity.partition("@")[0], self._clock()
        with self._lock:
            searches = [*(self.searches.get(who) or self._read(who))]
        search = next((one for one in searches if item in one.shown), None)
        if search is None or not search.shown[item] or not 0 <= now - search.at <= MINUTES * 60:
            return None
        is_known = item in search.ran or (item in search.read and not is_run)
        (search.ran if is_run else search.read).add(item)
        wanted = SearchIntent(search.request, search.parts.get(item, ""))
        # The item's own name finds it first anyway.
        is_name = (wanted.part or wanted.request).strip() in {item, item.rpartition("/")[2]}
        return None if is_known or is_name else wanted

    def forget(self, actor: str) -> None:
        """Forget the searches of an actor."""
        with self._lock:
            self.searches = {who: found for who, found in self.searches.items() if who.actor != actor}
            if self._file is not None:
                with suppress(OSError):
                    self._file.unlink(missing_ok=True)

    def _read(self, who: Searcher) -> deque[_Search]:
        """Return the searches that other processes noted; a damaged file counts as empty."""
        found: deque[_Search] = deque(maxlen=_SEARCHES)
        if self._file is not None:
            with suppress(OSError, ValueError, RecursionError), self._file.open("rb") as file:
                saved = msgspec.json.decode(file.read(_MAX_BYTES), type=_Saved)
                if saved.who == who:
                    found.extend(saved.searches)
        return found

    def _write(self, who: Searcher, searches: Iterable[_Search]) -> None:
        if self._file is not None:
            rows = [{"request": one.request, "shown": one.shown, "at": one.at, "parts": one.parts} for one in searches]
            with suppress(KiwiError), changing(self._file) as put:
                put(json.dumps({"who": [*who], "searches": rows}).encode())


class RecallAccess(Struct, frozen=True):
    """What recall needs from the kernel."""

    is_enabled: Callable[[], bool]  # whether the owner wants searches to be remembered
    uses_meaning: Callable[[], bool]  # whether the owner wants search by meaning
    open_store: Callable[[], RecallStore]
    open_store_if_any: Callable[[], RecallStore | None]  # returns None if the store was never created
    secrets: Callable[[Space], Mapping[str, str]]  # returns all secret values of a space by name


class RecallLog:
    """Remembers which searches led to a use of an item; `file` holds recent searches for the next process."""

    def __init__(self, access: RecallAccess, file: Path | None = None) -> None:
        self._access = access
        self._is_shared = file is not None
        self._recent = RecentSearches(file)
        self._lock = Lock()
        self._worker_if_any: RecallWorker | None = None

    @property
    def is_enabled(self) -> bool:
        """Whether the owner wants it."""
        return self._access.is_enabled()

    def recall(self, query: ParsedQuery, space: Space, caller: Caller) -> RecallMatches | None:
        """Return what is remembered of similar queries."""
        return self._worker().recall(caller.name, space, query) if self.is_enabled else None

    def add_search(self, query: str, response: JsonObject, space: Space, caller: Caller) -> None:
        """Note a search and its response; a query without words is not noted."""
        if not self.is_enabled or not _WORD.search(query):
            return
        shown, parts = [], _parts(response)
        for one in map(as_object, as_list(response.get("results"))):
            score = one.get("score")
            shown.append((as_text(one.get("identity")), float(score) if isinstance(score, int | float) else 0.0))
        try:
            if self._is_shared:
                secrets = self._access.secrets(space)
                stored = {part: storable_part(SearchIntent(query, part), secrets) for part in {*parts.values()}}
                parts = {one: stored[part] for one, part in parts.items()}
                query = storable_text(query, secrets)
        except KiwiError:  # without the secrets nothing can be cleaned of them, so nothing is stored
            return
        self._recent.add(Searcher(caller.name, caller.client, str(space.project)), query, shown, parts)

    def add_use(self, identity: str, space: Space, caller: Caller, *, is_run: bool) -> None:
        """Remember the search that found an item which is used now, if there was one."""
        if not self._is_shared and not self._recent.searches:  # nothing was searched here
            return
        who = Searcher(caller.name, caller.client, str(space.project))
        intent = self._recent.used(who, identity, is_run=is_run)
        if intent and intent.request and self.is_enabled:
            self._worker().add(caller.name, identity, intent, space, is_run=is_run)

    def add(self, identity: str, query: str, space: Space, caller: Caller, *, is_run: bool) -> None:
        """Remember that an item was used after a query, if that is enabled."""
        if self.is_enabled:
            self._worker().add(caller.name, identity, SearchIntent(query), space, is_run=is_run)

    def entries(self, actor: str) -> Sequence[RecallEntry]:
        """Return what is remembered of an actor, the latest first."""
        return self._worker().entries(actor)

    def forget(self, actor: str, items: Sequence[str] | None = None) -> int:
        """Forget everything about an actor, or about some items; return the number of forgotten queries."""
        self._recent.forget(actor)
        return self._worker().forget(actor, items)

    def wait_until_stored(self, seconds: float) -> bool:
        """Wait at most `seconds` until everything is stored and encoded; return whether it is."""
        return self._worker().wait_until_stored(seconds)

    def close(self) -> None:
        """Store what is left, and end the background work."""
        if self._worker_if_any is not None:
            self._worker_if_any.close()

    def _worker(self) -> RecallWorker:
        # The only deferred import of our own: it keeps numpy off the path of `execute`.
        from kiwi_mcp.search.recall import RecallWorker  # noqa: PLC0415

        with self._lock:
            if self._worker_if_any is None:
                self._worker_if_any = RecallWorker(self._access)
            return self._worker_if_any


def _parts(response: JsonObject) -> Mapping[str, str]:
    """Return the part of the query that each hit matches, if the query has several."""
    texts = dict(enumerate(map(as_text, as_list(response.get("parts"))), 1))
    results = [as_object(one) for one in as_list(response.get("results"))]
    numbers = {as_text(one.get("identity")): one.get("part") for one in reversed(results)}
    return {name: texts[number] for name, number in numbers.items() if isinstance(number, int) and number in texts}


def storable_text(query: str, secrets: Mapping[str, str]) -> str:
    """Return what may be stored of a query: its words without secrets, text that looks like one, and addresses."""
    text = _without_secrets(query, secrets)
    if len(text) > MAX_LENGTH:
        text = text[:MAX_LENGTH].rpartition(" ")[0] or text[:MAX_LENGTH]
    return text if _WORD.search(text) else ""


def storable_part(intent: SearchIntent, secrets: Mapping[str, str]) -> str:
    """Return what may be stored of the part that an item matches: never more than of the whole query."""
    part = storable_text(intent.part, secrets)
    is_safe = part and part in _without_secrets(intent.request, secrets)
    return part if is_safe else storable_text(intent.request, secrets)


def _without_secrets(query: str, secrets: Mapping[str, str]) -> str:
    """Return a query up to where it names a kind of secret; nothing if no words come before that."""
    text = _CALLED_SECRET.sub(_ELLIPSIS, " ".join(redact(query, secrets).split()))
    if found := _NAMED_SECRET.search(text):
        text = f"{text[: found.end()]} {_ELLIPSIS}" if _WORD.search(text[: found.start()]) else ""
    return " ".join(_UNLIKE_WORDS.sub(_ELLIPSIS, text).split())
