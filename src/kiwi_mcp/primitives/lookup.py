"""Lookup: names to addresses, looked up once and judged, and sockets to what was judged and to nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import TypeAlias

from kiwi_mcp.domain.errors import AddressDenied, RequestFailed
from kiwi_mcp.primitives.addresses import refusal, refusal_of_host

Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""A name and a port to addresses, the preferred one first."""


async def look_up(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a name, as the system knows them."""
    answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))


class Lookup:
    """The way to hosts: their addresses, and plain sockets for protocols of their own."""

    def __init__(self, resolver: Resolver = look_up) -> None:
        self._resolver = resolver

    async def addresses(self, host: str, port: int, granted: Sequence[str]) -> Sequence[str]:
        """Return the addresses of a host; one that is refused among them refuses the host."""
        if (reason := refusal_of_host(host, port=port, granted=granted)) is not None:
            raise denied(host, port, reason)
        found = [host] if _is_address(host) else await self._looked_up(host, port)
        for address in found:
            if (reason := refusal(address, host=host, port=port, granted=granted)) is not None:
                raise denied(host, port, reason)
        return found

    async def _looked_up(self, host: str, port: int) -> Sequence[str]:
        try:
            found = await self._resolver(host, port)
        except (OSError, UnicodeError) as fault:
            raise unknown_host(host) from fault
        if not found:
            raise unknown_host(host)
        return found

    async def connect(self, host: str, port: int, granted: Sequence[str]) -> socket.socket:
        """Return a connected socket for a host."""
        return await self.connect_to(await self.addresses(host, port, granted), port)

    async def connect_to(self, addresses: Sequence[str], port: int) -> socket.socket:
        """Return a socket that is connected to the first of some addresses that answers."""
        fault: OSError | None = None
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            opened = socket.socket(family, socket.SOCK_STREAM)
            opened.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(opened, (address, port))
            except OSError as refused:
                opened.close()
                fault = refused
            except BaseException:
                opened.close()
                raise
            else:
                return opened
        raise fault or OSError("no address")


def denied(host: str, port: int, reason: str) -> AddressDenied:
    """Return the refusal of a host, with the words that would grant it."""
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return AddressDenied(
        f"A request to {shown} is not permitted: {reason}.",
        suggestion=f"If the owner means it, add `{shown}` to `hosts.allow` in ~/.ai/policy.yaml.",
        host=host,
        port=port,
        reason=reason,
    )


def unknown_host(host: str) -> RequestFailed:
    """Return the failure to find a host's address."""
    return RequestFailed(
        f"The host {host!r} has no address.",
        suggestion="Check the spelling of the host, and that this machine can look up names.",
        cause="dns",
        host=host,
    )


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
