"""The answer to a message that was posted: plain JSON, or a stream of events once something is told before it."""

from __future__ import annotations

import asyncio
from typing import Final

from mcp_types import JSONRPCNotification
from starlette.types import Send

from kiwi_mcp.surfaces.mcp.lean import Answer
from kiwi_mcp.surfaces.mcp.streams import encoded

_JSON: Final = (b"content-type", b"application/json")
_EVENTS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"connection", b"keep-alive"),
    (b"x-accel-buffering", b"no"),
)
_PING: Final = b": ping\r\n\r\n"

Header = tuple[bytes, bytes]


class Reply:
    """What goes back to one client; `headers` are sent besides those of its form."""

    def __init__(self, send: Send, *headers: Header) -> None:
        self._send = send
        self._headers = headers
        self._is_begun = False
        self._turn = asyncio.Lock()

    async def tell(self, message: JSONRPCNotification) -> None:
        """Send what comes before the answer."""
        await self._stream(_event(encoded(message)))

    async def ping(self) -> None:
        """Let whoever stands in between see that the answer is still to come."""
        await self._stream(_PING)

    async def answer(self, message: Answer) -> None:
        """Send the answer itself."""
        body = encoded(message)
        async with self._turn:
            if self._is_begun:
                await self._send({"type": "http.response.body", "body": _event(body)})
                return
            length = (b"content-length", str(len(body)).encode())
            await self._begin(_JSON, length)
            await self._send({"type": "http.response.body", "body": body})

    async def end(self) -> bool:
        """End a stream without an answer, and say whether there was one."""
        if self._is_begun:
            await self._send({"type": "http.response.body", "body": b""})
        return self._is_begun

    async def _stream(self, chunk: bytes) -> None:
        async with self._turn:
            if not self._is_begun:
                await self._begin(*_EVENTS)
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _begin(self, *headers: Header) -> None:
        self._is_begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": [*headers, *self._headers]})


def _event(message: bytes) -> bytes:
    return b"event: message\r\ndata: %b\r\n\r\n" % message
