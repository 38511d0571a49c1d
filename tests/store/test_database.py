from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kiwi_mcp.store.postgres
import kiwi_mcp.store.sqlite
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, StoreDamaged, StoreUnavailable
from kiwi_mcp.store import sqlite
from kiwi_mcp.store.database import Database, IntegrityFault, Value
from kiwi_mcp.store.open import open_database

Begin = Callable[..., subprocess.Popen[str]]

TYPES = {
    "sqlite": "word text, number integer, share real, flag integer, bytes blob, at text, id text, "
    "document text, list text",
    "postgres": "word text, number bigint, share numeric, flag boolean, bytes bytea, at timestamptz, id uuid, "
    "document jsonb, list text[]",
}
COLUMNS = ("word", "number", "share", "flag", "bytes", "at", "id", "document", "list")
ROW: tuple[Value, ...] = (
    "Grüße\n\t\\N 'x' \"y\" 100%",
    2**62,
    0.25,
    True,
    bytes(range(256)),
    "2026-01-02T03:04:05.670Z",
    "0b0e7d3e-3f6b-4d6d-9d6c-0c9f6f3c2b11",
    '{"a": [1, null]}',
)


COUNTED = {
    "sqlite": "",
    "postgres": "create trigger changes_are_counted after insert or update or delete or truncate on counters"
    " for each statement execute function kiwi_count_change();",
}
"""On a server, changes count in the tables with this trigger."""


@pytest.fixture
def table(database: Database) -> Database:
    """A store with a table of every type that Kiwi uses, and one that counts."""
    with database.transaction() as transaction:
        transaction.run_script(
            f"create table kinds ({TYPES[database.dialect]});\n"
            "create table counters (name text primary key, value integer not null check (value >= 0));\n"
            "insert into counters (name, value) values ('a', 0);"
            f"{COUNTED[database.dialect]}"
        )
    return database


def value_of(database: Database) -> Value:
    return database.read("select value from counters where name = ?", ("a",))[0][0]


def write_now(database: Database, statement: str, *values: Value) -> bool:
    """Run one statement without waiting, and say whether it was done."""
    with database.transaction_now() as transaction:
        return transaction is not None and transaction.write(statement, values) > 0


def test_a_try_transaction_does_not_wait_for_another_one(table: Database) -> None:
    with ThreadPoolExecutor(1) as thread, table.transaction_now():
        assert not thread.submit(write_now, table, "update counters set value = 1").result(timeout=120)


@pytest.mark.parametrize("way", ["insert", "write"])
def test_values_are_returned_unchanged(table: Database, way: str) -> None:
    row = (*ROW, table.encode_list(("one", "two")))
    with table.transaction() as transaction:
        if way == "insert":
            transaction.insert("kinds", COLUMNS, [row, (None,) * len(COLUMNS)])
        else:
            statement = f"insert into kinds ({', '.join(COLUMNS)}) values (?, ?, ?, ?, ?, ?, ?, ?, ?)"
            assert transaction.write(statement, row) == 1
            transaction.write(statement, (None,) * len(COLUMNS))

    full, empty = table.read(f"select {', '.join(COLUMNS)} from kinds order by word is null")
    assert full[:-1] == ROW
    assert table.decode_list(full[-1]) == ("one", "two")
    assert empty == (None,) * len(COLUMNS)
    assert table.decode_list(empty[-1]) == ()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))))
def test_a_list_of_any_texts_is_returned_unchanged(table: Database, texts: list[str]) -> None:
    with table.transaction() as transaction:
        transaction.write("delete from kinds")
        transaction.write("insert into kinds (list) values (?)", (table.encode_list(texts),))
    assert table.decode_list(table.read("select list from kinds")[0][0]) == tuple(texts)


def test_values_are_found_by_equality(table: Database) -> None:
    with table.transaction() as transaction:
        transaction.insert("kinds", COLUMNS[:-1], [ROW])
    for column, value in zip(COLUMNS[:-2], ROW[:-1], strict=True):
        assert len(table.read(f"select word from kinds where {column} = ?", (value,))) == 1, column
    assert len(table.read("select word from kinds where flag = true and at < ?", ("2026-01-02T03:04:05.671Z",))) == 1


def test_question_marks_inside_a_text_are_not_placeholders(table: Database) -> None:
    statement = """select '?', '100%', 'it''s ?', value as "a?b%" -- why? 5%
    from counters where name = ? and name like '%'"""
    assert table.read(statement, ("a",)) == [("?", "100%", "it's ?", 0)]


