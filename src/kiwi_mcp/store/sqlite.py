"""The SQLite dialect: choice of the library, connections and errors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from time import monotonic, sleep
from typing import Literal

from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, StoreDamaged, StoreUnavailable
from kiwi_mcp.store.database import (
    PATIENCE,
    Database,
    IntegrityFault,
    Row,
    Transaction,
    Value,
    busy,
    insert_into,
    invalid_value,
    unavailable,
)

# Before its `SOUND` release SQLite may damage a file that several processes write, and most Pythons have an older one.
if find_spec("pysqlite3") is None:
    import sqlite3 as library
else:
    from pysqlite3 import dbapi2 as library  # type: ignore[import-untyped,no-redef]  # a copy of the standard module

__all__ = ["SOUND", "is_standard_library", "library", "version"]

SOUND = (3, 51, 3)  # the first release that several processes may write with

version: tuple[int, ...] = tuple(int(part) for part in library.sqlite_version.split("."))
is_standard_library: bool = library.__name__ == "sqlite3"

_MEND = (
    "Move {path} and the -wal and -shm files beside it to a safe place, then pull from a remote or restore a backup. "
    "Do not delete it: much of it may still be readable."
)


def code_of(error: BaseException) -> int:
    """Return SQLite's primary code for an error, 0 where it has none."""
    return int(getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def fault(error: BaseException, path: str) -> KiwiError | IntegrityFault:
    """Return the Kiwi error for an error of the driver."""
    code, response = code_of(error), str(error)
    match code:
        case library.SQLITE_CONSTRAINT:
            return IntegrityFault(response)
        case library.SQLITE_CORRUPT | library.SQLITE_NOTADB:
            return StoreDamaged(
                f"The store {path} is damaged, or is not a database.", suggestion=_MEND.format(path=path), path=path
            )
        case library.SQLITE_BUSY | library.SQLITE_LOCKED:
            return busy(path)
        case library.SQLITE_FULL:
            return unavailable(path, "there is no space left", "Free some space on that disk, then try again.")
        case library.SQLITE_READONLY | library.SQLITE_PERM | library.SQLITE_CANTOPEN | library.SQLITE_AUTH:
            return unavailable(
                path, "it cannot be written", f"Make {path} and its folder writable, or name another store."
            )
        case library.SQLITE_IOERR:
            return unavailable(
                path, "the disk failed to read or write", "Check the disk and its limits, then try again."
            )
        case library.SQLITE_INTERRUPT:
            return unavailable(path, "it took longer than a statement may", "Check the store with `kiwi verify`.")
        case library.SQLITE_ERROR if response.startswith("no such table"):
            return _incomplete(path, "table")
        case library.SQLITE_ERROR if response.startswith("no such column") or "has no column" in response:
            return _incomplete(path, "column")
    if isinstance(error, (UnicodeEncodeError, OverflowError, library.InterfaceError)) or code == library.SQLITE_TOOBIG:
        return invalid_value()
    if isinstance(error, library.ProgrammingError) and "closed" in response:
        return closed(path)
    return unavailable(path, "it could not do what was asked", "Run `kiwi doctor`; the log holds the cause.")


def _incomplete(path: str, missing: str) -> StoreDamaged:
    return StoreDamaged(
        f"The store {path} lacks a {missing} of Kiwi's schema.",
        suggestion=_MEND.format(path=path),
        path=path,
        missing=missing,
    )


def closed(path: str) -> StoreUnavailable:
    """Error: the store is closed."""
    return unavailable(path, "it was closed meanwhile", "Try again.")


LIMIT = 60.0  # for how many seconds a statement may run
FAULTS = (library.Error, UnicodeEncodeError, OverflowError)
"""What the driver raises: its own errors, and Python's for a value that SQLite cannot hold."""
_STEPS = 100_000  # after how many steps of SQLite's machine the time is looked at: some milliseconds


class Line:
    """A connection with the one cursor that is used on it, by one thread at a time."""

    def __init__(self, connection: library.Connection) -> None:
        self.connection = connection
        self._cursor = connection.cursor()
        self._end = end = [inf]  # the time at which its statement is ended
        # Not a method of the line: the connection would hold the line, and neither would ever go.
        connection.set_progress_handler(lambda: monotonic() > end[0], _STEPS)

    def execute(self, statement: str, values: Sequence[Value] = ()) -> library.Cursor:
        """Run one statement, and return the cursor with its rows and how many it changed."""
        self._end[0] = monotonic() + LIMIT
        return self._cursor.execute(statement, values)

    def insert(self, statement: str, rows: Iterable[Sequence[Value]]) -> None:
        """Run one statement for each row, without a time limit: the source of the rows may be slow."""
        self._end[0] = inf
        self._cursor.executemany(statement, rows)


_HASTE = 0.002  # how many seconds an urgent writer waits for another urgent writer. It may run on an event loop.
_READERS = 2  # two, so that a long list does not make a glance wait
_CLOSING = 5.0  # how many seconds `close` waits for the users of a connection
_encode = json.JSONEncoder(ensure_ascii=False).encode
_creating = Lock()
_abandoned: list[object] = []
"""What is kept open and never touched: to close what a parent process had opened would harm the parent, and SQLite
removes the files beside a database by their names, which may be those of another database by now."""


def connect(url: str, shown: str) -> SqliteDatabase:
    """Open the file of a `sqlite:///absolute/path` URL, and make it where it is not there."""
    path = url.removeprefix("sqlite://")
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise InvalidRequest(
            f"{shown!r} does not name a file by its absolute path.",
            suggestion="Use three slashes and an absolute path: `sqlite:///home/me/.ai/registry.db`.",
        )
    _create(Path(path))
    return SqliteDatabase(path)


def _create(path: Path) -> None:
    """Make the file so that only its owner reads it; SQLite gives the files beside it the same mode."""
    # One at a time: closing a file lets go of every lock that this process has on it.
    with _creating:
        if path.exists():
            return
        try:
            for folder in reversed([path.parent, *path.parent.parents]):
                folder.mkdir(mode=0o700, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            pass
        except OSError as error:
            raise StoreUnavailable(
                f"The store {path} cannot be made: {error.strerror}.",
                suggestion=f"Make {path.parent} writable, or name another store in registry.yaml.",
            ) from error


class SqliteTransaction(Transaction):
    """Work between BEGIN and COMMIT."""

    _faults = FAULTS

    def __init__(self, path: str, line: Line) -> None:
        self._line = line
        self._execute = line.execute
        self._fault = partial(fault, path=path)

    def insert(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Value]]) -> None:
        """Add rows to a table, through one prepared statement."""
        try:
            self._line.insert(insert_into(table, columns), rows)
        except FAULTS as error:
            raise self._failed(error) from error

    def run_script(self, script: str) -> None:
        """Run every statement of a script, inside the transaction as `executescript` would not be."""
        for statement in statements(script):
            self.write(statement)

    def commit(self) -> None:
        """End the transaction, unless a statement has failed."""
        if self._failure is not None:
            raise self._failure
        self.write("COMMIT")


