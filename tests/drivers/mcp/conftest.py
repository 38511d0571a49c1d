"""A test bench for the MCP driver: servers from manifests, and calls of their items."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import TypeVar
from unittest.mock import AsyncMock

import pytest
import uvicorn
from msgspec import Struct, field
from msgspec.structs import replace
from starlette.types import ASGIApp

from kiwi_mcp.domain.calls import Ask, Caller, Note, Space, no_answers, unheard
from kiwi_mcp.domain.grants import Grant, Rights, Rules
from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.domain.items import CLIENT_REQUESTS, Chain, Location, Manifest, Tool, TypeTraits
from kiwi_mcp.domain.json import Json, JsonObject, as_object, compact
from kiwi_mcp.domain.mcp import ServerListing
from kiwi_mcp.domain.outcome import Outcome, Report, silent
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.mcp.driver import McpDriver
from kiwi_mcp.policy.authorize import permit
from kiwi_mcp.policy.isolation import seeing

HOSTILE = Path(__file__).parent / "hostile.py"
ANSWERABLE: JsonObject = {"elicitation": {"form": {}, "url": {}}, "sampling": {}, "roots": {}}
Result = TypeVar("Result")
Work = Callable[[str], Awaitable[None]]


def tool(
    tool_id: str,
    tool_type: str,
    executor: str | None,
    config: JsonObject,
    outputs: JsonObject,
    parameters: JsonObject | None = None,
) -> Tool:
    manifest = Manifest(
        tool_id, tool_type, "1.0.0", executor, config=config, outputs=outputs, parameters=parameters or {}
    )
    digest = sha256(compact([tool_id, config]).encode()).hexdigest()
    return Tool(manifest, Location("project", Path("/nowhere") / tool_id, Path("/nowhere")), digest=digest)


class Bench(Struct):
    """A driver of its own, and the project that its servers run in."""

    space: Space
    driver: McpDriver = field(default_factory=McpDriver)
    profile: SandboxProfile = SandboxProfile("trusted")
    """How the processes of servers are held: as most tests are about what is said, not at all."""
    client: tuple[str, ...] = CLIENT_REQUESTS
    """What servers may ask of their callers, as their owner allowed it."""

    @property
    def notes(self) -> list[str]:
        """What the scripted servers noted: each start, each end, each request that was called off."""
        path = self.space.project / "notes"
        return path.read_text().splitlines() if path.exists() else []

    def server(self, *habits: str, server_id: str = "hostile", **config: Json) -> Tool:
        """A scripted server with these habits."""
        words: dict[str, Json] = {
            "transport": "stdio",
            "command": sys.executable,
            "args": ["-IS", str(HOSTILE), *habits],
            "env": {"NOTES": str(self.space.project / "notes")},
            "startup_timeout": 60,
            "timeout": 60,
        }
        return tool(server_id, "mcp_server", "subprocess", {**words, **config}, {})

    def remote(self, url: str, transport: str = "http", **config: Json) -> Tool:
        """A server at an address."""
        words: dict[str, Json] = {"transport": transport, "url": url, "startup_timeout": 60, "timeout": 60}
        return tool("remote", "mcp_server", "http_client", {**words, **config}, {})

    def chain(
        self,
        server: Tool,
        name: str,
        outputs: JsonObject | None = None,
        parameters: JsonObject | None = None,
        **config: Json,
    ) -> Chain:
        """A tool of a server."""
        words = config if "mcp_prompt_name" in config or "mcp_resource_uri" in config else {"mcp_tool_name": name}
        item = tool(name, "mcp_tool", server.id, {**words, **config}, outputs or {}, parameters)
        primitive = tool(server.manifest.executor or "", "primitive", None, {}, {})
        return Chain(
            (item, server, primitive),
            (TypeTraits("mcp", "server", "server"), TypeTraits("", "server", "server"), TypeTraits()),
        )

    async def call(
        self,
        chain: Chain,
        inputs: JsonObject | None = None,
        *,
        secrets: Mapping[str, str] | None = None,
        report: Report = silent,
        ask: Ask = no_answers,
        note: Note = unheard,
    ) -> Outcome:
        """One call, as the kernel makes it, with every loopback host granted."""
        rights = Rights((Grant(hosts=Rules(allow=("127.0.0.1",))),))
        plan = permit(self.driver.bind(chain, inputs or {}, self.space), rights)
        caller = Caller(report, ask, note, capabilities={} if ask is no_answers else ANSWERABLE)
        facts = {"mcp": {**as_object(plan.facts["mcp"]), "client": list(self.client)}}
        plan = replace(plan, profile=self._profile_of(chain.executor), facts=facts)
        return await self.driver.drive(
            plan, chain, self.space, secrets=secrets or {}, caller=caller, dispatch=AsyncMock()
        )

    async def list_items(self, server: Tool) -> ServerListing:
        """Everything a server offers."""
        chain, rights = (
            Chain((server,), (TypeTraits("", "server", "server"),)),
            Rights((Grant(hosts=Rules(allow=("127.0.0.1",))),)),
        )
        plan = permit(self.driver.plan_server(chain, self.space), rights)
        plan = replace(plan, profile=self._profile_of(server), facts={"mcp": {"client": list(self.client)}})
        return await self.driver.list_items(plan, chain, self.space, {})

    async def complete(self, chain: Chain, argument: str, value: str, context: Mapping[str, str]) -> list[str]:
        """What a server proposes for an argument."""
        plan = replace(self.driver.bind(chain, {"name": "x"}, self.space), profile=self.profile)
        return await self.driver.complete(plan, chain, self.space, {}, argument, value, context)

    def _profile_of(self, server: Tool) -> SandboxProfile:
        spec = self.driver.plan_server(Chain((server,), (TypeTraits("", "server", "server"),)), self.space).spec
        if not isinstance(spec, ProcessSpec):
            return self.profile
        # No server is talked to before its owner accepted it.
        return seeing(self.profile, server, spec, self.space, Rights(), is_meant=True)[0]

    def run(self, work: Coroutine[object, object, Result]) -> Result:
        """Do the work in a loop of its own, and close the driver afterwards."""

        async def closed() -> Result:
            try:
                return await work
            finally:
                await self.driver.aclose()

        return asyncio.run(closed())

    def ask(self, server: Tool, name: str, inputs: JsonObject | None = None, **config: Json) -> Outcome:
        """One call to a fresh driver, closed afterwards."""
        return self.run(self.call(self.chain(server, name, None, None, **config), inputs))


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    """Serve an application on a free port of the loopback address."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1, ws="none"))
        task = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await task


def at(bench: Bench, app: ASGIApp, work: Work) -> None:
    """Do the work with an application that listens, and close the driver before it stops."""

    async def scenario() -> None:
        async with listening(app) as address:
            try:
                await work(address)
            finally:
                await bench.driver.aclose()

    asyncio.run(scenario())


@pytest.fixture
def space(project: Path, home: Path, tmp_path: Path) -> Space:
    return Space(project=project, user=home / ".ai", cache=tmp_path / "cache")


@pytest.fixture
def bench(space: Space) -> Bench:
    return Bench(space)
