"""`kiwi up`: the gateway as one application, with authentication before every route, on uvicorn."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import uvicorn
from mcp_types import INTERNAL_ERROR, INVALID_REQUEST
from msgspec import Struct
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kiwi_mcp import __version__
from kiwi_mcp.catalog.release import seed
from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.errors import Internal, InvalidRequest, KiwiError, NotFound, RequestFailed, Unavailable
from kiwi_mcp.domain.json import JsonObject, as_object, compact
from kiwi_mcp.kernel.settings import RegistrySettings
from kiwi_mcp.kernel.verb import Response as VerbResponse
from kiwi_mcp.kernel.verb import Verb, payload_of
from kiwi_mcp.kernel.verbs import every_verb
from kiwi_mcp.manifest.document import read_json
from kiwi_mcp.policy.tokens import TokenStore
from kiwi_mcp.primitives.local_socket import is_own_peer
from kiwi_mcp.primitives.local_socket import listening as listening_at
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.remote.http import BLOBS, INDEX, LAYOUT
from kiwi_mcp.surfaces.gateway.auth import Authenticator, VisitedKernel
from kiwi_mcp.surfaces.gateway.mcp import MAX_BODY, MCP, McpEndpoint, principal
from kiwi_mcp.surfaces.gateway.oauth import LOOPBACK, WELL_KNOWN, IdentityProvider, TokenVerifier
from kiwi_mcp.surfaces.gateway.registry import RegistryRoutes
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.server import build_server
from kiwi_mcp.surfaces.mcp.tool_list import ToolListWatcher

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
"""What answers the requests for one address."""

_log = logging.getLogger("kiwi.gateway")
_SECONDS = 240.0
HEALTH = "/health"
_WAITS = {429: "60", 503: "2"}
"""After how many seconds a client may try again."""
API = "/v1/"
OPENAPI = "/openapi.json"
PORT = 8765
_CONNECTIONS = 512
_HEAD_SECONDS = 10.0
"""How long a connection may take to send the head of its first request."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def gateway(
    registry: Registry,
    door: Authenticator,
    *,
    mcp: McpEndpoint | None = None,
    kernel: VisitedKernel | None = None,
    seconds: float = _SECONDS,
) -> ASGIApp:
    """Return the application that serves a registry, and tools and verbs if it may, with authentication."""
    files = RegistryRoutes(registry)
    routes = [
        Route(HEALTH, _constant({"status": "ok"}), methods=["GET"]),
        Route(LAYOUT, answered(files.layout), methods=["GET"]),
        Route(INDEX, answered(files.index), methods=["GET"]),
        Route(INDEX, answered(files.put_index), methods=["PUT"]),
        Route(BLOBS + "/{digest}", answered(files.blob), methods=["GET"]),
        Route(BLOBS + "/{digest}", answered(files.put_blob), methods=["PUT"]),
        *(verb_routes(kernel, answered) if kernel is not None else ()),
    ]
    if door.metadata is not None:
        # Which identity provider clients go to; the address of that may follow the one of the resource.
        metadata = _constant(door.metadata)
        routes += [Route(path, metadata, methods=["GET"]) for path in (WELL_KNOWN, WELL_KNOWN + "/{resource:path}")]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
    app.router.redirect_slashes = False
    return AuthMiddleware(door, TimeoutMiddleware(app, seconds), mcp, verbs=app)


