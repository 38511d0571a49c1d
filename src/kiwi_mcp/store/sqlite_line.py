"""One connection to an SQLite file, on which no statement runs without end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from time import monotonic

from kiwi_mcp.store.database import Row, Value
from kiwi_mcp.store.sqlite_library import library

LIMIT = 60.0
"""For how many seconds a statement may run."""
FAULTS = (library.Error, UnicodeEncodeError, OverflowError)
"""What the driver raises: its own errors, and Python's for a value that SQLite cannot hold."""
_STEPS = 100_000
"""After how many steps of SQLite's machine the time is looked at: some milliseconds."""


class _Watch:
    """The time at which the statement of a connection is ended."""

    def __init__(self) -> None:
        self.end = inf

    def is_over(self) -> bool:
        return monotonic() > self.end


class Line:
    """A connection with the one cursor that is used on it, by one thread at a time."""

    def __init__(self, connection: library.Connection) -> None:
        self.connection = connection
        self._cursor = connection.cursor()
        # Not a method of the line: the connection would hold the line, and neither would ever go.
        self._watch = _Watch()
        connection.set_progress_handler(self._watch.is_over, _STEPS)

    def read(self, statement: str, values: Sequence[Value] = ()) -> Sequence[Row]:
        """Return all rows of a query."""
        self._watch.end = monotonic() + LIMIT
        return self._cursor.execute(statement, values).fetchall()

    def read_some(self, statement: str, values: Sequence[Value], most: int) -> Sequence[Row]:
        """Return the first rows of a query."""
        self._watch.end = monotonic() + LIMIT
        try:
            return self._cursor.execute(statement, values).fetchmany(most)
        finally:
            self._cursor.close()
            self._cursor = self.connection.cursor()

    def write(self, statement: str, values: Sequence[Value] = ()) -> int:
        """Run one statement, and return how many rows it changed."""
        self._watch.end = monotonic() + LIMIT
        return self._cursor.execute(statement, values).rowcount

    def insert(self, statement: str, rows: Iterable[Sequence[Value]]) -> None:
        """Run one statement for each row, for as long as whoever gives the rows takes."""
        self._watch.end = inf
        self._cursor.executemany(statement, rows)
