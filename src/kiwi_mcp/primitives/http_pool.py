"""Connections of requests: only to addresses that were looked up once and checked, and shared between requests.

There is one TLS context in the process, with the trust store of the system and nothing from the environment, and
for each event loop its own pools: for public addresses and, apart from them, for hosts that the owner granted. A
connection that was made because of a grant is thus never used by a request without it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from time import monotonic
from weakref import WeakKeyDictionary

import httpcore2
import httpx2

from kiwi_mcp.primitives.addresses import is_granted, refusal_of_host
from kiwi_mcp.primitives.http_stream import connected
from kiwi_mcp.primitives.lookup import Lookup, Resolver, denied, look_up

_CONNECTIONS, _IDLE, _KEPT = 100, 20, 30.0


@cache
def tls_context() -> ssl.SSLContext:
    """Return the one TLS context; it is made when it is first needed, since that takes tens of milliseconds."""
    return httpx2.create_ssl_context(trust_env=False)


class Network(Lookup):
    """The way out: pools of connections, besides plain sockets."""

    def __init__(self, resolver: Resolver = look_up, tls: Callable[[], ssl.SSLContext] = tls_context) -> None:
        super().__init__(resolver)
        self.tls = tls
        self._pools: WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[tuple[bool, bool], httpcore2.AsyncConnectionPool]
        ]
        self._pools = WeakKeyDictionary()

    def pool(self, host: str, port: int, granted: Sequence[str], *, is_secure: bool) -> httpcore2.AsyncConnectionPool:
        """Return the pool whose connections may carry a request for this host."""
        reason, has_grant = _judged(host, port, tuple(granted))
        if reason is not None:
            raise denied(host, port, reason)
        pools = self._pools.setdefault(asyncio.get_running_loop(), {})
        if (pool := pools.get((has_grant, is_secure))) is None:
            pool = pools[has_grant, is_secure] = self._new_pool(has_grant=has_grant, is_secure=is_secure)
        return pool

    def _new_pool(self, *, has_grant: bool, is_secure: bool) -> httpcore2.AsyncConnectionPool:
        return httpcore2.AsyncConnectionPool(
            ssl_context=self.tls() if is_secure else None,
            max_connections=_CONNECTIONS,
            max_keepalive_connections=_IDLE,
            keepalive_expiry=_KEPT,
            network_backend=_Checked(self, has_grant=has_grant),
        )

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
        granted = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}",) if self._has_grant else ()
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
