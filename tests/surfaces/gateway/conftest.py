"""Shared fixtures: releases, tokens, and a real server on a free port of this machine."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import Literal

import httpx2
import pytest
import uvicorn
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from kiwi_mcp.catalog.release import check_release
from kiwi_mcp.domain.items import ToolFile
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.registry import Actor, Pin, Release, ReleaseFile, VersionName, Visibility
from kiwi_mcp.manifest.signatures import statement_of
from kiwi_mcp.policy.tokens import TokenStore
from kiwi_mcp.primitives.http import client
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.remote.http import HttpRemote
from kiwi_mcp.surfaces.gateway.auth import Authenticator, VisitedKernel
from kiwi_mcp.surfaces.gateway.mcp import McpEndpoint
from kiwi_mcp.surfaces.gateway.oauth import IdentityProvider, TokenVerifier
from kiwi_mcp.surfaces.gateway.server import GatewayConfig, GatewayServer, _config, _door, gateway, tools

OWNER = Actor("owner", ("acme", "globex", "public"))


@pytest.fixture
def a_release() -> Callable[..., Release]:
    """Make a version with a manifest and one file."""

    def make(
        name: str, *, on: Release | None = None, code: str = "print('hi')\n", visibility: Visibility = "public"
    ) -> Release:
        namespace, _, rest = name.partition("/")
        tool_id, _, version = rest.partition("@")
        # A tool names an executor of another namespace in full.
        home = f"registry/{on.name.namespace}/" if on and on.name.namespace != namespace else ""
        ref = f"{home}{on.name.tool_id}" if on else None
        text = f"tool_id: {tool_id}\ntool_type: {'script' if on else 'primitive'}\nversion: {version}\n"
        text += f"description: Greets.\nexecutor: {ref}\nconfig:\n  entrypoint: main.py\n" if ref else ""
        main = ReleaseFile("main.py", code.encode())
        listed = [ToolFile(main.path, sha256(main.data).hexdigest(), len(main.data), main.is_executable)]
        statement = statement_of(
            tool_id=tool_id, version=version, executor=ref, manifest_body=text.encode(), files=listed
        )
        release = Release(
            name=VersionName(namespace, tool_id, version),
            place=f"tools/{tool_id}/tool.yaml",
            statement=statement,
            manifest={},
            files=(ReleaseFile("tool.yaml", text.encode()), main),
            executor=Pin(ref, on.name, on.digest) if on and ref else None,
            visibility=visibility,
        )
        return check_release(release)

    return make


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, headers and a JSON body."""

    status: int
    headers: Mapping[str, str]
    body: JsonObject


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway that runs: its registry, its tokens, and requests to it."""

    port: int
    registry: Registry
    tokens: TokenStore

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def token(self, name: str, *namespaces: str, can_write: bool = True) -> str:
        return self.tokens.add(name, namespaces, can_write=can_write)

    def remote(self, token: str) -> HttpRemote:
        network = client.Network()
        send = partial(client.send, secrets={"TEAM_TOKEN": token}, through=network)
        return HttpRemote(self.url, send, network.aclose, token="${TEAM_TOKEN}")

    def ask(
        self,
        method: str,
        path: str,
        body: Json | bytes = None,
        *,
        token: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            words = dict(headers or {}) | ({"Authorization": f"Bearer {token}"} if token else {})
            data = body if isinstance(body, str | bytes) else json.dumps(body) if body is not None else None
            connection.request(method, path, data, words)
            reply = connection.getresponse()
            answer = reply.read()
            found = {name.lower(): value for name, value in reply.getheaders()}
            return Answer(reply.status, found, json.loads(answer) if answer else {})
        finally:
            connection.close()


Serve = Callable[..., Served]


@pytest.fixture
def serving(home: Path, loopback: None) -> Iterator[Serve]:
    """Start gateways that end with the test."""
    with ExitStack() as stack:

        def start(url: str, *, is_read_only: bool = False, is_open: bool = False, seconds: float = 30.0) -> Served:
            database = open_database(url)
            stack.callback(database.close)
            registry, tokens = Registry(database, OWNER), TokenStore(home / ".ai")
            door = Authenticator(
                tokens, host="127.0.0.1", names=["kiwi.test"], is_read_only=is_read_only, is_open=is_open
            )
            listening = GatewayConfig(port=0)
            server = uvicorn.Server(_config(gateway(registry, door, seconds=seconds), listening))
            stack.enter_context(_running(server))
            return Served(server.servers[0].sockets[0].getsockname()[1], registry, tokens)

        yield start


@contextmanager
def _running(server: uvicorn.Server) -> Iterator[None]:
    thread = Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    end = time.monotonic() + 120
    while not server.started:
        assert time.monotonic() < end
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(120)


@pytest.fixture
def served(serving: Serve, store_url: str) -> Served:
    """A gateway before a store of each kind."""
    return serving(store_url)


@pytest.fixture
def served_once(serving: Serve, sqlite_url: str) -> Served:
    """A gateway before one store, for what has nothing to do with stores."""
    return serving(sqlite_url)


@dataclass(frozen=True, slots=True)
class Tools:
    """A gateway that serves tools in this event loop: its tokens, official clients of it, and bare requests to it."""

    url: str
    tokens: TokenStore
    endpoint: McpEndpoint
    stop: Callable[[], None]
    # The server speaks plain HTTP, and reading the certificates of the machine takes 20 ms.
    bare: httpx2.AsyncClient = field(
        default_factory=lambda: httpx2.AsyncClient(trust_env=False, verify=False, timeout=120)
    )

    def token(self, name: str = "ada", *, can_author: bool = False) -> str:
        return self.tokens.add(name, [], can_write=False, can_use_tools=True, can_author=can_author)

    @asynccontextmanager
    async def client(
        self, token: str, *, mode: Literal["auto", "legacy"] = "auto", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Client]:
        words = {"Authorization": f"Bearer {token}", **(headers or {})}
        async with (
            httpx2.AsyncClient(headers=words, trust_env=False, verify=False, timeout=120) as bare,
            Client(streamable_http_client(self.url, http_client=bare), mode=mode) as client,
        ):
            yield client

    async def post(self, token: str, body: Json, **headers: str) -> httpx2.Response:
        """Send one message as a client of the newest era would, and return the answer."""
        words = {
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
            **({"Authorization": f"Bearer {token}"} if token else {}),
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        content = body if isinstance(body, str) else json.dumps(body)
        return await self.bare.post(self.url, content=content, headers=words)


ServeTools = Callable[..., AbstractAsyncContextManager[Tools]]


@pytest.fixture
def serving_tools(home: Path, sqlite_url: str, loopback: None) -> ServeTools:
    """Serve tools for the length of a block."""

    @asynccontextmanager
    async def start(
        *,
        project: Path | None = None,
        oauth: IdentityProvider | None = None,
        is_read_only: bool = False,
        is_wide: bool = False,
        seconds: float = 30.0,
    ) -> AsyncIterator[Tools]:
        tokens, access = TokenStore(home / ".ai"), TokenVerifier(oauth) if oauth else None
        if not tokens.all():
            tokens.add("ben", [], can_write=False)
        listening = GatewayConfig(port=0, names=("kiwi.test",), oauth=oauth)
        door = _door(tokens, listening, access)
        port = asyncio.get_running_loop().create_future()
        async with AsyncExitStack() as stack:
            database = open_database(sqlite_url)
            stack.callback(database.close)
            if access is not None:
                stack.push_async_callback(access.aclose)
            kernel = VisitedKernel(project, user=home / ".ai", is_wide=is_wide)
            mcp = await stack.enter_async_context(tools(door, kernel))
            app = gateway(
                Registry(database, OWNER),
                door,
                mcp=None if is_read_only else mcp,
                kernel=None if is_read_only else kernel,
                seconds=seconds,
            )
            server = GatewayServer(_config(app, listening), announce=port.set_result, leave=mcp.end)
            serving = asyncio.create_task(server.serve())

            def stop() -> None:
                server.should_exit = True

            served = Tools(f"http://127.0.0.1:{await port}/mcp", tokens, mcp, stop)
            try:
                yield served
            finally:
                stop()
                await served.bare.aclose()
                async with asyncio.timeout(120):
                    await serving

    return start
