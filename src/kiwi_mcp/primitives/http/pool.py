"""Connection pools with checked addresses, and the TLS context."""

from __future__ import annotations

import asyncio
import os
import select
import ssl
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

import httpcore2
import httpx2

from kiwi_mcp.primitives.http.addresses import Lookup, Resolver, denied, host_port, is_granted, look_up, refusal_of_host
from kiwi_mcp.primitives.http.certificates import owner_certificates

_JOINED = 65_536
"""The maximum number of bytes that are buffered before a write, unless a read comes first."""
_AHEAD = 262_144
"""The maximum number of bytes that are read ahead of the reader."""
_HANDSHAKE = 60.0
"""The default time limit of a TLS handshake, in seconds."""


async def connected(
    address: str,
    port: int,
    timeout: float,  # noqa: ASYNC109 - as the library has it
    local_address: str | None,
    options: Iterable[httpcore2.SOCKET_OPTION],
) -> Stream:
    """Connect to an address, or raise the library's error."""
    loop = asyncio.get_running_loop()
    local = (local_address, 0) if local_address else None
    try:
        async with asyncio.timeout(timeout):
            transport, flow = await loop.create_connection(Flow, address, port, local_addr=local)
    except TimeoutError as late:
        raise httpcore2.ConnectTimeout(late) from late
    except OSError as fault:
        raise httpcore2.ConnectError(fault) from fault
    for option in options:
        transport.get_extra_info("socket").setsockopt(*option)
    return Stream(transport, flow)


