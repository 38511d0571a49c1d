"""The PostgreSQL dialect: connections, back-off and errors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from threading import Lock
from time import monotonic
from typing import Literal, TypeVar

import psycopg
from psycopg import errors, sql
from psycopg.abc import Buffer, PQGen
from psycopg.adapt import Loader
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.numeric import FloatLoader
from psycopg.types.string import TextLoader

from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, StoreDamaged, StoreUnavailable
from kiwi_mcp.store.database import (
    PATIENCE,
    Database,
    IntegrityFault,
    Row,
    Transaction,
    Value,
    busy,
    invalid_value,
    silence,
    unavailable,
)

_T = TypeVar("_T")
_INTERVAL = 0.1
_FIRST, _LONGEST = 5.0, 60.0


class Silence(psycopg.OperationalError):
    """A server that was connected has not answered in time."""


class PostgresConnection(psycopg.Connection[Row]):
    """A connection that closes when the server is silent for longer than the caller's limit."""

    def wait(self, gen: PQGen[_T], interval: float = _INTERVAL, timeout: float | None = None) -> _T:
        """Follow an exchange with the server to its end."""
        limit = silence.get() if timeout is None else timeout
        try:
            return super().wait(_followed(gen, limit), min(interval, _INTERVAL))
        except Silence:
            # A late response would be read as the response to another query.
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


def fault(error: BaseException, shown: str) -> KiwiError | IntegrityFault:
    """Return the Kiwi error for an error of the driver."""
    match error:
        case psycopg.IntegrityError() | errors.RaiseException():
            return IntegrityFault(error.diag.message_primary or "A rule of the schema refused it.")
        case errors.UndefinedTable():
            return _incomplete(shown, "table")
        case errors.UndefinedColumn():
            return _incomplete(shown, "column")
        case errors.LockNotAvailable() | errors.DeadlockDetected() | errors.SerializationFailure():
            return busy(shown)
        case errors.QueryCanceled():
            return unavailable(
                shown, "it took longer than a statement may", "Try again when the server has less to do."
            )
        case errors.DiskFull():
            return unavailable(shown, "its disk is full", "Free some space on the server, then try again.")
        case errors.InsufficientPrivilege() | errors.ReadOnlySqlTransaction():
            return unavailable(
                shown, "its user may not do that", "Grant the user of the URL its own schema, or use another."
            )
        case psycopg.DataError() | UnicodeEncodeError():
            return invalid_value()
        case Silence():
            return unavailable(shown, "it does not answer", "Check the server; it is asked again in a while.")
        case psycopg.OperationalError():
            return unavailable(shown, "the connection was lost", "Check that the server runs, then try again.")
    return unavailable(shown, "it could not do what was asked", "Run `kiwi doctor`; the log holds the cause.")


def unreachable(shown: str, message: str) -> StoreUnavailable:
    """Return why there is no connection, in the server's own words where it spoke."""
    if refusal := re.search(r"FATAL:\s+(.+)", message):
        return unavailable(shown, refusal[1], "Check the user, the password and the database in the URL.")
    if "no password supplied" in message:
        return unavailable(shown, "it asks for a password", "Add the password to the URL.")
    reasons = {
        "refused": "no server listens there",
        "timeout": "it does not answer",
        "resolve": "its host is not known",
    }
    reason = next((reason for word, reason in reasons.items() if word in message), "there is no connection")
    return unavailable(shown, reason, "Check that the server runs and that the URL names its host and port.")


def _incomplete(shown: str, missing: str) -> StoreDamaged:
    return StoreDamaged(
        f"The store {shown} lacks a {missing} of Kiwi's schema.",
        suggestion="Restore the database from a backup, or name another one in registry.yaml and pull into it.",
        missing=missing,
    )


_SETTINGS = {
    "TimeZone": "UTC",
    "DateStyle": "ISO",
    "application_name": "kiwi",
    "statement_timeout": "60s",
    "lock_timeout": f"{PATIENCE:.0f}s",
    "idle_in_transaction_session_timeout": "20s",  # less than others wait: a process that stands still blocks no one
    # For pgvector, if installed: with a filter, a search for near vectors must not return too few results.
    "hnsw.iterative_scan": "relaxed_order",
    "hnsw.ef_search": "100",
}
"""What holds for every connection."""
_OLDEST = 150_000
_OLDEST_VECTORS = (0, 7)
_CONNECTING = 4  # the time limit for opening a connection, in seconds
_WRITERS = 0x6B697769
"""The number of the lock that writers take, so that the entries of the log are committed in their order."""
_FAULTS = (psycopg.Error, UnicodeEncodeError)
_TOKENS = re.compile(r"""'(?:[^']|'')*'|"[^"]*"|--[^\n]*|\?|%""")
_ITEMS = re.compile(r'"((?:[^"\\]|\\.)*)"|([^",{}]+)')
_abandoned: list[object] = []
"""What a parent process had opened: to close it here would harm the parent, so it is kept and never touched."""


