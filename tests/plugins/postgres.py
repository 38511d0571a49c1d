"""Stores for tests: one PostgreSQL server per session, one database per test, and SQLite."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import open_database

PROGRAM = Path(__file__).parents[2] / "scripts" / "postgres.py"
_numbers = count(1)
_TABLES = "select tablename from pg_tables where schemaname = 'public'"
_OBJECTS = " union all ".join(
    f"select count(*), sum(hashtext({row})) from {catalog} o"
    for catalog, row in {
        **dict.fromkeys(
            ("pg_attribute", "pg_class", "pg_constraint", "pg_namespace", "pg_proc", "pg_type"), "ctid || ' ' || xmin"
        ),
        "pg_trigger": "o::text",  # a test may stop one and start it again
    }.items()
)
"""Changes with every object that is made, altered or removed in a database, and not with its rows."""
_END_OTHERS = """\
select pg_terminate_backend(pid, 60000) from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid()"""


class PostgresServer:
    """A server that runs for as long as this object's process is alive, and can be made to crash."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url = self._answer()

    def kill(self) -> None:
        """End the server as a crash would."""
        self._tell("kill")

    def start(self) -> None:
        """Start it again, with the data it had."""
        self._tell("start")

    def create(self, name: str, template: str = "template0") -> str:
        """Make a database, and return its URL."""
        self._run(sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template)))
        return self.url_of(name)

    def url_of(self, name: str) -> str:
        """Return the URL of a database."""
        return f"{self.url.rpartition('/')[0]}/{name}"

    def drop(self, name: str) -> None:
        """Remove a database, even if it has connections."""
        self._run(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def _run(self, statement: sql.Composed) -> None:
        with _connected(self.url) as connection:
            connection.execute(statement)

    def _tell(self, word: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout
        answer = self._process.stdout.readline().strip()
        assert answer, "the server has ended"
        return answer


@pytest.fixture(scope="session")
def postgres_server(processes: None) -> Iterator[PostgresServer]:
    """One PostgreSQL for all tests of this process; it ends with the process, however that ends."""
    # Only the server crashes in tests, never the machine, so nothing has to reach the disk.
    command = [sys.executable, str(PROGRAM), "fsync=off"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        # Leaving the block closes the input, upon which the server ends, and waits for that.
        yield PostgresServer(process)


class Databases:
    """Databases with Kiwi's schema: emptying one costs a fraction of making one, so a later test gets it again."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._template = "kiwi_template"
        self._free: list[str] = []
        open_database(server.create(self._template)).close()
        with _connected(server.url_of(self._template)) as connection:
            self._objects = connection.execute(_OBJECTS).fetchall()
            # No trigger and no foreign key stops it.
            reset: list[sql.Composable] = [sql.SQL("set session_replication_role = replica")]
            for (table,) in connection.execute(_TABLES).fetchall():
                reset.append(sql.SQL("delete from {}").format(name := sql.Identifier(table)))
                rows = connection.execute(sql.SQL("select * from {}").format(name)).fetchall()
                reset += [sql.SQL("insert into {} values ({})").format(name, sql.SQL(",").join(row)) for row in rows]
        self._reset = sql.SQL(";").join(reset)

    def take(self) -> str:
        """Return the name of a database that has Kiwi's schema and nothing in it."""
        if self._free:
            return self._free.pop()
        self._server.create(name := f"test_{next(_numbers)}", self._template)
        return name

    def give_back(self, name: str) -> None:
        """Empty a database for a later test; one with other objects than at first goes away."""
        with _connected(self._server.url_of(name)) as connection:
            connection.execute(_END_OTHERS)
            if is_as_before := connection.execute(_OBJECTS).fetchall() == self._objects:
                connection.execute(self._reset)
        if is_as_before:
            self._free.append(name)
        else:
            self._server.drop(name)


@contextmanager
def _connected(url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
        yield connection


@pytest.fixture(scope="session")
def _databases(postgres_server: PostgresServer) -> Databases:
    return Databases(postgres_server)


@pytest.fixture
def new_postgres(postgres_server: PostgresServer) -> Iterator[Callable[[], str]]:
    """Make an empty database that goes away after the test, and return its URL."""
    names: list[str] = []

    def make() -> str:
        names.append(f"test_{next(_numbers)}")
        return postgres_server.create(names[-1])

    yield make
    for name in names:
        postgres_server.drop(name)


@pytest.fixture
def new_postgres_store(postgres_server: PostgresServer, _databases: Databases) -> Iterator[Callable[[], str]]:
    """Make a database with Kiwi's schema, for this test alone, and return its URL."""
    names: list[str] = []

    def make() -> str:
        names.append(_databases.take())
        return postgres_server.url_of(names[-1])

    yield make
    for name in names:
        _databases.give_back(name)


@pytest.fixture
def postgres_url(new_postgres_store: Callable[[], str]) -> str:
    """The URL of a PostgreSQL database with Kiwi's schema, for this test alone."""
    return new_postgres_store()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of an SQLite file that is not there yet."""
    return f"sqlite://{tmp_path}/store/registry.db"


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest) -> str:
    """The URL of a store for this test alone: the test runs once for each kind."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def database(store_url: str) -> Iterator[Database]:
    """An open store for this test alone, of each kind."""
    opened = open_database(store_url)
    yield opened
    opened.close()
