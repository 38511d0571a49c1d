"""Recall in the store: queries after which items were used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from msgspec import Struct

from kiwi_mcp.store.database import OwnedRows, Row, clean, within

MAX_PER_ITEM = 10  # how many queries are stored for one item; the oldest are removed
MAX_PER_ACTOR = 2_000  # how many queries are stored for one actor
MAX_TOTAL = 20_000
MAX_LENGTH = 300  # how many characters of a query are stored

_TIMEOUT = 10.0
_READ = "select item, request, is_run, at, project, encoder, vector from remembered where owner = ? and actor = ?"
_OF = f"{_READ} order by at desc, request"
_OF_ITEM = f"{_READ} and project = ? and item = ? order by at desc, request"
_ADD = """insert into remembered (owner, actor, project, item, request, is_run, at, encoder, vector)
values (?, ?, ?, ?, ?, ?, ?, ?, ?) on conflict (owner, actor, project, item, request) do update
set at = excluded.at, is_run = case when remembered.is_run > excluded.is_run then remembered.is_run
else excluded.is_run end"""
_ENCODE = """update remembered set encoder = ?, vector = ?
where owner = ? and actor = ? and project = ? and item = ? and request = ?"""
_DROP = "delete from remembered where owner = ? and actor = ? and project = ? and item = ? and request = ?"
_FORGET = "delete from remembered where owner = ? and actor = ?"
_FORGET_ITEM = "delete from remembered where owner = ? and actor = ? and item = ?"
_CUT = """delete from remembered where owner = ? and actor = ? and at <=
(select at from remembered where owner = ? and actor = ? order by at desc limit 1 offset ?)"""
_CUT_ALL = """delete from remembered where owner = ? and at <=
(select at from remembered where owner = ? order by at desc limit 1 offset ?)"""
_ETAG = """select count(*), coalesce(max(at), 0), coalesce(sum(length(vector)), 0) from remembered
where owner = ? and actor = ?"""


class RecallEntry(Struct, frozen=True):
    """A query after which an item was used."""

    item: str  # its full name, without a version
    request: str
    is_run: bool  # whether it was run, and not only read
    at: int  # when that was last, in milliseconds since 1970
    project: str = ""  # the project that the item belongs to; empty if it is the same item everywhere
    encoder: str = ""  # the encoder of the vector
    vector: bytes = b""  # the vector of the query; empty if it is not computed yet


class RecallStore(OwnedRows):
    """What one owner's store remembers; several threads and processes may use it."""

    def of(self, actor: str) -> Sequence[RecallEntry]:
        """Return the entries of an actor, latest first."""
        with within(_TIMEOUT):
            return [_entry(row) for row in self.database.read(_OF, self._key(actor))]

    def of_item(self, actor: str, project: str, item: str) -> Sequence[RecallEntry]:
        """Return the entries of an actor for one item, latest first."""
        place = (*self._key(actor), clean(project), clean(item))
        with within(_TIMEOUT):
            return [_entry(row) for row in self.database.read(_OF_ITEM, place)]

    def etag(self, actor: str) -> tuple[int, int, int]:
        """Return a value that changes whenever the entries of an actor change."""
        with within(_TIMEOUT):
            ((count, at, size),) = self.database.read(_ETAG, self._key(actor))
        return int(str(count)), int(str(at)), int(str(size))

    def add(self, actor: str, entry: RecallEntry, *, instead: Sequence[str] = ()) -> None:
        """Store an entry in place of the queries `instead` of its item; the oldest entries over a limit are removed."""
        key = self._key(actor)
        place = (*key, clean(entry.project), clean(entry.item))
        request = clean(entry.request[:MAX_LENGTH])
        row = (*place, request, int(entry.is_run), entry.at, clean(entry.encoder), entry.vector)
        with within(_TIMEOUT), self.database.transaction() as transaction:
            for request in instead:
                transaction.write(_DROP, (*place, request))
            transaction.write(_ADD, row)
            for old in map(_entry, transaction.read(_OF_ITEM, place)[MAX_PER_ITEM:]):
                transaction.write(_DROP, (*place, old.request))
            # All entries that are as old as the first one over the limit are removed with it.
            transaction.write(_CUT, (*key, *key, MAX_PER_ACTOR))
            transaction.write(_CUT_ALL, (self.owner, self.owner, MAX_TOTAL))

    def encode(self, actor: str, encoder: str, vectors: Mapping[RecallEntry, bytes]) -> None:
        """Store the vectors of entries."""
        key = self._key(actor)
        with within(_TIMEOUT), self.database.transaction() as transaction:
            for entry, vector in vectors.items():
                transaction.write(_ENCODE, (encoder, vector, *key, entry.project, entry.item, entry.request))

    def forget(self, actor: str, items: Sequence[str] | None = None) -> int:
        """Delete the entries of an actor, for some items or for all, and return how many were deleted."""
        key = self._key(actor)
        with within(_TIMEOUT), self.database.transaction() as transaction:
            if items is None:
                return transaction.write(_FORGET, key)
            return sum(transaction.write(_FORGET_ITEM, (*key, clean(item))) for item in items)

    def _key(self, actor: str) -> tuple[str, str]:
        return self.owner, clean(actor)


def _entry(row: Row) -> RecallEntry:
    item, request, is_run, at, project, encoder, vector = cast("tuple[str, str, int, int, str, str, bytes]", row)
    return RecallEntry(item, request, bool(is_run), at, project, encoder, vector)
