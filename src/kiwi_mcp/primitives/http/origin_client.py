"""An HTTP client bound to one origin, for the MCP SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Mapping
from secrets import token_hex
from time import monotonic
from typing import Protocol
from weakref import WeakKeyDictionary

import httpcore2
import httpx2
from msgspec.structs import replace

from kiwi_mcp.domain.errors import AddressDenied, KiwiError
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.primitives.http.client import headers_of, network
from kiwi_mcp.primitives.http.pool import Network
from kiwi_mcp.primitives.http.request import WireRequest, explaining, prepare, refuse_denied
from kiwi_mcp.primitives.secrets.redaction import Redactor

CONNECT, WRITE = 10.0, 30.0
"""How long a connection, and one piece of a body that is sent, may take, in seconds."""
_INTERNAL = -32603
_SPOKEN = frozenset({400, 404, 405})
"""Statuses that say something in the protocols spoken here, and are passed on as they are."""
_OK, _NOT_FOUND, _FIRST_ERROR = 200, 404, 400
_LOST = "is_session_lost"
_LOGIN = f"login_required_{token_hex(8)}"  # a word that no server knows, so that none can say it
RESUMED = 100
"""How often in a row the stream of one request may be opened that breaks off soon."""
LASTING = 10.0
"""How long a stream lasts that did not break off soon, in seconds."""
_HELD = 1_000_000
"""The maximum size of a line that is buffered until its end arrives, in bytes."""


EventFault = httpx2.SSEError
"""An event in a stream that cannot be taken, and why."""


class Bearer(Protocol):
    """Provides the bearer token of each request, which may change between requests."""

    async def token(self) -> Secret | None:
        """Return the token of the next request, if there is one."""

    def is_asked(self, status: int, challenge: str) -> bool:
        """Whether a refusal asks for another token."""

    async def instead(self, token: Secret | None, status: int, challenge: str) -> Secret | None:
        """Return the token to send in place of one that was refused; None if the user has to log in first."""


def client(
    spec: HttpSpec,
    *,
    secrets: Mapping[str, str],
    through: Network = network,
    streamed: Collection[str] = ("GET", "POST"),
    bearer: Bearer | None = None,
) -> tuple[str, httpx2.AsyncClient]:
    """Return the address with its secrets in place, and a client that can reach its origin and no other.

    The responses to the methods in `streamed` may be event streams. A stream has no end, so it has no total size limit.
    """
    request = prepare(spec, secrets)
    own = {"accept", "accept-encoding", "content-type"}
    headers = {name: value for name, value in request.headers if name.lower() not in own}
    return str(request.url), httpx2.AsyncClient(
        transport=_Origin(spec, request, through, streamed, bearer),
        headers={**headers, "accept-encoding": "identity"},
        # Silence between the events of a stream is normal. A caller that waits for a response has its own timeout.
        timeout=httpx2.Timeout(None, connect=CONNECT, write=WRITE, pool=CONNECT),
        follow_redirects=False,
        trust_env=False,
    )


class _Origin(httpx2.AsyncBaseTransport):
    """Requests to one origin, over the pools of the network."""

    def __init__(
        self, spec: HttpSpec, first: WireRequest, through: Network, streamed: Collection[str], bearer: Bearer | None
    ) -> None:
        self._spec = spec
        self._first = first
        self._through = through
        self._streamed = streamed
        self._bearer = bearer
        self._taken_up: WeakKeyDictionary[asyncio.Task[object], tuple[int, float]] = WeakKeyDictionary()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send one request and return its answer with the body still to come."""
        ours = replace(self._first, method=request.method, url=request.url)
        if ours.origin != self._first.origin:
            raise AddressDenied(
                f"{self._first.authority} sends its visitors to {ours.authority}, which is not asked.",
                suggestion="Use that address itself, if it is the intended one.",
            )
        refuse_denied(ours, self._spec.denied)
        if ours.method == "GET":
            self._count_stream()
        bearer, is_again = self._bearer, False
        token = await bearer.token() if bearer else None
        while True:  # a request that is refused is sent once more where there is another token
            answer = await self._sent(ours, request, token)
            headers = headers_of(answer.headers)
            challenge = headers.get("www-authenticate", "")
            if bearer is None or not bearer.is_asked(answer.status, challenge):
                return await self._judged(ours, request, answer, headers, token)
            await answer.aclose()
            another = await bearer.instead(token, answer.status, challenge)
            if another is None or is_again:
                return _error_response(answer.status, headers, "wants a login", mark=_LOGIN)
            token, is_again = another, True

    async def _sent(self, ours: WireRequest, request: httpx2.Request, token: Secret | None) -> httpcore2.Response:
        pool = self._through.pool(ours.host, ours.port, self._spec.granted, is_secure=ours.url.scheme == "https")
        assert isinstance(request.stream, httpx2.AsyncByteStream)  # an async client makes no other
        own = [(b"Authorization", f"Bearer {token.reveal()}".encode())] if token else []
        message = httpcore2.Request(
            request.method,
            httpcore2.URL(scheme=ours.url.raw_scheme, host=ours.host, port=ours.port, target=ours.url.raw_path),
            headers=[*request.headers.raw, *own],
            content=request.stream,
            extensions=request.extensions,
        )
        with explaining(ours):
            return await pool.handle_async_request(message)

    async def _judged(
        self,
        ours: WireRequest,
        request: httpx2.Request,
        answer: httpcore2.Response,
        headers: Mapping[str, str],
        token: Secret | None,
    ) -> httpx2.Response:
        if answer.status == _NOT_FOUND and "mcp-session-id" in request.headers:
            await answer.aclose()
            return _error_response(answer.status, {}, "has forgotten the session", mark=_LOST)
        is_json = headers.get("content-type", "").lower().startswith("application/json")
        is_packed = headers.get("content-encoding", "identity").lower() != "identity"
        if is_packed or (answer.status >= _FIRST_ERROR and answer.status not in _SPOKEN and not is_json):
            await answer.aclose()
            packed = "compressed its answer, which was not asked for"
            return _error_response(answer.status, headers, packed if is_packed else f"answered {answer.status}")
        is_stream = headers.get("content-type", "").lower().startswith("text/event-stream")
        is_endless = is_stream and answer.status == _OK and ours.method in self._streamed
        limit = None if is_endless else self._spec.max_bytes
        redactor = Redactor({"ACCESS_TOKEN": token.reveal()}) if token else None
        return httpx2.Response(answer.status, headers=answer.headers, stream=_Body(ours, answer, limit, redactor))

    def _count_stream(self) -> None:
        """Refuse to take up a stream once more that breaks off each time: the library would go on for ever."""
        task = asyncio.current_task()
        assert task is not None  # a request is made by a task, and the library makes one for each of its own
        now = monotonic()
        count, opened_at = self._taken_up.get(task, (0, now))
        count = count + 1 if now - opened_at < LASTING else 1
        self._taken_up[task] = count, now
        if count > RESUMED:
            raise httpx2.StreamError(f"the stream broke off {RESUMED} times in a row")


