"""The ends of pipes that Kiwi holds, served by the event loop: what is read is capped, what is written never blocks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress

_CHUNK = 65_536
_AT_ONCE = 8
"""Chunks taken from one pipe before the others have their turn."""


class Capture:
    """The first and the last bytes of a stream, and how many there were in between.

    `margin` more are kept at both cuts, so that a secret which lies across one can be recognised before it is cut.
    """

    def __init__(self, limit: int, margin: int = 0) -> None:
        self.total = 0
        self._limit = limit
        self._margin = margin
        self._head = bytearray()
        self._tail = bytearray()

    @property
    def is_cut(self) -> bool:
        """Whether there was more than the limit."""
        return self.total > self._limit

    def add(self, data: bytes) -> None:
        """Take in more of the stream."""
        self.total += len(data)
        room = self._limit + self._margin - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 2 * self._reach:
                del self._tail[: -self._reach]

    @property
    def _reach(self) -> int:
        return self._limit // 2 + self._margin + 1

    def kept(self, clean: Callable[[bytes], bytes]) -> bytes:
        """Return what was kept, cleaned: all of it, or the first half, a line that says so, and the last half."""
        if not self.is_cut:
            return clean(bytes(self._head))
        half = self._limit // 2
        rest = (bytes(self._head) + bytes(self._tail))[-self._reach :]
        first, last = clean(bytes(self._head))[:half], clean(rest)
        note = f"\n[{self.total - 2 * half} bytes left out]\n".encode()
        return first + note + (last[-half:] if half else b"")

    def first(self) -> bytes:
        """Return the beginning alone, up to the limit."""
        return bytes(self._head[: self._limit])


class Source:
    """The reading end of a pipe, read as fast as data comes until its end."""

    def __init__(self, descriptor: int, take: Callable[[bytes], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._take = take
        self.ended: asyncio.Future[None] = self._loop.create_future()
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self.read)

    def read(self) -> None:
        """Take what is there now."""
        for _ in range(_AT_ONCE):
            if self.ended.done():
                return
            try:
                data = os.read(self._descriptor, _CHUNK)
            except BlockingIOError:
                return
            if data:
                self._take(data)
            else:
                self.close()

    def close(self) -> None:
        """Stop reading."""
        if not self.ended.done():
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self.ended.set_result(None)


class Sink:
    """The writing end of a pipe: bytes are written as the reader takes them, then the end is delivered."""

    def __init__(self, descriptor: int, data: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._rest = memoryview(data)
        self._is_open = True
        os.set_blocking(descriptor, False)
        self._ready()
        if self._is_open:
            self._loop.add_writer(descriptor, self._ready)

    def _ready(self) -> None:
        try:
            with suppress(BlockingIOError):
                while self._rest:
                    self._rest = self._rest[os.write(self._descriptor, self._rest) :]
        except OSError:  # the reader has closed its end, which is its right
            self._rest = self._rest[:0]
        if not self._rest:
            self.close()

    def close(self) -> None:
        """Deliver the end, whatever was not written."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_writer(self._descriptor)
            os.close(self._descriptor)
