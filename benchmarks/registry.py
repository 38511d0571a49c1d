"""What the registry costs, against bare drivers that run the same statement or add the same rows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from typing import TypeAlias, cast

import psycopg
from psycopg import sql

from kiwi_mcp.store.database import Database, Row, Value
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.postgres import translated
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease
from kiwi_mcp.store.sqlite import library
from measure import Case, Measured, interleaved
from releases import ACTOR, fill, opened, releases

_RESOLVES = 200
_IMPORTED = 10_000
_TABLES = ("tools", "tool_version_files", "tool_versions", "registry_log")
"""All that publishing adds rows to, in its order."""
_PRAGMAS = ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON")

Rows: TypeAlias = Mapping[str, Sequence[Row]]
"""Rows by table."""
Ask: TypeAlias = Callable[[str, Sequence[Value]], Sequence[Row]]


@dataclass(frozen=True, slots=True)
class Place:
    """A kind of database: new URLs of it, and the bare driver's way to query and to add rows."""

    name: str
    new_url: Callable[[], str]
    asking: Callable[[str], AbstractContextManager[Ask]]
    add: Callable[[str, Rows], None]


class Ear:
    """A database that remembers the last query, to let a bare driver ask the same."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.query: tuple[str, Sequence[Value]] = ("", ())

    def read(self, statement: str, values: Sequence[Value] = ()) -> Sequence[Row]:
        """Return all rows of a query."""
        self.query = (statement, values)
        return self._database.read(statement, values)


@contextmanager
def running_postgres() -> Iterator[str]:
    """Give the URL of a server that ends with the block."""
    script = Path(__file__).parents[1] / "scripts" / "postgres.py"
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()


def sqlite_in(folder: Path) -> Place:
    """Return SQLite, with files in a folder."""
    numbers = count()
    return Place("SQLite", lambda: f"sqlite://{folder}/{next(numbers)}.db", _asking_sqlite, _add_sqlite)


def postgres_at(url: str) -> Place:
    """Return the PostgreSQL whose databases are made beside the one at a URL."""
    numbers = count()

    def new_url() -> str:
        name = f"bench_{next(numbers)}"
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        return f"{url.rpartition('/')[0]}/{name}"

    return Place("PostgreSQL", new_url, _asking_postgres, _add_postgres)


def measure_resolve(place: Place, url: str, tools: int, turns: int) -> list[Measured]:
    """Return milliseconds for a chain of three links by the id of its version, after the bare driver."""
    with opened(url) as registry, place.asking(url) as bare:
        ear = Ear(registry.database)
        asker = Registry(cast("Database", ear), ACTOR)
        step = max(tools // 997, 1)
        ids = cycle([listed.id for number in range(0, tools, step) for listed in registry.named(f"tool_{number}")])
        if len(asker.resolve(next(ids))) != 3:
            raise RuntimeError(place.name)
        statement, values = ear.query

        def by_hand() -> None:
            for _ in range(_RESOLVES):
                bare(statement, (next(ids), *values[1:]))

        def through() -> None:
            for _ in range(_RESOLVES):
                registry.resolve(next(ids))

        cases = [Case(f"{place.name}, bare driver", by_hand), Case(f"{place.name}, resolve", through)]
        rows = interleaved(cases, turns=turns, warm=3)
    return [Measured(row.name, row.wall_ms / _RESOLVES, row.cpu_ms / _RESOLVES, row.ratio) for row in rows]


def measure_import(place: Place, turns: int) -> list[Measured]:
    """Return milliseconds for 10,000 new tools in one transaction, after the bare driver's bulk insert."""
    with ExitStack() as stack:
        # Stores are made before the clock starts: each turn fills one that nothing was published to.
        model, *seeded = (stack.enter_context(opened(place.new_url())) for _ in range(turns + 2))
        types = model.database.read("select tool_type from tool_types")
        empty = [_migrated(place.new_url(), types) for _ in seeded]
        made = [tuple(releases(registry, _IMPORTED)) for registry in seeded]
        fill(model, _IMPORTED)
        rows = {name: model.database.read(f"select * from {name}") for name in _TABLES}
        by_hand = Case(f"{place.name}, bare bulk insert", lambda: place.add(empty.pop(), rows))
        through = Case(f"{place.name}, publish", lambda: _publish(seeded.pop(), made.pop()))
        return interleaved([by_hand, through], turns=turns)


def _publish(registry: Registry, made: Sequence[CheckedRelease]) -> None:
    registry.publish(made)


def _migrated(url: str, types: Sequence[Row]) -> str:
    """Make a store without any item, in which each of the types can be used."""
    with closing(open_database(url)) as database, database.transaction() as transaction:
        known = {*transaction.read("select tool_type from tool_types")}
        transaction.insert("tool_types", ("tool_type",), [one for one in types if one not in known])
    return url


@contextmanager
def _asking_sqlite(url: str) -> Iterator[Ask]:
    with closing(library.connect(url.removeprefix("sqlite://"), isolation_level=None)) as connection:
        cursor = connection.cursor()
        yield lambda statement, values: cursor.execute(statement, values).fetchall()


@contextmanager
def _asking_postgres(url: str) -> Iterator[Ask]:
    with psycopg.connect(url, autocommit=True) as connection:
        yield lambda statement, values: connection.execute(translated(statement), values).fetchall()


def _add_sqlite(url: str, rows: Rows) -> None:
    with closing(library.connect(url.removeprefix("sqlite://"), isolation_level=None)) as connection:
        for pragma in _PRAGMAS:
            connection.execute(f"pragma {pragma}")
        connection.execute("begin immediate")
        for table, added in rows.items():
            connection.executemany(f"insert into {table} values ({', '.join('?' * len(added[0]))})", added)
        connection.execute("commit")


def _add_postgres(url: str, rows: Rows) -> None:
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        for table, added in rows.items():
            with cursor.copy(sql.SQL("copy {} from stdin").format(sql.Identifier(table))) as copy:
                for row in added:
                    copy.write_row(row)