class _Body(httpx2.AsyncByteStream):
    """The body of a response, up to a limit. Failures are raised as the errors that the library expects."""

    def __init__(
        self, request: WireRequest, answer: httpcore2.Response, limit: int | None, redactor: Redactor | None
    ) -> None:
        self._request = request
        self._answer = answer
        self._limit = limit
        self._redactor = redactor

    async def __aiter__(self) -> AsyncIterator[bytes]:
        chunks = self._chunks()
        async for chunk in chunks if self._redactor is None else _clean(chunks, self._redactor):
            yield chunk

    async def _chunks(self) -> AsyncIterator[bytes]:
        size = 0
        try:
            with explaining(self._request):
                async for chunk in self._answer.aiter_stream():
                    size += len(chunk)
                    if self._limit is not None and size > self._limit:
                        raise httpx2.StreamError(f"the answer has more than {self._limit:,} bytes")
                    yield chunk
        except KiwiError as fault:
            raise httpx2.StreamError(fault.message) from None

    async def aclose(self) -> None:
        await self._answer.aclose()


async def _clean(chunks: AsyncIterator[bytes], redactor: Redactor) -> AsyncIterator[bytes]:
    """Yield a body without the token it was asked for with; by whole lines, since an event ends with one."""
    held = b""
    async for chunk in chunks:
        held += chunk
        end = held.rfind(b"\n", len(held) - len(chunk)) + 1
        if not end and len(held) > _HELD:
            held = redactor.clean(held)
            end = max(0, len(held) - redactor.longest)  # what is left may be the start of a token
        if end:
            yield redactor.clean(held[:end])
            held = held[end:]
    yield redactor.clean(held)


def is_session_lost(data: object) -> bool:
    """Whether the data of an error tells that the server has forgotten the session, so that nothing was done."""
    return isinstance(data, Mapping) and data.get(_LOST) is True


def is_login_wanted(data: object) -> bool:
    """Whether the data of an error says that the user has to log in first."""
    return isinstance(data, Mapping) and data.get(_LOGIN) is True


def _error_response(status: int, headers: Mapping[str, str], what: str, *, mark: str = "") -> httpx2.Response:
    """Return an answer that no protocol error explains as one that does, so that its status is not lost."""
    data: dict[str, str | int] = {"http_status": status}
    if mark:
        data[mark] = True
    if challenge := headers.get("www-authenticate"):
        data["www_authenticate"] = challenge[:1_000]
    error = {"code": _INTERNAL, "message": f"The server {what}.", "data": data}
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()
    shown = status if status >= _FIRST_ERROR else 502
    return httpx2.Response(shown, headers={"content-type": "application/json"}, content=body)
