"""Pipes of a process: lines that are read, data that is written."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable

from kiwi_mcp.domain.errors import TooLarge

UNREAD = 64_000_000
"""The most that may wait for a reader which does not read, in bytes."""
_AHEAD = 1_000_000
"""The maximum number of bytes that are read ahead of the reader of the lines."""
_LINE = 50
"""What a line takes in memory besides its bytes: without it, empty lines could be read ahead without end."""
_CHUNK = 65_536
_LAST_CHUNKS = 32
"""The maximum number of chunks read from a pipe that is closed here while other processes have it open."""


class LineReader:
    """The reading end of a pipe as lines, read only as far ahead as a limit allows."""

    def __init__(self, descriptor: int, longest: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._longest = longest
        self._ready: deque[bytes] = deque()
        self._ahead = 0
        self._rest = bytearray()
        self._is_open, self._is_reading, self._is_overlong = True, False, False
        self._waiter: asyncio.Future[None] | None = None
        os.set_blocking(descriptor, False)
        self._resume()

    async def take(self) -> bytes | None:
        """Return the next line without its end, or None where there will be none; one over the limit is refused."""
        while not self._ready:
            if self._is_overlong:
                raise TooLarge("A line of the process's output", size=None, limit=self._longest)
            if not self._is_open:
                return None
            self._resume()
            self._waiter = self._loop.create_future()
            await self._waiter
        line = self._ready.popleft()
        self._ahead -= len(line) + _LINE
        return line

    def close(self) -> None:
        """Read the data that is available now and stop; its lines can still be taken."""
        for _ in range(_LAST_CHUNKS):
            if not self._is_open or self._is_overlong or not self._read():
                break
        self._shut()

    def _ready_to_read(self) -> None:
        if self._read() and (self._is_overlong or self._ahead > _AHEAD):
            self._pause()

    def _read(self) -> bool:
        """Read one available chunk, and return whether there was one. The end closes the pipe."""
        try:
            data = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._cut(data)
        else:
            self._shut()
        return bool(data)

    def _cut(self, data: bytes) -> None:
        *whole, rest = data.split(b"\n")
        for line in whole:
            self._rest += line
            if self._refuse_overlong():
                return
            self._add()
        self._rest += rest
        self._refuse_overlong()
        if whole:
            self._wake()

    def _refuse_overlong(self) -> bool:
        if len(self._rest) > self._longest:
            self._is_overlong = True
            self._rest.clear()
            self._wake()
        return self._is_overlong

    def _add(self) -> None:
        self._ready.append(bytes(self._rest))
        self._ahead += len(self._rest) + _LINE
        self._rest.clear()

    def _shut(self) -> None:
        if self._is_open:
            self._is_open = False
            self._pause()
            os.close(self._descriptor)
            if self._rest:  # a last line without its end
                self._add()
            self._wake()

    def _resume(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            self._loop.add_reader(self._descriptor, self._ready_to_read)

    def _pause(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._descriptor)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class PipeWriter:
    """The writing end of a pipe: data waits in memory until it is read, up to a limit."""

    def __init__(self, descriptor: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._waiting = bytearray()
        self._is_open = True
        os.set_blocking(descriptor, False)

    def write(self, data: bytes) -> None:
        """Write, together with all data of this turn of the event loop. The rest is written when the pipe is free."""
        if not self._is_open:
            raise BrokenPipeError
        if len(self._waiting) + len(data) > UNREAD:
            raise BrokenPipeError
        if not self._waiting:
            self._loop.call_soon(self._begin)
        self._waiting += data

    def _begin(self) -> None:
        if self._waiting and self._is_open:
            self._flush()
            if self._waiting and self._is_open:
                self._loop.add_writer(self._descriptor, self._flush)

    def _flush(self) -> None:
        try:
            with memoryview(self._waiting) as view:
                written = os.write(self._descriptor, view[:_CHUNK])
            del self._waiting[:written]
        except BlockingIOError:
            return
        except OSError:  # the reader has closed the pipe
            self._shut()
            return
        if not self._waiting:
            self._loop.remove_writer(self._descriptor)

    def close(self) -> None:
        """Write as much as the pipe accepts now, then close it. The rest is dropped."""
        if self._is_open and self._waiting:
            self._flush()
        self._shut()

    def _shut(self) -> None:
        if self._is_open:
            self._is_open = False
            self._waiting.clear()
            self._loop.remove_writer(self._descriptor)
            os.close(self._descriptor)


_AT_ONCE = 8
"""Chunks taken from one pipe before the others have their turn."""


class PipeReader:
    """The reading end of a pipe, read as fast as data comes until its end."""

    def __init__(self, descriptor: int, take: Callable[[bytes], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        self._take = take
        self.ended: asyncio.Future[None] = self._loop.create_future()
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self.read)

    def read(self) -> None:
        """Read the data that is available now."""
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
