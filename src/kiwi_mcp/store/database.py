"""The port of a database: what each dialect provides, so that every statement above it is written once.

Statements use `?` for values and `true`/`false` for booleans. Values have the same types on every dialect, in and out:
text, int, float, bool (`1`/`0` in results), bytes, None; a time, a uuid and a JSON document are text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Literal, Protocol, TypeAlias

from kiwi_mcp.domain.errors import InvalidRequest, StoreDamaged, StoreUnavailable
from kiwi_mcp.domain.json import JsonObject, as_object

Value: TypeAlias = str | int | float | bytes | None
Row: TypeAlias = tuple[Value, ...]

PATIENCE = 30.0  # how many seconds a writer waits for the writers before it
silence: ContextVar[float] = ContextVar("silence", default=65.0)  # for how many seconds a server may be silent now


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Set how many seconds the server may stay silent during this block before the operation fails."""
    before = silence.set(seconds)
    try:
        yield
    finally:
        silence.reset(before)


json_column = json.JSONEncoder(separators=(",", ":")).encode
"""Returns the text of a value, as ASCII: every database can store it, whichever characters it has, and uncut."""


def read_json_column(text: Value, what: str, suggestion: str) -> JsonObject:
    """Return the object of a column; `what` names the row in the error."""
    try:
        return as_object(json.loads(str(text)))
    except ValueError as error:
        raise StoreDamaged(f"{what} in the store is not JSON.", suggestion=suggestion) from error


def unavailable(store: str, why: str, suggestion: str) -> StoreUnavailable:
    """Error: the store did not do it now."""
    return StoreUnavailable(f"The store {store} is not available: {why}. Nothing was written.", suggestion=suggestion)


def busy(store: str) -> StoreUnavailable:
    """Error: another writer has not finished in time."""
    why = f"another process has been writing for over {PATIENCE:.0f} s"
    return unavailable(store, why, "Wait for it, then try again.")


def invalid_value() -> InvalidRequest:
    """Error: a value that no database can store."""
    return InvalidRequest(
        "A value is too large or is not valid text.", suggestion="Send shorter values in valid Unicode."
    )


