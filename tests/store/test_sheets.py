"""What searches have worked out is kept for the next process, on every store, and is never worth an error."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Thread

import pytest

from kiwi_mcp.domain.sheet import Kept
from kiwi_mcp.store.database import Database, Row, Value
from kiwi_mcp.store.open import connect_to, open_database
from kiwi_mcp.store.sheets import UNUSED_DAYS, Sheets

Begin = Callable[..., subprocess.Popen[str]]

WRITER = """
import sys, time
from pathlib import Path
from kiwi_mcp.domain.sheet import Kept
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.sheets import Sheets

database = open_database(sys.argv[1])
sheets = Sheets(database)
print("ready", flush=True)
end = time.monotonic() + 60
while not Path(sys.argv[2]).exists() and time.monotonic() < end:
    time.sleep(0.002)
for batch in range(10):
    digests = [f"{batch:08}{number:08}".encode() for number in range(100)]
    sheets.write({digest: Kept(b"words", b"") for digest in digests})
    sheets.write({digest: Kept(b"words", b"vector") for digest in digests})
print(sheets.fault, flush=True)
database.close()
"""


class Calendar:
    """A day that a test decides."""

    def __init__(self) -> None:
        self.day = 20_000

    def __call__(self) -> int:
        return self.day


def digest(number: int) -> bytes:
    return blake2b(str(number).encode(), digest_size=16).digest()


def some(*numbers: int, vector: bytes = b"") -> Mapping[bytes, Kept]:
    return {digest(number): Kept(f"words {number}".encode(), vector) for number in numbers}


def days(database: Database) -> Mapping[object, object]:
    return {row[0]: row[1] for row in database.read("select digest, used_on from sheets")}


@pytest.fixture
def calendar() -> Calendar:
    return Calendar()


@pytest.fixture
def sheets(database: Database, calendar: Calendar) -> Sheets:
    return Sheets(database, most=100, today=calendar)


@pytest.fixture
def beside(database: Database, store_url: str) -> Iterator[Database]:
    """The same store, as another process has it open."""
    opened = connect_to(store_url)
    yield opened
    opened.close()


def test_what_is_kept_is_found_again_and_the_rest_is_left_out(sheets: Sheets, beside: Database) -> None:
    kept = {**some(1, 2), **some(3, vector=bytes(range(256)))}
    sheets.write(kept)
    assert Sheets(beside).read([digest(number) for number in range(6)]) == kept
    assert sheets.read([]) == {}
    assert sheets.fault is None


def test_a_vector_completes_a_sheet_and_is_never_lost(sheets: Sheets) -> None:
    sheets.write(some(1))
    sheets.write(some(1, vector=b"first"))
    sheets.write(some(1))
    assert sheets.read([digest(1)]) == some(1, vector=b"first")


def test_what_was_damaged_is_written_over(sheets: Sheets, beside: Database) -> None:
    sheets.write(some(1, 2, vector=b"first"))
    with beside.transaction() as transaction:
        transaction.write("update sheets set words = ?, vector = ? where digest = ?", (b"x", b"y", digest(1)))
    sheets.write(some(1))
    assert sheets.read([digest(1)]) == some(1, vector=b"y")
    sheets.write(some(1, vector=b"first"))
    assert sheets.read([digest(1), digest(2)]) == some(1, 2, vector=b"first")


def test_what_sqlite_keeps_of_another_type_is_unknown_and_is_written_over(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    sheets = Sheets(database)
    sheets.write(some(1, 2))
    with database.transaction() as transaction:
        transaction.write("update sheets set words = 'text', vector = 7 where digest = ?", (digest(1),))
    assert sheets.read([digest(1), digest(2)]) == some(2)
    sheets.write(some(1, vector=b"first"))
    assert sheets.read([digest(1), digest(2)]) == {**some(1, vector=b"first"), **some(2)}
    database.close()


def test_thousands_are_written_and_read_at_once(database: Database) -> None:
    sheets = Sheets(database)
    kept = some(*range(2_345), vector=b"v" * 388)
    sheets.write(kept)
    assert sheets.read([*kept, digest(-1)]) == kept


def test_ten_thousand_known_sheets_are_read_by_a_few_statements(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = open_database(sqlite_url)
    sheets = Sheets(database)
    kept = {digest(number): Kept(b"w" * 300, b"v" * 388) for number in range(10_000)}
    sheets.write(kept)
    asked: list[str] = []
    read = type(database).read

    def counted(self: Database, statement: str, values: Sequence[Value] = ()) -> Sequence[Row]:
        asked.append(statement)
        return read(self, statement, values)

    monkeypatch.setattr(type(database), "read", counted)
    assert len(sheets.read([*kept])) == 10_000
    assert len(asked) <= 20
    database.close()


def test_a_use_is_written_down_after_a_week_and_not_before(
    sheets: Sheets, calendar: Calendar, database: Database
) -> None:
    first = calendar.day
    sheets.write(some(1, 2))
    for calendar.day in (first + 1, first + 7):
        sheets.read([digest(1)])
        sheets.tend()
        assert days(database) == {digest(1): first, digest(2): first}
    calendar.day = first + 8
    sheets.read([digest(1)])
    sheets.tend()
    assert days(database) == {digest(1): first + 8, digest(2): first}


def test_a_process_that_only_reads_lets_what_it_reads_count_as_used(
    sheets: Sheets, calendar: Calendar, database: Database
) -> None:
    first = calendar.day
    sheets.write(some(1, 2))
    calendar.day = first + 8
    reader = Sheets(database, today=lambda: calendar.day)
    reader.tend_to_used()  # nothing was read
    assert days(database) == {digest(1): first, digest(2): first}
    reader.read([digest(1)])
    reader.tend_to_used()
    assert days(database) == {digest(1): first + 8, digest(2): first}
    calendar.day = first + UNUSED_DAYS + 1
    sheets.tend()
    assert {*sheets.read([digest(1), digest(2)])} == {digest(1)}


def test_what_nobody_used_for_long_is_forgotten(sheets: Sheets, calendar: Calendar) -> None:
    sheets.write(some(1, 2))
    calendar.day += UNUSED_DAYS
    sheets.read([digest(1)])
    sheets.tend()
    calendar.day += 1
    sheets.tend()
    assert {*sheets.read([digest(1), digest(2)])} == {digest(1)}


def test_beyond_a_count_the_longest_unused_are_forgotten(
    sheets: Sheets, calendar: Calendar, database: Database
) -> None:
    sheets.write(some(*range(60)))
    calendar.day += 1
    sheets.write(some(*range(60, 120)))
    sheets.tend()
    assert len(days(database)) == 90
    assert all(digest(number) in days(database) for number in range(60, 120))


def test_processes_that_write_the_same_at_once_lose_nothing(
    store_url: str, begin: Begin, tmp_path: Path, database: Database
) -> None:
    go = tmp_path / "go"
    writers = [begin(WRITER, store_url, str(go)) for _ in range(3)]
    for writer in writers:
        assert writer.stdout
        assert writer.stdout.readline() == "ready\n"
    go.touch()
    assert [writer.communicate(timeout=60)[0] for writer in writers] == ["None\n"] * 3
    every = [f"{batch:08}{number:08}".encode() for batch in range(10) for number in range(100)]
    assert Sheets(database).read(every) == dict.fromkeys(every, Kept(b"words", b"vector"))


def test_a_store_that_cannot_be_used_costs_what_is_kept_and_no_error(sheets: Sheets, database: Database) -> None:
    sheets.write(some(1))
    with database.transaction() as transaction:
        transaction.write("alter table sheets rename to elsewhere")
    assert sheets.read([digest(1)]) == {}
    assert sheets.fault is not None
    sheets.write(some(2))
    sheets.tend()
    assert sheets.fault is not None
    with database.transaction() as transaction:
        transaction.write("alter table elsewhere rename to sheets")
    assert sheets.read([digest(1)]) == some(1)
    assert sheets.fault is None


def test_whoever_writes_already_is_waited_for(sheets: Sheets, beside: Database) -> None:
    waiting = Thread(target=sheets.write, args=(some(1),))
    with beside.transaction():
        waiting.start()
        assert sheets.read([digest(1)]) == {}
    waiting.join(30)
    assert sheets.read([digest(1)]) == some(1)


def test_keeping_a_sheet_makes_nobody_read_the_registry_again(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    before = database.stamp()
    Sheets(database).write(some(1))
    assert database.stamp() == before
    database.close()
