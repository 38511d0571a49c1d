"""Parsers of lines and server-sent events, with limits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

from kiwi_mcp.domain.errors import TooLarge

LONGEST_LINE = 1_000_000
"""The most a line may have, in bytes."""
LONGEST_EVENT = 4_000_000
"""The most the data of one event may have, in characters."""
_END = re.compile(rb"\r\n|\r|\n")


class ServerEvent(Struct, frozen=True):
    """One event: its type, its data, the last id seen, and the reconnection time if the server sent one."""

    event: str
    data: str
    id: str = ""
    retry: int | None = None


class LineSplitter:
    """A stream of bytes cut into lines at CR, LF or both."""

    def __init__(self, limit: int = LONGEST_LINE) -> None:
        self._limit = limit
        self._rest = bytearray()
        self._skips_feed = False

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the lines that are complete now."""
        if not data:
            return
        is_cut_after_return = data.endswith(b"\r")
        if self._skips_feed:  # the second half of a CR LF that was cut in two
            data = data.removeprefix(b"\n")
        *lines, rest = _END.split(data)
        for line in lines:
            self._add(line)
            yield self._taken()
        self._add(rest)
        self._skips_feed = is_cut_after_return

    def finish(self) -> Iterator[str]:
        """Yield a last line that has no end."""
        if self._rest:
            yield self._taken()

    def _add(self, data: bytes) -> None:
        self._rest += data
        if len(self._rest) > self._limit:
            raise TooLarge("A line of the stream", size=len(self._rest), limit=self._limit)

    def _taken(self) -> str:
        line = self._rest.decode(errors="replace")
        self._rest.clear()
        return line


class Events:
    """A stream of bytes read as server-sent events; one that is cut off by the end is dropped, as the grammar says."""

    def __init__(self) -> None:
        self._lines = LineSplitter()
        self._is_first = True
        self._data: list[str] = []
        self._size = 0
        self._event = ""
        self._id = ""
        self._retry: int | None = None

    def feed(self, data: bytes) -> Iterator[ServerEvent]:
        """Yield the events that are complete now."""
        for line in self._lines.feed(data):
            text = line.removeprefix("\ufeff") if self._is_first else line
            self._is_first = False
            if text:
                name, _, value = text.partition(":")  # a comment has no name
                self._field(name, value.removeprefix(" "))
                continue
            event = ServerEvent(self._event or "message", "\n".join(self._data), self._id, self._retry)
            has_data = bool(self._data)
            self._data, self._size, self._event, self._retry = [], 0, "", None
            if has_data:
                yield event

    def _field(self, name: str, value: str) -> None:
        match name:
            case "data":
                self._size += len(value) + 1
                if self._size > LONGEST_EVENT:
                    raise TooLarge("An event of the stream", size=self._size, limit=LONGEST_EVENT, unit="characters")
                self._data.append(value)
            case "event":
                self._event = value
            case "id" if "\0" not in value:
                self._id = value
            case "retry" if value.isascii() and value.isdigit():
                self._retry = int(value[:12])
