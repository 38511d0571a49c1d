"""The gateway as one application: authentication before every route, a route for each verb, one shape of refusals."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache
from typing import TypeAlias

import msgspec
from mcp_types import INTERNAL_ERROR, INVALID_REQUEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kiwi_mcp import __version__
from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.errors import Internal, InvalidRequest, KiwiError, NotFound, RequestFailed
from kiwi_mcp.domain.json import JsonObject, as_object, compact
from kiwi_mcp.kernel.verb import Response as VerbResponse
from kiwi_mcp.kernel.verb import Verb, payload_of
from kiwi_mcp.kernel.verbs import every_verb
from kiwi_mcp.manifest.document import read_json
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.remote.http import BLOBS, INDEX, LAYOUT
from kiwi_mcp.surfaces.gateway.auth import Authenticator, VisitedKernel
from kiwi_mcp.surfaces.gateway.mcp import MAX_BODY, MCP, McpEndpoint
from kiwi_mcp.surfaces.gateway.oauth import WELL_KNOWN
from kiwi_mcp.surfaces.gateway.registry import RegistryRoutes

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
"""What answers the requests for one address."""

_log = logging.getLogger("kiwi.gateway")
_SECONDS = 240.0
HEALTH = "/health"
_QUERY_WORDS = frozenset({"tool_id"})
_NO_ROUTE = 404
_OUR_FAULT = 500
_WAITS = {429: "60", 503: "2"}
"""After how many seconds a client may try again."""


def gateway(
    registry: Registry,
    door: Authenticator,
    *,
    mcp: McpEndpoint | None = None,
    kernel: VisitedKernel | None = None,
    seconds: float = _SECONDS,
) -> ASGIApp:
    """Return the application that serves a registry, and tools and verbs if it may, with authentication."""
    routes = RegistryRoutes(registry)
    app = Starlette(
        routes=[
            Route(HEALTH, _health, methods=["GET"]),
            Route(LAYOUT, answered(routes.layout), methods=["GET"]),
            Route(INDEX, answered(routes.index), methods=["GET"]),
            Route(INDEX, answered(routes.put_index), methods=["PUT"]),
            Route(BLOBS + "/{digest}", answered(routes.blob), methods=["GET"]),
            Route(BLOBS + "/{digest}", answered(routes.put_blob), methods=["PUT"]),
            *_well_known(door),
            *(verb_routes(kernel, answered) if kernel is not None else ()),
        ],
        exception_handlers={HTTPException: _no_route},
    )
    app.router.redirect_slashes = False
    return AuthMiddleware(door, TimeoutMiddleware(app, seconds), mcp, verbs=app)


def _well_known(door: Authenticator) -> Sequence[Route]:
    """Return where clients read which identity provider to go to; its address may follow that of the resource."""
    if (metadata := door.metadata) is None:
        return ()

    async def tell(_: Request) -> Response:
        return JSONResponse(metadata)

    return [Route(path, tell, methods=["GET"]) for path in (WELL_KNOWN, WELL_KNOWN + "/{resource:path}")]


class AuthMiddleware:
    """Authenticates each request, and gives it to the MCP endpoint, to the API (`verbs`) or to the registry."""

    def __init__(self, door: Authenticator, app: ASGIApp, mcp: McpEndpoint | None, verbs: ASGIApp) -> None:
        self._door = door
        self._app = app
        self._mcp = mcp
        self._verbs = verbs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        try:
            self._door.check_origin(headers)
            if not _is_for_all(scope["path"]):
                scope["kiwi.visitor"] = await self._door.admit(headers)
            request = Request(scope)
            # A token in an address would be kept in histories and logs; no word but these belongs there.
            if unknown := [word for word in request.query_params if word not in _QUERY_WORDS]:
                raise InvalidRequest(
                    f"The address holds {len(unknown)} words that this server does not know.",
                    suggestion="Send a token as `Authorization: Bearer …`, and nothing else in the address.",
                )
            await self._passed(scope, receive, send)
        except KiwiError as error:
            is_mcp = scope["path"] == MCP
            await _answer(error, self._door.challenge(error, headers), is_mcp=is_mcp)(scope, receive, send)

    async def _passed(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Whether an address belongs to the API, and so needs a token that may use tools.
        path = scope["path"]
        is_api = path.startswith(API) or path == OPENAPI
        if is_api or path == MCP:
            if self._mcp is None:
                hint = "Let its owner start `kiwi up` without `--read-only`, or use another server."
                raise NotFound("This server is read-only, and has no tools.", suggestion=hint)
            if not is_api:
                await self._mcp(scope, receive, send)
                return
            self._door.check_tools(scope["kiwi.visitor"])
            await self._mcp.limited(self._verbs, scope, receive, send)
            return
        if not _is_for_all(scope["path"]):
            self._door.check_reader(scope["kiwi.visitor"])
        await self._app(scope, receive, send)


class TimeoutMiddleware:
    """Gives each request its time, the way of its answer to the client included."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            async with asyncio.timeout(self._seconds):
                await self._app(scope, receive, noting)
        except TimeoutError:
            if has_begun:  # half an answer cannot be taken back: the connection is closed
                raise
            late = RequestFailed("The request took too long.", suggestion="Ask for less at once.")
            await _answer(late)(scope, receive, send)


