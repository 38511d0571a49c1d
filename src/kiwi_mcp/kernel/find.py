"""The search verb: a need in, ranked cards out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Lock
from types import MappingProxyType
from typing import get_args
from weakref import WeakKeyDictionary

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.entry import Entry
from kiwi_mcp.domain.grants import Rights
from kiwi_mcp.domain.items import Source
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.kernel.permission import Permission
from kiwi_mcp.kernel.requests import SearchRequest
from kiwi_mcp.search.choose import Filter, arrange
from kiwi_mcp.search.index import Index
from kiwi_mcp.search.port import Card, Hit
from kiwi_mcp.search.ranking import rank
from kiwi_mcp.search.request import read_request

_SOURCES: Mapping[str, tuple[Source, ...]] = MappingProxyType(
    {"local": ("project", "user", "mcp"), "all": get_args(Source), **{word: (word,) for word in get_args(Source)}}
)
"""Which sources a word stands for."""
_LINE = 200
_MARKDOWN = ("directive", "knowledge")
"""What an `item_type` narrows a search to; every other word means everything."""


class Desk:
    """The cards of one catalog, with the search that has indexed them."""

    def __init__(self) -> None:
        self._entries: Sequence[Entry] = ()
        self.cards: tuple[Card, ...] = ()
        self.index = Index()
        self.shared: frozenset[str] = frozenset()
        """The short names that several items have."""

    def follow(self, entries: Sequence[Entry]) -> None:
        """Make cards where the catalog has changed; it gives the same entries as long as it has not."""
        if entries is not self._entries:
            # What has not changed is the same entry, and keeps its card: the index sees at a glance that it may stay.
            made = dict(zip(map(id, self._entries), self.cards, strict=True))
            self.cards = tuple(made.get(id(entry)) or _card(entry) for entry in entries)
            homes = Counter(tool_id for _, _, tool_id in {(one.source, one.namespace, one.tool_id) for one in entries})
            self.shared = frozenset(name for name, count in homes.items() if count > 1)
            self._entries = entries
            self.index.follow(self.cards)
            self.index.catch_up(None, None, seconds=60)


class _Room:
    """The desks of one catalog, where one search is made at a time."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.desks: dict[str, Desk] = {}


_rooms: WeakKeyDictionary[Catalog, _Room] = WeakKeyDictionary()


def asks_registry(request: SearchRequest) -> bool:
    """Whether a search looks through what is published, which may be much and may be far."""
    return "registry" in _SOURCES[request.source]


def find(request: SearchRequest, catalog: Catalog, *, rights: Callable[[], Rights] | None = None) -> JsonObject:
    """Return the items that match a need, best first; what whoever asks is not to know of is left out."""
    room = _rooms.setdefault(catalog, _Room())
    with room.lock:
        permission = Permission(catalog, rights)
        return _found(request, catalog, room.desks.setdefault(request.source, Desk()), permission)


def _found(request: SearchRequest, catalog: Catalog, desk: Desk, permission: Permission) -> JsonObject:
    asked = _SOURCES[request.source]
    desk.follow(catalog.all(asked))
    if request.source == "registry":
        for fault in catalog.faults():
            raise fault.with_traceback(None)
    wanted = _filter(request)
    ranked = rank(
        read_request(request.query, None),
        [desk.index],
        limit=len(desk.cards),
        keeps=lambda card: wanted.keeps(card) and not permission.is_hidden(card.identity),
    )
    hits = ranked.hits
    told: dict[str, Json] = {
        "results": [_result(hit, permission, desk.shared) for hit in arrange(hits, request.sort_by)[: request.limit]],
        "total": len(hits),
        "query": request.query,
        "source": request.source,
    }
    faults = [*(catalog.faults() if "registry" in asked or "mcp" in asked else ()), *filter(None, [permission.fault])]
    if faults:
        told["warnings"] = [*dict.fromkeys(f"{fault.message} {fault.suggestion}" for fault in faults)]
    if broken := catalog.broken():
        told["broken"] = [{"path": one.path, "message": one.error.message} for one in broken[: request.limit]]
    if not hits:
        seen = [card for card in desk.cards if wanted.keeps(card) and not permission.is_hidden(card.identity)]
        told["suggestion"] = _hint(request, seen)
    return told


def _filter(request: SearchRequest) -> Filter:
    narrowed = (request.item_type,) if request.item_type in _MARKDOWN else ()
    return Filter(
        types=(request.tool_type,) if request.tool_type else narrowed,
        sources=(),
        tags=(request.tag,) if request.tag else (),
        categories=(request.category,) if request.category else (),
    )


def _card(entry: Entry) -> Card:
    return Card(
        identity=entry.identity,
        tool_id=entry.tool_id,
        name=entry.name,
        description=entry.description,
        tags=entry.tags,
        category=entry.category,
        parameters=entry.parameters,
        source=entry.source,
        tool_type=entry.tool_type,
        path=entry.path,
        modified=entry.modified,
        namespace=entry.namespace,
        server=entry.namespace if entry.source == "mcp" else "",
    )


def _result(hit: Hit, permission: Permission, shared: Collection[str]) -> JsonObject:
    card = hit.card
    full_name = card.identity.partition("@")[0]
    return {
        "name": card.tool_id,
        "description": _line(card.description),
        "source": card.source,
        "path": card.path,
        "score": round(hit.score, 4),
        "tool_type": card.tool_type,
        "identity": card.identity,
        **({"full_name": full_name} if card.tool_id in shared else {}),
        "why": list(hit.why.words),
        **_flag(card),
        **({"permitted": False} if permission.refusal(card.identity) else {}),
    }


def _line(description: str) -> str:
    line = description.partition("\n")[0]
    return line if len(line) <= _LINE else f"{line[: _LINE - 1]}…"


def _flag(card: Card) -> JsonObject:
    """Return that an item of an MCP server is not used before the owner accepts it, where that is so."""
    state = next((tag for tag in card.tags if tag in {"changed", "new"}), "") if card.source == "mcp" else ""
    return {"state": state} if state else {}


def _hint(request: SearchRequest, cards: Sequence[Card]) -> str:
    if not cards:
        return "Nothing is here yet: search with `source: all` for what is published or built in, or create a tool."
    names = ", ".join(f"`{card.tool_id}`" for card in cards[:8])
    wider = "" if request.source == "all" else " `source: all` searches what is published or built in too."
    return f"Try other words. Here: {names}{' and more' if len(cards) > 8 else ''}.{wider}"  # noqa: PLR2004 - as above
