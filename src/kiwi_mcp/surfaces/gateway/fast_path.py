"""`tools/call` of 2026-07-28 in one request; JSON or event-stream reply."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

from mcp.server.connection import Connection
from mcp.server.runner import serve_one
from mcp.server.streamable_http import check_accept_headers
from mcp.shared.inbound import (
    ERROR_CODE_HTTP_STATUS,
    MCP_METHOD_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
    InboundModernRoute,
    classify_inbound_request,
    find_duplicated_routing_header,
    validate_mcp_param_headers,
)
from mcp.shared.message import ServerMessageMetadata
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, jsonrpc_message_adapter
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Scope, Send

from kiwi_mcp.domain.json import as_object, as_text
from kiwi_mcp.surfaces.mcp.fast_path import METHOD, Answer, FastRequest, stop
from kiwi_mcp.surfaces.mcp.server import McpServer

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
Encode: TypeAlias = Callable[[JSONRPCMessage], bytes]
"""Writes a message as JSON."""


class StreamReply:
    """What goes back to one client; `headers` are sent besides those of its form."""

    def __init__(self, send: Send, encode: Encode, *headers: Header) -> None:
        self._send = send
        self._encode = encode
        self._headers = headers
        self._is_begun = False
        self._turn = asyncio.Lock()

    async def tell(self, message: JSONRPCNotification) -> None:
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


_OK = 200


def is_modern_call(scope: Scope) -> bool:
    """Whether a request says by its headers that it is a call of the newest era."""
    headers = Headers(scope=scope)
    return (
        scope["method"] == "POST"
        and headers.get(MCP_METHOD_HEADER) == METHOD
        and headers.get(MCP_PROTOCOL_VERSION_HEADER) in MODERN_PROTOCOL_VERSIONS
        and headers.get("content-type", "").lower().startswith("application/json")
    )


def read_message(body: bytes) -> JSONRPCMessage | None:
    """Return the message in a body; None where it holds none, and the SDK says what is wrong."""
    try:
        return jsonrpc_message_adapter.validate_json(body, by_name=False)
    except ValidationError:
        return None


class ModernRequest:
    """A request that is a call by its headers."""

    def __init__(self, server: McpServer, request: Request) -> None:
        self._server = server
        self._request = request
        self._body: bytes | None = None

    async def is_answered(self, send: Send) -> bool:
        """Answer the call if it is sound, and say whether it was."""
        self._body = await self._request.body()
        message = read_message(self._body)
        route = self._route(message) if isinstance(message, JSONRPCRequest) else None
        if route is None or not isinstance(message, JSONRPCRequest):
            return False
        reply = StreamReply(send, encoded)
        about = ServerMessageMetadata(request_context=self._request)
        await self._see_to(FastRequest(message, reply.tell, message_metadata=about), route, reply)
        return True

    async def read_again(self) -> Message:
        """Give the SDK what was already read, and then what follows."""
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._request.receive()

    def _route(self, message: JSONRPCRequest) -> InboundModernRoute | None:
        headers, params = self._request.headers, as_object(message.params)
        if not all(check_accept_headers(self._request)) or find_duplicated_routing_header(headers.items()):
            return None
        body = {"method": message.method, "params": message.params}
        route = classify_inbound_request(body, headers=dict(headers.items()))
        schema = self._server.get_tool_input_schema and self._server.get_tool_input_schema(as_text(params.get("name")))
        if schema and validate_mcp_param_headers(schema, as_object(params.get("arguments")), headers):
            return None
        return route if isinstance(route, InboundModernRoute) else None

    async def _see_to(self, exchange: FastRequest, route: InboundModernRoute, reply: StreamReply) -> None:
        work = partial(self._work, exchange, route)
        task = asyncio.create_task(exchange.answer(work, is_modern=True))
        gone = asyncio.create_task(self._gone())
        try:
            await reply.keep_alive(task, gone)
        finally:  # a client that has left wants no answer, and nothing else done
            gone.cancel()
            await stop(task)
        if not task.cancelled():
            answer = task.result()
            await reply.answer(answer, status=_status(answer))

    async def _work(self, exchange: FastRequest, route: InboundModernRoute) -> dict[str, Any]:
        connection = Connection.from_envelope(route.protocol_version, route.client_info, route.client_capabilities)
        params = exchange.request.params
        return await serve_one(self._server, exchange, METHOD, params, connection=connection, lifespan_state={})

    async def _gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass


def encoded(message: JSONRPCMessage) -> bytes:
    """Return a message as the SDK writes it in this era."""
    response = message.model_dump(mode="json", by_alias=True, exclude_none=True)
    return json.dumps(response, separators=(",", ":")).encode()


def _status(answer: Answer) -> int:
    return ERROR_CODE_HTTP_STATUS.get(answer.error.code, _OK) if isinstance(answer, JSONRPCError) else _OK