def _constant(content: JsonObject) -> Endpoint:
    async def answer(_: Request) -> Response:
        return JSONResponse(content)

    return answer


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
            if unknown := [word for word in request.query_params if word != "tool_id"]:
                message = f"The address holds {len(unknown)} words that this server does not know."
                suggestion = "Send a token as `Authorization: Bearer …`, and nothing else in the address."
                raise InvalidRequest(message, suggestion=suggestion)
            await self._pass(scope, receive, send)
        except KiwiError as error:
            is_mcp = scope["path"] == MCP
            await _answer(error, self._door.challenge(error, headers), is_mcp=is_mcp)(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        is_api = path.startswith(API) or path == OPENAPI
        if (is_api or path == MCP) and self._mcp is None:
            hint = "Let its owner start `kiwi up` without `--read-only`, or use another server."
            raise NotFound("This server is read-only, and has no tools.", suggestion=hint)
        if path == MCP and self._mcp is not None:
            await self._mcp(scope, receive, send)
        elif is_api and self._mcp is not None:
            self._door.check_tools(scope["kiwi.visitor"])
            await self._mcp.limited(self._verbs, scope, receive, send)
        else:
            if not _is_for_all(path):
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


async def _no_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for these alone
    is_unknown = error.status_code == HTTPStatus.NOT_FOUND
    hint = (
        f"The registry's layout is at `/registry/index.json`. Tools are at `{MCP}` and verbs below `{API}`, "
        f"as `{OPENAPI}` lists them, unless the server is read-only."
    )
    refusal = NotFound(
        "Nothing is served there." if is_unknown else "That method is not served there.", suggestion=hint
    )
    return JSONResponse(refusal.to_response(), status_code=error.status_code, headers=error.headers)


def _answer(error: KiwiError, challenge: str = "", *, is_mcp: bool = False) -> Response:
    headers = {"WWW-Authenticate": challenge} if challenge else {}
    if wait := _WAITS.get(error.http_status):
        headers["Retry-After"] = wait
    response = error.to_response()
    if is_mcp:  # clients of MCP read an error of the protocol, and nothing else of an answer
        code = INTERNAL_ERROR if error.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR else INVALID_REQUEST
        fault: JsonObject = {"code": code, "message": f"{error.message} {error.suggestion}", "data": response}
        response = {"jsonrpc": "2.0", "id": None, "error": fault}
    return JSONResponse(response, status_code=error.http_status, headers=headers)


def verb_routes(kernel: VisitedKernel, wrap: Callable[[Endpoint], Endpoint]) -> Sequence[Route]:
    """Return a route for each verb that is not local, and one for the OpenAPI document."""

    async def describe(_: Request) -> Response:
        return JSONResponse(openapi())

    described = Route(OPENAPI, describe, methods=["GET"])
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


@cache
def openapi() -> JsonObject:
    """Return the OpenAPI document of all routes."""
    verbs = [*_served()]
    parts = dict.fromkeys(part for verb in verbs for part in (verb.request, verb.response))
    types = [part for part in parts if part is not VerbResponse and hasattr(part, "__struct_fields__")]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(types, schemas, strict=True))

    def content(part: type) -> JsonObject:
        return {"application/json": {"schema": as_object(by_type.get(part, {"type": "object"}))}}

    def operation(verb: Verb) -> JsonObject:
        return {
            "operationId": verb.path.replace(" ", "_"),
            "summary": verb.help,
            "requestBody": {"content": content(verb.request)},
            "responses": {
                "200": {"description": "The response.", "content": content(verb.response)},
                "default": {"description": "A refusal: `error`, `code`, `message`, `suggestion`."},
            },
        }

    return {
        "openapi": "3.1.0",
        "info": {"title": "Kiwi", "version": __version__},
        "paths": {path_of(verb): {"post": operation(verb)} for verb in verbs},
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "security": [{"bearer": []}],
    }


class GatewayConfig(Struct, frozen=True):
    """Where the gateway listens, whether it is read-only, and for which project and which users it runs tools."""

    host: str = "127.0.0.1"
    port: int = PORT
    """0 takes a port that is free."""
    names: tuple[str, ...] = ()
    """Further names under which it is reached: behind a proxy, or from other machines."""
    is_read_only: bool = False
    project: Path | None = None
    """The project of calls that name none."""
    oauth: IdentityProvider | None = None
    """The identity provider; its access tokens are accepted as well."""
    is_wide: bool = False
    """Whether calls may name other projects than that one."""
    always_sent: int = 0
    """How many tools clients see without searching, once that is known."""
    socket: Path | None = None
    """The socket that it listens at instead of a port: then only processes of its own user reach it."""

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in LOOPBACK

    @property
    def url(self) -> str:
        """Its address; behind a socket, the one that requests name."""
        if self.socket is not None:
            return "http://localhost"
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def mcp_url(self) -> str | None:
        """Where MCP clients use tools: under the address that the owner gave it, or its own; None if they cannot."""
        if self.is_read_only:
            return None
        return self.oauth.audience if self.oauth else f"{self.url}{MCP}"


