"""The egress proxy: the only way from a confined process to the network, for the hosts it may reach.

Its listening socket lies in the sandbox's own network; here it is served, one server for each sandbox, so that none
can use up another's. A name is looked up here, once, by the rules that requests of `http_client` have too, and what is
connected to is the address that was judged. Where the proxy ends, nothing answers inside: the sandbox has no network.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

from kiwi_mcp.domain.errors import AddressDenied, KiwiError, RequestFailed
from kiwi_mcp.domain.isolation import Gate
from kiwi_mcp.primitives import egress_http, egress_socks
from kiwi_mcp.primitives.addresses import HostRules
from kiwi_mcp.primitives.egress_asked import PIECE, Asked, Unfit, refused
from kiwi_mcp.primitives.egress_entry import listen_inside
from kiwi_mcp.primitives.egress_record import Ledger
from kiwi_mcp.primitives.egress_relay import Caps, Relay, streams
from kiwi_mcp.primitives.lookup import Lookup

TASK = "kiwi-egress"
"""The name of the task that accepts connections."""
_PAUSE = 0.1
_LINGER = 1.0
CAPS = Caps()
OUTSIDE = Lookup()
"""The network of this machine, as requests of `http_client` find it."""


@asynccontextmanager
async def egress(
    rules: HostRules, gate: Gate, ledger: Ledger, *, through: Lookup = OUTSIDE, caps: Caps = CAPS
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


async def _opened(gate: Gate, proxy: Proxy) -> None:
    listener = await listen_inside(gate)
    gate.open()
    await proxy.serve(listener)


class Proxy:
    """Serves the connections of one sandbox."""

    def __init__(self, rules: HostRules, ledger: Ledger, through: Lookup, caps: Caps) -> None:
        self._rules = rules
        self._ledger = ledger
        self._through = through
        self._caps = caps
        self._places = asyncio.Semaphore(caps.at_once)
        # Names are looked up by threads that all of Kiwi shares, so one sandbox never has more than a few of them.
        self._lookups = asyncio.Semaphore(caps.lookups_at_once)
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until cancelled; whatever ends this, nothing listens and nothing is connected then."""
        fault = "it was ended"
        try:
            fault = await self._accept(listener)
        except Exception as broken:  # noqa: BLE001 - whatever it is, the process goes on, without a network
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
        # A client that is gone, or says half of what it announced, is nobody to answer.
        with suppress(OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            await self._answered(reader, writer)

    async def _answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a client with what it asks for, or tell it why not."""
        asked: Asked | None = None
        try:
            asked = await self._heard(reader, writer)
            server = await self._connected(asked)
        except Unfit as fault:
            await _tell(reader, writer, fault.answer)
        except TimeoutError:
            await _tell(reader, writer, egress_http.too_slow())
        except KiwiError as fault:
            self._note_refusal(fault, asked)
            await _tell(reader, writer, (asked.refused if asked else egress_http.refusal)(fault))
        else:
            row = self._ledger.note(asked.name, asked.port, "allowed")
            await Relay(asked, reader, writer, server, row, self._ledger, self._caps).run()

    async def _heard(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Asked:
        async with asyncio.timeout(self._caps.head_seconds):
            first = await reader.readexactly(1)
            if first == egress_socks.VERSION:
                return await egress_socks.hear(reader, writer)
            return await egress_http.hear(reader, first)

    async def _connected(self, asked: Asked) -> socket.socket:
        """Return a connection to what is asked for, at an address that was judged."""
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

    def _note_refusal(self, fault: KiwiError, asked: Asked | None) -> None:
        told = fault.details
        host, port = (asked.name, asked.port) if asked else (str(told["host"]), int(str(told["port"])))
        if isinstance(fault, AddressDenied):
            self._ledger.note(host, port, "denied", str(told["reason"]))
        else:
            self._ledger.note(host, port, "failed", str(told.get("cause", "")))


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
