"""The browser of a person: opens a login page, and returns to a callback on this machine."""

from __future__ import annotations

import asyncio
import os
import sys
import webbrowser
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from urllib.parse import parse_qsl

from msgspec import Struct

from kiwi_mcp.domain.errors import Unavailable

PATH = "/callback"
_HOST = "127.0.0.1"
_HEAD_LIMIT = 32_768
_VISITORS = 16
"""Connections that may be open at the same time."""


Words = Mapping[str, str]


class LoginCallback(Struct, frozen=True):
    """A place on this machine that the browser is sent back to."""

    address: str
    _came: asyncio.Future[Words]

    async def words(self, limit: float) -> Words:
        """Return the query parameters that the browser sent back; fail after `limit` seconds."""
        try:
            async with asyncio.timeout(limit):
                return await self._came
        except TimeoutError:
            raise Unavailable(
                f"The login was not finished within {limit:g} seconds.", suggestion="Start it again."
            ) from None


@asynccontextmanager
async def login_callback(is_ours: Callable[[Words], bool], *, port: int = 0) -> AsyncIterator[LoginCallback]:
    """Listen on the loopback address, and nowhere else, until the browser comes back with words that are ours."""
    came: asyncio.Future[Words] = asyncio.get_running_loop().create_future()
    gate = asyncio.Semaphore(_VISITORS)

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(10.0), gate:
                words = _asked(await reader.readuntil(b"\r\n\r\n"), listener.sockets[0].getsockname()[1])
                is_right = words is not None and is_ours(words)
                done = _answer("200 OK", "You can close this window.")
                writer.write(done if is_right else _answer("400 Bad Request", "Kiwi did not ask for this."))
                await writer.drain()
            if words is not None and is_right and not came.done():
                came.set_result(words)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            pass
        finally:
            writer.close()

    try:
        listener = await asyncio.start_server(visit, _HOST, port, limit=_HEAD_LIMIT)
    except OSError:
        if not port:
            raise
        listener = await asyncio.start_server(visit, _HOST, 0, limit=_HEAD_LIMIT)
    async with listener:
        yield LoginCallback(f"http://{_HOST}:{listener.sockets[0].getsockname()[1]}{PATH}", came)


def open_address(url: str) -> bool:
    """Open an address in the person's browser, where there is one with a window; say whether that was tried."""
    if sys.platform == "linux" and not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")):
        return False  # what is there is a browser in the terminal, if any, which would take that over
    try:
        return webbrowser.open(url)
    except (OSError, webbrowser.Error):
        return False


def _asked(head: bytes, port: int) -> Words | None:
    """Return the words of a request for our own page; None where it is for another one, or from another site."""
    lines = head.decode("latin-1").split("\r\n")
    method, _, rest = lines[0].partition(" ")
    path, _, query = rest.partition(" ")[0].partition("?")
    hosts = [line.partition(":")[2].strip() for line in lines[1:] if line.lower().startswith("host:")]
    if method != "GET" or path != PATH or hosts != [f"{_HOST}:{port}"]:
        return None
    try:
        pairs = parse_qsl(query, max_num_fields=50)
    except ValueError:
        return None
    words = dict(pairs)
    return words if len(words) == len(pairs) else None  # a word that is there twice has no meaning


def _answer(status: str, said: str) -> bytes:
    body = f"<!doctype html><meta charset=utf-8><title>Kiwi</title><p>{said}</p>".encode()
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: text/html; charset=utf-8\r\ncontent-length: {len(body)}\r\n"
        "cache-control: no-store\r\nreferrer-policy: no-referrer\r\n"
        "content-security-policy: default-src 'none'\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
