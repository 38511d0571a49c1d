"""`/mcp`: limits per user, sessions, revocation, and the fast path of a call; the API has the same limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeAlias
from uuid import uuid4

import mcp_types as types
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, AuthorizationContext
from mcp.server.auth.provider import AccessToken
from mcp.server.connection import Connection
from mcp.server.runner import serve_one
from mcp.server.streamable_http import (
    MCP_SESSION_ID_HEADER,
    REQUEST_CANCELLED,
    StreamableHTTPServerTransport,
    check_accept_headers,
)
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared import inbound
from mcp.shared.dispatcher import coerce_request_id
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params
from mcp.shared.message import ServerMessageMetadata
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from msgspec import Struct, field
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kiwi_mcp.domain.errors import KiwiError, TokenRefused, TooLarge, Unavailable
from kiwi_mcp.domain.json import as_object, as_text
from kiwi_mcp.surfaces.gateway.auth import Authenticator, GatewayUser, visiting, visitor_of
from kiwi_mcp.surfaces.gateway.registry import declared_length, timely
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.protocol import LEFT, Context
from kiwi_mcp.surfaces.mcp.running_call import askable
from kiwi_mcp.surfaces.mcp.server import METHOD, Answer, FastRequest, McpServer, stop
from kiwi_mcp.surfaces.mcp.stdio_server import encoded

_JSON: Final = (b"content-type", b"application/json")
_EVENTS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"connection", b"keep-alive"),
    (b"x-accel-buffering", b"no"),
)
_PING: Final = b": ping\r\n\r\n"

PING_SECONDS: Final = 15.0
"""How many seconds pass between pings, which keep proxies from closing the connection while a client waits."""

Header: TypeAlias = tuple[bytes, bytes]
MAX_BODY = 4_194_304
_SESSIONS, _SESSIONS_EACH = 1_024, 256
"""How many sessions are kept: of everybody, and of one visitor."""
_IDLE_SECONDS = 1_800.0
MCP = "/mcp"
_CALL_SECONDS = 86_460.0
"""How long a request may take: as long as the longest tool may, and a moment."""
_LISTENING_SECONDS = 3_600.0
"""How long a stream may listen for news; then the client opens another."""
_AT_ONCE = 64
"""How many requests of one visitor are answered at a time, and how many streams of theirs listen.