class Flow(asyncio.Protocol):
    """The received data of a connection, read ahead up to a limit, and whether more can be sent."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_ended = False
        self.fault: Exception | None = None
        self.transport: asyncio.Transport | None = None
        self._is_paused = self._is_full = False
        self._change: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport, to pause it when too much data arrives."""
        assert isinstance(transport, asyncio.Transport)  # a connection has two directions
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Keep what came."""
        self.data += data
        if len(self.data) > _AHEAD and self.transport is not None and not self._is_paused:
            self.transport.pause_reading()
            self._is_paused = True
        self._wake()

    def eof_received(self) -> None:
        """Note that nothing more comes."""
        self.is_ended = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end, and why."""
        self.is_ended, self.fault = True, exc
        self._wake()

    def pause_writing(self) -> None:
        """Note that the other side is slow."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Note that more may go out."""
        self._is_full = False
        self._wake()

    async def come(self) -> None:
        """Wait until there is something, or nothing will come."""
        while not self.data and not self.is_ended:
            await self._changed()

    async def gone(self) -> None:
        """Wait until more may go out, or nothing will."""
        while self._is_full and not self.is_ended:
            await self._changed()

    def take(self, most: int) -> bytes:
        """Return the received data, up to `most` bytes."""
        taken = bytes(self.data[:most])
        del self.data[:most]
        if self._is_paused and not self.data and self.transport is not None:
            self._is_paused = False
            self.transport.resume_reading()
        return taken

    async def _changed(self) -> None:
        # One request at a time uses a connection, but its body may be sent while its answer is read.
        if self._change is None or self._change.done():
            self._change = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._change)

    def _wake(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(None)


class Stream(httpcore2.AsyncNetworkStream):
    """An open connection."""

    def __init__(self, transport: asyncio.Transport, flow: Flow) -> None:
        self._transport = transport
        self._flow = flow
        self._held = bytearray()

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - as the library has it
        """Return the next data; empty at the end."""
        self._send()
        if not self._flow.data:
            try:
                async with asyncio.timeout(timeout):
                    await self._flow.come()
            except TimeoutError as late:
                raise httpcore2.ReadTimeout(late) from late
        if not self._flow.data and self._flow.fault is not None:
            raise httpcore2.ReadError(self._flow.fault) from self._flow.fault
        return self._flow.take(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as above
        """Send, now or with what follows at once."""
        if self._flow.is_ended or self._transport.is_closing():
            raise httpcore2.WriteError(self._flow.fault or ConnectionResetError("the connection was closed"))
        if not self._held:
            asyncio.get_running_loop().call_soon(self._send)
        self._held += buffer
        if len(self._held) > _JOINED:
            self._send()
            try:
                async with asyncio.timeout(timeout):
                    await self._flow.gone()
            except TimeoutError as late:
                raise httpcore2.WriteTimeout(late) from late

    def _send(self) -> None:
        if self._held and not self._transport.is_closing():
            self._transport.write(bytes(self._held))
        self._held.clear()

    async def aclose(self) -> None:
        """Abort the connection, including data that is not sent yet."""
        self._transport.abort()
        await asyncio.sleep(0)  # the loop closes the socket

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as above
    ) -> httpcore2.AsyncNetworkStream:
        """Go on over TLS."""
        loop, limit = asyncio.get_running_loop(), timeout or _HANDSHAKE
        try:
            async with asyncio.timeout(limit):
                secure = await loop.start_tls(self._transport, self._flow, ssl_context, server_hostname=server_hostname)
        except TimeoutError as late:
            await self.aclose()
            raise httpcore2.ConnectTimeout(late) from late
        except OSError as fault:  # all that TLS has to say is one
            await self.aclose()
            raise httpcore2.ConnectError(fault) from fault
        except BaseException:
            self._transport.abort()
            raise
        assert secure is not None  # only a transport that was closed meanwhile gives none
        self._flow.transport = secure
        return Stream(secure, self._flow)

    def get_extra_info(self, info: str) -> Any:  # as the library has it
        """Return the information that the library asks for about a connection."""
        match info:
            case "is_readable":  # of an idle connection that was closed, perhaps only now, before the loop heard of it
                if self._flow.data or self._flow.is_ended or self._transport.is_closing():
                    return True
                waiting = select.poll()
                waiting.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
                return bool(waiting.poll(0))
            case "client_addr":
                return self._transport.get_extra_info("sockname")
            case "server_addr":
                return self._transport.get_extra_info("peername")
            case _:
                return self._transport.get_extra_info(info)


@cache
def tls_context() -> ssl.SSLContext:
    """Return the one TLS context; it is made when it is first needed, since that takes tens of milliseconds."""
    context = httpx2.create_ssl_context(trust_env=False)
    if own := owner_certificates(Path(os.environ.get("USER_SPACE") or "~/.ai").expanduser()):
        context.load_verify_locations(cadata=own)
    return context


class Network(Lookup):
    """The way out: pools of connections, besides plain sockets."""

    def __init__(self, resolver: Resolver = look_up, tls: Callable[[], ssl.SSLContext] = tls_context) -> None:
        super().__init__(resolver)
        self.tls = tls
        self._pools: WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[tuple[bool, bool], httpcore2.AsyncConnectionPool]
        ] = WeakKeyDictionary()

    def pool(self, host: str, port: int, granted: Sequence[str], *, is_secure: bool) -> httpcore2.AsyncConnectionPool:
        """Return the pool with connections that may carry a request for this host."""
        reason, has_grant = _judged(host, port, tuple(granted))
        if reason is not None:
            raise denied(host, port, reason)
        pools = self._pools.setdefault(asyncio.get_running_loop(), {})
        if (pool := pools.get((has_grant, is_secure))) is None:
            pool = pools[has_grant, is_secure] = httpcore2.AsyncConnectionPool(
                ssl_context=self.tls() if is_secure else None,
                max_connections=100,
                max_keepalive_connections=20,
                keepalive_expiry=30.0,
                network_backend=_Checked(self, has_grant=has_grant),
            )
        return pool

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        for pool in self._pools.pop(asyncio.get_running_loop(), {}).values():
            await pool.aclose()


class _Checked(httpcore2.AsyncNetworkBackend):
    """A network backend that connects to addresses which were checked, and to no name."""

    def __init__(self, network: Network, *, has_grant: bool) -> None:
        self._network = network
        self._has_grant = has_grant

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the library's own signature
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        granted = (host_port(host, port),) if self._has_grant else ()
        addresses = await self._network.addresses(host, port, granted)
        end = monotonic() + (timeout or 60.0)
        for left in range(len(addresses), 0, -1):
            # Each address has its share of the time, so that a dead one does not use up the others'.
            share = max(0.1, (end - monotonic()) / left)
            try:
                return await connected(addresses[-left], port, share, local_address, socket_options or ())
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                if left == 1:
                    raise
        raise AssertionError("a host has at least one address")


@lru_cache(maxsize=256)
def _judged(host: str, port: int, granted: tuple[str, ...]) -> tuple[str | None, bool]:
    """Return why a host is refused, if it is, and whether the owner granted it."""
    return refusal_of_host(host, port=port, granted=granted), is_granted(host, port, granted)
