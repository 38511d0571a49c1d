"""A stream of bytes in, whole lines out, with a limit on how long a line may be."""

from __future__ import annotations

LINE_LIMIT = 16_000_000
"""The longest message that is read, in bytes."""

OVERLONG = b"\xff"
"""What stands for a line over the limit. It is no UTF-8, so it cannot be mistaken for a message."""


class Lines:
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
        """Give the line that was taken last back, to be taken again."""
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
            self._is_skipping = False  # that was the tail of a line already told as overlong
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