def serve(
    user: Path, settings: RegistrySettings, listening: GatewayConfig, announce: Callable[[GatewayConfig], None]
) -> None:
    """Serve until SIGTERM or SIGINT; `announce` is called once requests are answered."""
    access = TokenVerifier(listening.oauth) if listening.oauth and not listening.is_read_only else None
    door = _door(TokenStore(user), listening, access)
    database = open_database(settings.url)

    async def serving() -> None:
        async with AsyncExitStack() as stack:
            if access is not None:
                stack.push_async_callback(access.aclose)
            mcp = None
            kernel = None
            always_sent = 0
            if not listening.is_read_only:
                kernel = VisitedKernel(listening.project, user=user, is_wide=listening.is_wide)
                mcp = await stack.enter_async_context(tools(door, kernel))
                with suppress(KiwiError):  # unreadable preferences: every list says so, and the meta-tools stay
                    always_sent = len((await kernel.offers()).tools)
            server = GatewayServer(
                _config(gateway(registry, door, mcp=mcp, kernel=kernel), listening),
                announce=lambda port: announce(
                    replace(listening, port=port or listening.port, always_sent=always_sent)
                ),
                leave=mcp.end if mcp is not None else None,
            )
            # What is at that path and cannot be replaced is not removed at the end either.
            listener = [listening_at(listening.socket)] if listening.socket is not None else None
            try:
                await server.serve(listener)
            finally:
                if listening.socket is not None:
                    listening.socket.unlink(missing_ok=True)

    try:
        registry = Registry(database, settings.actor)
        seed(registry, __version__)  # what others push depends on what ships with Kiwi, which only the server provides
        asyncio.run(serving())
    finally:
        database.close()


@asynccontextmanager
async def tools(door: Authenticator, kernel: VisitedKernel) -> AsyncIterator[McpEndpoint]:
    """Yield the MCP server of one kernel for all users that are authenticated; it ends with the kernel."""
    calls = Calls(kernel.tasks, task_after=kernel.task_after, principal=principal, kernel=kernel)
    changes = ToolListWatcher(kernel, view=kernel.seen)
    server = build_server(kernel, calls=calls, changes=changes)
    endpoint = McpEndpoint(server, door, calls)
    async with AsyncExitStack() as stack:
        for close in (kernel.aclose, calls.aclose, changes.aclose):  # the last of them is closed first
            stack.push_async_callback(close)
        await stack.enter_async_context(endpoint.running())
        stack.callback(calls.leave)
        yield endpoint


def _door(tokens: TokenStore, listening: GatewayConfig, access: TokenVerifier | None) -> Authenticator:
    has_tokens = bool(tokens.all())
    if not has_tokens and access is None and not (listening.is_read_only and listening.is_local):
        raise InvalidRequest(
            "There is no token yet, so no client could use this server.",
            suggestion="Make one with `kiwi up token add NAME --tools`, or `--namespaces public --write` for the "
            "registry, or let everybody on this machine read what is public with `kiwi up --read-only`.",
        )
    return Authenticator(
        tokens,
        host=listening.host,
        names=(*listening.names, access.settings.host) if access else listening.names,
        is_read_only=listening.is_read_only,
        is_open=not has_tokens and access is None,
        access=access,
    )


def _config(app: ASGIApp, listening: GatewayConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=listening.host,
        port=listening.port,
        http=_Impatient,
        ws="none",
        lifespan="off",
        access_log=False,  # addresses and their parameters are private
        log_config=None,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=10,
        h11_max_incomplete_event_size=16_384,
    )


class GatewayServer(uvicorn.Server):
    """A server that says where it listens, and ends in order when it is asked to."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        announce: Callable[[int], None],
        leave: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(config)
        self._announce = announce
        self._leave = leave
        # The libraries log a lot about themselves; our own errors report what goes wrong.
        for library in ("uvicorn", "mcp", "sse_starlette"):
            logging.getLogger(library).setLevel(logging.CRITICAL)

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Listen, and say where."""
        try:
            await super().startup(sockets)
        except SystemExit:
            raise Unavailable(
                f"Nothing can listen on {self.config.host}, port {self.config.port}: it is taken, or not ours to use.",
                suggestion="Choose another port, or `--port 0` for one that is free.",
            ) from None
        self._announce(0 if sockets else self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """End calls first: a client that waits for one would keep the server from ending."""
        if self._leave is not None:
            await self._leave()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop in order at the first signal, and return as from any other end."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)


class _Impatient(H11Protocol):
    """A connection that has to be used: one that sends no request, or only half of a head, is closed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the library
        """Start the clock, unless it is another user of this machine who has come to a socket that is not theirs."""
        super().connection_made(transport)
        if not is_own_peer(transport):
            transport.abort()
            return
        self.loop.call_later(_HEAD_SECONDS, self._look, None)

    def _look(self, last: RequestResponseCycle | None) -> None:
        """Close the connection if it has waited for a request since the last look."""
        now: RequestResponseCycle | None = self.cycle
        is_waiting = now is None or now.response_complete
        if is_waiting and now is last:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.loop.call_later(_HEAD_SECONDS, self._look, now)
