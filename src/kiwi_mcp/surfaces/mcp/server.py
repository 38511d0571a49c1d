"""The SDK server object; what it would answer, as text."""

from __future__ import annotations

import json
from functools import cached_property

import anyio
import mcp_types as types
from mcp.server.caching import CacheableMethod, CacheHint
from mcp.server.connection import Connection
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.runner import ServerRunner
from mcp.shared.message import SessionMessage
from mcp_types.version import LATEST_HANDSHAKE_VERSION, LATEST_MODERN_VERSION

from kiwi_mcp import __version__
from kiwi_mcp.domain.json import JsonObject, compact
from kiwi_mcp.kernel.verbs import INSTRUCTIONS
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.handlers import Handlers
from kiwi_mcp.surfaces.mcp.protocol import Context, KernelApi, connection_of
from kiwi_mcp.surfaces.mcp.running_call import set_level
from kiwi_mcp.surfaces.mcp.tool_list import ToolListWatcher

_LIST = CacheHint(5_000)
"""A client that gets no notifications sees changes of the owner's preferences soon after."""
_HINTS: dict[CacheableMethod, CacheHint] = {
    "server/discover": CacheHint(300_000),
    "resources/read": CacheHint(),
    "tools/list": _LIST,
    "prompts/list": _LIST,
    "resources/list": _LIST,
    "resources/templates/list": _LIST,
}
_CLIENT: JsonObject = {"name": "rehearsal", "version": "0"}
ENVELOPE: JsonObject = {
    "_meta": {
        types.PROTOCOL_VERSION_META_KEY: LATEST_MODERN_VERSION,
        types.CLIENT_CAPABILITIES_META_KEY: {},
        types.CLIENT_INFO_META_KEY: _CLIENT,
    }
}
"""What every request of the modern era carries."""


class McpServer(Server[dict[str, object]]):
    """The SDK's server, which says in every handshake that its lists may change, and knows who has shaken hands."""

    @cached_property
    def _runners(self) -> dict[str | None, ServerRunner[dict[str, object]]]:
        return {}

    def opened(self, connection: Connection) -> None:
        """Note that a client of the handshake era is ready, for as long as it stays."""
        if connection.session_id not in self._runners:
            self._runners[connection.session_id] = ServerRunner(self, connection, {})
            connection.exit_stack.callback(self._runners.pop, connection.session_id)

    def open_runner(self, session_id: str | None) -> ServerRunner[dict[str, object]] | None:
        """Return what answers the client of a session, or the one without, if it has shaken hands."""
        return self._runners.get(session_id)

    def create_initialization_options(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, object]] | None = None,
        extensions: dict[str, dict[str, object]] | None = None,
    ) -> InitializationOptions:
        """Return what a handshake is answered with."""
        everything = NotificationOptions(prompts_changed=True, resources_changed=True, tools_changed=True)
        return super().create_initialization_options(
            notification_options or everything, experimental_capabilities, extensions
        )


def build_server(
    kernel: KernelApi, *, calls: Calls, changes: ToolListWatcher, name: str = "kiwi", instructions: str = INSTRUCTIONS
) -> McpServer:
    """Return the server that passes everything on to the kernel; its user must close `calls` and `changes`."""
    handlers = Handlers(kernel, changes, calls)
    server = McpServer(
        name,
        version=__version__,
        title="Kiwi",
        instructions=instructions,
        cache_hints=_HINTS,
        get_tool_input_schema=handlers.schema_of,
        on_list_tools=handlers.list_tools,
        on_list_prompts=handlers.list_prompts,
        on_list_resources=handlers.list_resources,
        on_list_resource_templates=handlers.list_templates,
        on_completion=handlers.complete,
    )
    # What may be answered with a question or a task first has more results than the constructor's types know.
    server.add_request_handler("tools/call", types.CallToolRequestParams, handlers.call_tool)
    server.add_request_handler("prompts/get", types.GetPromptRequestParams, handlers.get_prompt)
    server.add_request_handler("resources/read", types.ReadResourceRequestParams, handlers.read_resource)
    server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, set_level)

    async def greeted(context: Context, params: types.NotificationParams) -> None:
        server.opened(connection_of(context))
        await changes.greeted(context, params)

    server.add_notification_handler("notifications/initialized", types.NotificationParams, greeted)
    changes.serve(server)
    calls.serve(server)
    return server


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

    async def send(method: str, params: JsonObject) -> None:
        request = types.JSONRPCRequest(jsonrpc="2.0", id=1, method=method, params=dict(params))
        await to_server.send(SessionMessage(request))

    async with to_server, from_server, anyio.create_task_group() as tasks:
        tasks.start_soon(server.run, inbound, outbound, server.create_initialization_options())
        if is_legacy:
            await send("initialize", handshake(LATEST_HANDSHAKE_VERSION))
            await from_server.receive()
        await send(method, params)
        reply = json.loads((await from_server.receive()).message.model_dump_json(by_alias=True, exclude_unset=True))
        tasks.cancel_scope.cancel()
    return compact(reply["result"])