def test_a_time_always_has_milliseconds(postgres_url: str) -> None:
    database = open_database(postgres_url)
    read = "select '2026-01-02 03:04:05+00'::timestamptz, '2026-01-02 05:04:05.1239+02'::timestamptz"
    assert database.read(read) == [("2026-01-02T03:04:05.000Z", "2026-01-02T03:04:05.123Z")]
    database.close()


def test_a_failed_transaction_leaves_nothing_behind(table: Database) -> None:
    with pytest.raises(ZeroDivisionError), table.transaction() as transaction:  # noqa: PT012 - the block is the point
        transaction.write("update counters set value = 7")
        assert transaction.read("select value from counters") == [(7,)]
        raise ZeroDivisionError
    assert value_of(table) == 0
    with table.transaction() as transaction:
        assert transaction.write("update counters set value = 8") == 1
    assert value_of(table) == 8


def test_a_suppressed_failure_still_undoes_everything(table: Database) -> None:
    with pytest.raises(IntegrityFault), table.transaction() as transaction:  # noqa: PT012 - as above
        transaction.write("update counters set value = 7")
        with suppress(IntegrityFault):
            transaction.write("insert into counters (name, value) values ('a', 1)")
    assert value_of(table) == 0


def test_no_reader_sees_half_of_a_transaction(table: Database) -> None:
    with table.transaction() as transaction:
        transaction.write("update counters set value = 7")
        assert value_of(table) == 0
    assert value_of(table) == 7


@pytest.mark.parametrize(
    "statement",
    [
        "insert into counters (name, value) values ('a', 1)",
        "insert into counters (name, value) values ('b', -1)",
        "insert into counters (name, value) values ('b', null)",
    ],
)
def test_constraint_violations_are_distinguished(table: Database, statement: str) -> None:
    with pytest.raises(IntegrityFault) as refused, table.transaction() as transaction:
        transaction.write(statement)
    assert "insert" not in refused.value.reason
    with pytest.raises(IntegrityFault), table.transaction() as transaction:
        transaction.insert("counters", ("name", "value"), [("c", 1), ("a", 1)])
    assert table.read("select name, value from counters") == [("a", 0)]


def test_a_refusing_trigger_gives_its_own_message(table: Database) -> None:
    refuse = {
        "sqlite": "create trigger kept before delete on counters begin select raise(abort, 'kept; always'); end;",
        "postgres": "create function refuse() returns trigger language plpgsql as "
        "$$ begin raise exception 'kept; always'; end $$; "
        "create trigger kept before delete on counters for each row execute function refuse();",
    }
    with table.transaction() as transaction:
        transaction.run_script(refuse[table.dialect])
    with pytest.raises(IntegrityFault, match="kept; always"), table.transaction() as transaction:
        transaction.write("delete from counters")


def test_rows_are_streamed_and_a_failing_source_leaves_nothing(table: Database) -> None:
    def rows() -> Iterator[tuple[str, int]]:
        for number in range(1000):
            yield f"row {number}", number
        raise LookupError

    with pytest.raises(LookupError), table.transaction() as transaction:
        transaction.insert("counters", ("name", "value"), rows())
    assert table.read("select count(*) from counters") == [(1,)]


def test_threads_share_a_store_without_losing_anything(table: Database) -> None:
    def add(_: int) -> None:
        with table.transaction() as transaction:
            ((value,),) = transaction.read("select value from counters where name = 'a'")
            transaction.write("update counters set value = ? where name = 'a'", (int(value or 0) + 1,))
        assert int(value_of(table) or 0) > 0

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add, range(64)))
    assert value_of(table) == 64


ADD = """
import sys
from kiwi_mcp.store.open import open_database
database = open_database(sys.argv[1])
for _ in range(25):
    with database.transaction() as transaction:
        ((value,),) = transaction.read("select value from counters where name = 'a'")
        transaction.write("update counters set value = ? where name = 'a'", (value + 1,))
"""


def test_processes_write_sequentially(table: Database, store_url: str, begin: Begin) -> None:
    writers = [begin(ADD, store_url) for _ in range(4)]
    assert [writer.communicate(timeout=50)[1] for writer in writers] == [""] * 4
    assert value_of(table) == 100


def test_the_change_counter_changes_with_every_transaction(table: Database, store_url: str) -> None:
    other = open_database(store_url)
    stamps = [table.stamp()]
    for source in (table, other, other):
        with source.transaction() as transaction:
            transaction.write("update counters set value = value + 1")
        stamps.append(table.stamp())
    write_now(other, "update counters set value = value + 1")
    if other.is_embedded:
        stamps.append(table.stamp())
    other.close()
    assert len(set(stamps)) == len(stamps)


