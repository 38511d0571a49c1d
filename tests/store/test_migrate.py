from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from kiwi_mcp.domain.errors import KiwiError, StoreDamaged, StoreNewer
from kiwi_mcp.store.database import Database, Row, Value
from kiwi_mcp.store.open import FOLDER, connect_to, migrate, open_database, read_migrations
from kiwi_mcp.store.sqlite import statements

Begin = Callable[..., subprocess.Popen[str]]
Steps = Callable[..., Path]

SCHEMA = {
    "sqlite": ["select type, name, tbl_name, sql from sqlite_master order by type, name"],
    "postgres": [
        "select table_name, column_name, data_type, udt_name, is_nullable, column_default, generation_expression "
        "from information_schema.columns where table_schema = 'public' order by 1, 2",
        "select indexname, indexdef from pg_indexes where schemaname = 'public' order by 1",
        "select c.conname, pg_get_constraintdef(c.oid) from pg_constraint c "
        "where c.connamespace = 'public'::regnamespace order by 1, 2",
        "select tgname, pg_get_triggerdef(oid) from pg_trigger where not tgisinternal order by 1, 2",
        "select proname, prosrc from pg_proc where pronamespace = 'public'::regnamespace order by 1, 2",
    ],
}
LIVE = ("sqlite", "postgres")


def schema(database: Database) -> list[Sequence[Row]]:
    """All that a store's schema consists of."""
    return [database.read(statement) for statement in SCHEMA[database.dialect]]


def applied(database: Database) -> Sequence[Row]:
    return database.read("select number, name, checksum from schema_migrations order by number")


def tables(database: Database) -> set[Value]:
    """The names of the tables that a test's own steps make."""
    listed = {
        "sqlite": "select name from sqlite_master where type = 'table'",
        "postgres": "select tablename from pg_tables where schemaname = 'public'",
    }
    return {name for (name,) in database.read(listed[database.dialect])} - {"schema_migrations"}


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    """Make a folder of steps, the same ones for each dialect, and return it."""

    def write(name: str, **scripts: str) -> Path:
        for dialect in LIVE:
            folder = tmp_path / name / dialect
            folder.mkdir(parents=True)
            for step, script in scripts.items():
                (folder / f"{step.removeprefix('_')}.sql").write_text(script)
        return tmp_path / name

    return write


def test_a_new_store_records_every_migration(empty_url: str) -> None:
    database = open_database(empty_url)
    known = read_migrations(FOLDER / database.dialect)
    assert [step.number for step in known] == list(range(1, len(known) + 1))
    assert applied(database) == [(step.number, step.name, step.checksum) for step in known]
    database.close()


def test_both_dialects_have_the_same_migrations() -> None:
    sqlite, postgres = ([step.name for step in read_migrations(FOLDER / dialect)] for dialect in LIVE)
    assert sqlite == postgres


def test_opening_a_current_store_costs_one_small_query(database: Database) -> None:
    watched = Mock(wraps=database, dialect=database.dialect, url=database.url)
    migrate(watched)
    assert watched.mock_calls == [call.read("select number, checksum from schema_migrations order by number")]


def test_a_store_of_any_past_schema_is_migrated_to_the_current_one(
    empty: Database, new_url: Callable[[], str], steps: Steps
) -> None:
    known = read_migrations(FOLDER / empty.dialect)
    for count in range(1, len(known) + 1):
        migrate(empty, steps(f"as of {count}", **{f"_{step.name}": step.script for step in known[:count]}))
        assert len(applied(empty)) == count
    migrate(empty)
    fresh = open_database(new_url())
    assert schema(empty) == schema(fresh)
    assert applied(empty) == applied(fresh)
    fresh.close()


def test_migrations_are_applied_once_and_in_order(empty: Database, steps: Steps) -> None:
    first = "create table a (x integer); insert into a (x) values (1);"
    migrate(empty, steps("old", _0001_a=first))
    new = steps("new", _0001_a=first, _0002_b="insert into a (x) values (2);", _0010_c="update a set x = x * 10;")
    for _ in range(2):
        migrate(empty, new)
    assert empty.read("select x from a order by x") == [(10,), (20,)]
    assert [row[:2] for row in applied(empty)] == [(1, "0001_a"), (2, "0002_b"), (10, "0010_c")]


def test_a_failed_migration_leaves_nothing(empty: Database, steps: Steps) -> None:
    a, b, broken = (f"create table {name} (x integer);" for name in "abc")
    migrate(empty, steps("first", _0001_a=a))
    with pytest.raises(KiwiError):
        migrate(empty, steps("broken", _0001_a=a, _0002_b=b, _0003_c=f"{broken} insert into nowhere values (1);"))
    assert tables(empty) == {"a"}
    assert [row[0] for row in applied(empty)] == [1]

    migrate(empty, steps("fixed", _0001_a=a, _0002_b=b, _0003_c=broken))
    assert tables(empty) == {"a", "b", "c"}


def test_a_changed_migration_is_detected(empty: Database, steps: Steps) -> None:
    migrate(empty, steps("first", _0001_a="create table a (x integer);"))
    with pytest.raises(StoreDamaged, match="0001_a") as found:
        migrate(empty, steps("second", _0001_a="create table a (y integer);", _0002_b="create table b (x integer);"))
    assert "is left as it is" in found.value.message
    assert tables(empty) == {"a"}


def test_a_store_of_a_newer_kiwi_is_not_changed(store_url: str) -> None:
    database = open_database(store_url)
    with database.transaction() as transaction:
        transaction.write("insert into schema_migrations values (9000, '9000_later', 'abc', '2030-01-01')")
    before = schema(database), applied(database)
    with pytest.raises(StoreNewer) as refused:
        open_database(store_url)
    assert refused.value.details["found"] == 9000
    assert "newer Kiwi" in refused.value.suggestion
    assert (schema(database), applied(database)) == before
    database.close()


OPEN = "import sys; from kiwi_mcp.store.open import open_database; open_database(sys.argv[1]).close(); print('open')"


def test_processes_that_start_concurrently_all_find_the_store_ready(empty_url: str, begin: Begin) -> None:
    starting = [begin(OPEN, empty_url) for _ in range(6)]
    assert [process.communicate(timeout=50) for process in starting] == [("open\n", "")] * 6
    database = open_database(empty_url)
    assert len(applied(database)) == len(read_migrations(FOLDER / database.dialect))
    database.close()


def test_a_killed_migration_leaves_all_steps_or_none(new_url: Callable[[], str], begin: Begin) -> None:
    chance, url = random.Random(7), new_url()
    for _ in range(4):
        process = begin(OPEN, url)
        # Not to wait for anything: the moment at which it dies is what the test is about.
        time.sleep(chance.uniform(0.05, 0.4))
        process.kill()
        process.wait(120)
    migrated, fresh = open_database(url), open_database(new_url())
    assert applied(migrated) == applied(fresh)
    assert schema(migrated) == schema(fresh)
    migrated.close()
    fresh.close()


def test_a_script_is_split_at_the_end_of_its_statements() -> None:
    trigger = "create trigger t after insert on a begin update a set x = 1; select ';'; end;"
    script = f"-- one; two\ncreate table a (x text default ';');\n{trigger}\n/* the; end */ select 1"
    assert [part.strip() for part in statements(script)] == [
        "-- one; two\ncreate table a (x text default ';');",
        trigger,
        "/* the; end */ select 1",
    ]
    assert list(statements("\n \n")) == []


def test_a_store_without_migrations_is_opened_unchanged(empty_url: str) -> None:
    database = connect_to(empty_url)
    assert tables(database) == set()
    database.close()