class SqliteDatabase(Database):
    """One SQLite file."""

    dialect: Literal["sqlite"] = "sqlite"
    is_embedded = True

    def __init__(self, path: str) -> None:
        self._path = path
        self.url = f"sqlite://{path}"
        self._process = os.getpid()
        self._connections: list[library.Connection] = []
        self._open()

    def _open(self) -> None:
        self._process = os.getpid()
        self._writing, self._hurrying = Lock(), Lock()
        # Published data must survive a power loss. The record of a run need not, and is written at every call.
        modes = ((PATIENCE, "FULL"), (0.0, "NORMAL"), *[(PATIENCE, "NORMAL")] * _READERS)
        self._connections = [_connection(self._path, patience, mode) for patience, mode in modes]
        self._writer, self._hasty, *readers = map(Line, self._connections)
        self._idle: SimpleQueue[Line] = SimpleQueue()
        for line in readers:
            self._idle.put(line)
        self._file: tuple[int, int] | None = None
        with suppress(FileNotFoundError):  # it was removed since, so it is lost
            found = os.stat(self._path)  # noqa: PTH116 - as in `is_lost`
            self._file = found.st_dev, found.st_ino
        # A new connection counts from the start again. A forked process must not see the same number again.
        self._base = self._process << 40

    def _check(self) -> None:
        """Refuse what comes after the end; in a process that was forked, forget what its parent had opened."""
        if not self._connections:
            raise closed(self._path)
        if os.getpid() != self._process:
            _abandoned.append((self._connections, self._writer, self._hasty, self._idle))
            self._open()

    @property
    def is_lost(self) -> bool:
        """Whether the file was removed, or another one put in its place."""
        try:
            found = os.stat(self._path)  # noqa: PTH116 - text, as this is on the way of every call
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != self._file

    def read(self, statement: str, values: Sequence[Value] = ()) -> Sequence[Row]:
        """Return all rows of a query."""
        self._check()
        idle = self._idle
        try:
            line = idle.get(timeout=PATIENCE)
        except Empty:
            raise busy(self._path) from None
        try:
            return line.execute(statement, values).fetchall()
        except FAULTS as error:
            raise fault(error, self._path) from error
        finally:
            idle.put(line)

    def stamp(self) -> int:
        """Return a number that grows with every commit but those of `transaction_now`.

        A connection notices the commits of others alone, so the one that is asked is the one that records runs: what
        every call leaves behind would otherwise make the next one read everything again.
        """
        self._check()
        with self._hurrying:
            try:
                ((version,),) = self._hasty.execute("PRAGMA data_version").fetchall()
            except FAULTS as error:
                raise fault(error, self._path) from error
        return self._base + int(version or 0)

    @contextmanager
    def transaction(self) -> Iterator[SqliteTransaction]:
        """Begin to write: one writer at a time, no half of it ever visible, durable once the block has ended."""
        self._check()
        if not self._writing.acquire(timeout=PATIENCE):
            raise busy(self._path)
        try:
            transaction = SqliteTransaction(self._path, self._writer)
            transaction.write("BEGIN IMMEDIATE")
            try:
                yield transaction
                transaction.commit()
            except BaseException:
                _roll_back(self._writer)
                raise
        finally:
            self._writing.release()

    @contextmanager
    def transaction_now(self) -> Iterator[SqliteTransaction | None]:
        """Begin to write if no other writer is at work, in this process or another."""
        self._check()
        if not self._hurrying.acquire(timeout=_HASTE):
            yield None
            return
        try:
            try:
                self._hasty.execute("BEGIN IMMEDIATE")
            except FAULTS as error:
                if code_of(error) not in {library.SQLITE_BUSY, library.SQLITE_LOCKED}:
                    raise fault(error, self._path) from error
                yield None
                return
            transaction = SqliteTransaction(self._path, self._hasty)
            try:
                yield transaction
                transaction.commit()
            except BaseException:
                _roll_back(self._hasty)
                raise
        finally:
            self._hurrying.release()

    def settle(self) -> None:
        """Bring what stands in the log into the file, which writes both to the disk."""
        self._check()
        if not self._writing.acquire(timeout=PATIENCE):
            raise busy(self._path)
        try:
            self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except FAULTS as error:
            raise fault(error, self._path) from error
        finally:
            self._writing.release()

    def encode_list(self, values: Sequence[str]) -> Value:
        """Return texts as a JSON array."""
        return _encode(list(values)) if values else "[]"

    def decode_list(self, value: Value) -> tuple[str, ...]:
        """Return the texts of a JSON array."""
        return tuple(json.loads(value)) if isinstance(value, str) else ()

    def doubts(self) -> Sequence[str]:
        """Return a warning if the SQLite library is too old."""
        if version >= SOUND:
            return ()
        wanted = ".".join(map(str, SOUND))
        return (f"SQLite {library.sqlite_version} may damage a file that several processes write; {wanted} does not",)

    def close(self) -> None:
        """Close every connection once it is idle: SQLite must not be closed during a statement."""
        connections, self._connections = self._connections, []  # no new use can begin from here
        if not connections:
            return
        with ExitStack() as held:
            if os.getpid() == self._process and not self.is_lost and self._takes_all(held):
                for connection in connections:
                    connection.close()
            else:
                _abandoned.append((connections, self._writer, self._hasty, self._idle))

    def _takes_all(self, held: ExitStack) -> bool:
        """Lock every connection until `held` ends, and return whether that succeeded."""
        for lock in (self._writing, self._hurrying):
            if not lock.acquire(timeout=_CLOSING):
                return False
            held.callback(lock.release)
        for _ in range(_READERS):
            try:
                held.callback(self._idle.put, self._idle.get(timeout=_CLOSING))
            except Empty:
                return False
        return True


