"""Stage two: the official SDK's server over the kernel, for as long as the client stays."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Protocol

import anyio
import mcp_types as types
from mcp.server.caching import CacheHint
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server

from kiwi_mcp import __version__
from kiwi_mcp.domain.caller import NOBODY, Caller
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.surfaces.mcp.definitions import INSTRUCTIONS, definitions
from kiwi_mcp.surfaces.mcp.greeting import Opening
from kiwi_mcp.surfaces.mcp.progress import Relay
from kiwi_mcp.surfaces.mcp.replies import as_result
from kiwi_mcp.surfaces.mcp.stdio import Wire
from kiwi_mcp.surfaces.mcp.streams import Inbound, Outbound

_TIDY_SECONDS = 10.0
"""How long a cancelled call may take to end its processes."""
_LIST_IS_FRESH_MS = 300_000


class KernelApi(Protocol):
    """What the server needs of a kernel."""

    async def call(self, verb: str, payload: JsonObject, caller: Caller) -> Answer:
        """Answer one verb."""
        ...

    async def aclose(self) -> None:
        """Let go of everything."""
        ...


def run(wire: Wire, opening: Opening, project: str) -> None:
    """Serve the rest of a conversation that stage one has opened, with a kernel of its own."""
    kernel = Kernel(Path(project).expanduser().absolute() if project else None, is_owner=False)
    asyncio.run(serve(kernel, wire, opening, has_project=bool(project)))


async def serve(kernel: KernelApi, wire: Wire, opening: Opening, *, has_project: bool) -> None:
    """Serve until the client leaves or the process is asked to end; calls in flight are cancelled first."""
    outbound = Outbound(wire)
    inbound = Inbound(wire, opening, outbound)
    server = build_server(kernel, has_project=has_project)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, inbound.end)
    try:
        await outbound.open()
        await inbound.open()
        await server.run(inbound, outbound, server.create_initialization_options())
    finally:
        await kernel.aclose()


def build_server(kernel: KernelApi, *, has_project: bool) -> Server[dict[str, object]]:
    """Return the SDK's server that lists the meta-tools and passes every call on to the kernel."""
    listed = types.ListToolsResult(tools=definitions(has_project=has_project))

    async def list_tools(
        _context: ServerRequestContext[dict[str, object]], _params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return listed

    async def call_tool(
        context: ServerRequestContext[dict[str, object]], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        return as_result(await _call(kernel, context, params), revision=context.protocol_version)

    return Server(
        "kiwi",
        version=__version__,
        title="Kiwi",
        instructions=INSTRUCTIONS,
        cache_hints={"tools/list": CacheHint(_LIST_IS_FRESH_MS), "server/discover": CacheHint(_LIST_IS_FRESH_MS)},
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def _call(
    kernel: KernelApi, context: ServerRequestContext[dict[str, object]], params: types.CallToolRequestParams
) -> Answer:
    asked: JsonObject = params.arguments or {}
    if "progress_token" not in (context.meta or {}):
        return await in_own_task(kernel.call(params.name, asked, NOBODY))
    async with Relay(context.session.report_progress) as relay:
        return await in_own_task(kernel.call(params.name, asked, Caller(relay.report)))


async def in_own_task(work: Coroutine[object, object, Answer]) -> Answer:
    """Await a call in a task of its own, which hears of a cancellation once and may then tidy up in peace.

    The SDK cancels again at every step until its request is over; a call that waits for its processes to end would
    be torn from that wait.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({task}, timeout=_TIDY_SECONDS)
        raise
