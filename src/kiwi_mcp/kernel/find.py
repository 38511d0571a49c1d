"""The search verb: a need in, ranked cards out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.entry import Broken
from kiwi_mcp.domain.grants import Rights
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel.found import browse, filter_of, is_browsing, keeping, most_hits, tell, tell_nothing
from kiwi_mcp.kernel.permission import Permission
from kiwi_mcp.kernel.places import has_project
from kiwi_mcp.kernel.requests import SearchRequest
from kiwi_mcp.kernel.searching.library import Library
from kiwi_mcp.kernel.searching.sources import SOURCES
from kiwi_mcp.kernel.searching.view import View
from kiwi_mcp.search.frozen import DamagedIndex
from kiwi_mcp.search.memory import Recall
from kiwi_mcp.search.port import Card
from kiwi_mcp.search.ranking import rank
from kiwi_mcp.search.request import Request


def find(
    request: SearchRequest,
    catalog: Catalog,
    library: Library,
    *,
    rights: Callable[[], Rights] | None = None,
    recall: Callable[[Request], Recall | None] = lambda _: None,
) -> JsonObject:
    """Return the items that match a need, best first; what whoever asks is not to know of is left out.

    `recall` gives what is remembered of requests like one.
    """
    try:
        return _found(request, catalog, library, rights, recall)
    except DamagedIndex:
        library.forget_loaded()
        return _found(request, catalog, library, rights, recall)


def _found(
    request: SearchRequest,
    catalog: Catalog,
    library: Library,
    rights: Callable[[], Rights] | None,
    recall: Callable[[Request], Recall | None],
) -> JsonObject:
    asked = SOURCES[request.source]
    view = library.view(catalog, asked)
    if request.source == "registry":
        for fault in catalog.faults():
            raise fault.with_traceback(None)
    permission, wanted, is_server = Permission(catalog, rights), filter_of(request), _servers(catalog)
    need = view.read(request.query)
    known = recall(need)
    pools, keeps = view.pools(need, wanted, known.found if known else ()), keeping(wanted, permission)
    if is_browsing(request):
        ranked = browse(view.cards, keeps)
    else:
        # Whoever looks for a tool can run what a server offers, and not the server.
        ranked = rank(need, pools, limit=most_hits(request), keeps=keeps, recall=known, is_behind=is_server)
    sees = (lambda card: not permission.is_hidden(card.identity)) if permission.hides else None
    is_shared, homes = partial(view.is_shared, sees=sees), partial(view.homes, sees)
    told = tell(request, need, ranked, permission, is_shared=is_shared, homes=homes)
    if is_browsing(request) and view.is_remote:
        told["note"] = "What is published is on a server, and not listed here: search for it with words."
    unasked = catalog.faults() if "registry" in asked or "mcp" in asked else ()
    faults = [*unasked, *view.faults, *filter(None, [permission.fault])]
    if faults:
        told["warnings"] = [*dict.fromkeys(f"{fault.message} {fault.suggestion}" for fault in faults)]
    if not permission.hides:  # else these would tell of items that whoever asks is not to know of
        told |= _state(view, catalog.seen_broken(asked)[: request.limit])
    if not ranked.hits:
        is_about_one = has_project(catalog.space)
        told |= tell_nothing(
            request,
            need,
            pools,
            permission,
            lambda: view.cards,
            is_server=is_server,
            has_project=is_about_one,
        )
    return told


def _servers(catalog: Catalog) -> Callable[[Card], bool]:
    """Return what tells whether a card is that of an MCP server itself."""
    is_one = cache(lambda tool_type: catalog.sheets.carries(tool_type, "mcp"))
    return lambda card: is_one(card.tool_type)


def _state(view: View, broken: Sequence[Broken]) -> JsonObject:
    """Return what was not searched: items that are not indexed yet, and files that cannot be read."""
    files = [{"path": one.path, "message": one.error.message} for one in broken]
    return {**({"indexing": view.indexing} if view.indexing else {}), **({"broken": files} if files else {})}
