"""The primitive `http_client`: requests, and streams of lines and events, under the owner's rules.

Every connection goes to an address that was checked (`http_pool`), every redirect is a request of its own under the
same rules, certificates are always verified, and everything has a limit in time and size.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from time import monotonic
from types import MappingProxyType

from kiwi_mcp.domain.errors import RequestFailed, TooLarge
from kiwi_mcp.domain.outcome import Report, silent
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.primitives.egress_record import Ledger
from kiwi_mcp.primitives.http_exchange import Answer, open_answer
from kiwi_mcp.primitives.http_faults import limited
from kiwi_mcp.primitives.http_pool import Network
from kiwi_mcp.primitives.http_reply import HttpReply
from kiwi_mcp.primitives.http_request import Request, prepare
from kiwi_mcp.primitives.secrets import Redactor
from kiwi_mcp.primitives.sse import Events, Lines, ServerEvent
from kiwi_mcp.primitives.websocket import messages

__all__ = ["HttpReply", "Network", "ServerEvent", "aclose", "events", "lines", "network", "send", "websocket"]

IDLE = 60.0
"""How long a stream may be silent, in seconds, where its own limit is not shorter."""
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
    ledger: Ledger | None = None,
) -> HttpReply:
    """Send a request and return the whole answer; any status is an answer. What left is written into the ledger."""
    started, redactor = monotonic(), Redactor(secrets)
    request = prepare(spec, secrets)
    with limited(spec, request, redactor):
        async with asyncio.timeout(spec.timeout):
            begun = await open_answer(spec, request, through, report, ledger or Ledger())
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
    ledger: Ledger | None = None,
) -> AsyncGenerator[ServerEvent, None]:
    """Yield the server-sent events of an answer, up to `max_events`."""
    redactor, parser, left = Redactor(secrets), Events(), spec.max_events
    request = prepare(spec, secrets, accept="text/event-stream")
    with limited(spec, request, redactor):
        answered = _pieces(spec, request, through, report, ledger or Ledger(), content="text/event-stream")
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
    ledger: Ledger | None = None,
) -> AsyncGenerator[str, None]:
    """Yield the lines of an answer that are not empty, up to `max_events`."""
    redactor, parser, left = Redactor(secrets), Lines(), spec.max_events
    request = prepare(spec, secrets)
    with limited(spec, request, redactor):
        async with aclosing(_pieces(spec, request, through, report, ledger or Ledger())) as pieces:
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
    ledger: Ledger | None = None,
) -> AsyncGenerator[str | bytes, None]:
    """Yield the messages of a WebSocket, up to `max_events`; the body, if there is one, is sent first."""
    redactor = Redactor(secrets)
    request = prepare(spec, secrets, schemes=("ws", "wss"))
    with limited(spec, request, redactor):
        async with aclosing(messages(spec, request, through)) as found:
            row = (ledger or Ledger()).note(request.host, request.port, "allowed")
            row.bytes_out += len(request.body)
            async for message in found:
                row.bytes_in += len(message)
                yield redactor.text(message) if isinstance(message, str) else redactor.clean(message)


async def aclose() -> None:
    """Close the shared connections of this event loop."""
    await network.aclose()


async def _pieces(
    spec: HttpSpec, request: Request, through: Network, report: Report, ledger: Ledger, content: str = ""
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
            async with asyncio.timeout(min(IDLE, end - monotonic())):
                piece = await anext(chunks, None)
            if piece is None:
                return
            if (size := size + len(piece)) > spec.max_bytes:
                raise TooLarge(f"The stream of {request.authority}", size=None, limit=spec.max_bytes)
            yield piece


async def _check_stream(answer: Answer, content: str) -> None:
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
    )