def test_the_change_counter_of_a_file_stays_without_writes(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    assert database.stamp() == database.stamp()
    database.close()


def test_a_try_transaction_leaves_the_change_counter_of_a_file(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    with database.transaction() as transaction:
        transaction.write("create table seen (value integer)")
    stamp = database.stamp()
    assert write_now(database, "insert into seen values (1)")
    assert database.stamp() == stamp
    with database.transaction() as transaction:
        transaction.write("insert into seen values (2)")
    assert database.stamp() != stamp
    database.close()


FORK = """
import os, sys
from kiwi_mcp.store.open import open_database
database = open_database(sys.argv[1])
stamp = database.stamp()
def add():
    with database.transaction() as transaction:
        transaction.write("update counters set value = value + 1")
    return database.read("select value from counters where name = 'a'")[0][0]
add()
if (child := os.fork()) == 0:
    assert add() == 2
    assert database.stamp() != stamp
    database.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert add() == 3
database.close()
"""


def test_a_forked_process_has_its_own_connections(table: Database, store_url: str, begin: Begin) -> None:
    assert begin(FORK, store_url).communicate(timeout=120) == ("", "")
    assert value_of(table) == 3


def test_a_try_transaction_never_waits(table: Database, store_url: str) -> None:
    statement = "update counters set value = value + ?"
    assert write_now(table, statement, 1) is table.is_embedded
    other = open_database(store_url)
    with other.transaction() as transaction:
        transaction.write(statement, (1,))
        assert write_now(table, statement, 1) is False
    other.close()
    assert value_of(table) == 1 + table.is_embedded


def test_a_failed_try_transaction_changes_nothing(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    with database.transaction() as transaction:
        transaction.write("create table seen (value integer primary key)")
    with pytest.raises(IntegrityFault):
        write_now(database, "insert into seen values (1), (1)")
    assert database.read("select * from seen") == []
    assert write_now(database, "insert into seen values (1)")
    database.settle()
    database.close()


def test_waiting_for_another_writer_times_out(table: Database, store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kiwi_mcp.store.sqlite, "PATIENCE", 0.05)
    monkeypatch.setattr(kiwi_mcp.store.postgres, "PATIENCE", 0.05)
    monkeypatch.setitem(kiwi_mcp.store.postgres._SETTINGS, "lock_timeout", "50ms")
    other = open_database(store_url)
    with table.transaction():
        for waiting in (other, table):
            with pytest.raises(StoreUnavailable, match="writing for over") as refused, waiting.transaction():
                pytest.fail("two writers at once")
            assert "try again" in refused.value.suggestion
    with other.transaction() as transaction:
        transaction.write("update counters set value = 5")
    other.close()
    assert value_of(table) == 5


@pytest.mark.parametrize("value", ["\ud800", 2**80])
def test_a_value_that_no_store_can_hold_is_refused(table: Database, value: Value) -> None:
    with pytest.raises(InvalidRequest), table.transaction() as transaction:
        transaction.write("insert into kinds (word, number) values (?, ?)", (value, value))


def test_a_missing_table_means_damage(table: Database) -> None:
    with table.transaction() as transaction:
        transaction.write("drop table counters")
    with pytest.raises(StoreDamaged) as found:
        value_of(table)
    assert "counters" not in found.value.message


def test_an_invalid_statement_is_not_shown(table: Database) -> None:
    with pytest.raises(StoreUnavailable) as found:
        table.read("selekt 'private'")
    assert "private" not in f"{found.value} {found.value.suggestion}"


def test_a_closed_store_is_reported(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    database.close()
    database.close()
    with pytest.raises(KiwiError):
        database.read("select 1")


def test_every_statement_times_out(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "LIMIT", 0.2)
    database = open_database(sqlite_url)
    with pytest.raises(StoreUnavailable, match="longer than a statement may"):
        database.read("with recursive c (x) as (select 1 union all select x + 1 from c) select max(x) from c")
    assert database.read("select 1") == [(1,)]
    database.close()


def test_a_publish_waits_for_the_disk_and_a_run_record_does_not(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    with database.transaction() as transaction:
        assert transaction.read("PRAGMA synchronous") == [(2,)]
    assert database.read("PRAGMA synchronous") == [(1,)]
    database.close()
