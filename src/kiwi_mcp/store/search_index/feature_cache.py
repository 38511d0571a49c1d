"""The words and vectors of cards by the digest of their text, shared by processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from time import monotonic, time

from kiwi_mcp.domain.cards import CardFeatures
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.store.database import Database, Value, quick_transaction, within
from kiwi_mcp.store.registry.rows import chunks, placeholders

MAX_ENTRIES = 300_000  # the maximum number of entries: with their vectors, about 300 MB
UNUSED_DAYS = 90  # after how many days without use an entry is removed

_RECORDED_DAYS = 7  # how many days pass before a use is recorded again: that costs as much as writing the entry
_MAX_REMOVED = 10_000  # how many entries are removed at a time, so that other writers do not wait
_AT_ONCE = 2_000  # how many entries one query asks for
_MAINTAINED = 3_600.0  # how many seconds pass before a process maintains the cache again
_TIMEOUT = 10.0
_READ = "select digest, words, vector, used_on from sheets where digest in"
_ADD = "insert into sheets (digest, words, vector, used_on) values"
# A damaged entry is computed again from the text and overwritten; an intact one is equal and is not changed.
_REPAIR = """on conflict (digest) do update set words = excluded.words,
  vector = case when length(excluded.vector) > 0 then excluded.vector else sheets.vector end
where sheets.words <> excluded.words or (length(excluded.vector) > 0 and sheets.vector <> excluded.vector)"""
_USE = "update sheets set used_on = ? where used_on < ? and digest in"
_OLDEST = "delete from sheets where digest in (select digest from sheets where used_on < ? order by used_on limit ?)"


def days_now() -> int:
    """Return which day it is, counted from 1970."""
    return int(time() // 86_400)


class FeatureCache:
    """The cache in one store; several threads and processes may use it."""

    def __init__(
        self, database: Database, *, max_entries: int = MAX_ENTRIES, today: Callable[[], int] = days_now
    ) -> None:
        self.database = database
        self._max_entries = max_entries
        self._today = today
        self._used: set[bytes] = set()
        self._maintained = -inf
        self.fault: KiwiError | None = None  # the error of the last use, if it failed

    def read(self, digests: Sequence[bytes]) -> Mapping[bytes, CardFeatures]:
        """Return the features with some digests; unknown digests are left out."""
        found: dict[bytes, CardFeatures] = {}
        with self._tolerated():
            for some in chunks(digests, _AT_ONCE):
                rows = self.database.read(f"{_READ} ({placeholders(some)})", some)
                fresh = self._today() - _RECORDED_DAYS
                for row in rows:
                    match row:  # SQLite stores any type that another program writes to a column
                        case (bytes(digest), bytes(words), bytes(vector), int(used_on)):
                            found[digest] = CardFeatures(words, vector)
                            if used_on < fresh:
                                self._used.add(digest)
        return found

    def write(self, features: Mapping[bytes, CardFeatures]) -> None:
        """Store features, also in place of damaged ones; a vector completes features that were stored without one."""
        today = self._today()
        with self._tolerated():
            for some in chunks(features.items()):
                values: list[Value] = [value for digest, one in some for value in (digest, *one, today)]
                rows = ", ".join(["(?, ?, ?, ?)"] * len(some))
                with quick_transaction(self.database, _TIMEOUT) as transaction:
                    transaction.write(f"{_ADD} {rows} {_REPAIR}", values)
        if monotonic() - self._maintained > _MAINTAINED:
            self.maintain()

    def record_uses(self) -> None:
        """Record which features were read, if that was last done long ago; a process that writes records it anyway."""
        if self._used and monotonic() - self._maintained > _MAINTAINED:
            self.maintain()

    def maintain(self) -> None:
        """Record which features were used, and remove unused ones. This runs occasionally, outside of a request."""
        self._maintained = monotonic()
        used, self._used = self._used, set()
        with self._tolerated():
            today = self._today()
            for some in chunks(used):
                with quick_transaction(self.database, _TIMEOUT) as transaction:
                    transaction.write(f"{_USE} ({placeholders(some)})", (today, today - _RECORDED_DAYS, *some))
            self._remove(self._today() - UNUSED_DAYS)
            ((count,),) = self.database.read("select count(*) from sheets")
            if int(str(count)) > self._max_entries:
                self._remove(self._today() + 1, int(str(count)) - self._max_entries * 9 // 10)

    def _remove(self, before: int, limit: int = _MAX_REMOVED) -> None:
        with quick_transaction(self.database, _TIMEOUT) as transaction:
            transaction.write(_OLDEST, (before, min(limit, _MAX_REMOVED)))

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        try:
            with within(_TIMEOUT):
                yield
            self.fault = None
        except KiwiError as fault:
            self.fault = fault
