"""Progress of a process: the lines it prints, told to the caller while it runs, at most ten a second."""

from __future__ import annotations

import asyncio
import re

from kiwi_mcp.domain.outcome import Progress, Report
from kiwi_mcp.primitives.redaction import Redactor

INTERVAL = 0.1
"""The shortest time between two reports, in seconds."""
_LONGEST = 500
"""The most of a line that is reported, in bytes."""
_COUNTED = re.compile(r"::progress\s+(\d{1,15}(?:\.\d{1,9})?)(?:/(\d{1,15}(?:\.\d{1,9})?))?(?:\s+(.*))?", re.DOTALL)


class Lines:
    """One stream cut into lines, each handed on as progress."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._rest = b""

    def add(self, data: bytes) -> None:
        """Take in more of the stream; only the last line of a chunk is told, as the others would be dropped anyway."""
        complete, ended, rest = data.rpartition(b"\n")
        if ended:
            line = complete.rpartition(b"\n")[2] if b"\n" in complete else (self._rest + complete)[: self._pace.most]
            self._rest = b""
            self._pace.tell(line)
        self._rest = (self._rest + rest)[: self._pace.most]


class Pace:
    """Reports at a pace a caller can follow: of lines that come too fast, the newest is told."""

    def __init__(self, report: Report, redactor: Redactor) -> None:
        self._loop = asyncio.get_running_loop()
        self._report = report
        self._redactor = redactor
        self.most = _LONGEST * 2 + redactor.longest
        """The most of a line that is kept, in bytes: what is told of it ends well before."""
        self._waiting: bytes | None = None
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, line: bytes) -> None:
        """Report a line now, or as soon as the pace allows."""
        if not line.strip():
            return
        self._waiting = line
        if self._timer is None:
            self._now()

    def finish(self) -> None:
        """Report the line that still waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting is not None:
            self._report(self._progress(self._waiting))
            self._waiting = None

    def _now(self) -> None:
        self._timer = None
        if self._waiting is not None:
            line, self._waiting = self._waiting, None
            self._timer = self._loop.call_later(INTERVAL, self._now)
            self._report(self._progress(line))

    def _progress(self, line: bytes) -> Progress:
        is_whole = len(line) < self.most
        cleaned = self._redactor.clean(line) if is_whole else self._redactor.beginning(line)
        text = cleaned.decode(errors="replace").strip()[:_LONGEST]
        if (counted := _COUNTED.fullmatch(text)) is None:
            return Progress(message=text)
        done, total, message = counted.groups()
        return Progress(message=message or "", done=float(done), total=float(total) if total else None)
