"""An MCP server with the memory tools alone, for programs that are to see nothing else of Kiwi."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from mcp.server.stdio import stdio_server

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.items import ItemType
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.mcp import Offer, OfferKind, Offers
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.handlers import unknown_tool
from kiwi_mcp.surfaces.mcp.server import build_server
from kiwi_mcp.surfaces.mcp.stdio_server import principal
from kiwi_mcp.surfaces.mcp.tool_list import ToolListWatcher

NAMES = tuple(f"memory_{name}" for name in ("read", "write", "edit", "delete", "list", "search", "history", "export"))
_INSTRUCTIONS = (
    "The memory of the user: text files with a history. Search or list it before you ask the user. "
    "A change waits until the user has approved it."
)


class MemoryKernel:
    """A kernel of which clients see and call the memory tools alone."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._tools = tuple(offer for name in NAMES if (offer := kernel.offered(name, "tool")))

    async def call(self, verb: str, payload: JsonObject, caller: Caller) -> Answer:
        """Run a memory tool."""
        if verb != "execute" or payload.get("item_id") not in {offer.identity for offer in self._tools}:
            raise unknown_tool(verb)
        return await self._kernel.call(verb, payload, caller)

    async def offers(self) -> Offers:
        """Return the memory tools."""
        return Offers(meta_tools=(), tools=self._tools)

    def offers_mark(self) -> str:
        """Return a text that stays the same: the tools are built in."""
        return "memory"

    def offered(self, name: str, kind: OfferKind, item_type: ItemType | None = None) -> Offer | None:  # noqa: ARG002 - nothing else is offered
        """Return None."""
        return None

    async def complete(self, *_: str | Mapping[str, str]) -> Sequence[str]:
        """Return nothing to complete with."""
        return ()

    async def aclose(self) -> None:
        """Release all resources."""
        await self._kernel.aclose()


async def serve() -> None:
    """Serve over standard input and output until the client leaves."""
    own = Kernel(None, is_owner=False, surface="mcp")
    kernel = MemoryKernel(own)
    changes, calls = (
        ToolListWatcher(kernel),
        Calls(own.tasks, task_after=own.task_after, principal=principal, kernel=own),
    )
    server = build_server(kernel, calls=calls, changes=changes, name="kiwi-memory", instructions=_INSTRUCTIONS)
    try:
        async with stdio_server() as (inbound, outbound):
            await server.run(inbound, outbound, server.create_initialization_options())
    finally:
        calls.leave()
        await changes.aclose()
        await calls.aclose()
        await kernel.aclose()


def run() -> None:
    """Serve the memory as a process of its own."""
    asyncio.run(serve())
