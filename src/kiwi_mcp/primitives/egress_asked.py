"""What a client of the proxy asks for, whichever way it says so."""

from __future__ import annotations

from asyncio import StreamReader
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeAlias

from kiwi_mcp.domain.errors import AddressDenied, KiwiError
from kiwi_mcp.primitives.addresses import is_address, plain_host
from kiwi_mcp.primitives.egress_tls import HANDSHAKE, Malformed, client_hello

PIECE = 65_536
"""How much is passed on at once, in bytes."""
HTTPS = 443
Pieces: TypeAlias = Callable[[StreamReader], AsyncIterator[bytes]]
Refusal: TypeAlias = Callable[[KiwiError], bytes]
Spoken: TypeAlias = Callable[[StreamReader, bytes], AsyncIterator[bytes]]
"""What goes on to a server of what a client says that is not TLS, from its first byte, which was read already."""


class Unfit(Exception):
    """What is no request at all, and what the client is told about it."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Asked:
    """A host and a port, what is told to the client, and what of its words goes on to the server."""

    host: str
    """As the client wrote it, for it is judged so."""
    port: int
    granted: bytes
    """What the client is told when the connection stands."""
    refused: Refusal
    """What it is told when there is none."""
    sent: Pieces
    """What goes on to the server."""

    @property
    def name(self) -> str:
        """The host in the one spelling that names are compared and looked up in."""
        return plain_host(self.host)


def refused(host: str, port: int, reason: str) -> AddressDenied:
    """Return the refusal of a host, with what would change it."""
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return AddressDenied(
        f"{shown} is not permitted: {reason}.",
        suggestion=f"If the tool is to reach it, name `{shown}` under `needs.hosts` of its manifest; the owner's "
        "policy.yaml must not deny it, and must allow it where its address is not public.",
        host=host,
        port=port,
        reason=reason,
    )


def tunnel(host: str, port: int, spoken: Spoken | None = None) -> Pieces:
    """Return what goes through a tunnel: everything, if what it begins with means the host it was made for.

    What is not TLS goes through as `spoken` says, where that is given.
    """

    async def sent(reader: StreamReader) -> AsyncIterator[bytes]:
        opening = await reader.read(1)
        if opening[:1] == bytes([HANDSHAKE]):
            opening = await _greeting(reader, opening, host, port)
        elif opening and port == HTTPS:
            raise refused(host, port, "what is sent to it is not TLS")
        elif opening and spoken is not None:
            async for piece in spoken(reader, opening):
                yield piece
            return
        while opening:
            yield opening
            opening = await reader.read(PIECE)

    return sent


async def _greeting(reader: StreamReader, first: bytes, host: str, port: int) -> bytes:
    try:
        raw, name = await client_hello(reader, first)
    except Malformed as fault:
        raise refused(host, port, str(fault)) from fault
    # An address has no name to be said; where one is said all the same, it must not be another's.
    if plain_host(name) != plain_host(host) and (name or not is_address(host)):
        reason = "the TLS client names another server" if name else "the TLS client does not name the server it means"
        raise refused(host, port, reason)
    return raw
