"""Rehearsals: what a server would answer, as the text that it would put on the wire."""

from __future__ import annotations

import json

import anyio
import mcp_types as types
from mcp.shared.message import SessionMessage
from mcp_types.version import LATEST_HANDSHAKE_VERSION, LATEST_MODERN_VERSION

from kiwi_mcp.domain.json import JsonObject, compact
from kiwi_mcp.surfaces.mcp.server import McpServer

_CLIENT: JsonObject = {"name": "rehearsal", "version": "0"}
ENVELOPE: JsonObject = {
    "_meta": {
        types.PROTOCOL_VERSION_META_KEY: LATEST_MODERN_VERSION,
        types.CLIENT_CAPABILITIES_META_KEY: {},
        types.CLIENT_INFO_META_KEY: _CLIENT,
    }
}
"""What every request of the modern era carries."""


def handshake(version: str) -> JsonObject:
    """Return the parameters of a handshake."""
    return {"protocolVersion": version, "capabilities": {}, "clientInfo": _CLIENT}


async def tool_lists(server: McpServer) -> dict[str, str]:
    """Return the list of tools, by era."""
    return {
        "legacy": await answer(server, "tools/list", {}, is_legacy=True),
        "modern": await answer(server, "tools/list", ENVELOPE),
    }


async def answer(server: McpServer, method: str, params: JsonObject, *, is_legacy: bool = False) -> str:
    """Return the result that a new client would get."""
    to_server, inbound = anyio.create_memory_object_stream[SessionMessage | Exception](4)
    outbound, from_server = anyio.create_memory_object_stream[SessionMessage](4)
    async with to_server, from_server, anyio.create_task_group() as tasks:
        tasks.start_soon(server.run, inbound, outbound, server.create_initialization_options())
        if is_legacy:
            await to_server.send(_request("initialize", handshake(LATEST_HANDSHAKE_VERSION)))
            await from_server.receive()
        await to_server.send(_request(method, params))
        reply = json.loads((await from_server.receive()).message.model_dump_json(by_alias=True, exclude_unset=True))
        tasks.cancel_scope.cancel()
    return compact(reply["result"])


def _request(method: str, params: JsonObject) -> SessionMessage:
    return SessionMessage(types.JSONRPCRequest(jsonrpc="2.0", id=1, method=method, params=dict(params)))
