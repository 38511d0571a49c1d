"""Sheets: what searches have worked out of texts, kept by the digest of each text.

A cache that all processes on a store share. Losing it costs time and nothing else, so that a store that cannot be read
or written fails nobody's search; `fault` tells of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from time import monotonic, time

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.sheet import Kept
from kiwi_mcp.store.database import Database, Transaction, Value, within
from kiwi_mcp.store.rows import chunks, marks_for

MOST = 300_000
"""How many sheets are kept: with their vectors, about 300 MB."""
UNUSED_DAYS = 90
"""After how many days without use a sheet is forgotten."""

_FRESH_DAYS = 7
"""For how many days a use counts before it is written down again: that costs as much as to write the sheet."""
_MOST_FORGOTTEN = 10_000
"""How many sheets go at a time, so that other writers do not wait."""
_AT_ONCE = 2_000
"""How many sheets one query asks for."""
_TENDED = 3_600.0
"""How many seconds pass before a process looks after the rest again."""
_PATIENCE = 10.0
_READ = "select digest, words, vector, used_on from sheets where digest in"
_ADD = "insert into sheets (digest, words, vector, used_on) values"
# What is damaged is made again from the text, and written over; what is whole is the same, and is not touched.
_MEND = """on conflict (digest) do update set words = excluded.words,
  vector = case when length(excluded.vector) > 0 then excluded.vector else sheets.vector end
where sheets.words <> excluded.words or (length(excluded.vector) > 0 and sheets.vector <> excluded.vector)"""
_USE = "update sheets set used_on = ? where used_on < ? and digest in"
_OLDEST = "delete from sheets where digest in (select digest from sheets where used_on < ? order by used_on limit ?)"


def days_now() -> int:
    """Return which day it is, counted from 1970."""
    return int(time() // 86_400)


class Sheets:
    """What is kept in one store; it may be used from several threads and processes."""

    def __init__(self, database: Database, *, most: int = MOST, today: Callable[[], int] = days_now) -> None:
        self._database = database
        self._most = most
        self._today = today
        self._used: set[bytes] = set()
        self._tended = -inf
        self._fault: KiwiError | None = None

    @property
    def fault(self) -> KiwiError | None:
        """Why nothing could be kept or found the last time, if so."""
        return self._fault

    def read(self, digests: Sequence[bytes]) -> Mapping[bytes, Kept]:
        """Return what is kept under some digests; those that are unknown are left out."""
        found: dict[bytes, Kept] = {}
        with self._tolerated():
            for some in chunks(digests, _AT_ONCE):
                rows = self._database.read(f"{_READ} ({marks_for(some)})", some)
                self._take(rows, found)
        return found

    def write(self, kept: Mapping[bytes, Kept]) -> None:
        """Keep it, instead of what was damaged; a vector completes what was kept without one."""
        today = self._today()
        with self._tolerated():
            for some in chunks(kept.items()):
                values: list[Value] = [value for digest, one in some for value in (digest, *one, today)]
                rows = ", ".join(["(?, ?, ?, ?)"] * len(some))
                with self._writing() as transaction:
                    transaction.write(f"{_ADD} {rows} {_MEND}", values)
        if monotonic() - self._tended > _TENDED:
            self.tend()

    def tend_to_used(self) -> None:
        """Let what was read count as used, where that was last written down long ago; who writes does so anyway."""
        if self._used and monotonic() - self._tended > _TENDED:
            self.tend()

    def tend(self) -> None:
        """Write down what was used, and forget what nobody uses: now and then, and not on a caller's time."""
        self._tended = monotonic()
        used, self._used = self._used, set()
        with self._tolerated():
            self._write_used(used)
            self._forget(self._today() - UNUSED_DAYS)
            ((count,),) = self._database.read("select count(*) from sheets")
            if int(str(count)) > self._most:
                self._forget(self._today() + 1, int(str(count)) - self._most * 9 // 10)

    def _take(self, rows: Sequence[Sequence[Value]], found: dict[bytes, Kept]) -> None:
        fresh = self._today() - _FRESH_DAYS
        for row in rows:
            match row:  # SQLite keeps whatever another program has put in a column
                case (bytes(digest), bytes(words), bytes(vector), int(used_on)):
                    found[digest] = Kept(words, vector)
                    if used_on < fresh:
                        self._used.add(digest)

    def _write_used(self, digests: Iterable[bytes]) -> None:
        today = self._today()
        for some in chunks(digests):
            with self._writing() as transaction:
                transaction.write(f"{_USE} ({marks_for(some)})", (today, today - _FRESH_DAYS, *some))

    def _forget(self, before: int, most: int = _MOST_FORGOTTEN) -> None:
        with self._writing() as transaction:
            transaction.write(_OLDEST, (before, min(most, _MOST_FORGOTTEN)))

    @contextmanager
    def _writing(self) -> Iterator[Transaction]:
        """Begin to write, at once where that can be had: what a loss of power takes from a cache is made again."""
        with self._database.transaction_now() as transaction:
            if transaction is not None:
                yield transaction
                return
        with self._database.transaction() as transaction:
            yield transaction

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        try:
            with within(_PATIENCE):
                yield
            self._fault = None
        except KiwiError as fault:
            self._fault = fault
