"""Stores of others: read as they are, never made, never changed, and refused where they are anything but a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from kiwi_mcp.domain.errors import InvalidRequest, NotFound, StoreDamaged, StoreUnavailable
from kiwi_mcp.domain.registry import Actor
from kiwi_mcp.store import sqlite_line
from kiwi_mcp.store.open import connect_to, open_database, open_source, open_target
from kiwi_mcp.store.registry import Registry
from kiwi_mcp.store.sqlite_library import library

ENDLESS = "with recursive c (x) as (select 1 union all select x + 1 from c)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a store that somebody made."""
    file = tmp_path / "theirs.db"
    open_database(f"sqlite://{file}").close()
    return file


def change(path: Path, *statements: str) -> None:
    connection = library.connect(str(path), isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def test_a_store_is_read_as_it_is_and_stays_so(path: Path) -> None:
    before = sha256(path.read_bytes()).hexdigest()
    source = open_source(f"sqlite://{path}")
    registry = Registry(source, Actor("eve", ("public",)))
    assert registry.events() == ()
    assert source.read("select count(*) from namespaces") == [(2,)]
    with pytest.raises(StoreUnavailable), source.transaction():
        pass
    with pytest.raises(StoreUnavailable), source.transaction_now():
        pass
    with pytest.raises(StoreUnavailable):
        source.read("delete from namespaces")
    source.close()
    assert sha256(path.read_bytes()).hexdigest() == before


def test_what_others_write_meanwhile_is_seen(path: Path) -> None:
    source, theirs = open_source(f"sqlite://{path}"), open_database(f"sqlite://{path}")
    with theirs.transaction() as transaction:
        transaction.write("insert into namespaces (namespace, owner) values ('acme', 'ann')")
    assert source.read("select count(*) from namespaces") == [(3,)]
    theirs.close()
    source.close()


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no store at"):
        open_source(f"sqlite://{tmp_path}/deep/none.db")
    assert list(tmp_path.glob("deep*")) == []


@pytest.mark.parametrize(
    "statements",
    [
        ("alter table registry_log rename to old", f"create view registry_log as {ENDLESS} select x as seq from c"),
        ("create view more as select 1",),
        ("create table more (x)",),
        ("create trigger more after insert on tools begin delete from tools; end",),
        ("drop index idx_tools_tool_id",),
        ("alter table tools add column more text",),
    ],
    ids=["an endless view", "a view", "a table", "a trigger", "no index", "a column"],
)
def test_any_other_schema_is_refused_before_it_is_asked(path: Path, statements: tuple[str, ...]) -> None:
    change(path, *statements)
    with pytest.raises(StoreDamaged, match="not a store with the schema"):
        open_source(f"sqlite://{path}")


def test_what_is_no_file_or_no_database_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(InvalidRequest, match="not a file"):
            open_source(f"sqlite://{tmp_path}/{name}")
    (tmp_path / "text").write_text("no database at all " * 100)
    with pytest.raises(StoreDamaged):
        open_source(f"sqlite://{tmp_path}/text")


def test_only_a_store_or_nothing_is_written_to(path: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    for file in (path, tmp_path / "new.db", tmp_path / "empty.db"):
        target = open_target(f"sqlite://{file}")
        assert target.read("select count(*) from namespaces") == [(2,)]
        target.close()
    change(path, "create trigger more after insert on tools begin delete from tools; end")
    foreign = tmp_path / "foreign.db"
    change(foreign, "create table songs (title)")
    before = foreign.read_bytes()
    for file in (path, foreign):
        with pytest.raises(StoreDamaged):
            open_target(f"sqlite://{file}")
    assert foreign.read_bytes() == before


@pytest.mark.parametrize("opened", [open_source, open_database])
def test_no_statement_runs_without_end(
    path: Path, monkeypatch: pytest.MonkeyPatch, opened: Callable[[str], object]
) -> None:
    monkeypatch.setattr(sqlite_line, "LIMIT", 0.2)
    database = open_source(f"sqlite://{path}") if opened is open_source else open_database(f"sqlite://{path}")
    with pytest.raises(StoreUnavailable, match="longer than a statement may"):
        database.read(f"{ENDLESS} select max(x) from c")
    assert database.read("select 1") == [(1,)]
    database.close()


def test_a_server_is_read_and_nothing_is_made_there(new_postgres: Callable[..., str], postgres_url: str) -> None:
    source = open_source(postgres_url)
    assert Registry(source, Actor("eve", ("public",))).events() == ()
    with pytest.raises(StoreUnavailable), source.transaction() as transaction:
        transaction.write("delete from namespaces")
    source.close()

    empty = new_postgres()
    with pytest.raises(StoreDamaged):
        open_source(empty)
    database = connect_to(empty)
    assert database.read("select count(*) from information_schema.tables where table_schema = 'public'") == [(0,)]
    database.close()


def test_what_is_published_waits_for_the_disk_and_the_record_of_a_run_does_not(path: Path) -> None:
    database = open_database(f"sqlite://{path}")
    with database.transaction() as transaction:
        assert transaction.read("PRAGMA synchronous") == [(2,)]
    assert database.read("PRAGMA synchronous") == [(1,)]
    database.close()
