"""What a search answers with: cards to choose by, why each was found, and where nothing was, what there is instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.kernel.homes import homes_of, most
from kiwi_mcp.kernel.permission import Permission
from kiwi_mcp.kernel.requests import SearchRequest
from kiwi_mcp.search.choose import Filter, arrange
from kiwi_mcp.search.near import nearest
from kiwi_mcp.search.port import Card, Hit, Why
from kiwi_mcp.search.ranking import Ranked
from kiwi_mcp.search.request import Pool, Request

HOW_TO_ASK = "Ask for one need per search, in plain words: verb + object + service."
_NO_PROJECT = "No project was searched: add `project_path`, the absolute path of yours, to find what is in it."
_NOTHING_YET = "Nothing is here yet: search with `source: all` for what is published or built in, or create a tool."
_LINE, _REASON = 200, 200
_UNACCEPTED = frozenset({"changed", "new"})
"""What an item of an MCP server is called that is not used before the owner accepts it."""
_MOST_WORDS = 4
"""How many of the words that a card holds are told of, the rarest first."""
_LIKELY, _LIKELY_BY_WORDS = 0.25, 0.28
"""Below this the best card is the wrong one, or there is no right one, in two of three requests of our own corpus."""
_ORDERED = 100
"""How many of the best are put in another order than that of their scores."""
_CLOSE = 5
"""How many near misses are told of."""
_EVERYTHING = frozenset({"", "*"})
"""Requests that ask for nothing, so that all that passes the filters is meant."""
_MARKDOWN = ("directive", "knowledge")
"""What an `item_type` narrows a search to; every other word means everything."""

_ANYTHING = Filter()
_VALUES: Mapping[str, Callable[[Card], Collection[str]]] = MappingProxyType(
    {
        "tool_type": lambda card: (card.tool_type,),
        "category": lambda card: (card.category,),
        "tag": lambda card: card.tags,
        "server": lambda card: (card.server,),
    }
)
"""The words of a request that narrow a search, and what a card has of each kind."""


def filter_of(request: SearchRequest) -> Filter:
    """Return which cards a request is about."""
    narrowed = (request.item_type,) if request.item_type in _MARKDOWN else ()
    return Filter(
        types=_values(request.tool_type) or narrowed,
        tags=_values(request.tag),
        categories=_values(request.category),
        servers=_values(request.server),
    )


def keeping(wanted: Filter, permission: Permission) -> Callable[[Card], bool] | None:
    """Return what tells which cards may be found; None where all may."""
    if permission.hides:
        return lambda card: wanted.keeps(card) and not permission.is_hidden(card.identity)
    return wanted.keeps if wanted != _ANYTHING else None


def is_browsing(request: SearchRequest) -> bool:
    """Whether a request is for whatever there is, not for something."""
    return request.query.strip() in _EVERYTHING


def browse(cards: Iterable[Card], keeps: Callable[[Card], bool] | None) -> Ranked:
    """Return everything that may be found, by name; all of it fits, as nothing is asked of it."""
    kept = sorted(filter(keeps, cards) if keeps else cards, key=lambda card: (card.tool_id, card.identity, card.path))
    return Ranked([Hit(card, 1.0, Why()) for card in kept], len(kept))


def most_hits(request: SearchRequest) -> int:
    """Return how many hits an answer is chosen from."""
    return request.limit if request.sort_by == "score" else max(request.limit, _ORDERED)


def tell(
    request: SearchRequest,
    need: Request,
    ranked: Ranked,
    permission: Permission,
    *,
    is_shared: Callable[[str], bool],
    homes: Callable[[], str],
) -> dict[str, Json]:
    """Return the hits as cards, best first or as asked for.

    `is_shared` says whether several items have a name, and `homes` where those are that there are.
    """
    hits = arrange(ranked.hits, request.sort_by)[: request.limit]
    told: dict[str, Json] = {
        "results": [_result(hit, need, permission, is_shared) for hit in hits],
        "total": ranked.total,
        "query": request.query,
        "source": request.source,
    }
    if any(hit.why.part for hit in hits):
        told["parts"] = [*need.texts[1:]]
    if hits and is_weak(ranked, need):
        told["note"] = f"Weak match: perhaps none of these is meant. {HOW_TO_ASK}{homes()}"
    return told


def is_weak(ranked: Ranked, need: Request) -> bool:
    """Whether even the best of some hits is unlikely to be what is needed."""
    bar = _LIKELY_BY_WORDS if need.vectors is None else _LIKELY
    return max((hit.score for hit in ranked.hits), default=0.0) < bar


def tell_nothing(
    request: SearchRequest,
    need: Request,
    pools: Sequence[Pool],
    permission: Permission,
    cards: Callable[[], Iterable[Card]],
    *,
    is_server: Callable[[Card], bool],
    has_project: bool = True,
) -> dict[str, Json]:
    """Return what is close to a need that nothing answers, and how to ask; `cards` gives all that there is.

    `is_server` says whether a card is that of an MCP server itself, and `has_project` whether a project was looked
    through: a model that named none may take it for empty.
    """
    elsewhere = [] if has_project else [_NO_PROJECT]
    keeps = keeping(filter_of(request), permission) or (lambda _: True)
    known = [card for card in cards() if not (permission.hides and permission.is_hidden(card.identity))]
    if not known and (permission.hides or not any(pool.count for pool in pools)):
        return {"suggestion": " ".join([*elsewhere, _NOTHING_YET])}
    told: dict[str, Json] = {}
    if close := nearest(need, pools, limit=_CLOSE, keeps=keeps):
        told["close"] = [{"identity": card.identity, "description": _line(card.description)} for card in close]
    return {**told, "suggestion": " ".join([*elsewhere, *_hints(request, known, is_server, has_close=bool(close))])}


def _hints(
    request: SearchRequest, known: Sequence[Card], is_server: Callable[[Card], bool], *, has_close: bool
) -> Iterator[str]:
    if known and not any(map(filter_of(request).keeps, known)):
        yield from [*_unknown(request, known, is_server)] or ["Nothing here passes all of these filters."]
        return
    close = "; `close` is what comes nearest" if has_close else ""
    yield f"Try other words{close}. {HOW_TO_ASK}{homes_of(known)}"
    if request.source != "all":
        yield "`source: all` searches what is published or built in too."


def _unknown(request: SearchRequest, known: Sequence[Card], is_server: Callable[[Card], bool]) -> Iterator[str]:
    """Give a sentence for each word of a filter that nothing here has, with those that there are."""
    for kind, values_of in _VALUES.items():
        asked = _values(getattr(request, kind))
        there = Counter(value for card in known for value in values_of(card) if value)
        for value in asked:
            is_there = value in there or any(one.startswith(f"{value}/") for one in there if kind == "category")
            if is_there:
                continue
            if kind == "server" and any(card.tool_id == value and is_server(card) for card in known):
                ways = f"`kiwi mcp list` says why, `kiwi mcp refresh {value}` asks it again"
                yield f"The server {value!r} is here, and offers nothing yet: {ways}."
            else:
                yield f"There is no {kind} {value[:60]!r}" + (f"; there are {most(there)}." if there else " here.")


def _values(written: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (one.strip() for one in (written or "").split(","))))


def _result(hit: Hit, need: Request, permission: Permission, is_shared: Callable[[str], bool]) -> JsonObject:
    card, why = hit.card, hit.why
    told: dict[str, Json] = {
        "name": card.tool_id,
        "description": _line(card.description),
        "source": card.source,
        "path": card.path,
        "score": round(hit.score, 2) or 0.01,
        "tool_type": card.tool_type,
        "identity": card.identity,
    }
    if is_shared(card.tool_id):
        told["full_name"] = card.identity.partition("@")[0]
    told["why"] = [*why.words[:_MOST_WORDS]]
    if why.part:
        told["part"] = need.texts.index(why.part)
    if why.meaning and len(why.words) * 2 <= len(need.counted[0]):  # where words are few, meaning is a reason as well
        told["meaning"] = round(why.meaning, 2)
    if why.is_remembered:
        told["remembered"] = True
    if card.source == "mcp" and (state := next((tag for tag in card.tags if tag in _UNACCEPTED), "")):
        told["state"] = state
    if refusal := permission.refusal(card.identity):
        told |= {"permitted": False, "not_permitted": _cut(refusal, _REASON)}
    return told


def _line(description: str) -> str:
    return _cut(description.partition("\n")[0], _LINE)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
