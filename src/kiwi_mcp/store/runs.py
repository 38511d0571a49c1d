"""Runs in the store: the record of every call, large results by content hash, and their retention."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import accumulate
from operator import attrgetter
from random import getrandbits
from threading import Lock
from typing import TypeAlias

from msgspec import Struct

from kiwi_mcp.domain.errors import KiwiError, NotFound, RunNotFound, StoreDamaged
from kiwi_mcp.domain.records import Receipt, RunRecord, RunStatus
from kiwi_mcp.domain.times import encode_id, is_run_id, iso, run_id
from kiwi_mcp.store.database import (
    Database,
    IntegrityFault,
    Row,
    Transaction,
    Value,
    clean,
    conditions,
    insert_into,
    plain,
)
from kiwi_mcp.store.principals import named
from kiwi_mcp.store.receipts import append, begin, end, recording, refused

_COLUMNS = RunRecord.__struct_fields__
_ADD = insert_into("runs", _COLUMNS)
_READ = f"select {', '.join(_COLUMNS)} from runs"  # noqa: S608 - our own names
ADD_BLOB = (
    "insert into blobs (sha256, size_bytes, content, created_at) values (?, ?, ?, ?) on conflict (sha256) do nothing"
)
_DROP_BLOB = """delete from blobs where sha256 = ?
  and not exists (select 1 from runs where result_sha256 = ?)
  and not exists (select 1 from thread_blobs where sha256 = ?)
  and not exists (select 1 from tool_version_files where storage_key = ?)"""
_values = attrgetter(*_COLUMNS)
_STEP = 2_000  # the maximum number of runs that one pruning step removes
_last = [0]
_lock = Lock()


class RunRetention(Struct, frozen=True):
    """How much is kept: the newest runs (the oldest go in steps), and the newest of their large results."""

    count: int = 10_000
    days: int = 90
    result_bytes: int = 1_000_000_000


DEFAULT = RunRetention()


class RunFilter(Struct, frozen=True):
    """Which runs are wanted; times are milliseconds since 1970, and `before` is the id that a page ended with."""

    tool_id: str | None = None
    status: RunStatus | None = None
    project: str | None = None
    since: int | None = None
    until: int | None = None
    before: str | None = None
    limit: int = 20


class Pruned(Struct, frozen=True):
    """What was removed: runs, and large results."""

    runs: int = 0
    results: int = 0


AlsoWrite: TypeAlias = Callable[[Transaction], None]  # writes in the same transaction what a thread notes of its call


class EndedRun(Struct, frozen=True):
    """A run that has ended, with its receipt."""

    run: RunRecord
    receipt: Receipt | None
    is_begun: bool = False  # whether it is stored as started
    also: AlsoWrite | None = None


class Runs:
    """The runs of one store: all of them, or only those of one actor."""

    def __init__(
        self,
        database: Database,
        *,
        retention: RunRetention = DEFAULT,
        actor: str | None = None,
        is_people: bool = False,
    ) -> None:
        self._database, self._retention = database, retention
        self._actor, self._is_people = actor, is_people
        self.actor = actor or ""  # the actor of these runs; empty if they are the runs of all actors

    def of(self, actor: str) -> Runs:
        """Return the runs of another actor, in the same store."""
        return Runs(self._database, retention=self._retention, actor=actor)

    def named(self, name: str) -> Runs:
        """Return the runs of all whom people know by a name, however they came."""
        return Runs(self._database, retention=self._retention, actor=name, is_people=True)

    def begin_now(self, run: RunRecord, receipt: Receipt | None, kernel: str, also: AlsoWrite | None = None) -> bool:
        """Store a run that starts, without waiting; return whether that was done. If not, `begin` it."""
        try:
            with self._database.transaction_now() as transaction:
                if transaction is None:
                    return False
                _begin(transaction, run, receipt, kernel, also)
        except IntegrityFault as fault:
            raise refused("record of the run", fault) from fault
        return True

    def begin(self, run: RunRecord, receipt: Receipt | None, kernel: str, also: AlsoWrite | None = None) -> None:
        """Store a run that starts, with the receipt that it gets should its kernel disappear."""
        with recording(self._database, "record of the run") as transaction:
            _begin(transaction, run, receipt, kernel, also)

    def finish(self, ended: EndedRun, result: bytes | None) -> None:
        """Record how a run that was begun ended, in the place of what was stored then."""
        with recording(self._database, "record of the run") as transaction:
            _record(transaction, ended, result)

    def record_now(self, ended: Sequence[EndedRun]) -> bool:
        """Record runs in one transaction, without waiting; return whether that was done. If not, `add` them."""
        for one in ended:
            if _is_due(one.run):
                return False
        try:
            with self._database.transaction_now() as transaction:
                if transaction is None:
                    return False
                for one in ended:
                    _record(transaction, one, None)
        except IntegrityFault as fault:
            raise refused("record of the run", fault) from fault
        return True

    def is_beside(self, other: Runs) -> bool:
        """Whether two are in one store."""
        return self._database is other._database

    def add(self, run: RunRecord, result: bytes | None = None, receipt: Receipt | None = None) -> None:
        """Record a run with its receipt, and its large result, if it has one; now and then the oldest go."""
        self.finish(EndedRun(run, receipt), result)
        if _is_due(run):
            with suppress(KiwiError):  # the run is recorded; the next pruning removes the rest
                self.prune(time.time_ns() // 1_000_000)

    def list(self, wanted: RunFilter) -> tuple[RunRecord, ...]:
        """Return the runs that are wanted, the newest first."""
        own, mine = self._own()
        where, values = conditions(
            ("tool_id = ?", wanted.tool_id),
            ("status = ?", wanted.status),
            ("project = ?", wanted.project),
            ("id >= ?", None if wanted.since is None else run_id(wanted.since, 0)),
            ("id < ?", None if wanted.until is None else run_id(wanted.until, 0)),
            ("id < ?", wanted.before),
        )
        statement = f"{_READ} where {own} and {where} order by id desc limit ?"
        return tuple(map(_run, self._database.read(statement, (*mine, *values, wanted.limit))))

    def get(self, wanted: str) -> RunRecord:
        """Return one run by its id."""
        own, mine = self._own()
        rows = self._database.read(f"{_READ} where id = ? and {own}", (wanted, *mine)) if is_run_id(wanted) else ()
        if not rows:
            raise RunNotFound(wanted)
        return _run(rows[0])

    def result(self, wanted: str) -> bytes:
        """Return the large result that a run gave, exactly as it was."""
        run = self.get(wanted)
        rows = self._database.read("select content from blobs where sha256 = ?", (run.result_sha256,))
        if not rows or not isinstance(data := rows[0][0], bytes):
            raise NotFound(
                f"The result of the run {wanted!r} is not in the store.",
                suggestion="Run the tool again: small results are in the output file, and old large ones are removed.",
                run_id=wanted,
            )
        if sha256(data).hexdigest() != run.result_sha256:
            raise StoreDamaged(
                f"The result of the run {wanted!r} is not what was stored.",
                suggestion="Do not use it. Run the tool again, and check the store with `kiwi verify`.",
                run_id=wanted,
            )
        return data

    def prune(self, now: int) -> Pruned:
        """Remove runs of the actor that are no longer kept at a time in milliseconds, in one bounded step."""
        own, values = self._own()
        first = run_id(now - self._retention.days * 86_400_000, 0)  # the id from which on runs are kept
        newest = f"select id from runs where {own} order by id desc limit 1 offset ?"  # noqa: S608 - our own words
        for (id_,) in self._database.read(newest, (*values, max(self._retention.count - 1, 0))):
            first = max(first, str(id_))
        old_runs = f"from runs where {own} and id < ? order by id limit ?"
        if not self._database.read(f"select 1 {old_runs}", (*values, first, 1)) and not self._excess():
            return Pruned()
        with self._database.transaction() as transaction:
            old = transaction.read(f"select id, result_sha256 {old_runs}", (*values, first, _STEP))
            if old:
                transaction.write(f"delete from runs where {own} and id <= ?", (*values, old[-1][0]))  # noqa: S608 - as above
            excess = self._excess(transaction)
            for result in excess:
                statement = f"update runs set result_sha256 = null where {own} and result_sha256 = ?"  # noqa: S608 - as above
                transaction.write(statement, (*values, result))
            freed = dict.fromkeys([*(result for _, result in old if result is not None), *excess])
            return Pruned(len(old), sum(drop_blob(transaction, str(result)) for result in freed))

    def _own(self) -> tuple[str, Sequence[Value]]:
        """Return the condition that holds for the actor's runs, and its values."""
        if self._actor is None:
            return "true", ()
        return named(self._actor) if self._is_people else ("actor = ?", (clean(self._actor),))

    def _excess(self, source: Database | Transaction | None = None) -> Sequence[str]:
        """Return the hashes of the large results that exceed the retention, counted from the newest."""
        own, values = self._own()
        rows = (source or self._database).read(
            f"select result_sha256, max(id), max(result_size) from runs where {own} and result_sha256 is not null"  # noqa: S608 - as above
            " group by result_sha256 order by max(id) desc",
            values,
        )
        sizes = accumulate(int(size or 0) for _, _, size in rows)
        return tuple(str(row[0]) for row, size in zip(rows, sizes, strict=True) if size > self._retention.result_bytes)


