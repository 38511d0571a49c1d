"""The HTTP client: requests, streams of lines and events, WebSockets, retries, redirects and decompression."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import count
from time import monotonic
from types import MappingProxyType

import httpcore2
from msgspec import Struct
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK, InvalidHandshake, WebSocketException
from websockets.typing import Subprotocol

from kiwi_mcp.domain.errors import RequestFailed, TooLarge
from kiwi_mcp.domain.outcome import Progress, Report, silent
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.primitives.http.pool import Network
from kiwi_mcp.primitives.http.request import (
    AGENT,
    WireRequest,
    connection_failed,
    explaining,
    failed,
    limited,
    prepare,
    redirect,
    refuse_denied,
)
from kiwi_mcp.primitives.http.sse import Events, LineSplitter, ServerEvent
from kiwi_mcp.primitives.http.traffic_log import TrafficLog, TrafficRow
from kiwi_mcp.primitives.secrets.redaction import Redactor

_PIECE = 1_048_576
"""The most that is unpacked at once, in bytes."""
_GZIP_OR_DEFLATE = zlib.MAX_WBITS | 32
"""The library finds out itself which of the two it is."""
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
_TOO_MANY, _BUSY = 429, 503
"""What a server answers that did nothing; the second one only if it names a time for the next attempt."""
IDLE = 60.0
"""How long a server may be silent, in seconds, where the request's own limit is not shorter."""
_CLOSE = 0.5
"""How long a server may take to say goodbye, in seconds."""
_LONGEST_MESSAGE = 4_000_000
"""The most one message may have, in bytes."""
_SENDING = 30.0
"""How long the other side may take to accept one message of a talk, in seconds."""
_TOO_BIG = 1009
_ALSO_OURS = frozenset({"accept", "accept-encoding", "content-type", "user-agent"})
_QUOTED = 2_000
"""The most of a body that an error quotes, in bytes."""
_NO_CONTENT = 204
_NOTHING: Mapping[str, str] = MappingProxyType({})
network = Network()
"""The network of this process."""


class HttpReply(Struct, frozen=True):
    """What a server answered, without the values of the request's secrets.

    A body over the limit is an error, except where the status is one: then it is cut, for the status says more.
    """

    status: int
    headers: Mapping[str, str]
    """Names in lower case; the values of a name that came twice are joined by commas."""
    body: bytes
    url: str
    """Where the answer came from, after redirects, without the query."""
    attempts: int = 1
    is_truncated: bool = False
    duration: float = 0.0


