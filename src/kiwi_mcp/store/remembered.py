"""What is remembered of use: the requests after which items were used, of each who uses a store apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from kiwi_mcp.domain.trace import Trace
from kiwi_mcp.store.database import Database, Row, within
from kiwi_mcp.store.plain import clean

PER_ITEM = 10
"""How many requests are remembered of one item; the oldest go."""
MOST = 2_000
"""How many are remembered of one who uses the store."""
MOST_IN_ALL = 20_000
LONGEST = 300
"""How many characters of a request are kept."""

_PATIENCE = 10.0
_OF = """select item, request, is_run, at, project, encoder, vector from remembered
where owner = ? and actor = ? order by at desc, request"""
_OF_ITEM = """select item, request, is_run, at, project, encoder, vector from remembered
where owner = ? and actor = ? and project = ? and item = ? order by at desc, request"""
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
_MARK = """select count(*), coalesce(max(at), 0), coalesce(sum(length(vector)), 0) from remembered
where owner = ? and actor = ?"""


class Remembered:
    """What one owner's store remembers; it may be used from several threads and processes."""

    def __init__(self, database: Database, owner: str) -> None:
        self.database = database
        self._owner = clean(owner)

    def of(self, actor: str) -> Sequence[Trace]:
        """Return what is remembered of somebody, the latest first."""
        with within(_PATIENCE):
            return [_trace(row) for row in self.database.read(_OF, self._key(actor))]

    def of_item(self, actor: str, project: str, item: str) -> Sequence[Trace]:
        """Return what is remembered of somebody's use of one item, the latest first."""
        place = (*self._key(actor), clean(project), clean(item))
        with within(_PATIENCE):
            return [_trace(row) for row in self.database.read(_OF_ITEM, place)]

    def mark(self, actor: str) -> tuple[int, int, int]:
        """Return something else whenever what is remembered of somebody has changed."""
        with within(_PATIENCE):
            ((count, at, size),) = self.database.read(_MARK, self._key(actor))
        return int(str(count)), int(str(at)), int(str(size))

    def note(self, actor: str, trace: Trace, *, instead: Sequence[str] = ()) -> None:
        """Remember a request, in place of those of the same item that say the same; the oldest make room for it."""
        key = self._key(actor)
        place = (*key, clean(trace.project), clean(trace.item))
        row = (*place, clean(trace.request[:LONGEST]), int(trace.is_run), trace.at, clean(trace.encoder), trace.vector)
        with within(_PATIENCE), self.database.transaction() as transaction:
            for request in instead:
                transaction.write(_DROP, (*place, request))
            transaction.write(_ADD, row)
            for old in map(_trace, transaction.read(_OF_ITEM, place)[PER_ITEM:]):
                transaction.write(_DROP, (*place, old.request))
            # Whatever is as old as the first that is one too many goes with it.
            transaction.write(_CUT, (*key, *key, MOST))
            transaction.write(_CUT_ALL, (self._owner, self._owner, MOST_IN_ALL))

    def encode(self, actor: str, encoder: str, vectors: Mapping[Trace, bytes]) -> None:
        """Write down what requests mean."""
        key = self._key(actor)
        with within(_PATIENCE), self.database.transaction() as transaction:
            for trace, vector in vectors.items():
                transaction.write(_ENCODE, (encoder, vector, *key, trace.project, trace.item, trace.request))

    def forget(self, actor: str, items: Sequence[str] | None = None) -> int:
        """Forget what is remembered of somebody, of some items or of all, and return how many requests that was."""
        key = self._key(actor)
        with within(_PATIENCE), self.database.transaction() as transaction:
            if items is None:
                return transaction.write(_FORGET, key)
            return sum(transaction.write(_FORGET_ITEM, (*key, clean(item))) for item in items)

    def _key(self, actor: str) -> tuple[str, str]:
        return self._owner, clean(actor)


def _trace(row: Row) -> Trace:
    item, request, is_run, at, project, encoder, vector = cast("tuple[str, str, int, int, str, str, bytes]", row)
    return Trace(item, request, bool(is_run), at, project, encoder, vector)
