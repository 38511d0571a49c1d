"""Relays: what both sides of a connection say is passed on and counted, within limits of time and size."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from time import monotonic

from kiwi_mcp.domain.errors import AddressDenied
from kiwi_mcp.primitives.egress_asked import PIECE, Asked
from kiwi_mcp.primitives.egress_record import Ledger, Row
from kiwi_mcp.primitives.egress_tls import ALERT


@dataclass(frozen=True, slots=True)
class Caps:
    """The most that one sandbox may have of its proxy."""

    at_once: int = 32
    """Connections; further ones wait until one of them ends."""
    lookups_at_once: int = 2
    connections: int = 20_000
    """In the whole run; then the proxy ends."""
    head_bytes: int = 65_536
    head_seconds: float = 10.0
    """For what a client has to say before it is connected, and for the first words through a tunnel."""
    connect_seconds: float = 15.0
    idle_seconds: float = 120.0
    """For a connection on which nothing moves."""
    connection_seconds: float = 3_600.0
    total_bytes: int = 4_294_967_296
    """In both directions, of all connections together."""


class Relay:
    """One connection that stands, from the client's first words to the end of either side."""

    def __init__(
        self,
        asked: Asked,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server: socket.socket,
        row: Row,
        ledger: Ledger,
        caps: Caps,
    ) -> None:
        self._asked = asked
        self._reader = reader
        self._writer = writer
        self._server = server
        self._row = row
        self._ledger = ledger
        self._caps = caps
        self._end = monotonic() + caps.connection_seconds
        self._limit = asyncio.timeout(caps.head_seconds)

    async def run(self) -> None:
        """Pass on what both sides say, as far as it may be."""
        reader, writer = await streams(self._server, PIECE)
        try:
            self._writer.write(self._asked.granted)
            async with self._limit:
                await self._both(reader, writer)
        except AddressDenied as fault:
            self._ledger.note(self._asked.name, self._asked.port, "denied", str(fault.details["reason"]))
            self._writer.write(ALERT)
        finally:
            writer.transport.abort()

    async def _both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up, down = asyncio.create_task(self._up(writer)), asyncio.create_task(self._down(reader))
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            if up.done():
                up.result()
            await down  # what the server says last is passed on, also to a client that says no more
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _up(self, writer: asyncio.StreamWriter) -> None:
        async for piece in self._asked.sent(self._reader):
            self._row.bytes_out += len(piece)
            self._moved(len(piece))
            writer.write(piece)
            await writer.drain()
        writer.write_eof()

    async def _down(self, reader: asyncio.StreamReader) -> None:
        while piece := await reader.read(PIECE):
            self._row.bytes_in += len(piece)
            self._moved(len(piece))
            self._writer.write(piece)
            await self._writer.drain()

    def _moved(self, size: int) -> None:
        """Count what goes on, and let the connection stand a while longer."""
        self._ledger.bytes += size
        if self._ledger.bytes > self._caps.total_bytes:
            raise ConnectionAbortedError("more than a sandbox may send and receive")
        until_end = self._end - monotonic()
        loop = asyncio.get_running_loop()
        self._limit.reschedule(loop.time() + min(self._caps.idle_seconds, until_end))


async def streams(connected: socket.socket, limit: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return both directions of a connection, which is closed where that fails."""
    try:
        return await asyncio.open_connection(sock=connected, limit=limit)
    except BaseException:
        connected.close()
        raise
