"""The egress proxy of one sandbox: it reads HTTP, CONNECT, SOCKS 5 and TLS server names, checks, relays and limits."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from asyncio import IncompleteReadError, LimitOverrunError, StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from io import BytesIO
from ipaddress import ip_address
from time import monotonic
from typing import TypeAlias

from msgspec import Struct

from kiwi_mcp.domain.errors import AddressDenied, Denied, KiwiError, RequestFailed
from kiwi_mcp.domain.isolation import StartGate
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.primitives.http.addresses import HostRules, Lookup, host_port, is_address, plain_host
from kiwi_mcp.primitives.http.traffic_log import TrafficLog
from kiwi_mcp.primitives.process.namespaces import listen_inside

HANDSHAKE = 22
ALERT = b"\x15\x03\x03\x00\x02\x02\x70"
"""The alert `unrecognized_name`: the server name of the client was not accepted."""
_CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 1, 0, 0
_RECORD, _LARGEST = 16_640, 65_536
PIECE = 65_536
"""How much is passed on at once, in bytes."""
Pieces: TypeAlias = Callable[[StreamReader], AsyncIterator[bytes]]
_LINE = lazy_pattern(r"([A-Za-z]{1,32}) ([\x21-\x7e]+) HTTP/1\.[01]")
_HEADER = lazy_pattern(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_ABSOLUTE = lazy_pattern(r"http://([^/?#]*)((?:[/?][^#]*)?)", re.IGNORECASE)
_PORT = lazy_pattern(r"(.*?)(?::([0-9]{1,5}))?")
_BRACKETED = lazy_pattern(r"(\[[^\[\]]*\])(?::([0-9]{1,5}))?")
_CHUNK = lazy_pattern(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_HOP = frozenset(
    {"host", "connection", "proxy-connection", "proxy-authorization", "keep-alive", "te", "trailer", "upgrade"}
)
_HTTP, _HTTPS = 80, 443
_LAST_PORT = 65_535
Headers = Sequence[tuple[str, str]]
_BAD_REQUEST, _TIMEOUT, _HEAD_TOO_LARGE = 400, 408, 431
_PHRASES = {
    _BAD_REQUEST: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    _TIMEOUT: "Request Timeout",
    409: "Conflict",
    413: "Request Entity Too Large",
    422: "Unprocessable Entity",
    429: "Too Many Requests",
    _HEAD_TOO_LARGE: "Request Header Fields Too Large",
    500: "Internal Server Error",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}
"""The reason phrases of the statuses that are answered; `http.HTTPStatus` would take milliseconds to load."""
# SOCKS 5: methods, commands, kinds of addresses, and replies.
SOCKS_5 = b"\x05"
_NO_LOGIN, _NO_METHOD = 0x00, 0xFF
_CONNECT = 1
_V4, _NAME, _V6 = 1, 3, 4
_DONE, _DENIED, _UNREACHABLE, _NO_COMMAND, _NO_KIND = 0, 2, 4, 7, 8
TASK = "kiwi-egress"
"""The name of the task that accepts connections."""
_LINGER = 1.0
OUTSIDE = Lookup()
"""The network of this machine, as requests of `http_client` find it."""


class Malformed(ValueError):
    """The first bytes of a client are not TLS."""


async def client_hello(reader: StreamReader, first: bytes) -> tuple[bytes, str]:
    """Return the first message as it came, and the name of the server in it, empty where it says none."""
    raw, message = first, b""
    while len(raw) < _LARGEST:
        raw += await reader.readexactly(4)
        kind, major, length = raw[-5], raw[-4], int.from_bytes(raw[-2:], "big")
        if kind != HANDSHAKE or major != 3 or not 0 < length <= _RECORD:  # noqa: PLR2004 - 3 is every TLS
            raise Malformed("it is not TLS")
        body = await reader.readexactly(length)
        raw, message = raw + body, message + body
        if len(message) >= 4 and len(message) >= 4 + (size := int.from_bytes(message[1:4], "big")):  # noqa: PLR2004 - kind and length
            if message[0] != _CLIENT_HELLO:
                raise Malformed("it does not begin with a client's hello")
            return raw, _server_name(BytesIO(message[4 : 4 + size]))
        raw += await reader.readexactly(1)
    raise Malformed("its hello is too long")


def _server_name(hello: BytesIO) -> str:
    _take(hello, 34)  # version and random
    for size in (1, 2, 1):  # session, ciphers, compression
        _part(hello, size)
    if not _has_more(hello):
        return ""
    extensions, names = _part(hello, 2), list[str]()
    while _has_more(extensions):
        kind, content = _take(extensions, 2), _part(extensions, 2)
        if int.from_bytes(kind, "big") != _SERVER_NAME:
            continue
        listed = _part(content, 2)
        while _has_more(listed):
            kind, name = _take(listed, 1), _part(listed, 2)
            if kind[0] != _HOST_NAME:
                raise Malformed("its hello names a server of no known kind")
            names.append(name.read().decode("latin-1"))
    if len(names) > 1:
        raise Malformed("its hello names several servers")
    return names[0] if names else ""


def _take(data: BytesIO, size: int) -> bytes:
    taken = data.read(size)
    if len(taken) < size:
        raise Malformed("its hello breaks off")
    return taken


def _part(data: BytesIO, size: int) -> BytesIO:
    """Return the part after a length field of `size` bytes."""
    return BytesIO(_take(data, int.from_bytes(_take(data, size), "big")))


def _has_more(data: BytesIO) -> bool:
    return data.tell() < data.getbuffer().nbytes


class BadProxyRequest(Exception):
    """The bytes received are not a valid request. `answer` is the response to the client."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer = answer


