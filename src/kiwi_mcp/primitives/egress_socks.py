"""SOCKS 5 as the proxy speaks it: connections to names and addresses, without a login."""

from __future__ import annotations

from asyncio import StreamReader, StreamWriter
from ipaddress import ip_address

from kiwi_mcp.domain.errors import Denied, KiwiError
from kiwi_mcp.primitives.egress_asked import Asked, Unfit
from kiwi_mcp.primitives.egress_http import through

VERSION = b"\x05"
_NO_LOGIN, _NO_METHOD = 0x00, 0xFF
_CONNECT = 1
_V4, _NAME, _V6 = 1, 3, 4
_DONE, _DENIED, _UNREACHABLE, _NO_COMMAND, _NO_KIND = 0, 2, 4, 7, 8


async def hear(reader: StreamReader, writer: StreamWriter) -> Asked:
    """Return what a client asks for, whose first byte was read already."""
    methods = await reader.readexactly((await reader.readexactly(1))[0])
    method = _NO_LOGIN if _NO_LOGIN in methods else _NO_METHOD
    writer.write(VERSION + bytes([method]))
    await writer.drain()
    if method == _NO_METHOD:
        raise Unfit(b"")
    version, command, _, kind = await reader.readexactly(4)
    if version != VERSION[0] or command != _CONNECT:
        raise Unfit(_reply(_NO_COMMAND))
    host = await _host(reader, kind)
    port = int.from_bytes(await reader.readexactly(2), "big")
    return Asked(host, port, _reply(_DONE), _refusal, through(host, port))


async def _host(reader: StreamReader, kind: int) -> str:
    if kind in {_V4, _V6}:
        return str(ip_address(await reader.readexactly(4 if kind == _V4 else 16)))
    if kind != _NAME:
        raise Unfit(_reply(_NO_KIND))
    name = await reader.readexactly((await reader.readexactly(1))[0])
    return name.decode("latin-1")  # what is not ASCII is no name, and refused as such


def _refusal(fault: KiwiError) -> bytes:
    return _reply(_DENIED if isinstance(fault, Denied) else _UNREACHABLE)


def _reply(code: int) -> bytes:
    return VERSION + bytes([code, 0, _V4, 0, 0, 0, 0, 0, 0])
