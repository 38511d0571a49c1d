"""Writes `prepared.json`, what stage one answers with: `python -m kiwi_mcp.surfaces.mcp.prepare`.

Every text in it is the answer that the SDK itself gave to the request, so the two stages cannot differ in wording.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import anyio
import mcp_types as types
from mcp.shared.message import SessionMessage
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, LATEST_HANDSHAKE_VERSION, LATEST_MODERN_VERSION

from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.json import JsonObject, compact
from kiwi_mcp.kernel import Answer
from kiwi_mcp.surfaces.mcp.server import build_server

PREPARED = Path(__file__).with_name("prepared.json")

_CLIENT: JsonObject = {"name": "prepare", "version": "0"}
_ENVELOPE: JsonObject = {
    "_meta": {
        types.PROTOCOL_VERSION_META_KEY: LATEST_MODERN_VERSION,
        types.CLIENT_CAPABILITIES_META_KEY: {},
        types.CLIENT_INFO_META_KEY: _CLIENT,
    }
}


class NoKernel:
    """Stands where a kernel would: nothing that is prepared needs one."""

    async def call(self, verb: str, payload: JsonObject, caller: Caller) -> Answer:
        """Never called."""
        raise NotImplementedError(verb, payload, caller)

    async def aclose(self) -> None:
        """Hold nothing."""


async def prepared() -> Mapping[str, Mapping[str, str]]:
    """Return the SDK's answers to the opening of a conversation, by era and method."""
    greetings = {version: await _result("initialize", _handshake(version)) for version in HANDSHAKE_PROTOCOL_VERSIONS}
    return {
        "versions": {"modern": LATEST_MODERN_VERSION},
        "initialize": {**greetings, "else": greetings[LATEST_HANDSHAKE_VERSION]},
        "legacy": {"ping": await _result("ping", {}, is_legacy=True)},
        "modern": {"server/discover": await _result("server/discover", _ENVELOPE)},
        "tools": await _tools(has_project=False),
        "tools_with_project": await _tools(has_project=True),
    }


async def _tools(*, has_project: bool) -> Mapping[str, str]:
    return {
        "legacy": await _result("tools/list", {}, is_legacy=True, has_project=has_project),
        "modern": await _result("tools/list", _ENVELOPE, has_project=has_project),
    }


def _handshake(version: str) -> JsonObject:
    return {"protocolVersion": version, "capabilities": {}, "clientInfo": _CLIENT}


async def _result(method: str, params: JsonObject, *, is_legacy: bool = False, has_project: bool = False) -> str:
    """Return what a fresh server answers, as the text it would put on the wire."""
    to_server, inbound = anyio.create_memory_object_stream[SessionMessage | Exception](4)
    outbound, from_server = anyio.create_memory_object_stream[SessionMessage](4)
    server = build_server(NoKernel(), has_project=has_project)
    async with to_server, from_server, anyio.create_task_group() as tasks:
        tasks.start_soon(server.run, inbound, outbound, server.create_initialization_options())
        if is_legacy:
            await to_server.send(_request("initialize", _handshake(LATEST_HANDSHAKE_VERSION)))
            await from_server.receive()
        await to_server.send(_request(method, params))
        reply = json.loads((await from_server.receive()).message.model_dump_json(by_alias=True, exclude_unset=True))
        tasks.cancel_scope.cancel()
    return compact(reply["result"])


def _request(method: str, params: JsonObject) -> SessionMessage:
    return SessionMessage(types.JSONRPCRequest(jsonrpc="2.0", id=1, method=method, params=dict(params)))


def main() -> None:
    """Write the file anew, in one piece."""
    text = json.dumps(asyncio.run(prepared()), ensure_ascii=False, indent=1) + "\n"
    draft = PREPARED.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(PREPARED)
    sys.stderr.write(f"wrote {PREPARED.name}\n")


if __name__ == "__main__":
    main()
