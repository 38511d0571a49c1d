"""The answer to a message that was posted: plain JSON, or a stream of events once something is told before it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeAlias

from mcp_types import JSONRPCMessage, JSONRPCNotification
from starlette.types import Send

from kiwi_mcp.surfaces.mcp.lean import Answer

_JSON: Final = (b"content-type", b"application/json")
_EVENTS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"connection", b"keep-alive"),
    (b"x-accel-buffering", b"no"),
)
_PING: Final = b": ping\r\n\r\n"

PING_SECONDS: Final = 15.0
"""How long whoever stands between a client and its answer hears nothing."""

Header: TypeAlias = tuple[bytes, bytes]
Encode: TypeAlias = Callable[[JSONRPCMessage], bytes]
"""Writes a message as JSON."""


class Reply:
    """What goes back to one client; `headers` are sent besides those of its form."""

    def __init__(self, send: Send, encode: Encode, *headers: Header) -> None:
        self._send = send
        self._encode = encode
        self._headers = headers
        self._is_begun = False
        self._turn = asyncio.Lock()

    async def tell(self, message: JSONRPCNotification) -> None:
        """Send what comes before the answer."""
        await self._stream(_event(self._encode(message)))

    async def answer(self, message: Answer, *, status: int = 200) -> None:
        """Send the answer itself; `status` is that of an answer which is not a stream already."""
        body = self._encode(message)
        async with self._turn:
            if self._is_begun:
                await self._send({"type": "http.response.body", "body": _event(body)})
                return
            length = (b"content-length", str(len(body)).encode())
            await self._begin(_JSON, length, status=status)
            await self._send({"type": "http.response.body", "body": body})

    async def keep_alive(self, *waited_for: asyncio.Task[Answer] | asyncio.Task[None]) -> None:
        """Wait until one of several has ended; the client is not left in silence for long."""
        while not (await asyncio.wait(waited_for, timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED))[0]:
            await self._stream(_PING)

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

    async def _begin(self, *headers: Header, status: int = 200) -> None:
        self._is_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._headers]})


def _event(message: bytes) -> bytes:
    return b"event: message\r\ndata: %b\r\n\r\n" % message