def new_run(milliseconds: int) -> tuple[str, str]:
    """Return a new id for a run that begins at a time, larger than all that this process gave before, and the time."""
    number = (milliseconds << 80) | getrandbits(80)
    with _lock:
        _last[0] = number = max(number, _last[0] + 1)
    return encode_id(number), iso(milliseconds)


def _record(transaction: Transaction, ended: EndedRun, result: bytes | None) -> None:
    run = ended.run
    if ended.is_begun:  # in the place of what was stored then
        end(transaction, run.id)
        transaction.write("delete from runs where id = ?", (run.id,))
    if result is not None:
        transaction.write(ADD_BLOB, (run.result_sha256, len(result), result, run.started_at))
    transaction.write(_ADD, plain(_values(run)))
    if ended.receipt is not None:
        append(transaction, ended.receipt)
    if ended.also is not None:
        ended.also(transaction)


def _begin(
    transaction: Transaction, run: RunRecord, receipt: Receipt | None, kernel: str, also: AlsoWrite | None
) -> None:
    transaction.write(_ADD, plain(_values(run)))
    begin(transaction, run.id, kernel, receipt)
    if also is not None:
        also(transaction)


def _is_due(run: RunRecord) -> bool:
    """Whether it falls to a run to prune, by the noise in its id: one in 1,024, or in 32 with large results."""
    return run.id.endswith("0" if run.result_sha256 else "00")


def _run(row: Row) -> RunRecord:
    return RunRecord(*row)  # type: ignore[arg-type]  # the columns are the fields, and the schema checks their types


def drop_blob(transaction: Transaction, digest: str) -> int:
    """Remove a blob that no run, thread or published version needs any more; return how many were removed."""
    return transaction.write(_DROP_BLOB, (digest, digest, digest, f"sha256:{digest}"))