Both together are a quarter of the connections that there can be.
"""
_LOOK_SECONDS = 5.0
"""How soon a token that was removed ends what was begun with it."""


class StreamReply:
    """What goes back to one client: `encode` writes messages as JSON; `headers` are sent besides those of its form."""

    def __init__(self, send: Send, encode: Callable[[types.JSONRPCMessage], bytes], *headers: Header) -> None:
        self._send = send
        self._encode = encode
        self._headers = headers
        self._is_begun = False
        self._turn = asyncio.Lock()

    async def tell(self, message: types.JSONRPCNotification) -> None:
        """Send what comes before the answer."""
        await self._stream(_event(self._encode(message)))

    async def answer(self, message: Answer, *, status: int = 200) -> None:
        """Send the answer itself; `status` is that of an answer which is not a stream already."""
        body = self._encode(message)
        async with self._turn:
            if self._is_begun:
                await self._send({"type": "http.response.body", "body": _event(body)})
                return
            length = (b"content-length", str(len(body)).encode())
            await self._begin(_JSON, length, status=status)
            await self._send({"type": "http.response.body", "body": body})

    async def keep_alive(self, *waited_for: asyncio.Task[Answer] | asyncio.Task[None]) -> None:
        """Wait until one of several has ended; the client is not left in silence for long."""
        while not (await asyncio.wait(waited_for, timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED))[0]:
            await self._stream(_PING)

    async def end(self) -> bool:
        """End a stream without an answer, and say whether there was one."""
        if self._is_begun:
            await self._send({"type": "http.response.body", "body": b""})
        return self._is_begun

    async def _stream(self, chunk: bytes) -> None:
        async with self._turn:
            if not self._is_begun:
                await self._begin(*_EVENTS)
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _begin(self, *headers: Header, status: int = 200) -> None:
        self._is_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._headers]})


def _event(message: bytes) -> bytes:
    return b"event: message\r\ndata: %b\r\n\r\n" % message


def is_modern_call(scope: Scope) -> bool:
    """Whether a request says by its headers that it is a call of the newest era."""
    headers = Headers(scope=scope)
    return (
        scope["method"] == "POST"
        and headers.get(inbound.MCP_METHOD_HEADER) == METHOD
        and headers.get(inbound.MCP_PROTOCOL_VERSION_HEADER) in MODERN_PROTOCOL_VERSIONS
        and headers.get("content-type", "").lower().startswith("application/json")
    )


def read_message(body: bytes) -> types.JSONRPCMessage | None:
    """Return the message in a body; None where it holds none, and the SDK says what is wrong."""
    try:
        return types.jsonrpc_message_adapter.validate_json(body, by_name=False)
    except ValidationError:
        return None


def _route(server: McpServer, request: Request, message: types.JSONRPCRequest) -> inbound.InboundModernRoute | None:
    """Return what a sound call of the newest era says about its client; None for every other."""
    headers, params = request.headers, as_object(message.params)
    if not all(check_accept_headers(request)) or inbound.find_duplicated_routing_header(headers.items()):
        return None
    body = {"method": message.method, "params": message.params}
    route = inbound.classify_inbound_request(body, headers=dict(headers.items()))
    schema = server.get_tool_input_schema and server.get_tool_input_schema(as_text(params.get("name")))
    if schema and inbound.validate_mcp_param_headers(schema, as_object(params.get("arguments")), headers):
        return None
    return route if isinstance(route, inbound.InboundModernRoute) else None


async def _answer_modern(
    server: McpServer, request: Request, message: types.JSONRPCRequest, route: inbound.InboundModernRoute, send: Send
) -> None:
    """Answer a call of the newest era."""
    reply = StreamReply(send, encode_modern)
    exchange = FastRequest(message, reply.tell, message_metadata=ServerMessageMetadata(request_context=request))

    async def work() -> dict[str, Any]:
        connection = Connection.from_envelope(route.protocol_version, route.client_info, route.client_capabilities)
        return await serve_one(server, exchange, METHOD, message.params, connection=connection, lifespan_state={})

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(exchange.answer(work, is_modern=True))
    leaving = asyncio.create_task(gone())
    try:
        await reply.keep_alive(task, leaving)
    finally:  # a client that has left wants no answer, and nothing else done
        leaving.cancel()
        await stop(task)
    if not task.cancelled():
        answer = task.result()
        code = answer.error.code if isinstance(answer, types.JSONRPCError) else 0
        status = inbound.ERROR_CODE_HTTP_STATUS.get(code, 200)
        await reply.answer(answer, status=status)


def encode_modern(message: types.JSONRPCMessage) -> bytes:
    """Return a message as the SDK writes it in this era."""
    response = message.model_dump(mode="json", by_alias=True, exclude_none=True)
    return json.dumps(response, separators=(",", ":")).encode()


class Session(StreamableHTTPServerTransport):
    """The SDK's session; calls take the fast path if their client cannot be asked while it waits."""

    def __init__(self, server: McpServer) -> None:
        name = uuid4().hex
        super().__init__(name, idle_timeout=_IDLE_SECONDS)
        self._server = server
        self._header = (MCP_SESSION_ID_HEADER.encode(), name.encode())
        self._exchanges: dict[types.RequestId, tuple[FastRequest, asyncio.Task[Answer]]] = {}

    async def _handle_post_request(self, scope: Scope, request: Request, receive: Receive, send: Send) -> None:
        try:
            body = await request.body()  # kept by the request for the SDK to read again
        except ClientDisconnect:
            return
        match read_message(body):
            case types.JSONRPCNotification(method="notifications/cancelled", params=params):
                number = cancelled_request_id_from_params(params)
                known = self._exchanges.get(coerce_request_id(number)) if number is not None else None
                if known is not None:
                    known[0].call_off(known[1])
            # If the SDK would take the request as it is, and its client an answer in either form.
            case types.JSONRPCRequest(method="tools/call") as message if all(
                check_accept_headers(request)
            ) and self._check_content_type(request):
                reply = StreamReply(send, encoded, self._header)
                about = ServerMessageMetadata(request_context=request)
                exchange = FastRequest(message, reply.tell, message_metadata=about)
                if self._begin(exchange):
                    await self._see_to(exchange, reply, scope, receive, send)
                    return
        await super()._handle_post_request(scope, request, receive, send)

    async def terminate(self) -> None:
        """End the session, and with it what is done for it."""
        for _, task in self._exchanges.values():
            if not task.cancelling():
                task.cancel()
        await super().terminate()

    def _begin(self, exchange: FastRequest) -> bool:
        key, runner = exchange.key, self._server.open_runner(self.mcp_session_id)
        if runner is None or key in self._exchanges or askable(runner.connection.client_capabilities):
            return False
        work = partial(runner.on_request, exchange, METHOD, exchange.request.params)
        task = asyncio.create_task(exchange.answer(work))
        self._exchanges[key] = exchange, task
        task.add_done_callback(lambda _: self._exchanges.pop(key))
        return True

    async def _see_to(
        self, exchange: FastRequest, reply: StreamReply, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a client when there is an answer; one that leaves meanwhile does not end the call, in this era."""
        _, task = self._exchanges[exchange.key]
        try:
            await reply.keep_alive(task)
        finally:
            await stop(task)
        if not task.cancelled():
            await reply.answer(task.result())
        elif exchange.cancel_requested.is_set():
            error = types.ErrorData(code=REQUEST_CANCELLED, message="Request cancelled")
            await reply.answer(types.JSONRPCError(jsonrpc="2.0", id=exchange.request.id, error=error))
        elif not await reply.end():
            message = "Session terminated before the request completed"
            response = self._create_error_response(message, HTTPStatus.INTERNAL_SERVER_ERROR, types.INTERNAL_ERROR)
            await response(scope, receive, send)


class Sessions(StreamableHTTPSessionManager):
    """The sessions of all clients; no client can take all of them."""

    def __init__(self, server: McpServer) -> None:
        super().__init__(server, max_request_body_size=MAX_BODY)
        self._server = server

    async def _handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        # What is no call of the newest era by its headers is not even read here.
        if is_modern_call(scope):
            request = Request(scope, receive)
            body = await request.body()
            message = read_message(body)
            if isinstance(message, types.JSONRPCRequest) and (route := _route(self._server, request, message)):
                await _answer_modern(self._server, request, message, route, send)
                return
            again: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

            async def read_again() -> Message:  # the SDK gets what was read already, and then what follows
                return again.pop() if again else await request.receive()

            await super()._handle_request(scope, read_again, send)
            return
        await super()._handle_request(scope, receive, send)

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        theirs = sum(owner == requestor for owner in self._session_owners.values())
        if theirs >= _SESSIONS_EACH or len(self._server_instances) >= _SESSIONS or requestor is None:
            return None
        session = Session(self._server)
        assert session.mcp_session_id is not None  # noqa: S101 - each is made with one
        self._session_owners[session.mcp_session_id] = requestor
        self._server_instances[session.mcp_session_id] = session
        return session

    async def end_where(self, is_over: Callable[[str], bool]) -> None:
        """End the sessions of credentials that no longer exist; their calls are cancelled."""
        for name in [name for name, owner in self._session_owners.items() if is_over(owner["client_id"])]:
            if (transport := self._server_instances.get(name)) is not None:
                await self._discard_session(name, transport)


class _Visit(Struct, eq=False):
    """One request on its way, and the limit that ends it."""

    visitor: GatewayUser
    is_listening: bool
    limit: asyncio.Timeout
    has_begun: bool = field(default=False)
    reason: KiwiError | None = None
    """Why it was ended, where that is the visitor's affair."""

    def end(self, reason: KiwiError | None = None) -> None:
        self.reason = reason
        if not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())


