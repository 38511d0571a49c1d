"""Stdin/stdout claimed for the protocol; line buffer with a limit."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from types import FrameType

LINE_LIMIT = 16_000_000
"""The longest message that is read, in bytes."""

OVERLONG = b"\xff"
"""The placeholder of a line over the limit. It is not UTF-8, so it cannot be mistaken for a message."""


class LineBuffer:
    """Bytes that arrived and were not taken yet, one line at a time."""

    __slots__ = ("_buffer", "_is_closed", "_is_skipping", "_limit", "_returned", "_scanned")

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self._buffer = bytearray()
        self._limit = limit
        self._returned: bytes | None = None
        self._scanned = 0
        self._is_skipping = False
        self._is_closed = False

    @property
    def is_ended(self) -> bool:
        """Whether no line is left and none will come."""
        return self._is_closed and not self._buffer and self._returned is None

    def feed(self, data: bytes) -> None:
        """Add what was read; no data is the end of the stream."""
        self._buffer += data
        self._is_closed = self._is_closed or not data

    def push_back(self, line: bytes) -> None:
        """Put the last line back, to be read again."""
        self._returned = line

    def take(self) -> bytes | None:
        """Return the next line without its end, `OVERLONG` in the place of one over the limit; None for now."""
        if self._returned is not None:
            line, self._returned = self._returned, None
            return line
        while (end := self._buffer.find(b"\n", self._scanned)) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._scanned = 0
            if not self._is_skipping:
                return line if len(line) <= self._limit else OVERLONG
            self._is_skipping = False  # that was the tail of a line already reported as overlong
        return self._last() if self._is_closed else self._wait()

    def _wait(self) -> bytes | None:
        self._scanned = len(self._buffer)
        if self._scanned <= self._limit:
            return None
        self._buffer.clear()
        self._scanned = 0
        is_new, self._is_skipping = not self._is_skipping, True
        return OVERLONG if is_new else None

    def _last(self) -> bytes | None:
        line = bytes(self._buffer)
        self._buffer.clear()
        return line if line and not self._is_skipping else None


class StdioPipe:
    """The two ends that carry the conversation: private duplicates, which no child inherits."""

    __slots__ = ("inbound", "outbound")

    def __init__(self, inbound: int, outbound: int) -> None:
        self.inbound = inbound
        self.outbound = outbound

    def write(self, data: bytes) -> None:
        """Write all of the data, however long it takes; a client that has left ends the process quietly."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self.outbound, rest) :]
        except BrokenPipeError:
            raise SystemExit(0) from None


def claim() -> StdioPipe:
    """Take standard input and output for the protocol, and leave nothing and standard error in their places.

    A stray `print`, of Kiwi or of a library, then goes to standard error and never between two messages; and a
    program that reads standard input finds it empty instead of eating a request.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    wire = StdioPipe(_duplicate(0), _duplicate(1))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    try:
        os.dup2(2, 1)
    except OSError:  # started without standard error
        os.dup2(nothing, 1)
    os.close(nothing)
    return wire


def _duplicate(number: int) -> int:
    try:
        # Above the standard three: one of them may be closed, and its number must not become the wire.
        private = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:
        raise SystemExit(0) from None  # there is no client to talk to
    os.set_blocking(private, True)
    return private


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)
