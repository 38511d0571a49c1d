"""Schedules in the store, and their occurrences: each time of a schedule has one row, so one worker serves it."""

from __future__ import annotations

import json

from kiwi_mcp.domain.errors import Conflict, NotFound
from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.threads import Occurrence, Schedule
from kiwi_mcp.store.database import OwnedRows, Row, Transaction, clean, insert_into, json_column, quick_transaction

_COLUMNS = Schedule.__struct_fields__
_JSON = ("inputs", "limits")
_READ = f"select {', '.join(_COLUMNS)} from schedules where owner = ?"  # noqa: S608 - our own names
_ADD = f"{insert_into('schedules', ('owner', *_COLUMNS))} on conflict do nothing"
_CLAIM = """insert into occurrences (owner, name, created_at, at, status, thread_id, message)
  values (?, ?, ?, ?, ?, ?, ?) on conflict do nothing"""
_START_PENDING = """update occurrences set status = ?, thread_id = ?, message = ?
  where owner = ? and name = ? and created_at = ? and at = ? and status = 'pending'"""
_LIVE = """select o.thread_id from occurrences o join threads t on t.id = o.thread_id
  where o.owner = ? and o.name = ? and t.ended_at = 0 order by o.at"""
_OCCURRENCES = "select at, status, thread_id, message from occurrences where owner = ? and name = ? and created_at = ?"
_FORGET = "delete from occurrences where owner = ? and name = ? and at < ? and status <> 'pending'"
_KEPT_MS = 90 * 86_400_000  # how long occurrences are kept


class OccurrenceTaken(Exception):
    """Another worker serves this time of a schedule."""


class Schedules(OwnedRows):
    """The schedules of one owner."""

    def add(self, schedule: Schedule) -> None:
        """Store a new schedule."""
        cells = {name: getattr(schedule, name) for name in _COLUMNS}
        cells |= {name: json_column(cells[name]) for name in _JSON} | {"is_paused": int(schedule.is_paused)}
        with quick_transaction(self.database) as transaction:
            if not transaction.write(_ADD, (self.owner, *(cells[name] for name in _COLUMNS))):
                raise Conflict(
                    f"There is a schedule named {schedule.name!r}.",
                    suggestion=f"Choose another name, or remove it: `kiwi schedule remove {schedule.name}`.",
                )

    def get(self, name: str) -> Schedule:
        """Return a schedule by its name."""
        rows = self.database.read(f"{_READ} and name = ?", (self.owner, clean(name)))
        if not rows:
            raise NotFound(f"There is no schedule named {name[:40]!r}.", suggestion="List them: `kiwi schedule list`.")
        return _schedule(rows[0])

    def list(self) -> tuple[Schedule, ...]:
        """Return every schedule, by name."""
        return tuple(map(_schedule, self.database.read(f"{_READ} order by name", (self.owner,))))

    def due(self, now: int) -> tuple[Schedule, ...]:
        """Return the schedules whose next time has come."""
        rows = self.database.read(f"{_READ} and is_paused = 0 and due_at <= ? order by due_at", (self.owner, now))
        return tuple(map(_schedule, rows))

    def waiting(self) -> tuple[tuple[Schedule, int], ...]:
        """Return the oldest time of each schedule that waits for the end of an earlier thread."""
        statement = """select o.name, min(o.at) from occurrences o join schedules s
          on s.owner = o.owner and s.name = o.name and s.created_at = o.created_at
          where o.owner = ? and o.status = 'pending' and s.is_paused = 0 group by o.name"""
        rows = self.database.read(statement, (self.owner,))
        return tuple((self.get(str(name)), int(str(at))) for name, at in rows)

    def set_next(self, schedule: Schedule, next_at: int, due_at: int) -> None:
        """Store the next time of a schedule, unless another worker stored a later one; forget old occurrences."""
        statement = """update schedules set next_at = ?, due_at = ?
          where owner = ? and name = ? and created_at = ? and next_at < ?"""
        values = (next_at, due_at, self.owner, schedule.name, schedule.created_at, next_at)
        with quick_transaction(self.database) as transaction:
            transaction.write(statement, values)
            transaction.write(_FORGET, (self.owner, schedule.name, next_at - _KEPT_MS))

    def put_times(self, schedule: Schedule) -> None:
        """Store whether a schedule is paused, and its next time."""
        statement = "update schedules set is_paused = ?, next_at = ?, due_at = ? where owner = ? and name = ?"
        values = (int(schedule.is_paused), schedule.next_at, schedule.due_at, self.owner, schedule.name)
        with quick_transaction(self.database) as transaction:
            transaction.write(statement, values)

    def remove(self, name: str) -> None:
        """Remove a schedule and its occurrences; the threads that it started stay."""
        self.get(name)
        with quick_transaction(self.database) as transaction:
            transaction.write("delete from schedules where owner = ? and name = ?", (self.owner, clean(name)))
            transaction.write("delete from occurrences where owner = ? and name = ?", (self.owner, clean(name)))

    def settle(self, schedule: Schedule, made: Occurrence) -> None:
        """Store what came of a time; nothing changes where another worker has served it."""
        with quick_transaction(self.database) as transaction:
            self._settle(transaction, schedule, made)

    def claim(self, schedule: Schedule, at: int, transaction: Transaction, thread_id: str) -> None:
        """Claim a time in the transaction that creates its thread; raise where another worker has served it."""
        if not self._settle(transaction, schedule, Occurrence(at, "started", thread_id)):
            raise OccurrenceTaken

    def _settle(self, transaction: Transaction, schedule: Schedule, made: Occurrence) -> int:
        where = (self.owner, schedule.name, schedule.created_at, made.at)
        result = (made.status, made.thread_id, clean(made.message))
        is_start = made.status in {"started", "failed"}
        return (is_start and transaction.write(_START_PENDING, (*result, *where))) or transaction.write(
            _CLAIM, (*where, *result)
        )

    def live(self, schedule: Schedule) -> tuple[str, ...]:
        """Return the threads of a schedule that have not ended, the oldest first."""
        return tuple(str(row[0]) for row in self.database.read(_LIVE, (self.owner, schedule.name)))

    def occurrences(self, schedule: Schedule, limit: int) -> tuple[Occurrence, ...]:
        """Return the last occurrences of a schedule, the newest first."""
        statement = f"{_OCCURRENCES} order by at desc limit ?"
        rows = self.database.read(statement, (self.owner, schedule.name, schedule.created_at, limit))
        return tuple(Occurrence(*row) for row in rows)  # type: ignore[arg-type]  # the schema checks the types


def _schedule(row: Row) -> Schedule:
    cells: dict[str, Json] = dict(zip(_COLUMNS, row, strict=True))
    cells |= {name: json.loads(str(cells[name])) for name in _JSON} | {"is_paused": bool(cells["is_paused"])}
    return Schedule(**cells)  # type: ignore[arg-type]  # the columns are the fields, and the schema checks them