class ProxyRequest(Struct, frozen=True):
    """A host and a port, the responses to the client, and the bytes to forward to the server."""

    host: str
    """As the client wrote it, for it is judged so."""
    port: int
    granted: bytes
    """The response to the client after the connection is open."""
    refused: Callable[[KiwiError], bytes]
    """The response to the client if there is no connection."""
    sent: Pieces
    """The bytes to forward to the server."""

    @property
    def name(self) -> str:
        """The host in the one spelling that names are compared and looked up in."""
        return plain_host(self.host)


def refused(host: str, port: int, reason: str) -> AddressDenied:
    """Return the refusal of a host, with what would change it."""
    shown = host_port(host, port)
    return AddressDenied(
        f"{shown} is not permitted: {reason}.",
        suggestion=f"If the tool is to reach it, name `{shown}` under `needs.hosts` of its manifest; the owner's "
        "policy.yaml must not deny it, and must allow it where its address is not public.",
        host=host,
        port=port,
        reason=reason,
    )


async def read_http_request(reader: StreamReader, first: bytes) -> ProxyRequest:
    """Return the request of a client. Its first byte was read already and is `first`."""
    method, target, headers = await _head(reader, first)
    if method == "CONNECT":
        host, port = _authority(target, None)
        return ProxyRequest(host, port, b"HTTP/1.1 200 Connection established\r\n\r\n", refusal, through(host, port))
    written = _ABSOLUTE.fullmatch(target)
    if written is None:
        raise _unfit(_BAD_REQUEST, "a proxy is asked for a whole `http://` address, or to CONNECT")
    host, port = _authority(written[1].rpartition("@")[2], _HTTP)
    if "@" in written[1]:
        raise refused(host, port, "its address holds a user name")
    path = written[2] if written[2].startswith("/") else f"/{written[2]}"
    return ProxyRequest(host, port, b"", refusal, _request(method, path, host, port, headers))


def through(host: str, port: int) -> Pieces:
    """Return the bytes that pass through a tunnel: at the port of plain HTTP only one request to its host.

    TLS must name the host that the tunnel was made for, and nothing but TLS goes to the port of HTTPS.
    """

    async def sent(reader: StreamReader) -> AsyncIterator[bytes]:
        opening = await reader.read(1)
        if opening == bytes([HANDSHAKE]):
            try:
                opening, name = await client_hello(reader, opening)
            except Malformed as fault:
                raise refused(host, port, str(fault)) from fault
            # An address needs no server name. If a client sends one, it must not be that of another host.
            if plain_host(name) != plain_host(host) and (name or not is_address(host)):
                reason = "names another server" if name else "does not name the server it means"
                raise refused(host, port, f"the TLS client {reason}")
        elif opening and port == _HTTPS:
            raise refused(host, port, "what is sent to it is not TLS")
        elif opening and port == _HTTP:
            async for piece in await _plain_request(reader, opening, host, port):
                yield piece
            return
        while opening:
            yield opening
            opening = await reader.read(PIECE)

    return sent


async def _plain_request(reader: StreamReader, first: bytes, host: str, port: int) -> AsyncIterator[bytes]:
    """Return the bytes of the one request that a tunnel to the port of plain HTTP carries."""
    try:
        method, target, headers = await _head(reader, first)
        sent = _request(method, target, host, port, headers)
    except BadProxyRequest as fault:
        raise refused(host, port, "what is sent to it is not one plain request") from fault
    # A whole address would count for more than the host that is written into the head.
    if method == "CONNECT" or not target.startswith("/"):
        raise refused(host, port, "what is sent to it names a server once more")
    return sent(reader)


def refusal(fault: KiwiError) -> bytes:
    """Return the answer to a request that is not passed on."""
    return _answer(fault.http_status, fault.to_response())


