"""A connection to a PostgreSQL server that may hang: it is waited for with a limit, and then left alone for a while."""

from __future__ import annotations

from time import monotonic
from typing import TypeVar

import psycopg
from psycopg.abc import PQGen

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.store.database import Row, longest_silence

_T = TypeVar("_T")
_INTERVAL = 0.1
_FIRST, _LONGEST = 5.0, 60.0


class Silence(psycopg.OperationalError):
    """A server that was connected has not answered in time."""


class Connection(psycopg.Connection[Row]):
    """A connection that is closed once the server is silent for longer than whoever asks can wait."""

    def wait(self, gen: PQGen[_T], interval: float = _INTERVAL, timeout: float | None = None) -> _T:
        """Follow an exchange with the server to its end."""
        limit = longest_silence() if timeout is None else timeout
        try:
            return super().wait(_followed(gen, limit), min(interval, _INTERVAL))
        except Silence:
            # What it says later would be taken for the answer to another question.
            self.close()
            raise


class Patience:
    """For how long a server that was silent is not asked again: longer each time that it is silent again."""

    def __init__(self) -> None:
        self._fault: KiwiError | None = None
        self._pause = self._until = 0.0

    def check(self) -> None:
        """Raise why the server is not asked now, if it is not."""
        if self._fault is not None and monotonic() < self._until:
            raise self._fault.with_traceback(None)

    def lose(self, fault: KiwiError) -> None:
        """Take down that the server was silent."""
        self._pause = min(self._pause * 2, _LONGEST) or _FIRST
        self._fault, self._until = fault, monotonic() + self._pause

    def gain(self) -> None:
        """Take down that the server answers."""
        self._fault, self._pause = None, 0.0


def _followed(gen: PQGen[_T], limit: float) -> PQGen[_T]:
    """Follow an exchange, and raise when nothing has come for too long; the driver asks at every interval."""
    heard = monotonic()
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if ready:
                heard = monotonic()
            elif monotonic() - heard > limit:
                raise Silence
            wanted = gen.send(ready)
    except StopIteration as end:
        value: _T = end.value
        return value
