"""How a server is spoken with: over the pipes of a process, or over the network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.plan import HttpSpec, ProcessSpec
from kiwi_mcp.drivers.mcp.messages import Inbound, Incoming, Outbound
from kiwi_mcp.drivers.mcp.server import Server
from kiwi_mcp.primitives import http_channel, http_client, peer, websocket


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
            async with _streamed(address, secrets) as wire:
                yield wire
        case _, HttpSpec() as address:
            async with _socketed(address, secrets) as wire:
                yield wire
        case _:
            raise TypeError(server.transport)


@asynccontextmanager
async def _piped(server: Server, spec: ProcessSpec, secrets: Mapping[str, str]) -> AsyncIterator[Wire]:
    async with peer.talking(spec, secrets=secrets, longest_line=server.max_bytes) as process:

        async def send(message: bytes) -> None:
            process.send(message + b"\n")

        inbound = Inbound(process.line)
        yield Wire(inbound, Outbound(send), process.complaints, process.ending, lambda: inbound.noise)


@asynccontextmanager
async def _posted(server: Server, spec: HttpSpec, secrets: Mapping[str, str]) -> AsyncIterator[Wire]:
    url, client = http_channel.client(spec, secrets=secrets)
    async with (
        client,
        streamable_http_client(url, http_client=client, max_sse_event_size=server.max_bytes) as (incoming, outgoing),
    ):
        yield Wire(incoming, outgoing)


@asynccontextmanager
async def _streamed(spec: HttpSpec, secrets: Mapping[str, str]) -> AsyncIterator[Wire]:
    url, client = http_channel.client(spec, secrets=secrets, streamed=("GET",))
    try:
        async with sse_client(url, httpx_client_factory=lambda *_, **__: client) as (incoming, outgoing):
            yield Wire(incoming, outgoing)
    except* http_channel.EventFault as faults:
        reason = f"its stream cannot be read: {faults.exceptions[0]}"
        raise Unavailable(reason, suggestion="Ask for less at once, or use the server's `http` transport.") from None


@asynccontextmanager
async def _socketed(spec: HttpSpec, secrets: Mapping[str, str]) -> AsyncIterator[Wire]:
    async with websocket.channel(spec, secrets=secrets, through=http_client.network, protocol="mcp") as socket:
        inbound = Inbound(socket.receive)
        yield Wire(inbound, Outbound(socket.send), noise=lambda: inbound.noise)
