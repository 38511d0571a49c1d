"""How a server is spoken with: over the pipes of a process, or over the network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self
from urllib.parse import urljoin

from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.plan import HttpSpec, ProcessSpec
from kiwi_mcp.drivers.held import Hold, held_by
from kiwi_mcp.drivers.mcp.messages import Inbound, Incoming, Outbound
from kiwi_mcp.drivers.mcp.oauth.account import account_of
from kiwi_mcp.drivers.mcp.oauth.bearer import AccountBearer
from kiwi_mcp.drivers.mcp.server import Server
from kiwi_mcp.drivers.seen import is_in, seen_by
from kiwi_mcp.primitives import http_channel, http_client, peer, websocket

_POST = 30.0
"""How long a server may take to accept a message that is posted to it, in seconds."""


class Outgoing(Protocol):
    """Where messages for a server are put."""

    async def send(self, item: SessionMessage, /) -> None:
        """Send one message."""

    async def aclose(self) -> None:
        """Send no more."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


class LoginWanted(Exception):
    """A conversation cannot begin, or go on, before somebody has logged in."""


@dataclass(frozen=True, slots=True)
class Wire:
    """Both directions of a conversation, and what else can be known of the other side."""

    incoming: Incoming
    outgoing: Outgoing
    complaints: Callable[[], str] = str
    """What the server wrote to standard error last."""
    ending: Callable[[], str] = str
    """How its process ended, empty while it runs."""
    noise: Callable[[], int] = int
    """How many lines it printed among its messages that were none."""
    refused: Callable[[], tuple[str, ...]] = tuple
    """The hosts that its process asked for in vain."""
    left: Callable[[], JsonObject] = dict
    """What its process sent and received since this was asked last."""


@asynccontextmanager
async def opened(server: Server, secrets: Mapping[str, str]) -> AsyncIterator[Wire]:
    """Open the way to a server; what was started or connected for it is gone when the block ends."""
    match server.transport, server.spec:
        case "stdio", ProcessSpec() as process:
            async with _piped(server, process, secrets) as wire:
                yield wire
        case "http", HttpSpec() as address:
            async with _posted(server, address, secrets) as wire:
                yield wire
        case "sse", HttpSpec() as address:
            async with _streamed(server, address, secrets) as wire:
                yield wire
        case _, HttpSpec() as address:
            async with _socketed(address, secrets) as wire:
                yield wire
        case _:
            raise TypeError(server.transport)


@asynccontextmanager
async def _piped(server: Server, spec: ProcessSpec, secrets: Mapping[str, str]) -> AsyncIterator[Wire]:
    async with _started(server, spec, secrets) as (process, held):

        async def send(message: bytes) -> None:
            process.send(message + b"\n")

        inbound = Inbound(process.line)
        told = process.complaints, process.ending, lambda: inbound.noise
        yield Wire(inbound, Outbound(send), *told, held.left.refused, held.left.news)


@asynccontextmanager
async def _started(
    server: Server, spec: ProcessSpec, secrets: Mapping[str, str]
) -> AsyncIterator[tuple[peer.Peer, Hold]]:
    """Start the process of a server, held as its jail says."""
    jail = server.jail
    if jail.level != "trusted":
        seen = seen_by(spec, has_folder=server.has_folder)
        # What its command names is in its jail already; what Kiwi installed for it was not there then.
        made = tuple(path for path in seen.readable if server.package and is_in(path, server.package.folder))
        jail, spec = replace(jail, readable=(*jail.readable, *made)), seen.spec
    held = await held_by(jail, server.space)
    async with held.talking(spec, secrets=secrets, longest_line=server.max_bytes) as process:
        yield process, held


@asynccontextmanager
async def _posted(server: Server, spec: HttpSpec, secrets: Mapping[str, str]) -> AsyncIterator[Wire]:
    url, client = http_channel.client(spec, secrets=secrets, bearer=_bearer(server, spec, secrets))
    async with (
        client,
        streamable_http_client(url, http_client=client, max_sse_event_size=server.max_bytes) as (incoming, outgoing),
    ):
        yield Wire(incoming, outgoing)


@asynccontextmanager
async def _streamed(server: Server, spec: HttpSpec, secrets: Mapping[str, str]) -> AsyncIterator[Wire]:
    """Open the one stream of all that a server says; each message to it is posted to the address it says first."""
    bearer = _bearer(server, spec, secrets)
    url, client = http_channel.client(spec, secrets=secrets, streamed=("GET",), bearer=bearer)
    async with client, client.sse(url, max_event_size=server.max_bytes) as source:
        if not source.response.is_success:
            raise _refused(bearer, f"it answered {source.response.status_code}")
        events = aiter(source)

        async def heard(kind: str = "message") -> str | None:
            try:
                async for event in events:
                    if event.event == kind and event.data:  # empty ones keep the stream alive
                        return event.data
            except http_channel.EventFault as fault:
                raise _unread(f"its stream cannot be read: {fault}") from None
            return None

        endpoint = urljoin(url, await heard("endpoint") or "")

        async def line() -> bytes | None:
            data = await heard()
            return None if data is None else data.encode()

        async def send(message: bytes) -> None:
            async with asyncio.timeout(_POST):
                reply = await client.post(endpoint, content=message, headers={"content-type": "application/json"})
            if not reply.is_success:
                raise _refused(bearer, f"it answered {reply.status_code} to a message")

        inbound = Inbound(line)
        yield Wire(inbound, Outbound(send), noise=lambda: inbound.noise)


def _bearer(server: Server, spec: HttpSpec, secrets: Mapping[str, str]) -> AccountBearer | None:
    """Return whoever knows the tokens of a server, where it can have any."""
    return AccountBearer(account_of(spec, server.oauth, secrets)) if server.oauth is not None else None


def _refused(bearer: AccountBearer | None, reason: str) -> Exception:
    return LoginWanted() if bearer is not None and bearer.is_login_wanted else _unread(reason)


def _unread(reason: str) -> Unavailable:
    return Unavailable(reason, suggestion="Ask for less at once, or use the server's `http` transport.")


@asynccontextmanager
async def _socketed(spec: HttpSpec, secrets: Mapping[str, str]) -> AsyncIterator[Wire]:
    async with websocket.channel(spec, secrets=secrets, through=http_client.network, protocol="mcp") as socket:
        inbound = Inbound(socket.receive)
        yield Wire(inbound, Outbound(socket.send), noise=lambda: inbound.noise)
