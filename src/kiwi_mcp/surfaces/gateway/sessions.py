"""Sessions of the handshake era over HTTP: the SDK's, each bound to who opened it, with a short way for calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from uuid import uuid4

from mcp.server.auth.middleware.bearer_auth import AuthorizationContext
from mcp.server.streamable_http import (
    MCP_SESSION_ID_HEADER,
    REQUEST_CANCELLED,
    StreamableHTTPServerTransport,
    check_accept_headers,
)
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.dispatcher import coerce_request_id
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params
from mcp.shared.message import ServerMessageMetadata
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, JSONRPCNotification, JSONRPCRequest, RequestId
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from kiwi_mcp.surfaces.gateway.modern import ModernCall, is_modern_call, read_message
from kiwi_mcp.surfaces.gateway.reply import Reply
from kiwi_mcp.surfaces.mcp.lean import METHOD, Answer, Exchange, stop
from kiwi_mcp.surfaces.mcp.questions import askable
from kiwi_mcp.surfaces.mcp.server import McpServer
from kiwi_mcp.surfaces.mcp.streams import encoded

MAX_BODY = 4_194_304
_SESSIONS, _SESSIONS_EACH = 1_024, 256
"""How many sessions are kept: of everybody, and of one visitor."""
_IDLE_SECONDS = 1_800.0


class Session(StreamableHTTPServerTransport):
    """The SDK's session, whose calls take the short way where their client cannot be asked while it waits."""

    def __init__(self, server: McpServer) -> None:
        name = uuid4().hex
        super().__init__(name, idle_timeout=_IDLE_SECONDS)
        self._server = server
        self._header = (MCP_SESSION_ID_HEADER.encode(), name.encode())
        self._exchanges: dict[RequestId, tuple[Exchange, asyncio.Task[Answer]]] = {}

    async def _handle_post_request(self, scope: Scope, request: Request, receive: Receive, send: Send) -> None:
        try:
            body = await request.body()  # kept by the request for the SDK to read again
        except ClientDisconnect:
            return
        match read_message(body):
            case JSONRPCNotification(method="notifications/cancelled", params=params):
                self._call_off(cancelled_request_id_from_params(params))
            case JSONRPCRequest(method="tools/call") as message if self._is_plain(request):
                reply = Reply(send, encoded, self._header)
                exchange = Exchange(
                    message, reply.tell, message_metadata=ServerMessageMetadata(request_context=request)
                )
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

    def _is_plain(self, request: Request) -> bool:
        """Whether the SDK would take a request as it is, and its client an answer in either form."""
        return all(check_accept_headers(request)) and self._check_content_type(request)

    def _begin(self, exchange: Exchange) -> bool:
        key, runner = exchange.key, self._server.open_runner(self.mcp_session_id)
        if runner is None or key in self._exchanges or askable(runner.connection.client_capabilities):
            return False
        work = partial(runner.on_request, exchange, METHOD, exchange.request.params)
        task = asyncio.create_task(exchange.answer(work))
        self._exchanges[key] = exchange, task
        task.add_done_callback(lambda _: self._exchanges.pop(key))
        return True

    async def _see_to(self, exchange: Exchange, reply: Reply, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a client when there is an answer; one that leaves meanwhile does not end the call, in this era."""
        _, task = self._exchanges[exchange.key]
        try:
            await reply.keep_alive(task)
        finally:
            await stop(task)
        if not task.cancelled():
            await reply.answer(task.result())
        elif exchange.cancel_requested.is_set():
            error = ErrorData(code=REQUEST_CANCELLED, message="Request cancelled")
            await reply.answer(JSONRPCError(jsonrpc="2.0", id=exchange.request.id, error=error))
        elif not await reply.end():
            told = "Session terminated before the request completed"
            await self._create_error_response(told, HTTPStatus.INTERNAL_SERVER_ERROR, INTERNAL_ERROR)(
                scope, receive, send
            )

    def _call_off(self, number: RequestId | None) -> None:
        known = self._exchanges.get(coerce_request_id(number)) if number is not None else None
        if known is not None:
            known[0].call_off(known[1])


class Sessions(StreamableHTTPSessionManager):
    """The sessions of everybody, of whom nobody can take all."""

    def __init__(self, server: McpServer) -> None:
        super().__init__(server, max_request_body_size=MAX_BODY)
        self._server = server

    async def _handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        # What is no call of the newest era by its headers is not even read here.
        if is_modern_call(scope):
            call = ModernCall(self._server, Request(scope, receive))
            if await call.is_answered(send):
                return
            receive = call.read_again
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
        """End the sessions of credentials that are no more; their calls are cancelled."""
        over = [name for name, owner in self._session_owners.items() if is_over(owner["client_id"])]
        for name in over:
            if (transport := self._server_instances.get(name)) is not None:
                await self._discard_session(name, transport)
