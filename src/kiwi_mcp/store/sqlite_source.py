"""A store in somebody else's SQLite file, only read: nothing in it is run, changed, or waited for without end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Literal, NoReturn
from urllib.parse import quote

from kiwi_mcp.domain.errors import InvalidRequest, NotFound, StoreDamaged, StoreUnavailable, TooLarge
from kiwi_mcp.store.database import Row, Transaction, Value
from kiwi_mcp.store.migrate import migrate
from kiwi_mcp.store.sqlite import SqliteDatabase, path_in
from kiwi_mcp.store.sqlite_faults import PATIENCE, busy, code_of, fault
from kiwi_mcp.store.sqlite_library import library
from kiwi_mcp.store.sqlite_line import FAULTS, LIMIT, Line

_PRAGMAS = "query_only=ON", "trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0"
_SCHEMA = "select type, name, tbl_name, sql from sqlite_master"
_MOST_ROWS = 100_000
"""How many rows one question may have for an answer; whoever asks for more asks in pages."""


def connect_source(url: str, shown: str) -> SqliteSource:
    """Open the file of a `sqlite:///absolute/path` URL to read from it; it has to be there."""
    return SqliteSource(path_in(url, shown))


def check_target(url: str, shown: str) -> None:
    """Refuse to write to a file that holds anything but a store; one that is empty or not there becomes one."""
    file = Path(path_in(url, shown))
    if file.exists() and (not file.is_file() or file.stat().st_size):
        connect_source(url, shown).close()


class SqliteSource:
    """One SQLite file that is read."""

    dialect: Literal["sqlite"] = "sqlite"
    is_embedded = True
    is_lost = False

    def __init__(self, path: str) -> None:
        self._path = path
        self.url = f"sqlite://{path}"
        self._reading = Lock()
        self._line = Line(_connection(path))
        try:
            self._refuse_foreign()
        except BaseException:
            self.close()
            raise

    def _refuse_foreign(self) -> None:
        # A view or a trigger is a program, and a table of another shape is another program's: nothing but exactly our
        # own schema is asked anything else.
        if {*self.read(_SCHEMA)} != own_schema():
            raise StoreDamaged(
                f"{self.url} is not a store with the schema of this Kiwi. Nothing was read from it.",
                suggestion="Open it with this Kiwi as a store first, or let its owner push to a folder.",
            )

    def read(self, statement: str, values: Sequence[Value] = ()) -> Sequence[Row]:
        """Return all rows of a query."""
        if not self._reading.acquire(timeout=LIMIT):
            raise busy(self._path)
        try:
            rows = self._line.read_some(statement, values, _MOST_ROWS + 1)
        except FAULTS as error:
            raise fault(error, self._path) from error
        finally:
            self._reading.release()
        if len(rows) > _MOST_ROWS:
            raise TooLarge(f"An answer of {self.url}, in rows,", size=len(rows), limit=_MOST_ROWS)
        return rows

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Refuse: a source is not written."""
        self._refuse()
        yield  # type: ignore[unreachable]  # a context manager has to be able to

    def transaction_now(self) -> AbstractContextManager[Transaction]:
        """Refuse: a source is not written."""
        return self.transaction()

    def settle(self) -> None:
        """Do nothing: a source is not written."""

    def _refuse(self) -> NoReturn:
        raise StoreUnavailable(f"{self.url} was opened to be read.", suggestion="Push to it to write to it.")

    def encode_list(self, values: Sequence[str]) -> Value:
        """Return texts as a JSON array."""
        return json.dumps(list(values), ensure_ascii=False)

    def decode_list(self, value: Value) -> tuple[str, ...]:
        """Return the texts of a JSON array; anything else holds none."""
        with suppress(ValueError, RecursionError):
            found = json.loads(value) if isinstance(value, str) else ()
            return tuple(text for text in found if isinstance(text, str)) if isinstance(found, list) else ()
        return ()

    def stamp(self) -> int:
        """Return a number that changes with every commit of others."""
        return int(self.read("PRAGMA data_version")[0][0] or 0)

    def doubts(self) -> Sequence[str]:
        """Return nothing: it is not this machine's own."""
        return ()

    def close(self) -> None:
        """Let go of the file."""
        with self._reading:
            self._line.connection.close()


@cache
def own_schema() -> frozenset[Row]:
    """Return what a store that this Kiwi made says of its own schema."""
    with TemporaryDirectory(prefix="kiwi-schema-") as folder:
        database = SqliteDatabase(f"{folder}/schema.db")
        try:
            migrate(database)
            return frozenset(database.read(_SCHEMA))
        finally:
            database.close()


def _connection(path: str) -> library.Connection:
    file = Path(path)
    if not file.exists():
        raise NotFound(f"There is no store at {path}.", suggestion="Check the path; only a push makes a new store.")
    if not file.is_file():  # to open a pipe would wait for somebody at its other end
        raise InvalidRequest(f"{path} is not a file.", suggestion="Name the file of a store, or a folder.")
    try:
        return _opened(path, "mode=ro")
    except library.Error as error:
        # Beside a store that lies where nothing can be written, SQLite cannot lay the files it works with.
        if code_of(error) != library.SQLITE_CANTOPEN or Path(f"{path}-wal").exists():
            raise fault(error, path) from error
    try:
        return _opened(path, "mode=ro&immutable=1")
    except library.Error as error:
        raise fault(error, path) from error


def _opened(path: str, words: str) -> library.Connection:
    connection = library.connect(
        f"file:{quote(path)}?{words}", uri=True, timeout=PATIENCE, isolation_level=None, check_same_thread=False
    )
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("select 1 from sqlite_master limit 1").fetchall()
    except library.Error:
        connection.close()
        raise
    return connection
