"""A store on a PostgreSQL server: one connection that reads, one that writes, each made again when it is lost."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import count
from threading import Lock
from types import MappingProxyType
from typing import Literal

import psycopg
from psycopg import sql
from psycopg.abc import Buffer
from psycopg.adapt import Loader
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.numeric import FloatLoader
from psycopg.types.string import TextLoader

from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, StoreUnavailable
from kiwi_mcp.store.database import IntegrityFault, Row, Value, longest_silence
from kiwi_mcp.store.postgres_faults import PATIENCE, busy, fault, occupied, unreachable
from kiwi_mcp.store.postgres_line import Connection, Patience, Silence

_SETTINGS = {
    "TimeZone": "UTC",
    "DateStyle": "ISO",
    "application_name": "kiwi",
    "statement_timeout": "60s",
    "lock_timeout": f"{PATIENCE:.0f}s",
    "idle_in_transaction_session_timeout": "300s",
    # For pgvector, where there is one: a filter must not leave a search for what is near with too few answers.
    "hnsw.iterative_scan": "relaxed_order",
    "hnsw.ef_search": "100",
}
"""What holds for every connection."""
_CONNECTING = 4
"""How many seconds a server may take to let somebody in."""
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


_TEXT_ARRAY = 1009
"""The number by which PostgreSQL knows the type `text[]`."""
_LOADERS: Mapping[str | int, type[TextLoader | FloatLoader | TimeLoader]] = {
    **dict.fromkeys(("uuid", "json", "jsonb", "date", _TEXT_ARRAY), TextLoader),
    "numeric": FloatLoader,
    "timestamptz": TimeLoader,
}


def connect(url: str, shown: str) -> PostgresDatabase:
    """Open the database of a `postgresql://user@host/database` URL."""
    check_url(url, shown)
    return PostgresDatabase(url, shown)


def check_url(url: str, shown: str) -> None:
    """Refuse what is not the URL of a database."""
    try:
        conninfo_to_dict(url)
    except psycopg.Error:
        # What the driver says may repeat the URL, so nothing of it is kept.
        raise InvalidRequest(
            f"{shown!r} is not a PostgreSQL URL.",
            suggestion="Use `postgresql://user:password@host:5432/database`, with special characters percent-encoded.",
        ) from None


@lru_cache(maxsize=512)
def translated(statement: str) -> bytes:
    """Return a statement with `?` for values as the driver wants it."""
    replaced = {"?": "%s", "%": "%%"}
    return _TOKENS.sub(lambda found: replaced.get(found[0], found[0].replace("%", "%%")), statement).encode()


class PostgresTransaction:
    """Work between BEGIN and COMMIT."""

    def __init__(self, fault: Callable[[BaseException], Exception], connection: Connection) -> None:
        self._fault = fault
        self._cursor = connection.cursor()
        self._failure: Exception | None = None

    def _fail(self, error: BaseException) -> Exception:
        self._failure = self._fault(error)
        return self._failure

    def raise_failure(self) -> None:
        """Raise again what a statement failed with, in case that was passed over."""
        if self._failure is not None:
            raise self._failure

    def read(self, statement: str, values: Sequence[Value] = ()) -> Sequence[Row]:
        """Return all rows of a query, as they are inside the transaction."""
        try:
            return self._cursor.execute(translated(statement), values).fetchall()
        except _FAULTS as error:
            raise self._fail(error) from error

    def write(self, statement: str, values: Sequence[Value] = ()) -> int:
        """Run one statement that changes rows, and return how many it changed."""
        try:
            return self._cursor.execute(translated(statement), values).rowcount
        except _FAULTS as error:
            raise self._fail(error) from error

    def insert(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Value]]) -> None:
        """Add rows to a table, as one stream."""
        names = sql.SQL(", ").join(sql.Identifier(column) for column in columns)
        statement = sql.SQL("copy {} ({}) from stdin").format(sql.Identifier(table), names)
        try:
            with self._cursor.copy(statement) as copy:
                for row in rows:
                    copy.write_row(row)
        except _FAULTS as error:
            raise self._fail(error) from error

    def run_script(self, script: str) -> None:
        """Run every statement of a script."""
        try:
            self._cursor.execute(script.encode())
        except _FAULTS as error:
            raise self._fail(error) from error


class PostgresDatabase:
    """One database of a PostgreSQL server. It is closed with its last user, where nobody closes it before."""

    dialect: Literal["postgres"] = "postgres"
    is_embedded = False
    is_lost = False

    def __init__(self, url: str, shown: str, settings: Mapping[str, str] = MappingProxyType({})) -> None:
        self._secret_url = url
        self._further = settings
        self.url = shown
        self._stamps = count(1)
        self._patience = Patience()
        self._reader: Connection | None = None
        self._writer: Connection | None = None
        self._begin_anew()
        self._reader = self._connection()

    def __repr__(self) -> str:
        return f"PostgresDatabase({self.url!r})"

    def __del__(self) -> None:
        self.close()

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
        if not self._reading.acquire(timeout=longest_silence()):
            raise occupied(self.url)
        try:
            if (reader := self._reader) is not None and not reader.closed:
                try:
                    return reader.execute(query, values).fetchall()
                except _FAULTS as error:
                    if isinstance(error, Silence) or not reader.closed:
                        raise self._fault(error) from error
            self._reader = reader = self._connection()
            try:
                return reader.execute(query, values).fetchall()
            except _FAULTS as error:
                raise self._fault(error) from error
        finally:
            self._reading.release()

    def _fault(self, error: BaseException) -> KiwiError | IntegrityFault:
        """Return what an error means; a server that is silent is not waited for again for a while."""
        told = fault(error, self.url)
        if isinstance(error, Silence) and isinstance(told, KiwiError):
            self._patience.lose(told)
        return told

    def stamp(self) -> int:
        """Return a new number each time: only the server knows whether somebody wrote."""
        return next(self._stamps)

    @contextmanager
    def transaction(self) -> Iterator[PostgresTransaction]:
        """Begin to write: one writer at a time, no half of it ever visible, durable once the block has ended."""
        self._leave_parent()
        self._patience.check()
        if not self._writing.acquire(timeout=min(PATIENCE, longest_silence())):
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

    def _begun(self) -> Connection:
        """Return the writing connection inside a transaction, made again if it was lost since the last one."""
        if (writer := self._writer) is not None and not writer.closed:
            try:
                return _begin(writer)
            except psycopg.Error as error:
                if isinstance(error, Silence) or not writer.closed:
                    _forget(writer)
                    raise self._fault(error) from error
        self._writer = writer = self._connection()
        try:
            return _begin(writer)
        except psycopg.Error as error:
            _forget(writer)
            raise self._fault(error) from error

    def _commit(self, connection: Connection) -> None:
        try:
            connection.execute(b"commit")
        except psycopg.Error as error:
            told = self._fault(error)
            if not connection.closed:
                raise told from error
            raise StoreUnavailable(
                f"The connection to {self.url} broke at the last moment: it is unknown whether this was written.",
                suggestion="Look, or do the same again: publishing what is already there changes nothing.",
            ) from error

    @contextmanager
    def transaction_now(self) -> Iterator[None]:
        """Begin nothing: a server is always waited for."""
        yield None

    def settle(self) -> None:
        """Do nothing: what a server has committed is on its disk."""

    def encode_list(self, values: Sequence[str]) -> Value:
        """Return texts as an array literal."""
        quoted = (value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
        return "{" + ",".join(f'"{value}"' for value in quoted) + "}"

    def decode_list(self, value: Value) -> tuple[str, ...]:
        """Return the texts of an array literal."""
        items = _ITEMS.findall(value) if isinstance(value, str) else []
        return tuple(plain or re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL) for quoted, plain in items)

    def doubts(self) -> Sequence[str]:
        """Return nothing: a server that is too old is refused by the migrations."""
        return ()

    def close(self) -> None:
        """Let go of every connection; whoever waits for an answer is told that it was lost."""
        connections = [one for one in (self._reader, self._writer) if one is not None]
        if os.getpid() != self._process:
            _abandoned.append(connections)
            return
        for connection in connections:
            connection.close()

    def _connection(self) -> Connection:
        try:
            connection = Connection.connect(
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
            told = unreachable(self.url, str(error))
            if isinstance(error, psycopg.errors.ConnectionTimeout):
                self._patience.lose(told)
            raise told from None
        try:
            for name, loader in _LOADERS.items():
                connection.adapters.register_loader(name, loader)
            settings = {**_SETTINGS, **self._further}.items()
            wanted = [f"set_config({_quoted(name)}, {_quoted(value)}, false)" for name, value in settings]
            connection.execute(f"select {', '.join(wanted)}".encode())
        except psycopg.Error as error:
            connection.close()
            raise self._fault(error) from error
        self._patience.gain()
        return connection


def _begin(connection: Connection) -> Connection:
    connection.execute(b"begin")
    connection.execute(b"select pg_advisory_xact_lock(%s)", (_WRITERS,))
    return connection


def _forget(connection: Connection) -> None:
    with suppress(psycopg.Error):
        connection.close()


def _quoted(text: str) -> str:
    return f"'{text}'"
