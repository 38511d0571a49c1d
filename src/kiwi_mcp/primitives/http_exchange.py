"""One exchange: a request sent, its redirects followed, tried again where that is allowed, until an answer begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from time import monotonic

import httpcore2

from kiwi_mcp.domain.errors import RequestFailed, TooLarge
from kiwi_mcp.domain.outcome import Progress, Report
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.primitives.egress_record import Ledger, Row
from kiwi_mcp.primitives.http_faults import explaining
from kiwi_mcp.primitives.http_pool import Network
from kiwi_mcp.primitives.http_reply import headers_of, retry_after, unpacked
from kiwi_mcp.primitives.http_request import Request, redirect, refuse_denied

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of an answer, with its body still to come."""

    request: Request
    response: httpcore2.Response
    headers: Mapping[str, str]
    attempts: int
    row: Row
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
        """Give the connection back, or close it where the body was not read to its end."""
        await self.response.aclose()


async def open_answer(spec: HttpSpec, request: Request, through: Network, report: Report, ledger: Ledger) -> Answer:
    """Return the first answer that is not to be asked for again."""
    end = monotonic() + spec.timeout
    for attempt in count(1):
        wait = min(spec.retry.delay * 2.0 ** min(attempt - 1, 30), spec.retry.max_delay)
        is_last = attempt >= spec.retry.attempts
        try:
            last, response, row = await _follow(spec, request, through, ledger)
        except RequestFailed as fault:
            if is_last or not _may_repeat(request, fault) or monotonic() + wait >= end:
                raise
            reason = fault.message
        else:
            answer = Answer(last, response, headers_of(response.headers), attempt, row)
            if is_last or answer.status not in spec.retry.statuses:
                return answer
            if (asked := retry_after(answer.headers)) is not None:
                wait = min(asked, spec.retry.max_delay)
            if monotonic() + wait >= end:
                return answer
            await answer.aclose()
            reason = f"The server answered {answer.status}."
        report(Progress(f"{reason} Trying again in {wait:.1f} s."))
        await asyncio.sleep(wait)
    raise AssertionError("attempts are counted")


def _may_repeat(request: Request, fault: RequestFailed) -> bool:
    """Whether nothing was sent, or sending it again does no harm."""
    match fault.details.get("cause"):
        case "dns" | "connect":
            return True
        case "protocol":
            return request.method in _REPEATABLE
        case _:
            return False


async def _follow(
    spec: HttpSpec, request: Request, through: Network, ledger: Ledger
) -> tuple[Request, httpcore2.Response, Row]:
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


async def _exchange(spec: HttpSpec, request: Request, through: Network) -> httpcore2.Response:
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