class IntegrityFault(Exception):
    """A rule of the schema refused a row: a key that is taken, a reference to nothing, a check, a trigger."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Cursor(Protocol):
    @property
    def rowcount(self) -> int: ...
    def fetchall(self) -> Sequence[Row]: ...


class Transaction(ABC):
    """One piece of work that is done whole or not at all; once a statement has failed, it is not done.

    A dialect gives what runs a statement, the errors of its driver, and what makes Kiwi's errors of them.
    """

    _execute: Callable[[str, Sequence[Value]], _Cursor]
    _faults: tuple[type[Exception], ...]
    _fault: Callable[[Exception], Exception]
    _failure: Exception | None = None

    def read(self, statement: str, values: Sequence[Value] = ()) -> Sequence[Row]:
        """Return all rows of a query, as they are inside the transaction."""
        try:
            return self._execute(statement, values).fetchall()
        except self._faults as error:
            raise self._failed(error) from error

    def write(self, statement: str, values: Sequence[Value] = ()) -> int:
        """Run one statement that changes rows, and return how many it changed."""
        try:
            return self._execute(statement, values).rowcount
        except self._faults as error:
            raise self._failed(error) from error

    @abstractmethod
    def insert(self, table: str, columns: Sequence[str], rows: Iterable[Sequence[Value]]) -> None:
        """Add rows to a table, in the quickest way the database has."""

    @abstractmethod
    def run_script(self, script: str) -> None:
        """Run every statement of a script, none of which takes values."""

    def raise_failure(self) -> None:
        """Raise again what a statement failed with, in case that was passed over."""
        if self._failure is not None:
            raise self._failure

    def _failed(self, error: Exception) -> Exception:
        self._failure = self._fault(error)
        return self._failure


class Database(ABC):
    """A place where rows are kept; it may be used from several threads. It closes with its last user at the latest."""

    dialect: Literal["sqlite", "postgres"]
    """The word for how its SQL differs, which is also the name of its migrations' folder."""
    url: str  # where it is, without any password
    is_embedded: bool  # whether a small read or write takes microseconds, so that it may be done without another thread

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __del__(self) -> None:
        self.close()

    @property
    def is_lost(self) -> bool:
        """Whether its path now has another database, or none. Other processes would never see what is written here."""
        return False

    @abstractmethod
    def read(self, statement: str, values: Sequence[Value] = ()) -> Sequence[Row]:
        """Return all rows of a query."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[Transaction]:
        """Begin to write: one writer at a time, no half of it ever visible, durable once the block has ended."""

    @contextmanager
    def transaction_now(self) -> Iterator[Transaction | None]:
        """Begin to write without waiting; None if that is impossible. `settle` makes it outlive a loss of power."""
        yield None

    def settle(self) -> None:  # noqa: B027 - a server has it on its disk
        """Let all that was written outlive a loss of power."""

    @abstractmethod
    def encode_list(self, values: Sequence[str]) -> Value:
        """Return texts as the value of a column that holds a list."""

    @abstractmethod
    def decode_list(self, value: Value) -> tuple[str, ...]:
        """Return the texts in the value of a column that holds a list."""

    @abstractmethod
    def stamp(self) -> int:
        """Return a number that differs from the last one whenever another process may have written.

        So it does after a transaction of this one; what `transaction_now` wrote here need not change it. Nor need runs,
        receipts, tasks and what searches worked out: no prepared item depends on them.
        """

    def check_extensions(self) -> None:  # noqa: B027 - most need nothing
        """Refuse a database that lacks what the schema needs, before anything is made in it."""

    def doubts(self) -> Sequence[str]:
        """Return warnings about this database for its owner, a sentence each."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Close every connection."""


@contextmanager
def quick_transaction(database: Database, patience: float = 10.0) -> Iterator[Transaction]:
    """Begin to write at once where that is possible, else wait; `patience` is how long a server may be silent."""
    with database.transaction_now() as transaction:
        if transaction is not None:
            yield transaction
            return
    with within(patience), database.transaction() as transaction:
        yield transaction


LONGEST = 2_000  # the most that is kept of a text, in characters


def plain(values: Sequence[Value]) -> Sequence[Value]:
    """Return the values of a row, with texts that every database can hold."""
    text = ""
    for value in values:
        if type(value) is str:
            text += value
    if text.isascii() and len(text) <= LONGEST and "\0" not in text:  # as the texts of most rows
        return values
    return [clean(value) if type(value) is str else value for value in values]


def id_range(wanted: str) -> tuple[str, str]:
    """Return the first id that begins with a text, and the first that comes after all of them."""
    start = clean(wanted.upper())
    return start, f"{start}["  # `[` comes after the last letter of an id


def clean(text: str, limit: int = LONGEST) -> str:
    """Return a text as every database can hold it."""
    return text[:limit].encode(errors="replace").decode().replace("\0", "\ufffd")


def insert_into(table: str, columns: Sequence[str]) -> str:
    """Return the statement that adds a row to a table; the names are our own."""
    return f"insert into {table} ({', '.join(columns)}) values ({', '.join('?' * len(columns))})"  # noqa: S608 - as it says


def conditions(*clauses: tuple[str, Value]) -> tuple[str, list[Value]]:
    """Return a condition of the clauses that have a value, and the values, with texts that every database can hold."""
    given = [(clause, clean(value) if isinstance(value, str) else value) for clause, value in clauses]
    known = [(clause, value) for clause, value in given if value is not None]
    return " and ".join(clause for clause, _ in known) or "true", [value for _, value in known]


class OwnedRows:
    """The rows of one kind that belong to one owner, in one store."""

    def __init__(self, database: Database, owner: str = "") -> None:
        self.database = database
        self.owner = clean(owner)
