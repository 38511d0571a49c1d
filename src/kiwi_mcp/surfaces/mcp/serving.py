"""Stage two: the SDK's server on the wire of stage one, for as long as the client stays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp

from kiwi_mcp.kernel import Kernel
from kiwi_mcp.store.whose import STDIO
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.changes import Changes
from kiwi_mcp.surfaces.mcp.greeting import Opening, load_prepared
from kiwi_mcp.surfaces.mcp.lean import ShortWay
from kiwi_mcp.surfaces.mcp.lists import conditions, path_of, stamp
from kiwi_mcp.surfaces.mcp.port import Context, KernelApi
from kiwi_mcp.surfaces.mcp.rehearsal import tool_lists
from kiwi_mcp.surfaces.mcp.server import McpServer, build_server
from kiwi_mcp.surfaces.mcp.stdio import Wire
from kiwi_mcp.surfaces.mcp.streams import Inbound, Outbound

_KEPT = 64
"""For how many projects a list is kept."""


def run(wire: Wire, opening: Opening, project: str) -> None:
    """Serve the rest of a conversation that stage one has opened, with a kernel of its own."""
    folder = Path(project).expanduser().absolute() if project else None
    kernel = Kernel(folder, is_owner=False, surface="mcp")
    calls = Calls(kernel.tasks, task_after=kernel.task_after, principal=principal)
    asyncio.run(serve(kernel, wire, opening, calls=calls, project=project))


def principal(_context: Context) -> str:
    """Return who calls over standard input: whoever has started the process."""
    return STDIO


async def serve(kernel: KernelApi, wire: Wire, opening: Opening, *, calls: Calls, project: str = "") -> None:
    """Serve until the client leaves or the process is asked to end; calls in flight are cancelled first."""
    outbound = Outbound(wire)
    changes = Changes(kernel)
    server = build_server(kernel, calls=calls, changes=changes)
    short = ShortWay(server, outbound.send)
    inbound = Inbound(wire, opening, outbound, short)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, inbound.end)
    settling = asyncio.create_task(settle(server, changes, opening, project))
    try:
        await outbound.open()
        await inbound.open()
        await server.run(inbound, outbound, server.create_initialization_options())
    finally:
        settling.cancel()
        await asyncio.wait({settling})
        await short.aclose()
        await changes.aclose()
        await calls.aclose()
        await kernel.aclose()


async def settle(server: McpServer, changes: Changes, opening: Opening, project: str) -> None:
    """Keep the list of tools that holds for the next start, and notice whether stage one gave out another.

    Where the owner prefers nothing of their own, and has no servers, it is the prepared one, which is not kept again.
    """
    made_under, path = stamp(), Path(path_of(project))
    tools = await tool_lists(server)
    if made_under is None and tools == load_prepared()["tools"]:
        await asyncio.to_thread(forget, path)
    else:
        await asyncio.to_thread(keep, path, {**conditions(project, made_under), "tools": tools})
    if opening.listed is not None and tools[opening.listed[0]] != opening.listed[1]:
        changes.outdate_tools()


def forget(path: Path) -> None:
    """Keep a list no longer."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def keep(path: Path, kept: Mapping[str, object]) -> None:
    """Write a list down whole; where that cannot be done, the next start takes a moment longer."""
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, draft = mkstemp(dir=path.parent)  # for nobody else to read
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(kept, file)
        Path(draft).replace(path)
        by_age = sorted(path.parent.iterdir(), key=lambda one: one.stat().st_mtime_ns)
        for oldest in by_age[:-_KEPT]:
            oldest.unlink()
