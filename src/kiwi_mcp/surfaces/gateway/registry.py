"""The registry's part of the gateway: events, versions to read, versions and marks to write, as each token allows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kiwi_mcp.catalog.release import check_release
from kiwi_mcp.domain.errors import InvalidRequest, PolicyDenied, TooLarge, TooSlow
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, compact
from kiwi_mcp.domain.registry import Published, Release, VersionName
from kiwi_mcp.kernel.registry import wire
from kiwi_mcp.kernel.registry.port import read_named, write_all
from kiwi_mcp.manifest.sheets import load_sheets
from kiwi_mcp.store.artifact import bundle, encode, unbundle
from kiwi_mcp.store.registry import Registry
from kiwi_mcp.store.words import marks_of
from kiwi_mcp.surfaces.gateway.visitors import Visitor, visitor_of

_BODY_SECONDS = 60.0
_AT_ONCE = 4
"""How many requests that carry versions are worked on at a time, each way: each may hold a large body."""
_MAX_WISH = 1_000_000
"""How many bytes the names of wanted versions may take."""


class RegistryRoutes:
    """One registry, as each visitor may see it."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        # Whoever sends slowly keeps others from sending, and nobody from reading.
        self._reads, self._writes = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_AT_ONCE)

    async def events(self, request: Request) -> Response:
        """Answer with what happened after an event, as far as the visitor may see it."""
        registry = self._seen_by(visitor_of(request))
        after, limit = (_number(request, word, default) for word, default in (("after", 0), ("limit", wire.PAGE)))
        limit = max(1, min(limit, wire.PAGE))
        # One more than is given tells whether there are more.
        tool_id = request.query_params.get("tool_id")
        ask = partial(registry.history, tool_id) if tool_id else registry.events
        found = await asyncio.to_thread(ask, after, limit + 1)
        return JSONResponse(
            {"events": [wire.event_to_json(event) for event in found[:limit]], "more": len(found) > limit}
        )

    async def read(self, request: Request) -> Response:
        """Answer with versions: as many of those asked for as fit, at least the first."""
        registry = self._seen_by(visitor_of(request))
        names = wire.names_from((await _body(request, _MAX_WISH)).get("names"))
        async with self._reads:
            return await asyncio.to_thread(_bundles, registry, names)

    async def write(self, request: Request) -> Response:
        """Take versions and marks in the visitor's name, whoever the versions say published them."""
        visitor = visitor_of(request)
        if not visitor.can_write:
            raise PolicyDenied(visitor.why_not, suggestion="Ask the owner of this registry for a token that may write.")
        async with self._writes:
            body = await _body(request, wire.MAX_BODY)
            published = await asyncio.to_thread(_write, self._seen_by(visitor), visitor, body)
        return JSONResponse({"published": wire.published_to_json(published)})

    def _seen_by(self, visitor: Visitor) -> Registry:
        return self._registry.as_seen_by(visitor.actor)


def _bundles(registry: Registry, names: Sequence[VersionName]) -> Response:
    bundles: list[Json] = []
    weight = 0
    for name in names:
        (release,) = read_named(registry, [name])
        weight += wire.weight(release)
        if bundles and weight > wire.MAX_WEIGHT:
            break
        bundles.append(bundle(encode(release), marks_of(release)))
    return Response(compact({"bundles": bundles}), media_type="application/json")


def _write(registry: Registry, visitor: Visitor, body: JsonObject) -> Sequence[Published]:
    rows, told = as_list(body.get("bundles")), as_list(body.get("marks"))
    if len(rows) > wire.MAX_NAMES or len(told) > wire.MAX_NAMES:
        raise TooLarge("The request", size=max(len(rows), len(told)), limit=wire.MAX_NAMES, unit="versions")
    sheets = load_sheets()
    releases = [check_release(_taken(unbundle(as_object(row)), visitor), sheets) for row in rows]
    # What ships with Kiwi is the server's own to bring: the store refuses it from everybody else.
    return write_all(registry, releases, [wire.event_from(row) for row in told])


def _taken(release: Release, visitor: Visitor) -> Release:
    """Return a version as it is kept here: in the name of the visitor, and official in nobody's."""
    return replace(release, published_by=visitor.actor.name, is_official=False, is_builtin=False)


def _number(request: Request, word: str, default: int) -> int:
    text = request.query_params.get(word)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 15:  # noqa: PLR2004 - more than there are events
        raise InvalidRequest(f"`{word}` is not a number.", suggestion=f"Send `?{word}={default}`.")
    return int(text)


async def _body(request: Request, limit: int) -> JsonObject:
    """Return the body, which has to come within its limits of size and time."""
    if declared_length(request.headers) > limit:
        raise TooLarge("The body", size=declared_length(request.headers), limit=limit)
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise TooLarge("The body", size=None, limit=limit)
    except TimeoutError:
        raise TooSlow("The body did not come in time.", suggestion="Send it faster, or less of it.") from None
    return await asyncio.to_thread(wire.read_body, bytes(body), what="The body")


def declared_length(headers: Mapping[str, str]) -> int:
    """Return how many bytes a body says it has; 0 where it does not say."""
    text = headers.get("content-length", "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0  # noqa: PLR2004 - of any body
