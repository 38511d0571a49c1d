"""The approval gate of MCP servers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from mcp.server import MCPServer
from mcp_types import ToolAnnotations

from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.kernel import Kernel


@asynccontextmanager
async def listening(written: list[str]) -> AsyncIterator[int]:
    """A server over HTTP with a tool that writes and one that says it only reads, at a port."""
    server = MCPServer("notes")

    @server.tool()
    def write(text: str) -> str:
        """Writes."""
        written.append(text)
        return "written"

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    def read() -> str:
        """Reads."""
        return "a note"

    bound = socket.create_server(("127.0.0.1", 0))
    uvicorn_server = uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error", lifespan="on"))
    task = asyncio.create_task(uvicorn_server.serve([bound]))
    try:
        yield bound.getsockname()[1]
    finally:
        uvicorn_server.should_exit = uvicorn_server.force_exit = True
        await task


@pytest.mark.usefixtures("loopback")
@pytest.mark.req("K4")
async def test_a_tool_of_an_http_server_needs_approval_unless_it_was_accepted_as_reading(kernel: Kernel) -> None:
    written: list[str] = []

    async with asyncio.timeout(120), listening(written) as port:
        url = f"http://127.0.0.1:{port}/mcp"
        added = await kernel.call("mcp", {"action": "add", "server": "notes", "url": url})
        assert not added.is_error, added
        assert (await kernel.call("execute", {"item_id": "mcp/notes/read"})).content["status"] == "success"
        request: JsonObject = {"item_id": "mcp/notes/write", "parameters": {"text": "hi"}}
        waiting = (await kernel.call("execute", request)).content
        assert (waiting["code"], written) == ("approval_required", [])
        await kernel.call("approvals", {"action": "approve", "approval_id": waiting["approval_id"]})
        assert (await kernel.call("execute", request)).content["status"] == "success"
        waiting = (await kernel.call("execute", request)).content
        assert waiting["code"] == "approval_required"
        # A rule for the server: for all its tools, as long as the server is as it is.
        always: JsonObject = {"action": "approve", "approval_id": str(waiting["number"]), "always": "this server"}
        rule = as_object((await kernel.call("approvals", always)).content["rule"])
        assert (rule["item"], len(as_text(rule["digest"]))) == ("mcp/notes/*", 64)
        for text in ("one", "two"):
            again = await kernel.call("execute", {**request, "parameters": {"text": text}})
            assert again.content["status"] == "success"
        manifest = kernel.catalog().find("notes").origin.path
        manifest.write_text(f"{manifest.read_text()}# changed\n")
        assert (await kernel.call("mcp", {"action": "accept", "server": "notes"})).is_error is False
        changed = await kernel.call("execute", {**request, "parameters": {"text": "three"}})
        assert changed.content["code"] == "approval_required", changed.content
        await kernel.aclose()
    assert written == ["hi", "one", "two"]