def _roll_back(line: Line) -> None:
    # SQLite ends a transaction by itself after some faults, such as a full disk.
    with suppress(library.Error):
        if line.connection.in_transaction:
            line.execute("ROLLBACK")


def _connection(path: str, patience: float, synchronous: str) -> library.Connection:
    try:
        connection = library.connect(path, timeout=patience, isolation_level=None, check_same_thread=False)
    except library.Error as error:
        raise fault(error, path) from error
    try:
        _turn_on_wal(connection)
        for pragma in ("foreign_keys=ON", "trusted_schema=OFF", f"synchronous={synchronous}"):
            connection.execute(f"PRAGMA {pragma}")
    except library.Error as error:
        connection.close()
        raise fault(error, path) from error
    return connection


def _turn_on_wal(connection: library.Connection) -> None:
    # While several processes open a new file at once SQLite says that it is busy without waiting first.
    end = monotonic() + PATIENCE
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except library.OperationalError as error:
            if code_of(error) != library.SQLITE_BUSY or monotonic() > end:
                raise
            sleep(0.005)
        else:
            return


def statements(script: str) -> Iterator[str]:
    """Yield the statements of a script one by one; a trigger is one statement, although it contains semicolons."""
    *ended, rest = script.split(";")
    statement = ""
    for part in ended:
        statement += f"{part};"
        if library.complete_statement(statement):
            yield statement
            statement = ""
    if (statement + rest).strip():
        yield statement + rest