def answered(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint that turns a refusal into its answer, and a fault of ours into an incident."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except KiwiError as error:
            return _answer(error)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception:  # noqa: BLE001 - the surface's edge: a fault of ours is an incident, not a traceback
            incident = secrets.token_hex(6)
            _log.exception("incident %s", incident)
            return _answer(Internal(incident))

    return answer


def _is_for_all(path: str) -> bool:
    return path in {HEALTH, WELL_KNOWN} or path.startswith(f"{WELL_KNOWN}/")


async def _health(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _no_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for these alone
    response = "Nothing is served there." if error.status_code == _NO_ROUTE else "That method is not served there."
    hint = (
        f"The registry's layout is at `/registry/index.json`. Tools are at `{MCP}` and verbs below `{API}`, "
        f"as `{OPENAPI}` lists them, unless the server is read-only."
    )
    return JSONResponse(
        NotFound(response, suggestion=hint).to_response(), status_code=error.status_code, headers=error.headers
    )


def _answer(error: KiwiError, challenge: str = "", *, is_mcp: bool = False) -> Response:
    headers = {"WWW-Authenticate": challenge} if challenge else {}
    if wait := _WAITS.get(error.http_status):
        headers["Retry-After"] = wait
    response = _as_rpc(error) if is_mcp else error.to_response()
    return JSONResponse(response, status_code=error.http_status, headers=headers)


def _as_rpc(error: KiwiError) -> JsonObject:
    """Return a refusal as clients of MCP show it: they read an error of the protocol, and nothing else of an answer."""
    code = INTERNAL_ERROR if error.http_status >= _OUR_FAULT else INVALID_REQUEST
    said = f"{error.message} {error.suggestion}"
    return {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": said, "data": error.to_response()}}


API = "/v1/"
OPENAPI = "/openapi.json"


def verb_routes(kernel: VisitedKernel, wrap: Callable[[Endpoint], Endpoint]) -> Sequence[Route]:
    """Return a route for each verb that is not local, and one for the OpenAPI document."""
    described = Route(OPENAPI, _describe, methods=["GET"])
    return [described, *(Route(path_of(one), wrap(_verb_endpoint(kernel, one)), methods=["POST"]) for one in _served())]


def path_of(verb: Verb) -> str:
    """Return the address of a verb: `/v1/{group}/{name}`, or `/v1/{name}` without a group."""
    return API + verb.path.replace(" ", "/")


def _served() -> Iterator[Verb]:
    return (verb for verb in every_verb() if not verb.is_local)


def _verb_endpoint(kernel: VisitedKernel, verb: Verb) -> Endpoint:
    async def answer(request: Request) -> Response:
        # The body of a request, which is a JSON object. An empty body has no arguments.
        body = await request.body()
        try:
            arguments = read_json(body.decode() or "{}", what="The body", max_bytes=MAX_BODY).value
        except UnicodeDecodeError as error:
            raise InvalidRequest("The body is not UTF-8.", suggestion="Send a JSON object in UTF-8.") from error
        if not isinstance(arguments, dict):
            raise InvalidRequest("The body is not a JSON object.", suggestion="Send the arguments as a JSON object.")
        if "action" in arguments:
            raise InvalidRequest("Unknown argument `action`.", suggestion="The address names the action.")
        # A program sends this with its own token. A model's calls come over MCP and are never direct.
        result = await kernel.call(verb.wire[0], payload_of(verb, arguments), Caller(is_direct=True))
        wait = result.content.get("retry_after") if result.is_error else None
        headers = {"Retry-After": str(wait)} if wait else None
        return Response(compact(result.content), result.http_status, headers, "application/json")

    return answer


async def _describe(_: Request) -> Response:
    return JSONResponse(openapi())


@cache
def openapi() -> JsonObject:
    """Return the OpenAPI document of all routes."""
    verbs = [*_served()]
    types = dict.fromkeys(part for verb in verbs for part in (verb.request, verb.response) if _has_schema(part))
    schemas, components = msgspec.json.schema_components([*types], ref_template="#/components/schemas/{name}")
    by_type = dict(zip(types, schemas, strict=True))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kiwi", "version": __version__},
        "paths": {path_of(verb): {"post": _operation(verb, by_type)} for verb in verbs},
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "security": [{"bearer": []}],
    }


def _has_schema(part: type) -> bool:
    return part is not VerbResponse and hasattr(part, "__struct_fields__")


def _operation(verb: Verb, schemas: dict[type, dict[str, object]]) -> JsonObject:
    def content(part: type) -> JsonObject:
        return {"application/json": {"schema": as_object(schemas.get(part, {"type": "object"}))}}  # type: ignore[arg-type]

    return {
        "operationId": verb.path.replace(" ", "_"),
        "summary": verb.help,
        "requestBody": {"content": content(verb.request)},
        "responses": {
            "200": {"description": "The response.", "content": content(verb.response)},
            "default": {"description": "A refusal: `error`, `code`, `message`, `suggestion`."},
        },
    }
