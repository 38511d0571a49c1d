"""search: find items by what they do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.registry_source import is_listed
from kiwi_mcp.catalog.source import ItemSource
from kiwi_mcp.domain.cards import Card, part_number, whole_path
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.grants import Rights
from kiwi_mcp.domain.items import NO_SOURCE, SOURCE_TRAITS, Source
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.kernel.context import Services, VerbContext
from kiwi_mcp.kernel.paths import has_project
from kiwi_mcp.kernel.permission import ItemVisibility
from kiwi_mcp.kernel.settings import search_mode
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.kernel.tool_names import write_namespaces
from kiwi_mcp.kernel.verb import ANYONE, Answer, AnyJson, Response, SearchRequest, verb
from kiwi_mcp.kernel.view import Notice, TableRow, ViewItem, first_sentence, warning_rows
from kiwi_mcp.search.encoder import load_encoder
from kiwi_mcp.search.index import CardPool
from kiwi_mcp.search.index_file import DamagedIndex
from kiwi_mcp.search.indexes import SearchIndexes, describe_locations, list_names
from kiwi_mcp.search.port import Encoder, Filter, Hit, MatchReason, PublishedItems, sort_hits
from kiwi_mcp.search.query import ParsedQuery
from kiwi_mcp.search.ranking import RankedHits, near_misses, rank
from kiwi_mcp.search.recall import RecallMatches
from kiwi_mcp.search.tokens import forms_in, words
from kiwi_mcp.store.search_index.feature_cache import FeatureCache

SOURCES: Mapping[str, tuple[Source, ...]] = MappingProxyType(
    {"local": ("project", "user", "mcp"), "all": get_args(Source), **{word: (word,) for word in get_args(Source)}}
)
"""The sources that each value of `source` stands for."""

_ORDER = get_args(Source)
"""The order in which a short name is looked for."""
_ARGUMENT = re.compile(r"`(source|server|tag|category): (\w+)`")
QUERY_HINT = "Ask for one need per search, in plain words: verb + object + service."
_NO_PROJECT = "No project was searched: add `project_path`, the absolute path of yours, to find what is in it."
_NOTHING_YET = "Nothing is here yet: search with `source: all` for what is published or built in, or create a tool."
_EMPTY_SERVER = (
    "The server '{0}' is here, and offers nothing of this: `kiwi mcp list {0}` says why, "
    "`kiwi mcp refresh {0}` asks it again."
)
_MAX_DESCRIPTION, _MAX_REASON = 200, 200
_UNACCEPTED = frozenset({"changed", "new"})
"""The tags of an MCP server's item that the owner has not accepted."""
_MAX_WORDS = 4
"""How many matching words of a card are reported, the rarest first."""
_WEAK, _WEAK_BY_WORDS = 0.25, 0.28
"""Below this score, in two of three queries of our own corpus, the best card is wrong or there is no right one."""
_SURE = 0.6
"""From this score on an item matches well. If none of the owner's does, built-in items that do follow them."""
_OF_NOTHING = frozenset({"note", "suggestion", "close"})
"""The fields of a response that are advice to one who found nothing."""
_SORTED = 100
"""How many of the best hits are sorted by name or date."""
_CLOSE = 5
"""How many near misses are reported."""
_SPARE = 20
"""How many more hits are ranked than shown, to replace duplicates."""
_LISTS_SERVERS = frozenset({"registry", "builtin"})
"""The values of `source` that also show MCP servers, which can be brought here from there."""
_EVERYTHING = frozenset({"", "*"})
"""Queries that match every item."""
_MARKDOWN = ("directive", "knowledge", "skill")
"""The values of `item_type` that filter a search; every other value means everything."""

_NO_FILTER = Filter()
_VALUES: Mapping[str, Callable[[Card], Collection[str]]] = MappingProxyType(
    {
        "tool_type": lambda card: (card.tool_type,),
        "category": lambda card: (card.category,),
        "tag": lambda card: card.tags,
        "server": lambda card: (card.server,),
    }
)
"""The arguments that filter a search, and the values of a card for each."""