async def _head(reader: StreamReader, first: bytes) -> tuple[str, str, Headers]:
    """Return the method, the target and the headers of a request."""
    try:
        head = first + await reader.readuntil(b"\r\n\r\n")
    except LimitOverrunError:
        raise _unfit(_HEAD_TOO_LARGE, "the head of the request is too large") from None
    lines = head[:-4].decode("latin-1").split("\r\n")
    line, headers = _LINE.fullmatch(lines[0]), [_HEADER.fullmatch(one) for one in lines[1:]]
    if line is None or not all(headers):
        raise _unfit(_BAD_REQUEST, "the head of the request is not HTTP")
    return line[1].upper(), line[2], [(one[1], one[2].rstrip(" \t")) for one in headers if one]


def _authority(written: str, default: int | None) -> tuple[str, int]:
    """Return host and port. An invalid host is found when the rules are applied."""
    found = (_BRACKETED if written.startswith("[") else _PORT).fullmatch(written)
    port = int(found[2]) if found and found[2] else default
    if found is None or port is None or not 0 < port <= _LAST_PORT:
        raise _unfit(_BAD_REQUEST, "the request names no host and port")
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
    lengths, codings = (
        [value for name, value in headers if name.lower() == word] for word in ("content-length", "transfer-encoding")
    )
    match lengths, codings:
        case [], []:
            return partial(_counted, 0)
        case [length], [] if length.isascii() and length.isdigit() and len(length) < 16:  # noqa: PLR2004 - a petabyte
            return partial(_counted, int(length))
        case [], [coding] if coding.lower() == "chunked":
            return _chunks
        case _:
            raise _unfit(_BAD_REQUEST, "the length of the body is not clear")


async def _counted(size: int, reader: StreamReader) -> AsyncIterator[bytes]:
    while size and (piece := await reader.read(min(PIECE, size))):
        size -= len(piece)
        yield piece


async def _chunks(reader: StreamReader) -> AsyncIterator[bytes]:
    """Yield a body in chunks as it arrives, up to its last one; extensions and trailers are not passed on."""
    while True:
        found = _CHUNK.fullmatch(await reader.readuntil(b"\r\n"))
        if found is None:
            raise IncompleteReadError(b"", None)
        if not (size := int(found[1], 16)):
            break
        yield b"%x\r\n" % size
        async for piece in _counted(size, reader):
            yield piece
        if await reader.readexactly(2) != b"\r\n":
            raise IncompleteReadError(b"", None)
        yield b"\r\n"
    yield b"0\r\n\r\n"


def _unfit(status: int, reason: str) -> BadProxyRequest:
    return BadProxyRequest(
        _answer(status, {"error": _PHRASES[status], "code": "proxy_misused", "message": f"{reason}."})
    )


def _answer(status: int, answer: JsonObject) -> bytes:
    body = json.dumps(answer).encode()
    head = f"HTTP/1.1 {status} {_PHRASES.get(status, 'Error')}\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


async def read_socks_request(reader: StreamReader, writer: StreamWriter) -> ProxyRequest:
    """Return the request of a client. Its first byte was read already."""
    methods = await reader.readexactly((await reader.readexactly(1))[0])
    method = _NO_LOGIN if _NO_LOGIN in methods else _NO_METHOD
    writer.write(SOCKS_5 + bytes([method]))
    await writer.drain()
    if method == _NO_METHOD:
        raise BadProxyRequest(b"")
    version, command, _, kind = await reader.readexactly(4)
    if version != SOCKS_5[0] or command != _CONNECT:
        raise BadProxyRequest(_reply(_NO_COMMAND))
    if kind in {_V4, _V6}:
        host = str(ip_address(await reader.readexactly(4 if kind == _V4 else 16)))
    elif kind == _NAME:  # what is not ASCII is no name, and refused as such
        host = (await reader.readexactly((await reader.readexactly(1))[0])).decode("latin-1")
    else:
        raise BadProxyRequest(_reply(_NO_KIND))
    port = int.from_bytes(await reader.readexactly(2), "big")
    return ProxyRequest(host, port, _reply(_DONE), _refusal, through(host, port))


def _refusal(fault: KiwiError) -> bytes:
    return _reply(_DENIED if isinstance(fault, Denied) else _UNREACHABLE)


def _reply(code: int) -> bytes:
    return SOCKS_5 + bytes([code, 0, _V4, 0, 0, 0, 0, 0, 0])


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


async def streams(connected: socket.socket, limit: int) -> tuple[StreamReader, StreamWriter]:
    """Return both directions of a connection, which is closed where that fails."""
    try:
        return await asyncio.open_connection(sock=connected, limit=limit)
    except BaseException:
        connected.close()
        raise


