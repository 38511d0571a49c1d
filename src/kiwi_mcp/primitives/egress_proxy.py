"""The egress proxy of one sandbox: it accepts, checks, relays and limits connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from time import monotonic

from msgspec import Struct

from kiwi_mcp.domain.errors import AddressDenied, KiwiError, RequestFailed
from kiwi_mcp.domain.process import StartGate
from kiwi_mcp.primitives import egress_protocols
from kiwi_mcp.primitives.egress_protocols import ALERT, PIECE, BadProxyRequest, ProxyRequest, refused
from kiwi_mcp.primitives.http.addresses import HostRules, Lookup
from kiwi_mcp.primitives.http.traffic_log import TrafficLog, TrafficRow
from kiwi_mcp.primitives.process.namespaces import listen_inside


class ProxyLimits(Struct, frozen=True):
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


class ProxyRelay:
    """One connection that stands, from the client's first words to the end of either side."""

    def __init__(
        self,
        asked: ProxyRequest,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server: socket.socket,
        row: TrafficRow,
        ledger: TrafficLog,
        caps: ProxyLimits,
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
        except AddressDenied as fault:
            self._ledger.note(self._asked.name, self._asked.port, "denied", str(fault.details["reason"]))
            self._writer.write(ALERT)
        finally:
            writer.transport.abort()

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
        """Count the bytes that are forwarded, and extend the idle timeout of the connection."""
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


TASK = "kiwi-egress"
"""The name of the task that accepts connections."""
_PAUSE = 0.1
_LINGER = 1.0
CAPS = ProxyLimits()
OUTSIDE = Lookup()
"""The network of this machine, as requests of `http_client` find it."""


@asynccontextmanager
async def serve_proxy(
    rules: HostRules, gate: StartGate, ledger: TrafficLog, *, through: Lookup = OUTSIDE, caps: ProxyLimits = CAPS
) -> AsyncIterator[None]:
    """Serve a confined process that is started in the block: it begins when its proxy stands, or never.

    That it could not be given one is raised, and what runs in the block is cancelled; that the proxy ended too soon is
    written into the ledger.
    """
    ledger.is_kept, ledger.is_closed = True, False
    try:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(_opened(gate, Proxy(rules, ledger, through, caps)), name=TASK)
            try:
                yield
            finally:
                ledger.is_closed = True
                serving.cancel()
    except BaseExceptionGroup as faults:
        # The block's own error, or the one that ended the block.
        raise faults.exceptions[0] from None


async def _opened(gate: StartGate, proxy: Proxy) -> None:
    listener = await listen_inside(gate)
    gate.open()
    await proxy.serve(listener)


class Proxy:
    """Serves the connections of one sandbox."""

    def __init__(self, rules: HostRules, ledger: TrafficLog, through: Lookup, caps: ProxyLimits) -> None:
        self._rules = rules
        self._ledger = ledger
        self._through = through
        self._caps = caps
        self._places = asyncio.Semaphore(caps.at_once)
        # Names are looked up by threads that all of Kiwi shares, so one sandbox never has more than a few of them.
        self._lookups = asyncio.Semaphore(caps.lookups_at_once)
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until cancelled. However this ends, the listener and all connections are closed then."""
        fault = "it was ended"
        try:
            fault = await self._accept(listener)
        except Exception as broken:  # noqa: BLE001 - after any error, the process continues without a network
            fault = repr(broken)
        finally:
            listener.close()
            if not self._ledger.is_closed:
                self._ledger.fault = f"The proxy ended before the process did: {fault}."
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> str:
        for _ in range(self._caps.connections):
            await self._places.acquire()
            reader, writer = await streams(await _next(listener), self._caps.head_bytes)
            task = asyncio.create_task(self._serve(reader, writer))
            self._serving.add(task)
            task.add_done_callback(partial(self._over, writer))
        return f"there were {self._caps.connections:,} connections"

    def _over(self, writer: asyncio.StreamWriter, task: asyncio.Task[None]) -> None:
        # Also where the task was cancelled before it began; and who does not read the last words keeps nothing open.
        writer.close()
        asyncio.get_running_loop().call_later(_LINGER, writer.transport.abort)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._ledger.fault = f"A connection was ended by a fault of the proxy's own: {fault!r}."
        self._serving.discard(task)
        self._places.release()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # There is no one to answer if the client has gone or sent an incomplete request.
        with suppress(OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            # Connect a client with what it asks for, or tell it why not.
            asked: ProxyRequest | None = None
            try:
                asked = await self._heard(reader, writer)
                server = await self._connected(asked)
            except BadProxyRequest as fault:
                await _tell(reader, writer, fault.answer)
            except TimeoutError:
                await _tell(reader, writer, egress_protocols.too_slow())
            except KiwiError as fault:
                self._note_refusal(fault, asked)
                await _tell(reader, writer, (asked.refused if asked else egress_protocols.refusal)(fault))
            else:
                row = self._ledger.note(asked.name, asked.port, "allowed")
                await ProxyRelay(asked, reader, writer, server, row, self._ledger, self._caps).run()

    async def _heard(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> ProxyRequest:
        async with asyncio.timeout(self._caps.head_seconds):
            first = await reader.readexactly(1)
            if first == egress_protocols.VERSION:
                return await egress_protocols.read_socks_request(reader, writer)
            return await egress_protocols.read_http_request(reader, first)

    async def _connected(self, asked: ProxyRequest) -> socket.socket:
        """Return a connection to the requested host, at an address that the rules allow."""
        host, port = asked.name, asked.port
        if (reason := self._rules.refusal(asked.host, port)) is not None:
            raise refused(host, port, reason)
        if self._ledger.bytes >= self._caps.total_bytes:
            raise refused(host, port, f"{self._caps.total_bytes:,} bytes were sent and received, which is the limit")
        try:
            async with asyncio.timeout(self._caps.connect_seconds):
                async with self._lookups:
                    addresses = await self._through.addresses(host, port, self._rules.granted)
                return await self._through.connect_to(addresses, port)
        except AddressDenied as fault:
            raise refused(host, port, str(fault.details["reason"])) from fault
        except OSError as fault:  # a time limit that ended is among them
            raise RequestFailed(
                f"No connection to {host}:{port} ({getattr(fault, 'strerror', None) or 'no answer'}).",
                suggestion="Check that the server is running and that the port is right.",
                cause="connect",
                host=host,
                port=port,
            ) from fault

    def _note_refusal(self, fault: KiwiError, asked: ProxyRequest | None) -> None:
        response = fault.details
        host, port = (asked.name, asked.port) if asked else (str(response["host"]), int(str(response["port"])))
        if isinstance(fault, AddressDenied):
            self._ledger.note(host, port, "denied", str(response["reason"]))
        else:
            self._ledger.note(host, port, "failed", str(response.get("cause", "")))


async def _next(listener: socket.socket) -> socket.socket:
    while True:
        try:
            client, _ = await asyncio.get_running_loop().sock_accept(listener)
        except OSError:
            # Too many open files, or a client that went away: both pass. A listener that is broken does not.
            if listener.fileno() < 0 or listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0:
                raise
            await asyncio.sleep(_PAUSE)
        else:
            return client


async def _tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes) -> None:
    """Say something last; what the client still sends is read for a moment, since to reset it would lose the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER):
            writer.write(answer)
            await writer.drain()
            writer.write_eof()
            while await reader.read(PIECE):
                pass