class SearchResult(Struct, frozen=True, kw_only=True):
    """One item that was found, and why."""

    name: str
    description: str
    source: str
    path: str
    score: float
    tool_type: str
    identity: str
    section: str = ""
    """The part of a text that fits: `load` returns it as a `file`."""
    full_name: str = ""
    also: tuple[str, ...] = ()
    """The same item in other places."""
    parameters: dict[str, AnyJson] = {}
    """With `with_schema`: the schema of the first result."""
    why: tuple[str, ...] = ()
    part: int = 0
    meaning: float | None = None
    remembered: bool = False
    state: str = ""
    permitted: bool = True
    not_permitted: str = ""

    @property
    def typed_name(self) -> str:
        """The name to use for it: a published item has its namespace in front."""
        full, home = self.identity.partition("@")[0], SOURCE_TRAITS.get(self.source, NO_SOURCE)
        if home.is_offered:
            return f"{full} ({self.state})" if self.state else full
        if home.is_published:
            return full.removeprefix("registry/")
        return self.full_name or self.name


class NearMiss(Struct, frozen=True):
    """An item that came close."""

    identity: str
    description: str


class UnreadableFile(Struct, frozen=True):
    """A file that could not be read."""

    path: str
    message: str


class IndexCounts(Struct, frozen=True):
    """How many items there are, and how many of them are indexed."""

    cards: int = 0
    words: int = 0
    meaning: int = 0


class SearchResponse(Response, frozen=True, kw_only=True):
    """The items that were found, best first."""

    results: tuple[SearchResult, ...]
    total: int
    query: str
    source: str
    parts: tuple[str, ...] = ()
    note: str = ""
    warnings: tuple[str, ...] = ()
    broken: tuple[UnreadableFile, ...] = ()
    indexing: IndexCounts | None = None
    suggestion: str = ""
    close: tuple[NearMiss, ...] = ()


def _view(response: SearchResponse) -> Iterator[ViewItem]:
    width = max((len(one.typed_name) for one in response.results), default=0)
    for one in response.results:
        kind, text = f"{one.source}/{one.tool_type}", first_sentence(one.description)
        row = f"{one.typed_name.ljust(width)}  {kind:<18} {text_of(one.score):<6}  {text}"
        yield TableRow(row, forms_in(row, one.why))
        reasons = [
            f"by {', '.join(one.why)}" if one.why else "",
            "" if one.meaning is None else f"near in meaning ({text_of(one.meaning)})",
            "used before for a need like this" if one.remembered else "",
            f"for “{response.parts[one.part - 1]}”" if 0 < one.part <= len(response.parts) else "",
            "" if one.permitted else f"✗ not permitted: {one.not_permitted}",
        ]
        if any(reasons):
            yield TableRow(f"    {'; '.join(filter(None, reasons))}")
    yield from warning_rows([*response.warnings, *(file.message for file in response.broken)])
    found = f"{len(response.results)} of {response.total} found"
    yield Notice(found if response.results else f"Nothing found. {_typed(response.suggestion)}")
    for miss in response.close:
        yield TableRow(f"close: {miss.identity.partition('@')[0]}  {first_sentence(miss.description)}")
    if response.note:
        yield Notice(f"note: {_typed(response.note)}")
    if (state := response.indexing) is not None:
        counts = f"of {state.cards} items {state.words} are found by words, {state.meaning} by meaning so far"
        yield Notice(f"note: still indexing: {counts}.")


def _typed(hint: str) -> str:
    """Return a hint with the arguments of a request as options: `source: all` is `--source all`."""
    return _ARGUMENT.sub(r"`--\1 \2`", hint)


@verb("search", access=ANYONE, records=False, needs_rules=True, everyday="search", response=SearchResponse, shows=_view)
async def search(request: SearchRequest, context: VerbContext) -> Answer:
    """Find tools by what they do, and see why each was found."""
    services, caller, sources = context.services, context.caller, SOURCES[request.source]
    # Published items may be many and far away: a search for local items does not wait for them.
    is_far = any(SOURCE_TRAITS[name].is_published for name in sources)
    thread = services.catalogs.far if is_far else services.catalogs.near
    is_of_project = SOURCE_TRAITS.get(request.source, NO_SOURCE).is_in_project
    space = (services.catalogs.space if is_of_project else services.catalogs.space_if_any)(request.project_path)

    def look(catalog: Catalog) -> JsonObject:
        recall = partial(services.recall_log.recall, space=catalog.space, caller=caller)
        response = find(request, catalog, open_indexes(services), rights=services.rights(caller), recall=recall)
        services.recall_log.add_search(request.query, response, catalog.space, caller)
        return response

    return Answer(await thread.do(space, look))


def open_indexes(services: Services) -> SearchIndexes:
    """Return the search indexes of a kernel; the first search opens them."""
    store = services.store

    def load() -> Encoder | None:
        return load_encoder() if search_mode(store.user) == "meaning" else None

    def make() -> SearchIndexes:
        features = _Features(store)
        return SearchIndexes(features, load, features.maintain, partial(write_namespaces, store.user, store))

    return services.search.open(make)