def headers_of(pairs: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
    """Return headers as text."""
    headers: dict[str, str] = {}
    for name, value in pairs:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds a server asks to wait, written as a number or as a date."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, IndexError):
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


async def unpacked(chunks: AsyncIterator[bytes], headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Yield a body in decompressed pieces of bounded size; an unknown encoding is left as it is."""
    if headers.get("content-encoding", "").strip().lower() not in {"gzip", "x-gzip", "deflate"}:
        async for chunk in chunks:
            yield chunk
        return
    inflate, is_fresh = zlib.decompressobj(_GZIP_OR_DEFLATE), True
    async for chunk in chunks:
        data = chunk
        while data:
            if inflate.eof:  # one packed part after another is allowed
                inflate = zlib.decompressobj(_GZIP_OR_DEFLATE)
            try:
                piece = inflate.decompress(data, _PIECE)
            except zlib.error as fault:
                raise _damaged() from fault
            is_fresh = False
            data = inflate.unconsumed_tail or inflate.unused_data
            if piece:
                yield piece
    if not inflate.eof and not is_fresh:
        raise _damaged()


def _damaged() -> RequestFailed:
    return RequestFailed(
        "The reply is packed and damaged, or ended too early.",
        suggestion="Try again; if it stays, the server is at fault.",
        cause="protocol",
    )


class OpenResponse(Struct, frozen=True):
    """The head of an answer, with its body still to come."""

    request: WireRequest
    response: httpcore2.Response
    headers: Mapping[str, str]
    attempts: int
    row: TrafficRow
    """Where what comes is counted."""

    @property
    def status(self) -> int:
        """The status code."""
        return self.response.status

    @property
    def is_error(self) -> bool:
        """Whether the status says that the request failed."""
        return self.response.status >= 400  # noqa: PLR2004 - where the error statuses begin

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body, unpacked."""
        with explaining(self.request):
            async for chunk in unpacked(self._received(), self.headers):
                yield chunk

    async def _received(self) -> AsyncGenerator[bytes, None]:
        async for chunk in self.response.aiter_stream():
            self.row.bytes_in += len(chunk)
            yield chunk

    async def whole(self, limit: int) -> tuple[bytes, bool]:
        """Return the body, and whether it was cut: one over the limit is refused, but that of an error is cut."""
        body = bytearray()
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > limit:
                    if not self.is_error:
                        raise TooLarge(f"The reply of {self.request.authority}", size=None, limit=limit)
                    return bytes(body[:limit]), True
        return bytes(body), False

    async def aclose(self) -> None:
        """Return the connection to the pool, or close it if the body was not read to its end."""
        await self.response.aclose()


async def open_answer(
    spec: HttpSpec, request: WireRequest, through: Network, report: Report, ledger: TrafficLog
) -> OpenResponse:
    """Return the first answer that is not to be asked for again."""
    end = monotonic() + spec.timeout
    for attempt in count(1):
        wait = min(spec.retry.delay * 2.0 ** min(attempt - 1, 30), spec.retry.max_delay)
        is_last = attempt >= spec.retry.attempts
        try:
            last, response, row = await _follow(spec, request, through, ledger)
        except RequestFailed as fault:
            cause = fault.details.get("cause")
            # Nothing was sent, or sending it again does no harm.
            may_repeat = cause in ("dns", "connect") or (
                cause == "protocol" and spec.is_repeatable and request.method in _REPEATABLE
            )
            if is_last or not may_repeat or monotonic() + wait >= end:
                raise
            reason = fault.message
        else:
            answer = OpenResponse(last, response, headers_of(response.headers), attempt, row)
            asked = retry_after(answer.headers)
            was_refused = answer.status == _TOO_MANY or (answer.status == _BUSY and asked is not None)
            if is_last or answer.status not in spec.retry.statuses or not (spec.is_repeatable or was_refused):
                return answer
            if asked is not None:
                wait = min(asked, spec.retry.max_delay)
            if monotonic() + wait >= end:
                return answer
            await answer.aclose()
            reason = f"The server answered {answer.status}."
        report(Progress(f"{reason} Trying again in {wait:.1f} s."))
        await asyncio.sleep(wait)
    raise AssertionError("attempts are counted")


async def _follow(
    spec: HttpSpec, request: WireRequest, through: Network, ledger: TrafficLog
) -> tuple[WireRequest, httpcore2.Response, TrafficRow]:
    for _ in range(spec.max_redirects + 1):
        refuse_denied(request, spec.denied)
        pool = through.pool(request.host, request.port, spec.granted, is_secure=request.url.scheme == "https")
        headers = [("host", request.authority), *request.headers]
        if request.body or request.method in {"POST", "PUT", "PATCH"}:
            headers.append(("content-length", str(len(request.body))))
        message = httpcore2.Request(
            request.method,
            httpcore2.URL(
                scheme=request.url.raw_scheme, host=request.host, port=request.port, target=request.url.raw_path
            ),
            headers=[(name.encode("ascii"), value.encode()) for name, value in headers],
            content=request.body,
        )
        with explaining(request):
            response = await pool.handle_async_request(message)
        row = ledger.note(request.host, request.port, "allowed")
        row.bytes_out += len(request.body)
        location = headers_of(response.headers).get("location")
        if response.status not in {301, 302, 303, 307, 308} or not location or not spec.max_redirects:
            return request, response, row
        await response.aclose()
        request = redirect(request, response.status, location)
    raise RequestFailed(
        f"{request.shown} is the end of more than {spec.max_redirects} redirects.",
        suggestion="Call the final address itself; two servers may be sending each other's visitors back.",
        cause="protocol",
    )


class Channel:
    """A WebSocket on which both sides send at any time."""

    def __init__(self, connection: ClientConnection, request: WireRequest) -> None:
        self._connection = connection
        self._request = request

    async def send(self, message: bytes) -> None:
        """Send one message as text; a connection that is gone is a broken pipe."""
        try:
            async with asyncio.timeout(_SENDING):
                await self._connection.send(message, text=True)
        except (ConnectionClosed, TimeoutError):
            raise BrokenPipeError from None

    async def receive(self) -> bytes | None:
        """Return the next message, or None where the other side has said goodbye."""
        message = await _received(self._connection, self._request)
        return message.encode(errors="surrogatepass") if isinstance(message, str) else message


@asynccontextmanager
async def channel(
    spec: HttpSpec, *, secrets: Mapping[str, str], through: Network, protocol: str
) -> AsyncIterator[Channel]:
    """Open a WebSocket for another protocol, such as MCP, for as long as the block lasts."""
    request = prepare(spec, secrets, schemes=("ws", "wss"))
    connection = await _opened(spec, request, through, protocol=protocol, longest=spec.max_bytes)
    try:
        yield Channel(connection, request)
    finally:
        await connection.close()


async def _opened(
    spec: HttpSpec, request: WireRequest, through: Network, *, protocol: str = "", longest: int = _LONGEST_MESSAGE
) -> ClientConnection:
    is_secure = request.url.scheme == "wss"
    refuse_denied(request, spec.denied)
    try:
        addresses = await through.addresses(request.host, request.port, spec.granted)
        return await connect(
            str(request.url.copy_with(fragment=None)),
            sock=await through.connect_to(addresses, request.port),
            ssl=through.tls() if is_secure else None,
            server_hostname=request.host if is_secure else None,
            additional_headers=[pair for pair in request.headers if pair[0].lower() not in _ALSO_OURS],
            user_agent_header=AGENT,
            proxy=None,
            compression=None,  # so that a small message cannot become a large one
            subprotocols=[Subprotocol(protocol)] if protocol else None,
            max_size=min(longest, spec.max_bytes),
            open_timeout=None,
            close_timeout=_CLOSE,
        )
    except InvalidHandshake as fault:
        raise failed(request, "protocol", f"the server did not open a WebSocket ({type(fault).__name__})") from None
    except TimeoutError:
        raise
    except OSError as fault:
        raise connection_failed(request, fault) from None
    except ValueError:  # a redirect, which a socket that is connected already cannot follow
        raise failed(request, "protocol", "the server did not open a WebSocket (redirect)") from None


async def _received(connection: ClientConnection, request: WireRequest) -> str | bytes | None:
    try:
        return await connection.recv()
    except ConnectionClosedOK:
        return None
    except ConnectionClosed as fault:
        if fault.sent is not None and fault.sent.code == _TOO_BIG:
            raise TooLarge(
                f"A message of {request.authority}",
                size=None,
                limit=connection.protocol.max_message_size or _LONGEST_MESSAGE,
            ) from None
        raise failed(request, "protocol", "the connection was lost") from None
    except WebSocketException:
        raise failed(request, "protocol", "the server did not speak the WebSocket protocol") from None


__all__ = ["HttpReply", "Network", "ServerEvent", "aclose", "events", "lines", "network", "send", "websocket"]


async def send(
    spec: HttpSpec,
    *,
    secrets: Mapping[str, str] = _NOTHING,
    report: Report = silent,
    through: Network = network,
    ledger: TrafficLog | None = None,
) -> HttpReply:
    """Send a request and return the whole answer; any status is an answer. What left is written into the ledger."""
    started, redactor = monotonic(), Redactor(secrets)
    request = prepare(spec, secrets)
    with limited(spec, request, redactor):
        async with asyncio.timeout(spec.timeout):
            begun = await open_answer(spec, request, through, report, ledger or TrafficLog())
            async with aclosing(begun) as answer:
                body, is_cut = await answer.whole(spec.max_bytes)
    return HttpReply(
        status=answer.status,
        headers={name: redactor.text(value) for name, value in answer.headers.items()},
        body=redactor.clean(body),
        url=redactor.text(answer.request.shown),
        attempts=answer.attempts,
        is_truncated=is_cut,
        duration=monotonic() - started,
    )


async def events(
    spec: HttpSpec,
    *,
    secrets: Mapping[str, str] = _NOTHING,
    report: Report = silent,
    through: Network = network,
    ledger: TrafficLog | None = None,
) -> AsyncGenerator[ServerEvent, None]:
    """Yield the server-sent events of an answer, up to `max_events`."""
    redactor, parser, left = Redactor(secrets), Events(), spec.max_events
    request = prepare(spec, secrets, accept="text/event-stream")
    with limited(spec, request, redactor):
        answered = _pieces(spec, request, through, report, ledger or TrafficLog(), content="text/event-stream")
        async with aclosing(answered) as pieces:
            async for piece in pieces:
                for event in parser.feed(piece):
                    yield ServerEvent(event.event, redactor.text(event.data), redactor.text(event.id), event.retry)
                    if (left := left - 1) <= 0:
                        return


async def lines(
    spec: HttpSpec,
    *,
    secrets: Mapping[str, str] = _NOTHING,
    report: Report = silent,
    through: Network = network,
    ledger: TrafficLog | None = None,
) -> AsyncGenerator[str, None]:
    """Yield the lines of an answer that are not empty, up to `max_events`."""
    redactor, parser, left = Redactor(secrets), LineSplitter(), spec.max_events
    request = prepare(spec, secrets)
    with limited(spec, request, redactor):
        async with aclosing(_pieces(spec, request, through, report, ledger or TrafficLog())) as pieces:
            async for piece in pieces:
                for line in filter(None, parser.feed(piece)):
                    yield redactor.text(line)
                    if (left := left - 1) <= 0:
                        return
        for line in parser.finish():
            yield redactor.text(line)


async def websocket(
    spec: HttpSpec,
    *,
    secrets: Mapping[str, str] = _NOTHING,
    through: Network = network,
    ledger: TrafficLog | None = None,
) -> AsyncGenerator[str | bytes, None]:
    """Yield the messages of a WebSocket, up to `max_events`; the body, if there is one, is sent first."""
    redactor = Redactor(secrets)
    request = prepare(spec, secrets, schemes=("ws", "wss"))
    with limited(spec, request, redactor):
        row = (ledger or TrafficLog()).note(request.host, request.port, "allowed")
        row.bytes_out += len(request.body)
        end, size = monotonic() + spec.timeout, 0
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(spec.timeout):
                connection = await _opened(spec, request, through)
                stack.push_async_callback(connection.close)
                if spec.has_body:
                    await connection.send(request.body.decode())
            for _ in range(spec.max_events):
                async with asyncio.timeout(min(IDLE, end - monotonic())):
                    message = await _received(connection, request)
                if message is None:
                    return
                if (size := size + len(message)) > spec.max_bytes:
                    raise TooLarge(f"The stream of {request.authority}", size=None, limit=spec.max_bytes)
                row.bytes_in += len(message)
                yield redactor.text(message) if isinstance(message, str) else redactor.clean(message)


async def aclose() -> None:
    """Close the shared connections of this event loop."""
    await network.aclose()


async def _pieces(
    spec: HttpSpec, request: WireRequest, through: Network, report: Report, ledger: TrafficLog, content: str = ""
) -> AsyncGenerator[bytes, None]:
    """Yield the body of a stream as it comes, within the limits of time and size."""
    end, size = monotonic() + spec.timeout, 0
    async with AsyncExitStack() as stack:
        # The limit stands around each wait and not around the whole, because the reader's own time runs between them.
        async with asyncio.timeout(spec.timeout):
            begun = await open_answer(spec, request, through, report, ledger)
            answer = await stack.enter_async_context(aclosing(begun))
            kind = answer.headers.get("content-type", "")
            if answer.is_error or not (kind.lower().startswith(content) or answer.status == _NO_CONTENT):
                body = (await answer.whole(_QUOTED))[0] if answer.is_error else b""
                raise RequestFailed(
                    f"{answer.request.shown} answered {answer.status} ({kind or 'no content type'}) and no stream.",
                    suggestion="Check the URL and the parameters against the service's own description.",
                    cause="protocol",
                    status=answer.status,
                    body=body.decode(errors="replace"),
                    retry_after=retry_after(answer.headers),
                )
        chunks = await stack.enter_async_context(aclosing(answer.chunks()))
        while True:
            async with asyncio.timeout(min(spec.idle, end - monotonic())):
                piece = await anext(chunks, None)
            if piece is None:
                return
            if (size := size + len(piece)) > spec.max_bytes:
                raise TooLarge(f"The stream of {request.authority}", size=None, limit=spec.max_bytes)
            yield piece