class McpEndpoint:
    """The handler of `/mcp`; requests that get here are already authenticated."""

    def __init__(self, server: McpServer, door: Authenticator, calls: Calls) -> None:
        self._sessions = Sessions(server)
        self._calls = calls
        self._door = door
        self._visits: set[_Visit] = set()
        self._is_ending = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer requests within the block; what is under way at its end is cancelled, and waited for."""
        fault: KiwiError | None = None
        async with self._sessions.run():
            watch = asyncio.create_task(self._watch())
            try:
                yield
            except KiwiError as error:
                fault = error  # raised in here, it would leave the SDK's group of tasks as one of a group of errors
            finally:
                watch.cancel()
                await self.end()
        if fault is not None:
            raise fault

    async def end(self) -> None:
        """Accept no further requests, and end those in progress."""
        self._is_ending = True
        for visit in self._visits:
            visit.end()
        await self._sessions.end_where(lambda _: True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; refusals are raised before anything was answered."""
        visitor, headers = scope["kiwi.visitor"], Headers(scope=scope)
        self._door.check_mcp(visitor)
        is_listening = scope["method"] == "GET" or headers.get("mcp-method") == "subscriptions/listen"
        scope["user"] = AuthenticatedUser(AccessToken(token="", client_id=visitor.principal, scopes=[]))
        scope[LEFT] = left = asyncio.Event()
        try:
            await self.limited(self._sessions.handle_request, scope, receive, send, is_listening=is_listening)
        finally:
            left.set()

    async def limited(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, *, is_listening: bool = False
    ) -> None:
        """Have an application answer a request within the limits of its token, until the token is removed."""
        visitor = scope["kiwi.visitor"]
        if self._is_ending:
            raise _leaving()
        if (length := declared_length(Headers(scope=scope))) > MAX_BODY:
            raise TooLarge("The body", size=length, limit=MAX_BODY)
        theirs = [visit for visit in self._visits if visit.visitor.principal == visitor.principal]
        if sum(visit.is_listening == is_listening for visit in theirs) >= _AT_ONCE:
            message = f"{_AT_ONCE} requests of yours are under way."
            raise Unavailable(message, suggestion="Wait for some of them to end.")
        visiting.set(visitor)
        limit = asyncio.timeout(_LISTENING_SECONDS if is_listening else _CALL_SECONDS)
        visit = _Visit(visitor, is_listening, limit)

        async def noting(message: Message) -> None:
            visit.has_begun = True
            await send(message)

        self._visits.add(visit)
        try:
            async with visit.limit:
                await app(scope, timely(receive, MAX_BODY), noting)
        except TimeoutError:
            if not visit.has_begun:  # half an answer cannot be taken back: the connection is closed
                raise (visit.reason or _leaving()) from None
        finally:
            self._visits.discard(visit)

    async def _watch(self) -> None:
        """End what was begun with a token that has been removed, and what listens with one that has expired."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for visit in list(self._visits):
                is_good = self._door.still_admits(visit.visitor)
                # A call that began in time is finished; notifications are only for clients that may still get them.
                if not is_good and (visit.is_listening or visit.visitor.expires_at is None):
                    message = "The token was removed, or has expired, while the request was under way."
                    suggestion = "Ask the owner for another one; what was begun with this one was stopped."
                    visit.end(TokenRefused(message, suggestion=suggestion))
            await self._sessions.end_where(self._door.has_removed)
            self._calls.end_where(self._door.has_removed)


def principal(context: Context) -> str:
    """Return the sender of a request, as the record names them."""
    assert isinstance(context.request, Request)  # noqa: S101 - every message came in one
    return visitor_of(context.request).principal


def _leaving() -> Unavailable:
    return Unavailable("This server is ending, or the request took too long.", suggestion="Try again in a moment.")
