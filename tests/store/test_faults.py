from __future__ import annotations

import os
import pwd
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from tests.plugins.postgres import PostgresServer

from kiwi_mcp.domain.errors import KiwiError, StoreDamaged, StoreUnavailable
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import open_database

Begin = Callable[..., subprocess.Popen[str]]

NOTES = "create table notes (number integer primary key, word text not null);"


def write(database: Database, *numbers: int, word: str = "kept") -> None:
    with database.transaction() as transaction:
        transaction.insert("notes", ("number", "word"), [(number, word) for number in numbers])


def numbers(database: Database) -> list[object]:
    return [number for (number,) in database.read("select number from notes order by number")]


@pytest.fixture
def notes(database: Database) -> Database:
    """A store with something in it."""
    with database.transaction() as transaction:
        transaction.run_script(NOTES)
    write(database, 1, 2, 3)
    return database


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An SQLite store with something in it, closed."""
    path = tmp_path / "store" / "registry.db"
    database = open_database(f"sqlite://{path}")
    with database.transaction() as transaction:
        transaction.run_script(NOTES)
    write(database, *range(2000), word="kept " * 20)
    database.close()
    return path


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that every user of this machine may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def as_unprivileged_user() -> Iterator[None]:
    """Do something with the rights of an ordinary user, because nothing is read-only for root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(pwd.getpwnam("nobody").pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_full_disk_loses_nothing_and_works_again_afterwards(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    with database.transaction() as transaction:
        transaction.run_script(NOTES)
    write(database, 1)
    ((pages,),) = database.read("PRAGMA page_count")
    with database.transaction() as transaction:
        transaction.read(f"PRAGMA max_page_count={int(str(pages))}")
    with pytest.raises(StoreUnavailable, match="no space left") as refused:
        write(database, *range(2, 2000), word="too much " * 50)
    assert "Free some space" in refused.value.suggestion
    assert numbers(database) == [1]

    with database.transaction() as transaction:
        transaction.read("PRAGMA max_page_count=100000")
    write(database, 2)
    assert numbers(database) == [1, 2]
    database.close()


LIMITED = """
import resource, signal, sys
from kiwi_mcp.domain.errors import StoreUnavailable
from kiwi_mcp.store.open import open_database
database = open_database(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
def write(first, last):
    with database.transaction() as transaction:
        transaction.insert("notes", ("number", "word"), [(number, "too much " * 50) for number in range(first, last)])
try:
    write(10_000, 20_000)
except StoreUnavailable as error:
    print(error.message, error.suggestion, sep="|")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
write(10_000, 10_001)
"""


def test_a_size_limit_loses_nothing_and_works_again_afterwards(file: Path, begin: Begin) -> None:
    said, failed = begin(LIMITED, f"sqlite://{file}").communicate(timeout=120)
    assert failed == ""
    message, _, suggestion = said.partition("|")
    assert "Nothing was written" in message
    assert "try again" in suggestion
    database = open_database(f"sqlite://{file}")
    assert numbers(database) == [*range(2000), 10_000]
    assert database.read("PRAGMA integrity_check") == [("ok",)]
    database.close()


def test_a_read_only_folder_is_named(shared_folder: Path) -> None:
    shared_folder.chmod(0o555)
    with as_unprivileged_user(), pytest.raises(StoreUnavailable, match="cannot be made") as refused:
        open_database(f"sqlite://{shared_folder}/.ai/registry.db")
    assert str(shared_folder) in refused.value.suggestion
    shared_folder.chmod(0o755)
    assert list(shared_folder.iterdir()) == []


def test_a_read_only_store_is_named_and_works_again_afterwards(shared_folder: Path) -> None:
    path = shared_folder / "registry.db"
    open_database(f"sqlite://{path}").close()
    before = path.read_bytes()
    path.chmod(0o444)
    shared_folder.chmod(0o555)
    with as_unprivileged_user(), pytest.raises(StoreUnavailable, match="cannot be written") as refused:
        open_database(f"sqlite://{path}")
    assert str(path) in refused.value.suggestion
    assert path.read_bytes() == before
    shared_folder.chmod(0o755)
    path.chmod(0o644)
    open_database(f"sqlite://{path}").close()


def test_a_folder_in_place_of_the_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(KiwiError) as refused:
        open_database(f"sqlite://{tmp_path}")
    assert str(tmp_path) in refused.value.message
    (tmp_path / "plain").write_text("a file")
    with pytest.raises(KiwiError):
        open_database(f"sqlite://{tmp_path}/plain/registry.db")


def test_a_file_that_is_not_a_database_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    path.write_text("My diary, not a database at all. " * 100)
    before = path.read_bytes()
    with pytest.raises(StoreDamaged) as found:
        open_database(f"sqlite://{path}")
    assert str(path) in found.value.suggestion
    assert path.read_bytes() == before


def test_a_damaged_page_is_detected_and_nothing_is_deleted(file: Path) -> None:
    whole = file.read_bytes()
    notes = [at for at in range(0, len(whole), 4096) if b"kept kept" in whole[at : at + 4096]]
    middle = notes[len(notes) // 2]
    file.write_bytes(whole[:middle] + b"\xff" * 4096 + whole[middle + 4096 :])
    database = open_database(f"sqlite://{file}")
    with pytest.raises(StoreDamaged) as found:
        database.read("select number, word from notes")
    for word in (str(file), "pull from a remote", "backup", "Do not delete"):
        assert word in found.value.suggestion
    database.close()
    assert file.exists()

    file.write_bytes(whole)
    database = open_database(f"sqlite://{file}")
    assert len(numbers(database)) == 2000
    database.close()


def test_a_truncated_file_is_detected(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(5000)
    with pytest.raises(StoreDamaged):
        numbers(open_database(f"sqlite://{file}"))


@pytest.fixture
def served(postgres_url: str) -> Iterator[Database]:
    """A store on a server, with something in it."""
    database = open_database(postgres_url)
    with database.transaction() as transaction:
        transaction.run_script(NOTES)
    write(database, 1)
    yield database
    database.close()


def test_a_lost_connection_is_reopened(served: Database, postgres_url: str) -> None:
    other = open_database(postgres_url)
    ended = other.read(
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()"
    )
    other.close()
    assert ended == [(True,), (True,)]
    assert numbers(served) == [1]
    write(served, 2)
    assert numbers(served) == [1, 2]


def test_a_database_crash_during_a_write_loses_nothing(
    served: Database, postgres_url: str, postgres_server: PostgresServer
) -> None:
    with crashed(postgres_server):
        with pytest.raises(StoreUnavailable, match="Nothing was written") as lost, served.transaction() as transaction:  # noqa: PT012 - the block is the point
            transaction.write("insert into notes (number, word) values (2, 'lost')")
            postgres_server.kill()
            transaction.write("insert into notes (number, word) values (3, 'lost')")
        assert "try again" in lost.value.suggestion
        for attempt in (lambda: numbers(served), lambda: write(served, 4), lambda: open_database(postgres_url)):
            # A server that ends while it is asked has not refused yet.
            with pytest.raises(StoreUnavailable, match=r"no server listens|there is no connection"):
                attempt()

    assert numbers(served) == [1]
    write(served, 2)
    assert numbers(served) == [1, 2]


def test_a_connection_lost_during_a_commit_gives_no_wrong_answer(
    served: Database, postgres_server: PostgresServer
) -> None:
    with crashed(postgres_server):
        with pytest.raises(StoreUnavailable, match="unknown whether") as lost, served.transaction() as transaction:  # noqa: PT012 - as above
            transaction.write("insert into notes (number, word) values (2, 'perhaps')")
            postgres_server.kill()
        assert "again" in lost.value.suggestion
    assert numbers(served) in ([1], [1, 2])


@contextmanager
def crashed(server: PostgresServer) -> Iterator[None]:
    """Let a server crash in the block, and start it again after it."""
    try:
        yield
    finally:
        server.start()


WRITE = """
import sys
from kiwi_mcp.store.open import open_database
database = open_database(sys.argv[1])
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 100_000, 2):
    with database.transaction() as transaction:
        transaction.write("insert into notes (number, word) values (?, 'first half')", (number,))
        transaction.write("insert into notes (number, word) values (?, 'second half')", (number + 1,))
    print(number, flush=True)
"""


def said(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout
    return process.stdout


def test_a_killed_writer_loses_nothing_that_was_acknowledged(notes: Database, store_url: str, begin: Begin) -> None:
    chance, response = random.Random(11), {1, 2, 3}
    for turn in range(1, 4):
        writers = [begin(WRITE, store_url, str(turn * 1_000_000 + place * 500_000)) for place in range(2)]
        lines = [said(writer).readline() for writer in writers for _ in range(chance.randrange(1, 30))]
        for writer in writers:
            writer.kill()
            lines += said(writer).readlines()
        # A number on a partial line was not acknowledged.
        response |= {int(line) for line in lines if line.endswith("\n")}

    kept = {int(str(number)) for number in numbers(notes)}
    assert response <= kept
    assert {number ^ 1 for number in kept - {1, 2, 3}} == kept - {1, 2, 3}
    write(notes, 4)
