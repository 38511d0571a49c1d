"""The search verb: a need in, ranked cards out."""

from __future__ import annotations

from collections.abc import Sequence

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.entry import Entry
from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.kernel.requests import SearchRequest
from kiwi_mcp.search.keywords import Keywords
from kiwi_mcp.search.port import Card, Hit

_LOCAL = ("project", "user")
_KINDS = {"directive": "directives", "knowledge": "knowledge"}
_search = Keywords()


def find(request: SearchRequest, catalog: Catalog) -> JsonObject:
    """Return the items that match a need, best first."""
    if request.source == "registry":
        raise InvalidRequest(
            "No registry is connected to this installation.", suggestion="Search with `source: local` or `source: all`."
        )
    entries = [entry for entry in catalog.all() if _is_wanted(entry, request)]
    hits = _search.rank(request.query, [_card(entry) for entry in entries], limit=max(len(entries), 1))
    shown = _ordered(hits, request.sort_by)[: request.limit]
    told: dict[str, Json] = {
        "results": [_result(hit) for hit in shown],
        "total": len(hits),
        "query": request.query,
        "source": request.source,
    }
    if broken := catalog.broken():
        told["broken"] = [{"path": one.path, "message": one.error.message} for one in broken[: request.limit]]
    if not hits:
        told["suggestion"] = _hint(request, entries)
    return told


def _is_wanted(entry: Entry, request: SearchRequest) -> bool:
    sources = {"local": _LOCAL, "all": (entry.source,)}.get(request.source, (request.source,))
    kind = _KINDS.get(request.item_type)
    return (
        entry.source in sources
        and (kind is None or kind == entry.kind or request.item_type == entry.tool_type)
        and (request.tool_type is None or request.tool_type == entry.tool_type)
        and (request.category is None or request.category == entry.category)
        and (request.tag is None or request.tag in entry.tags)
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
    )


def _ordered(hits: Sequence[Hit], sort_by: str) -> Sequence[Hit]:
    match sort_by:
        case "date":
            return sorted(hits, key=lambda hit: -hit.card.modified)
        case "name":
            return sorted(hits, key=lambda hit: hit.card.tool_id)
        case _:
            return hits


def _result(hit: Hit) -> JsonObject:
    card = hit.card
    return {
        "name": card.tool_id,
        "description": card.description.partition("\n")[0][:200],
        "source": card.source,
        "path": card.path,
        "score": round(hit.score, 4),
        "tool_type": card.tool_type,
        "identity": card.identity,
        "why": list(hit.why),
    }


def _hint(request: SearchRequest, entries: Sequence[Entry]) -> str:
    if not entries:
        return "Nothing is here yet: search with `source: all` for what is built in, or create a tool."
    names = ", ".join(f"`{entry.tool_id}`" for entry in entries[:8])
    wider = "" if request.source == "all" else " `source: all` searches what is built in too."
    return f"Try other words; here are {len(entries)} items, such as {names}.{wider}"
