"""Servers in the local network: adding one grants its address and nothing else."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn
from mcp.server import MCPServer
from mcp_types import ToolAnnotations
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kiwi_mcp.domain.json import Json, JsonObject, as_text
from kiwi_mcp.kernel import Answer, Kernel


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[int]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1, ws="none"))
        task = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            yield bound.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            await task


def notes() -> ASGIApp:
    """An MCP server."""
    server = MCPServer("notes")

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))  # of others the owner is asked
    def read() -> str:
        """Reads."""
        return "a note"

    return server.streamable_http_app()


class Owner:
    """The owner at work."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    async def mcp(self, action: str, **words: Json) -> Answer:
        return await self.kernel.call("mcp", {"action": action, **words})

    async def run(self) -> Answer:
        return await self.kernel.call("execute", {"item_id": "mcp/notes/read"})


@pytest.fixture
def story(kernel: Kernel, loopback: None) -> Callable[[Callable[[Owner, int], Awaitable[None]]], None]:
    async def main(work: Callable[[Owner, int], Awaitable[None]]) -> None:
        async with asyncio.timeout(120), listening(notes()) as port:
            try:
                await work(Owner(kernel), port)
            finally:
                await kernel.aclose()

    return lambda work: asyncio.run(main(work))


Story = Callable[[Callable[[Owner, int], Awaitable[None]]], None]


def test_adding_a_local_network_server_grants_its_address(story: Story, home: Path) -> None:
    async def work(owner: Owner, port: int) -> None:
        added = await owner.mcp("add", server="notes", url=f"http://127.0.0.1:{port}/mcp")
        assert as_text(added.content["message"]).endswith(f"; Kiwi may reach 127.0.0.1:{port} for it")
        assert (await owner.run()).content["status"] == "success"
        assert not (home / ".ai/policy.yaml").exists()
        (home / ".ai/policy.yaml").write_text("hosts: {deny: [127.0.0.1]}\n")
        assert (await owner.run()).content["code"] == "not_permitted"

    story(work)


def test_another_address_needs_the_owner_again(story: Story, project: Path) -> None:
    async def work(owner: Owner, port: int) -> None:
        await owner.mcp("add", server="notes", url="http://127.0.0.1:9/mcp", start=False)
        manifest = project / ".ai/tools/mcp/notes.yaml"
        manifest.write_text(manifest.read_text().replace("127.0.0.1:9/", f"127.0.0.1:{port}/"))
        refused = await owner.mcp("refresh", server="notes")
        assert refused.content["code"] == "address_denied"
        accepted = await owner.mcp("accept", server="notes")
        assert as_text(accepted.content["message"]).endswith(f"; Kiwi may reach it at 127.0.0.1:{port}")
        assert not (await owner.mcp("refresh", server="notes")).is_error

    story(work)


def test_a_manifest_of_a_cloned_project_reaches_no_local_address(story: Story, project: Path) -> None:
    async def work(owner: Owner, port: int) -> None:
        folder = project / ".ai/tools/mcp"
        folder.mkdir(parents=True)
        words: JsonObject = {
            "tool_id": "notes", "tool_type": "mcp_server", "version": "1.0.0", "executor": "http_client",
            "description": "Notes", "config": {"transport": "http", "url": f"http://127.0.0.1:{port}/mcp"},
        }  # fmt: skip
        (folder / "notes.yaml").write_text(json.dumps(words))
        for _ in range(2):  # asking is not accepting, however often
            assert (await owner.mcp("refresh", server="notes")).content["code"] == "address_denied"

    story(work)


def test_an_address_that_a_local_server_names_is_not_reached(story: Story, kernel: Kernel) -> None:
    asked: list[str] = []

    async def inner(request: Request) -> Response:
        asked.append(request.url.path)
        return JSONResponse({})

    async def work(owner: Owner, port: int) -> None:
        hidden = Starlette(routes=[Route("/{path:path}", inner, methods=["GET", "POST"])])
        async with listening(hidden) as secret:

            async def moved(_: Request) -> Response:
                return RedirectResponse(f"http://127.0.0.1:{secret}/mcp", status_code=307)

            async def guarded(_: Request) -> Response:
                metadata = f'Bearer resource_metadata="http://127.0.0.1:{secret}/.well-known/x"'
                return JSONResponse({}, status_code=401, headers={"WWW-Authenticate": metadata})

            routes = [Route("/moved", moved, methods=["GET", "POST"]), Route("/mcp", guarded, methods=["GET", "POST"])]
            async with listening(Starlette(routes=routes)) as outer:
                for name in ("moved", "mcp"):
                    url = f"http://127.0.0.1:{outer}/{name}"
                    await owner.mcp("add", server=name, url=url)
                    assert (await owner.mcp("login", server=name)).is_error

    story(work)
    assert asked == []
