"""Stores for tests: one PostgreSQL server per session, one database per test, and SQLite."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import open_database

PROGRAM = Path(__file__).parents[2] / "scripts" / "postgres.py"
_numbers = count(1)


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
        return f"{self.url.rpartition('/')[0]}/{name}"

    def drop(self, name: str) -> None:
        """Remove a database, even if it has connections."""
        self._run(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def _run(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.url, autocommit=True, connect_timeout=10) as connection:
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
    with subprocess.Popen(
        [sys.executable, PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        # Leaving the block closes the input, upon which the server ends, and waits for that.
        yield PostgresServer(process)


@pytest.fixture(scope="session")
def _postgres_template(postgres_server: PostgresServer) -> str:
    """The name of a database that has Kiwi's schema and nothing in it."""
    open_database(postgres_server.create("kiwi_template")).close()
    return "kiwi_template"


@pytest.fixture
def new_postgres(postgres_server: PostgresServer) -> Iterator[Callable[..., str]]:
    """Make a database that goes away after the test, empty or as a copy of another, and return its URL."""
    names: list[str] = []

    def make(template: str = "template0") -> str:
        names.append(f"test_{next(_numbers)}")
        return postgres_server.create(names[-1], template)

    yield make
    for name in names:
        postgres_server.drop(name)


@pytest.fixture
def postgres_url(new_postgres: Callable[..., str], _postgres_template: str) -> str:
    """The URL of a PostgreSQL database with Kiwi's schema, for this test alone."""
    return new_postgres(_postgres_template)


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