class _Features:
    """The feature cache in a user's store, opened again when the owner names another store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cache: FeatureCache | None = None

    def __call__(self) -> FeatureCache | None:
        """Return the cache; None if the store cannot be used, which costs time and nothing else."""
        try:
            registry = self._store.registry_if_any()
        except KiwiError:
            return None
        if registry is None:
            return None
        if self._cache is None or self._cache.database is not registry.database:
            self._cache = FeatureCache(registry.database)
        return self._cache

    def maintain(self) -> None:
        """Record which features were used, so that they are not removed."""
        if self._cache is not None:
            self._cache.record_uses()


class CatalogCards(Struct, frozen=True):
    """One source of a catalog, as search reads it."""

    catalog: Catalog
    source: ItemSource
    name: str
    home: str
    cache: Path
    """The folder in which its index may be saved."""

    @property
    def owner(self) -> ItemSource:
        """The source object, which lives as long as its catalog."""
        return self.source

    def etag(self) -> str:
        """Return the current etag of the source; empty if it has none."""
        if self.source.mark:
            self.generation()  # reads the changes, so that the etag is the current one
        return self.source.mark

    def generation(self) -> tuple[int, ...]:
        """Return numbers that change with the cards."""
        return (self.source.sync(self.catalog.sheets),)

    def cards(self) -> Sequence[Card]:
        """Return all cards of the source."""
        return self.catalog.searchable(self.source)

    def published(self) -> PublishedItems | None:
        """Return the registry that holds the items, if they are published and it can be opened."""
        registry = self.source.registry()
        return PublishedItems(registry, is_listed) if registry else None


def card_sources(catalog: Catalog, names: Collection[Source]) -> Sequence[CatalogCards]:
    """Return some sources of a catalog, as search reads them."""
    cache = catalog.space.cache
    return [CatalogCards(catalog, source, source.name, source.home, cache) for source in catalog.sources(names)]


def find(
    request: SearchRequest,
    catalog: Catalog,
    indexes: SearchIndexes,
    *,
    rights: Callable[[], Rights] | None = None,
    recall: Callable[[ParsedQuery], RecallMatches | None] = lambda _: None,
) -> JsonObject:
    """Return the items that match a query, best first, without those that are hidden from the caller."""

    def look(asked: SearchRequest) -> JsonObject:
        try:
            return _find(asked, catalog, indexes, rights, recall)
        except DamagedIndex:
            indexes.forget_loaded()
            return _find(asked, catalog, indexes, rights, recall)

    response = look(request)
    own = as_list(response["results"])
    free = request.limit - len(own)
    if request.source != "local" or is_browsing(request) or free <= 0 or any(map(_is_sure, own)):
        return response
    # Built-in items that can be run and match well take the free places.
    built_in = look(replace(request, source="builtin", limit=free, with_schema=request.with_schema and not own))
    more = [
        one
        for one in map(as_object, as_list(built_in["results"]))
        if catalog.sheets.traits(as_text(one["tool_type"])).driver and _is_sure(one)
    ]
    if not more:
        return response
    kept = {key: value for key, value in response.items() if own or key not in _OF_NOTHING}
    return {**kept, "results": [*own, *more], "total": int(text_of(response["total"])) + len(more)}


def _find(
    request: SearchRequest,
    catalog: Catalog,
    indexes: SearchIndexes,
    rights: Callable[[], Rights] | None,
    recall: Callable[[ParsedQuery], RecallMatches | None],
) -> JsonObject:
    sources = card_sources(catalog, SOURCES[request.source])
    view = indexes.view(sources)
    faults = [one.source.fault for one in sources if one.source.fault]
    if len(sources) == len(faults) == 1:  # the only source that was asked for has no items to show
        raise faults[0].with_traceback(None)
    permission = ItemVisibility(catalog, rights)
    wanted = filter_of(request)
    is_type_of_server = cache(catalog.sheets.is_server)

    def is_server(card: Card) -> bool:
        return is_type_of_server(card.tool_type)

    query = view.parse(request.query)
    known = recall(query)
    pools, keeps = view.pools(query, wanted, known.found if known else ()), visible_cards(wanted, permission)
    if not (request.tool_type or request.source in _LISTS_SERVERS):
        keeps = partial(_is_no_server, is_server, keeps)
    if is_browsing(request):
        ranked = browse(view.cards, keeps)
    else:
        limit = request.limit + _SPARE if request.sort_by == "score" else max(request.limit, _SORTED)
        ranked = rank(query, pools, limit=limit, keeps=keeps, recall=known, is_behind=is_server)
    sees = (lambda card: not permission.is_hidden(card.identity)) if permission.hides else None
    is_shared, locations = partial(view.is_shared, sees=sees), partial(view.locations, sees)
    response = hits_response(request, query, ranked, permission, is_shared=is_shared, locations=locations)
    if is_browsing(request) and view.is_on_server:
        response["note"] = "What is published is on a server, and not listed here: search for it with words."
    if faults := [*faults, *view.faults, *filter(None, [permission.fault])]:
        response["warnings"] = [*dict.fromkeys(f"{fault.message} {fault.suggestion}" for fault in faults)]
    if request.with_schema and response["results"]:
        first, *others = map(as_object, as_list(response["results"]))
        with suppress(KiwiError):
            first = {**first, "parameters": catalog.find(as_text(first["identity"])).manifest.parameters}
        response["results"] = [first, *others]
    if not permission.hides:  # otherwise these would reveal items that the caller may not know about
        broken = catalog.seen_broken(SOURCES[request.source])[: request.limit]
        response |= {"indexing": view.indexing} if view.indexing else {}
        response |= {"broken": [{"path": one.path, "message": one.error.message} for one in broken]} if broken else {}
    if not ranked.hits:
        here = has_project(catalog.space)
        response |= no_hits_response(
            request, query, pools, permission, view.cards, is_server=is_server, has_project=here
        )
    return response


def _is_sure(result: Json) -> bool:
    return float(text_of(as_object(result)["score"])) >= _SURE


def _is_no_server(is_server: Callable[[Card], bool], keeps: Callable[[Card], bool] | None, card: Card) -> bool:
    """Whether a card may be found by a caller who looks for something to run; a server itself cannot be run."""
    return not is_server(card) and (keeps is None or keeps(card))


def filter_of(request: SearchRequest) -> Filter:
    """Return the filter of a request."""
    types = (request.item_type,) if request.item_type in _MARKDOWN else ()
    return Filter(
        types=_values(request.tool_type) or types,
        tags=_values(request.tag),
        categories=_values(request.category),
        servers=_values(request.server),
    )


def visible_cards(wanted: Filter, permission: ItemVisibility) -> Callable[[Card], bool] | None:
    """Return a function that tells which cards may be found; None if all may."""
    if permission.hides:
        return lambda card: wanted.keeps(card) and not permission.is_hidden(card.identity)
    return wanted.keeps if wanted != _NO_FILTER else None


def is_browsing(request: SearchRequest) -> bool:
    """Whether a request lists every item instead of searching."""
    return request.query.strip() in _EVERYTHING


def browse(cards: Iterable[Card], keeps: Callable[[Card], bool] | None) -> RankedHits:
    """Return every visible card, by name, with the full score."""
    whole = (card for card in cards if not part_number(card))
    kept = sorted(filter(keeps, whole) if keeps else whole, key=lambda card: (card.tool_id, card.identity, card.path))
    return RankedHits([Hit(card, 1.0, MatchReason()) for card in kept], len(kept))


def hits_response(
    request: SearchRequest,
    query: ParsedQuery,
    ranked: RankedHits,
    permission: ItemVisibility,
    *,
    is_shared: Callable[[str], bool],
    locations: Callable[[], str],
) -> dict[str, Json]:
    """Return the hits, in the requested order; `is_shared` says whether several items have a name."""
    groups: dict[tuple[object, ...], list[Hit]] = {}
    seen: set[tuple[str, str]] = set()
    for hit in sort_hits(ranked.hits, request.sort_by):
        card = hit.card
        # A text is found once, by the part that fits best.
        if (key := (card.identity, whole_path(card))) in seen:
            continue
        seen.add(key)
        # What only looks alike is not the same: two servers may ask before one of them is used.
        groups.setdefault((card.tool_id, card.tool_type, card.description, card.parameters), []).append(hit)
    shown = [*groups.values()][: request.limit]
    hits = [group[0] for group in shown]
    response: dict[str, Json] = {
        "results": [_result(group, query, permission, is_shared) for group in shown],
        "total": ranked.total - (len(ranked.hits) - len(groups)),
        "query": request.query,
        "source": request.source,
    }
    if any(hit.why.part for hit in hits):
        response["parts"] = [*query.texts[1:]]
    if hits and is_weak(ranked, query):
        response["note"] = f"Weak match: perhaps none of these is meant. {QUERY_HINT}{locations()}"
    return response


def is_weak(ranked: RankedHits, query: ParsedQuery) -> bool:
    """Whether even the best hit is unlikely to be what is needed."""
    bar = _WEAK_BY_WORDS if query.vectors is None else _WEAK
    return max((hit.score for hit in ranked.hits), default=0.0) < bar


def no_hits_response(
    request: SearchRequest,
    query: ParsedQuery,
    pools: Sequence[CardPool],
    permission: ItemVisibility,
    cards: Iterable[Card],
    *,
    is_server: Callable[[Card], bool],
    has_project: bool,
) -> dict[str, Json]:
    """Return near misses and advice for a query without hits; `cards` are all cards.

    `is_server` says whether a card is an MCP server itself. `has_project` says whether a project was searched: a model
    that named none may take the project for empty.
    """
    hints = [] if has_project else [_NO_PROJECT]
    keeps = visible_cards(filter_of(request), permission) or (lambda _: True)
    known = [card for card in cards if not (permission.hides and permission.is_hidden(card.identity))]
    if not known and (permission.hides or not any(pool.count for pool in pools)):
        return {"suggestion": " ".join([*hints, _NOTHING_YET])}
    response: dict[str, Json] = {}
    if close := near_misses(query, pools, limit=_CLOSE, keeps=keeps):
        response["close"] = [{"identity": card.identity, "description": _line(card.description)} for card in close]
    return {**response, "suggestion": " ".join([*hints, *_hints(request, known, is_server, has_close=bool(close))])}


def _hints(
    request: SearchRequest, known: Sequence[Card], is_server: Callable[[Card], bool], *, has_close: bool
) -> Iterator[str]:
    if known and not any(map(filter_of(request).keeps, known)):
        yield from [*_unknown_values(request, known, is_server)] or ["Nothing here passes all of these filters."]
        return
    asked = {*words(request.query)}
    if server := next((card.tool_id for card in known if card.tool_id in asked and is_server(card)), ""):
        yield _EMPTY_SERVER.format(server)
    close = "; `close` is what comes nearest" if has_close else ""
    yield f"Try other words{close}. {QUERY_HINT}{describe_locations(known)}"
    if len(SOURCES[request.source]) < len(SOURCES["all"]):
        yield "`source: all` searches what is published or built in too."


def _unknown_values(request: SearchRequest, known: Sequence[Card], is_server: Callable[[Card], bool]) -> Iterator[str]:
    """Yield a sentence for each filter value that no card has, with the values that exist."""
    for kind, values_of in _VALUES.items():
        existing = Counter(value for card in known for value in values_of(card) if value)
        for value in _values(getattr(request, kind)):
            if value in existing or any(one.startswith(f"{value}/") for one in existing if kind == "category"):
                continue
            if kind == "server" and any(card.tool_id == value and is_server(card) for card in known):
                yield _EMPTY_SERVER.format(value)
            else:
                others = f"; there are {list_names(existing)}." if existing else " here."
                yield f"There is no {kind} {value[:60]!r}{others}"


def _values(written: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (one.strip() for one in (written or "").split(","))))


def _result(
    group: Sequence[Hit], query: ParsedQuery, permission: ItemVisibility, is_shared: Callable[[str], bool]
) -> JsonObject:
    """Return some hits that are the same but for where they are: the one that its name stands for, and the others."""
    hit = group[0]
    card, *others = sorted((one.card for one in group), key=lambda card: _ORDER.index(card.source))
    why = hit.why
    response: dict[str, Json] = {
        "name": card.tool_id,
        "description": _line(card.description),
        "source": card.source,
        "path": whole_path(card),
        "score": round(hit.score, 2) or 0.01,
        "tool_type": card.tool_type,
        "identity": card.identity,
    }
    if number := part_number(card):
        response["section"] = f"#{number}"
    if is_shared(card.tool_id):
        response["full_name"] = card.identity.partition("@")[0]
    if others:
        response["also"] = [other.identity.partition("@")[0] for other in others[:_MAX_WORDS]]
    response["why"] = [*why.words[:_MAX_WORDS]]
    if why.part:
        response["part"] = query.texts.index(why.part)
    if why.meaning and len(why.words) * 2 <= len(query.counted[0]):  # with few words, meaning is a reason as well
        response["meaning"] = round(why.meaning, 2)
    if why.is_recalled:
        response["remembered"] = True
    if card.server and (state := next((tag for tag in card.tags if tag in _UNACCEPTED), "")):
        response["state"] = state
    if refusal := permission.refusal(card.identity):
        response |= {"permitted": False, "not_permitted": _cut(refusal, _MAX_REASON)}
    return response


def _line(description: str) -> str:
    return _cut(description.partition("\n")[0], _MAX_DESCRIPTION)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
