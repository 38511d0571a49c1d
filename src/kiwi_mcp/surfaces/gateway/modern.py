"""Calls of 2026-07-28 over HTTP on the short way: one request in, one answer out, and nothing kept in between.

Whatever the SDK would refuse, or would have to look at twice, is left to the SDK, which says why.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

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
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCRequest, jsonrpc_message_adapter
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Scope, Send

from kiwi_mcp.domain.json import as_object, as_text
from kiwi_mcp.surfaces.gateway.reply import Reply
from kiwi_mcp.surfaces.mcp.lean import METHOD, Answer, Exchange, stop
from kiwi_mcp.surfaces.mcp.server import McpServer

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


class ModernCall:
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
        reply = Reply(send, encoded)
        about = ServerMessageMetadata(request_context=self._request)
        await self._see_to(Exchange(message, reply.tell, message_metadata=about), route, reply)
        return True

    async def read_again(self) -> Message:
        """Give the SDK what was read already, and then what comes."""
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

    async def _see_to(self, exchange: Exchange, route: InboundModernRoute, reply: Reply) -> None:
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

    async def _work(self, exchange: Exchange, route: InboundModernRoute) -> dict[str, Any]:
        connection = Connection.from_envelope(route.protocol_version, route.client_info, route.client_capabilities)
        params = exchange.request.params
        return await serve_one(self._server, exchange, METHOD, params, connection=connection, lifespan_state={})

    async def _gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass


def encoded(message: JSONRPCMessage) -> bytes:
    """Return a message as the SDK writes it in this era."""
    told = message.model_dump(mode="json", by_alias=True, exclude_none=True)
    return json.dumps(told, separators=(",", ":")).encode()


def _status(answer: Answer) -> int:
    return ERROR_CODE_HTTP_STATUS.get(answer.error.code, _OK) if isinstance(answer, JSONRPCError) else _OK
