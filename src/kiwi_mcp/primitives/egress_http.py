"""HTTP as the proxy speaks it: one request to a server, or a tunnel.

The target is what the request line names in full. The client's own Host header is dropped and written anew from it,
and nothing is passed on after the one body that the head announces: a second request on the same connection could
otherwise speak to another host of the same server. A tunnel to the port of plain HTTP carries one such request too.
"""

from __future__ import annotations

import json
import re
from asyncio import IncompleteReadError, LimitOverrunError, StreamReader
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.primitives.addresses import plain_host
from kiwi_mcp.primitives.egress_asked import PIECE, Asked, Pieces, Unfit, refused, tunnel

_LINE = re.compile(r"([A-Za-z]{1,32}) ([\x21-\x7e]+) HTTP/1\.[01]")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_ABSOLUTE = re.compile(r"http://([^/?#]*)((?:[/?][^#]*)?)", re.IGNORECASE)
_PORT = re.compile(r"(.*?)(?::([0-9]{1,5}))?")
_BRACKETED = re.compile(r"(\[[^\[\]]*\])(?::([0-9]{1,5}))?")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_HOP = frozenset(
    {"host", "connection", "proxy-connection", "proxy-authorization", "keep-alive", "te", "trailer", "upgrade"}
)
_HTTP = 80
_LAST_PORT = 65_535
_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"

Headers = Sequence[tuple[str, str]]


async def hear(reader: StreamReader, first: bytes) -> Asked:
    """Return what a client asks for, whose first byte was read already."""
    method, target, headers = _parsed(await _head(reader, first))
    if method == "CONNECT":
        host, port = _authority(target, None)
        return Asked(host, port, _ESTABLISHED, refusal, through(host, port))
    written = _ABSOLUTE.fullmatch(target)
    if written is None:
        raise _unfit(HTTPStatus.BAD_REQUEST, "a proxy is asked for a whole `http://` address, or to CONNECT")
    host, port = _authority(written[1].rpartition("@")[2], _HTTP)
    if "@" in written[1]:
        raise refused(host, port, "its address holds a user name")
    path = written[2] if written[2].startswith("/") else f"/{written[2]}"
    return Asked(host, port, b"", refusal, _request(method, path, host, port, headers))


def through(host: str, port: int) -> Pieces:
    """Return what goes through a tunnel: to the port of plain HTTP, TLS for its host or one request to it."""

    async def spoken(reader: StreamReader, first: bytes) -> AsyncIterator[bytes]:
        try:
            method, target, headers = _parsed(await _head(reader, first))
            sent = _request(method, target, host, port, headers)
        except Unfit as fault:
            raise refused(host, port, "what is sent to it is not one plain request") from fault
        # A whole address would count for more than the host that is written into the head.
        if method == "CONNECT" or not target.startswith("/"):
            raise refused(host, port, "what is sent to it names a server once more")
        async for piece in sent(reader):
            yield piece

    return tunnel(host, port, spoken if port == _HTTP else None)


def refusal(fault: KiwiError) -> bytes:
    """Return the answer to a request that is not passed on."""
    return _answer(HTTPStatus(fault.http_status), fault.to_response())


def too_slow() -> bytes:
    """Return the answer to a request that does not come to its end."""
    return _unfit(HTTPStatus.REQUEST_TIMEOUT, "the request did not come in time").answer


async def _head(reader: StreamReader, first: bytes) -> list[str]:
    try:
        head = first + await reader.readuntil(b"\r\n\r\n")
    except LimitOverrunError:
        raise _unfit(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head of the request is too large") from None
    return head[:-4].decode("latin-1").split("\r\n")


def _parsed(lines: Sequence[str]) -> tuple[str, str, Headers]:
    line, headers = _LINE.fullmatch(lines[0]), [_HEADER.fullmatch(one) for one in lines[1:]]
    if line is None or not all(headers):
        raise _unfit(HTTPStatus.BAD_REQUEST, "the head of the request is not HTTP")
    return line[1].upper(), line[2], [(one[1], one[2].rstrip(" \t")) for one in headers if one]


def _authority(written: str, default: int | None) -> tuple[str, int]:
    """Return host and port; what is no host is found out when it is judged."""
    found = (_BRACKETED if written.startswith("[") else _PORT).fullmatch(written)
    port = int(found[2]) if found and found[2] else default
    if found is None or port is None or not 0 < port <= _LAST_PORT:
        raise _unfit(HTTPStatus.BAD_REQUEST, "the request names no host and port")
    return found[1], port


def _request(method: str, path: str, host: str, port: int, headers: Headers) -> Pieces:
    """Return the request as the server gets it: its head, written anew, and the body that it announces."""
    body = _body(headers)
    plain = plain_host(host)
    named = f"[{plain}]" if ":" in plain else plain
    listed = {
        word.strip().lower() for name, value in headers if name.lower() == "connection" for word in value.split(",")
    }
    kept = [(name, value) for name, value in headers if name.lower() not in _HOP | listed]
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {named if port == _HTTP else f'{named}:{port}'}",
        *(f"{name}: {value}" for name, value in kept),
        "Connection: close",
    ]

    async def sent(reader: StreamReader) -> AsyncIterator[bytes]:
        yield "\r\n".join([*lines, "", ""]).encode("latin-1")
        async for piece in body(reader):
            yield piece

    return sent


def _body(headers: Headers) -> Pieces:
    """Return the body that a head announces; one that says so in two ways is refused, since two readers may differ."""
    found: Mapping[str, list[str]] = {
        word: [value for name, value in headers if name.lower() == word]
        for word in ("content-length", "transfer-encoding")
    }
    lengths, codings = found["content-length"], found["transfer-encoding"]
    match lengths, codings:
        case [], []:
            return _counted(0)
        case [length], [] if length.isascii() and length.isdigit() and len(length) < 16:  # noqa: PLR2004 - a petabyte
            return _counted(int(length))
        case [], [coding] if coding.lower() == "chunked":
            return _chunks
        case _:
            raise _unfit(HTTPStatus.BAD_REQUEST, "the length of the body is not clear")


def _counted(size: int) -> Pieces:
    async def body(reader: StreamReader) -> AsyncIterator[bytes]:
        left = size
        while left and (piece := await reader.read(min(PIECE, left))):
            left -= len(piece)
            yield piece

    return body


async def _chunks(reader: StreamReader) -> AsyncIterator[bytes]:
    """Yield a body in chunks as it comes, up to its last one; what is beside the data is not passed on."""
    while size := await _size(reader):
        yield b"%x\r\n" % size
        async for piece in _counted(size)(reader):
            yield piece
        if await reader.readexactly(2) != b"\r\n":
            raise IncompleteReadError(b"", None)
        yield b"\r\n"
    yield b"0\r\n\r\n"


async def _size(reader: StreamReader) -> int:
    found = _CHUNK.fullmatch(await reader.readuntil(b"\r\n"))
    if found is None:
        raise IncompleteReadError(b"", None)
    return int(found[1], 16)


def _unfit(status: HTTPStatus, reason: str) -> Unfit:
    return Unfit(_answer(status, {"error": status.phrase, "code": "proxy_misused", "message": f"{reason}."}))


def _answer(status: HTTPStatus, told: JsonObject) -> bytes:
    body = json.dumps(told).encode()
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\nConnection: close\r\n\r\n".encode() + body
