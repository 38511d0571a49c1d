"""Ways to one echo server: through Kiwi, through other gateways, and directly. What is started, and how it is asked."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from msgspec import Struct, field

from load import Say, Words

ECHO = Path(__file__).with_name("echo.py")
PEERS = Path(__file__).parents[1] / ".venv" / "bench"
KIWI = str(Path(sys.executable).with_name("kiwi"))
# Without the packages of this folder, which a small server does not want to look through.
STARTED = (getattr(sys, "_base_executable", sys.executable), "-IS", str(ECHO))
"""The command of the server that is spoken to over pipes."""
_SHARED = """
import asyncio, json, sys
from fastmcp import Client
from fastmcp.server import create_proxy

async def main(config, *port):
    async with Client(json.load(open(config))) as client:
        options = {"transport": "http", "port": int(port[0])} if port else {"transport": "stdio"}
        await create_proxy(client).run_async(show_banner=False, **options)

asyncio.run(main(*sys.argv[1:]))
"""
_FASTMCP = "FastMCP's proxy"
_ONE_SESSION = "FastMCP's proxy with one session for all"

Upstream = Literal["stdio", "HTTP"]


class Place(Struct, frozen=True):
    """Where the benchmark happens: its folder, the address of the server over HTTP, and a token for Kiwi's gateway."""

    folder: Path
    url: str
    token: str = ""

    @property
    def project(self) -> Path:
        """The project that Kiwi works in."""
        return self.folder / "project"

    @property
    def environment(self) -> Mapping[str, str]:
        """What every process sees: a home of its own, and bytecode is written as at any ordinary start."""
        home = self.folder / "home"
        own = {name: str(home / word) for name, word in _HOMES.items()}
        return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | own

    def config(self, upstream: Upstream) -> str:
        """Return the path of a file such as clients keep, with one server in it."""
        path = self.folder / f"{upstream}.json"
        server = {"command": STARTED[0], "args": STARTED[1:]} if upstream == "stdio" else {"url": self.url}
        path.write_text(json.dumps({"mcpServers": {"echo": server}}), encoding="utf-8")
        return str(path)


_HOMES = {"HOME": "", "USER_SPACE": ".ai", "XDG_CACHE_HOME": "cache", "XDG_CONFIG_HOME": "c", "XDG_STATE_HOME": "state"}


def echoed(text: str, *, name: str = "echo") -> Words:
    """Return the parameters of an ordinary call."""
    return {"name": name, "arguments": {"text": text}}


def executed(text: str, *, item: str) -> Words:
    """Return the parameters of a call by Kiwi's meta-tool."""
    return {"name": "execute", "arguments": {"item_id": item, "parameters": {"text": text}}}


class Way(Struct, frozen=True):
    """One way to the server: what is started for it (`{port}` is one that is free), and how it is asked.

    Without a path it is asked over its pipes, else by requests to that path.
    """

    name: str
    command: tuple[str, ...]
    path: str = ""
    say: Say = echoed
    is_mcp: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)


def ways(upstream: Upstream, place: Place) -> Iterator[Way]:
    """Give every way to one of the two servers, but the direct one over HTTP, for which nothing is started."""
    config = place.config(upstream)
    if upstream == "stdio":
        yield Way("direct", STARTED)
    yield from _kiwi(upstream, place)
    yield from _fastmcp(config)
    yield from _mcp_proxy(upstream, place)
    yield _mcpo(upstream, place)
    hub = ("node", str(PEERS / "npm/node_modules/mcp-hub/dist/cli.js"), "--port", "{port}", "--config", config)
    yield Way("mcp-hub over HTTP, its own API", hub, "/api/servers/tools", _hubbed, is_mcp=False)


def _kiwi(upstream: Upstream, place: Place) -> Iterator[Way]:
    server = f"echo_{upstream.lower()}"
    sent, execute = partial(echoed, name=f"{server}_echo"), partial(executed, item=f"mcp/{server}/echo")
    serve = (KIWI, "serve", "--project", str(place.project))
    up = (KIWI, "up", "--port", "{port}", "--project", str(place.project))
    bearer = {"authorization": f"Bearer {place.token}"}
    yield Way("Kiwi over stdio, always-send tool", serve, say=sent)
    yield Way("Kiwi over stdio, `execute`", serve, say=execute)
    yield Way("Kiwi over HTTP, always-send tool", up, "/mcp", sent, headers=bearer)
    yield Way("Kiwi over HTTP, `execute`", up, "/mcp", execute, headers=bearer)


def _fastmcp(config: str) -> Iterator[Way]:
    run = (_program("fastmcp"), "run", config, "--no-banner", "--transport")
    shared = (_program("fastmcp", "python"), "-c", _SHARED, config)
    yield Way(f"{_FASTMCP} over stdio", (*run, "stdio"))
    yield Way(f"{_ONE_SESSION}, over stdio", shared)
    yield Way(f"{_FASTMCP} over HTTP", (*run, "http", "--port", "{port}"), "/mcp")
    yield Way(f"{_ONE_SESSION}, over HTTP", (*shared, "{port}"), "/mcp")


def _mcp_proxy(upstream: Upstream, place: Place) -> Iterator[Way]:
    if upstream == "stdio":
        yield Way("mcp-proxy over HTTP", (_program("mcp-proxy"), "--port", "{port}", "--", *STARTED), "/mcp")
    else:
        yield Way("mcp-proxy over stdio", (_program("mcp-proxy"), "--transport", "streamablehttp", place.url))


def _mcpo(upstream: Upstream, place: Place) -> Way:
    target = ("--", *STARTED) if upstream == "stdio" else ("--type", "streamable-http", "--", place.url)
    command = (_program("mcpo"), "--host", "127.0.0.1", "--port", "{port}", "--log-level", "ERROR", *target)
    return Way("mcpo over HTTP, its own API", command, "/echo", _opened, is_mcp=False)


def _opened(text: str) -> Words:
    return {"text": text}


def _hubbed(text: str) -> Words:
    return {"server_name": "echo", "tool": "echo", "arguments": {"text": text}}


def _program(peer: str, program: str = "") -> str:
    return str(PEERS / peer / "bin" / (program or peer))