CAPS = ProxyLimits()


@asynccontextmanager
async def serve_proxy(
    rules: HostRules, gate: StartGate, ledger: TrafficLog, *, through: Lookup = OUTSIDE, caps: ProxyLimits = CAPS
) -> AsyncIterator[None]:
    """Serve a confined process that is started in the block: it begins when its proxy stands, or never.

    If it cannot be given one, the block is cancelled and that is raised; a proxy that ends too soon is in the ledger.
    """

    async def serve() -> None:
        listener = await listen_inside(gate)
        gate.open()
        await Proxy(rules, ledger, through, caps).serve(listener)

    ledger.is_kept, ledger.is_closed = True, False
    try:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve(), name=TASK)
            try:
                yield
            finally:
                ledger.is_closed = True
                serving.cancel()
    except BaseExceptionGroup as faults:
        # The block's own error, or the one that ended the block.
        raise faults.exceptions[0] from None


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

    def _over(self, writer: StreamWriter, task: asyncio.Task[None]) -> None:
        # Also where the task was cancelled before it began; and who does not read the last words keeps nothing open.
        writer.close()
        asyncio.get_running_loop().call_later(_LINGER, writer.transport.abort)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._ledger.fault = f"A connection was ended by a fault of the proxy's own: {fault!r}."
        self._serving.discard(task)
        self._places.release()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        # There is no one to answer if the client has gone or sent an incomplete request.
        with suppress(OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            # Connect a client with what it asks for, or tell it why not.
            asked: ProxyRequest | None = None
            try:
                async with asyncio.timeout(self._caps.head_seconds):
                    first = await reader.readexactly(1)
                    is_socks = first == SOCKS_5
                    asked = await (read_socks_request(reader, writer) if is_socks else read_http_request(reader, first))
                server = await self._connected(asked)
            except BadProxyRequest as fault:
                await _tell(reader, writer, fault.answer)
            except TimeoutError:
                await _tell(reader, writer, _unfit(_TIMEOUT, "the request did not come in time").answer)
            except KiwiError as fault:
                details = fault.details
                host, port = (asked.name, asked.port) if asked else (str(details["host"]), int(str(details["port"])))
                if isinstance(fault, AddressDenied):
                    self._ledger.note(host, port, "denied", str(details["reason"]))
                else:
                    self._ledger.note(host, port, "failed", str(details.get("cause", "")))
                await _tell(reader, writer, (asked.refused if asked else refusal)(fault))
            else:
                await self._relay(asked, reader, writer, server)

    async def _relay(
        self, asked: ProxyRequest, reader: StreamReader, writer: StreamWriter, server: socket.socket
    ) -> None:
        """Forward what both sides send, as far as it may be, until the end of either side."""
        row = self._ledger.note(asked.name, asked.port, "allowed")
        caps = self._caps
        end = monotonic() + caps.connection_seconds
        limit = asyncio.timeout(caps.head_seconds)

        def count(size: int) -> None:
            """Count the bytes that are forwarded, and extend the idle timeout of the connection."""
            self._ledger.bytes += size
            if self._ledger.bytes > caps.total_bytes:
                raise ConnectionAbortedError("more than a sandbox may send and receive")
            limit.reschedule(asyncio.get_running_loop().time() + min(caps.idle_seconds, end - monotonic()))

        async def send() -> None:
            async for piece in asked.sent(reader):
                row.bytes_out += len(piece)
                count(len(piece))
                server_writer.write(piece)
                await server_writer.drain()
            server_writer.write_eof()

        async def receive() -> None:
            while piece := await server_reader.read(PIECE):
                row.bytes_in += len(piece)
                count(len(piece))
                writer.write(piece)
                await writer.drain()

        server_reader, server_writer = await streams(server, PIECE)
        try:
            writer.write(asked.granted)
            async with limit:
                up, down = asyncio.create_task(send()), asyncio.create_task(receive())
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
            self._ledger.note(asked.name, asked.port, "denied", str(fault.details["reason"]))
            writer.write(ALERT)
        finally:
            server_writer.transport.abort()

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


async def _next(listener: socket.socket) -> socket.socket:
    while True:
        try:
            client, _ = await asyncio.get_running_loop().sock_accept(listener)
        except OSError:
            # Too many open files, or a client that went away: both pass. A listener that is broken does not.
            if listener.fileno() < 0 or listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0:
                raise
            await asyncio.sleep(0.1)
        else:
            return client


async def _tell(reader: StreamReader, writer: StreamWriter, answer: bytes) -> None:
    """Send a last answer, and read what the client still sends for a moment: a reset would lose the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER):
            writer.write(answer)
            await writer.drain()
            writer.write_eof()
            while await reader.read(PIECE):
                pass
