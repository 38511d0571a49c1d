"""Replies: their headers, and their bodies unpacked within a limit."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from kiwi_mcp.domain.errors import RequestFailed

_PIECE = 1_048_576
"""The most that is unpacked at once, in bytes."""


@dataclass(frozen=True, slots=True)
class HttpReply:
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
    duration: float = field(default=0.0, compare=False)


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
    """Yield a body in pieces of bounded size, whatever it was packed from; an unknown packing is left as it is."""
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