class TimeLoader(Loader):
    """A time in ISO 8601, in UTC with milliseconds."""

    def load(self, data: Buffer) -> str:
        """Return `2026-01-02T03:04:05.678Z` for `2026-01-02 03:04:05.678901+00`."""
        day, _, time = bytes(data).decode().partition(" ")
        seconds, _, fraction = time.removesuffix("+00").partition(".")
        return f"{day}T{seconds}.{fraction[:3]:0<3}Z"


_TEXT_ARRAY = 1009  # the number by which PostgreSQL knows the type `text[]`
_LOADERS: Mapping[str | int, type[TextLoader | FloatLoader | TimeLoader]] = {
    **dict.fromkeys(("uuid", "json", "jsonb", "date", _TEXT_ARRAY), TextLoader),
    "numeric": FloatLoader,
    "timestamptz": TimeLoader,
}


def connect(url: str, shown: str) -> PostgresDatabase:
    """Open the database of a `postgresql://user@host/database` URL."""
    try:
        conninfo_to_dict(url)
    except psycopg.Error:
        # What the driver says may repeat the URL, so nothing of it is kept.
        raise InvalidRequest(
            f"{shown!r} is not a PostgreSQL URL.",
            suggestion="Use `postgresql://user:password@host:5432/database`, with special characters percent-encoded.",
        ) from None
    return PostgresDatabase(url, shown)


@lru_cache(maxsize=512)
def translated(statement: str) -> bytes:
    """Return a statement with `?` for values as the driver wants it."""
    replaced = {"?": "%s", "%": "%%"}
    return _TOKENS.sub(lambda found: replaced.get(found[0], found[0].replace("%", "%%")), statement).encode()


class PostgresTransaction(Transaction):
    """Work between BEGIN and COMMIT."""

    _faults = _FAULTS

    def __init__(self, fault: Callable[[Exception], Exception], connection: PostgresConnection) -> None:
        self._fault = fault
        self._cursor = cursor = connection.cursor()
        self._execute = lambda statement, values: cursor.execute(translated(statement), values)

    def insert(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Value]]) -> None:
        """Add rows to a table, as one stream."""
        names = sql.SQL(", ").join(sql.Identifier(column) for column in columns)
        statement = sql.SQL("copy {} ({}) from stdin").format(sql.Identifier(table), names)
        try:
            with self._cursor.copy(statement) as copy:
                for row in rows:
                    copy.write_row(row)
        except _FAULTS as error:
            raise self._failed(error) from error

    def run_script(self, script: str) -> None:
        """Run every statement of a script."""
        try:
            self._cursor.execute(script.encode())
        except _FAULTS as error:
            raise self._failed(error) from error


