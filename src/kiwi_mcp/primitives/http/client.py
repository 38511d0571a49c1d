"""The HTTP client: requests, streams of lines and events, retries, redirects and decompression."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import count
from time import monotonic
from types import MappingProxyType

import httpcore2
from msgspec import Struct

from kiwi_mcp.domain.errors import RequestFailed, TooLarge
from kiwi_mcp.domain.outcome import Progress, Report, silent
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.primitives.http.pool import Network
from kiwi_mcp.primitives.http.request import WireRequest, explaining, limited, prepare, redirect, refuse_denied
from kiwi_mcp.primitives.http.sse import Events, LineSplitter, ServerEvent
from kiwi_mcp.primitives.http.traffic_log import TrafficLog, TrafficRow
from kiwi_mcp.primitives.http.websocket import messages
from kiwi_mcp.primitives.secrets.redaction import Redactor

_PIECE = 1_048_576
"""The most that is unpacked at once, in bytes."""


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
    unpacker = _Unpacker()
    async for chunk in chunks:
        for piece in unpacker.feed(chunk):
            yield piece
    unpacker.finish()


class _Unpacker:
    def __init__(self) -> None:
        self._inflate = _inflater()
        self._is_fresh = True

    def feed(self, data: bytes) -> Iterator[bytes]:
        try:
            while data:
                if self._inflate.eof:  # one packed part after another is allowed
                    self._inflate = _inflater()
                piece = self._inflate.decompress(data, _PIECE)
                self._is_fresh = False
                data = self._inflate.unconsumed_tail or self._inflate.unused_data
                if piece:
                    yield piece
        except zlib.error as fault:
            raise _damaged() from fault

    def finish(self) -> None:
        if not self._inflate.eof and not self._is_fresh:
            raise _damaged()


def _inflater() -> zlib._Decompress:
    return zlib.decompressobj(zlib.MAX_WBITS | 32)  # finds out itself whether it is gzip or deflate


def _damaged() -> RequestFailed:
    return RequestFailed(
        "The reply is packed and damaged, or ended too early.",
        suggestion="Try again; if it stays, the server is at fault.",
        cause="protocol",
    )


_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
_TOO_MANY, _BUSY = 429, 503
"""What a server answers that did nothing; the second one only if it names a time for the next attempt."""


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
            if is_last or not _may_repeat(spec, request, fault) or monotonic() + wait >= end:
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


def _may_repeat(spec: HttpSpec, request: WireRequest, fault: RequestFailed) -> bool:
    """Whether nothing was sent, or sending it again does no harm."""
    match fault.details.get("cause"):
        case "dns" | "connect":
            return True
        case "protocol":
            return spec.is_repeatable and request.method in _REPEATABLE
        case _:
            return False


async def _follow(
    spec: HttpSpec, request: WireRequest, through: Network, ledger: TrafficLog
) -> tuple[WireRequest, httpcore2.Response, TrafficRow]:
    for _ in range(spec.max_redirects + 1):
        response = await _exchange(spec, request, through)
        row = ledger.note(request.host, request.port, "allowed")
        row.bytes_out += len(request.body)
        location = headers_of(response.headers).get("location")
        if response.status not in _REDIRECTS or not location or not spec.max_redirects:
            return request, response, row
        await response.aclose()
        request = redirect(request, response.status, location)
    raise RequestFailed(
        f"{request.shown} is the end of more than {spec.max_redirects} redirects.",
        suggestion="Call the final address itself; two servers may be sending each other's visitors back.",
        cause="protocol",
    )


async def _exchange(spec: HttpSpec, request: WireRequest, through: Network) -> httpcore2.Response:
    is_secure = request.url.scheme == "https"
    refuse_denied(request, spec.denied)
    pool = through.pool(request.host, request.port, spec.granted, is_secure=is_secure)
    headers = [("host", request.authority), *request.headers]
    if request.body or request.method in {"POST", "PUT", "PATCH"}:
        headers.append(("content-length", str(len(request.body))))
    message = httpcore2.Request(
        request.method,
        httpcore2.URL(scheme=request.url.raw_scheme, host=request.host, port=request.port, target=request.url.raw_path),
        headers=[(name.encode("ascii"), value.encode()) for name, value in headers],
        content=request.body,
    )
    with explaining(request):
        return await pool.handle_async_request(message)


__all__ = ["HttpReply", "Network", "ServerEvent", "aclose", "events", "lines", "network", "send", "websocket"]

_QUOTED = 2_000
"""The most of a body that an error quotes, in bytes."""
_NO_CONTENT = 204
_NOTHING: Mapping[str, str] = MappingProxyType({})
network = Network()
"""The network of this process."""


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
        async with aclosing(messages(spec, request, through)) as found:
            row = (ledger or TrafficLog()).note(request.host, request.port, "allowed")
            row.bytes_out += len(request.body)
            async for message in found:
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
            await _check_stream(answer, content)
        chunks = await stack.enter_async_context(aclosing(answer.chunks()))
        while True:
            async with asyncio.timeout(min(spec.idle, end - monotonic())):
                piece = await anext(chunks, None)
            if piece is None:
                return
            if (size := size + len(piece)) > spec.max_bytes:
                raise TooLarge(f"The stream of {request.authority}", size=None, limit=spec.max_bytes)
            yield piece


async def _check_stream(answer: OpenResponse, content: str) -> None:
    kind = answer.headers.get("content-type", "")
    if not answer.is_error and (kind.lower().startswith(content) or answer.status == _NO_CONTENT):
        return
    body = (await answer.whole(_QUOTED))[0] if answer.is_error else b""
    raise RequestFailed(
        f"{answer.request.shown} answered {answer.status} ({kind or 'no content type'}) and no stream.",
        suggestion="Check the URL and the parameters against the service's own description.",
        cause="protocol",
        status=answer.status,
        body=body.decode(errors="replace"),
        retry_after=retry_after(answer.headers),
    )