class PostgresDatabase(Database):
    """One database of a PostgreSQL server. It is always waited for, and what it has committed is on its disk."""

    dialect: Literal["postgres"] = "postgres"
    is_embedded = False

    def __init__(self, url: str, shown: str) -> None:
        self._secret_url = url
        self.url = shown
        self._patience = Patience()
        self._reader: PostgresConnection | None = None
        self._writer: PostgresConnection | None = None
        self._begin_anew()
        self._reader = self._connection()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._reading, self._writing = Lock(), Lock()
        self._reader = self._writer = None

    def _leave_parent(self) -> None:
        """Forget what a parent process had opened, in a process that was forked from it."""
        if os.getpid() != self._process:
            _abandoned.append((self._reader, self._writer))
            self._begin_anew()

    def read(self, statement: str, values: Sequence[Value] = ()) -> Sequence[Row]:
        """Return all rows of a query; if the connection turns out to be lost, it is made again once."""
        self._leave_parent()
        self._patience.check()
        query = translated(statement)
        if not self._reading.acquire(timeout=silence.get()):
            raise unavailable(self.url, "it has other calls to answer first", "Try again in a moment.")
        try:
            while True:
                is_new = (reader := self._reader) is None or reader.closed
                reader = self._reader = self._connection() if reader is None or is_new else reader
                try:
                    return reader.execute(query, values).fetchall()
                except _FAULTS as error:
                    if is_new or isinstance(error, Silence) or not reader.closed:
                        raise self._fault(error) from error
        finally:
            self._reading.release()

    def _fault(self, error: BaseException) -> KiwiError | IntegrityFault:
        """Return the Kiwi error for an error. After a timeout, the server is not asked again for a while."""
        response = fault(error, self.url)
        if isinstance(error, Silence) and isinstance(response, KiwiError):
            self._patience.lose(response)
        return response

    def stamp(self) -> int:
        """Return the change counter of the server, and which transaction wrote it: that differs after a restore."""
        rows = self.read("select value, xmin::text::bigint from change_counter")
        if not rows:  # then no change would ever be noticed
            raise _incomplete(self.url, "row of the change counter")
        return int(str(rows[0][0])) << 32 | int(str(rows[0][1]))

    @contextmanager
    def transaction(self) -> Iterator[PostgresTransaction]:
        """Begin to write: one writer at a time, no half of it ever visible, durable once the block has ended."""
        self._leave_parent()
        self._patience.check()
        if not self._writing.acquire(timeout=min(PATIENCE, silence.get())):
            raise busy(self.url)
        try:
            connection = self._begun()
            transaction = PostgresTransaction(self._fault, connection)
            try:
                yield transaction
                transaction.raise_failure()
            except BaseException:
                with suppress(psycopg.Error):
                    connection.execute(b"rollback")
                raise
            self._commit(connection)
        finally:
            self._writing.release()

    def _begun(self) -> PostgresConnection:
        """Return the writing connection inside a transaction, made again if it was lost since the last one."""
        while True:
            is_new = (writer := self._writer) is None or writer.closed
            writer = self._writer = self._connection() if writer is None or is_new else writer
            try:
                writer.execute(b"begin")
                writer.execute(b"select pg_advisory_xact_lock(%s)", (_WRITERS,))
            except psycopg.Error as error:
                if is_new or isinstance(error, Silence) or not writer.closed:
                    with suppress(psycopg.Error):
                        writer.close()
                    raise self._fault(error) from error
            else:
                return writer

    def _commit(self, connection: PostgresConnection) -> None:
        try:
            connection.execute(b"commit")
        except psycopg.Error as error:
            response = self._fault(error)
            if not connection.closed:
                raise response from error
            raise StoreUnavailable(
                f"The connection to {self.url} broke at the last moment: it is unknown whether this was written.",
                suggestion="Look, or do the same again: publishing what is already there changes nothing.",
            ) from error

    def encode_list(self, values: Sequence[str]) -> Value:
        """Return texts as an array literal."""
        quoted = (value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
        return "{" + ",".join(f'"{value}"' for value in quoted) + "}"

    def decode_list(self, value: Value) -> tuple[str, ...]:
        """Return the texts of an array literal."""
        items = _ITEMS.findall(value) if isinstance(value, str) else []
        return tuple(plain or re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL) for quoted, plain in items)

    def check_extensions(self) -> None:
        """Refuse a database in which the schema cannot be made, before anything is made in it."""
        found = self.read(
            "select coalesce(installed_version, default_version) from pg_available_extensions where name = 'vector'"
        )
        version = str(found[0][0]) if found else ""
        if found and tuple(map(int, version.split(".")[:2])) < _OLDEST_VECTORS:
            raise unavailable(
                self.url,
                f"its extension vector is {version}, and 0.7 is needed",
                "Install pgvector 0.7 or newer, then `psql -c 'alter extension vector update'`; or remove pgvector.",
            )

    def close(self) -> None:
        """Close every connection. A query that is still waiting fails with a lost connection."""
        connections = [one for one in (self._reader, self._writer) if one is not None]
        if os.getpid() != self._process:
            _abandoned.append(connections)
            return
        for connection in connections:
            connection.close()

    def _connection(self) -> PostgresConnection:
        try:
            connection = PostgresConnection.connect(
                self._secret_url,
                autocommit=True,
                prepare_threshold=1,
                connect_timeout=_CONNECTING,
                # A server that is not there any more is given up after a minute, and sooner while it is written to.
                keepalives_idle=30,
                keepalives_interval=10,
                keepalives_count=3,
                tcp_user_timeout=30_000,
            )
        except psycopg.Error as error:
            # As above: the driver's words are looked at, and not kept.
            response = unreachable(self.url, str(error))
            if isinstance(error, psycopg.errors.ConnectionTimeout):
                self._patience.lose(response)
            raise response from None
        if (unfit := _unfit(connection, self.url)) is not None:
            connection.close()
            raise unfit
        try:
            for name, loader in _LOADERS.items():
                connection.adapters.register_loader(name, loader)
            settings = _SETTINGS.items()
            wanted = [f"set_config('{name}', '{value}', false)" for name, value in settings]
            connection.execute(f"select {', '.join(wanted)}".encode())
        except psycopg.Error as error:
            connection.close()
            raise self._fault(error) from error
        self._patience.gain()
        return connection


def _unfit(connection: PostgresConnection, shown: str) -> StoreUnavailable | None:
    """Return why a database cannot be a store; None if the server reported nothing wrong."""
    encoding, version = connection.info.parameter_status("server_encoding"), connection.info.server_version
    if version < _OLDEST:
        return unavailable(
            shown, f"PostgreSQL {version // 10_000} is too old", f"Use version {_OLDEST // 10_000} or a newer one."
        )
    if encoding != "UTF8":
        fix = f"Make another: `createdb -E UTF8 -T template0 {connection.info.dbname}_utf8`."
        return unavailable(shown, f"its encoding is {encoding}, not UTF8", fix)
    return None
