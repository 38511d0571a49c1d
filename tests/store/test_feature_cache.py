"""The feature cache: stored for the next process, on every store, and never an error."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Thread

import pytest

from kiwi_mcp.domain.cards import CardFeatures
from kiwi_mcp.store.database import Database, Row, Value
from kiwi_mcp.store.open import connect_to, open_database
from kiwi_mcp.store.search_index.feature_cache import UNUSED_DAYS, FeatureCache

Begin = Callable[..., subprocess.Popen[str]]

WRITER = """
import sys, time
from pathlib import Path
from kiwi_mcp.domain.cards import CardFeatures
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.search_index.feature_cache import FeatureCache

database = open_database(sys.argv[1])
sheets = FeatureCache(database)
print("ready", flush=True)
end = time.monotonic() + 120
while not Path(sys.argv[2]).exists() and time.monotonic() < end:
    time.sleep(0.002)
for batch in range(10):
    digests = [f"{batch:08}{number:08}".encode() for number in range(100)]
    sheets.write({digest: CardFeatures(b"words", b"") for digest in digests})
    sheets.write({digest: CardFeatures(b"words", b"vector") for digest in digests})
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


def some(*numbers: int, vector: bytes = b"") -> Mapping[bytes, CardFeatures]:
    return {digest(number): CardFeatures(f"words {number}".encode(), vector) for number in numbers}


def days(database: Database) -> Mapping[object, object]:
    return {row[0]: row[1] for row in database.read("select digest, used_on from sheets")}


@pytest.fixture
def calendar() -> Calendar:
    return Calendar()


@pytest.fixture
def sheets(database: Database, calendar: Calendar) -> FeatureCache:
    return FeatureCache(database, max_entries=100, today=calendar)


@pytest.fixture
def beside(database: Database, store_url: str) -> Iterator[Database]:
    """The same store, as another process has it open."""
    opened = connect_to(store_url)
    yield opened
    opened.close()


def test_stored_features_are_found_and_missing_ones_omitted(sheets: FeatureCache, beside: Database) -> None:
    kept = {**some(1, 2), **some(3, vector=bytes(range(256)))}
    sheets.write(kept)
    assert FeatureCache(beside).read([digest(number) for number in range(6)]) == kept
    assert sheets.read([]) == {}
    assert sheets.fault is None


def test_a_vector_completes_stored_features_and_is_never_lost(sheets: FeatureCache) -> None:
    sheets.write(some(1))
    sheets.write(some(1, vector=b"first"))
    sheets.write(some(1))
    assert sheets.read([digest(1)]) == some(1, vector=b"first")


def test_a_damaged_row_is_overwritten(sheets: FeatureCache, beside: Database) -> None:
    sheets.write(some(1, 2, vector=b"first"))
    with beside.transaction() as transaction:
        transaction.write("update sheets set words = ?, vector = ? where digest = ?", (b"x", b"y", digest(1)))
    sheets.write(some(1))
    assert sheets.read([digest(1)]) == some(1, vector=b"y")
    sheets.write(some(1, vector=b"first"))
    assert sheets.read([digest(1), digest(2)]) == some(1, 2, vector=b"first")


def test_a_value_of_another_sqlite_type_is_unknown_and_overwritten(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    sheets = FeatureCache(database)
    sheets.write(some(1, 2))
    with database.transaction() as transaction:
        transaction.write("update sheets set words = 'text', vector = 7 where digest = ?", (digest(1),))
    assert sheets.read([digest(1), digest(2)]) == some(2)
    sheets.write(some(1, vector=b"first"))
    assert sheets.read([digest(1), digest(2)]) == {**some(1, vector=b"first"), **some(2)}
    database.close()


def test_thousands_of_rows_are_written_and_read_at_once(database: Database) -> None:
    sheets = FeatureCache(database)
    kept = some(*range(2_345), vector=b"v" * 388)
    sheets.write(kept)
    assert sheets.read([*kept, digest(-1)]) == kept


def test_ten_thousand_known_rows_are_read_by_a_few_statements(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    database = open_database(sqlite_url)
    sheets = FeatureCache(database)
    kept = {digest(number): CardFeatures(b"w" * 300, b"v" * 388) for number in range(10_000)}
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


def test_a_use_is_recorded_after_a_week(sheets: FeatureCache, calendar: Calendar, database: Database) -> None:
    first = calendar.day
    sheets.write(some(1, 2))
    for calendar.day in (first + 1, first + 7):
        sheets.read([digest(1)])
        sheets.maintain()
        assert days(database) == {digest(1): first, digest(2): first}
    calendar.day = first + 8
    sheets.read([digest(1)])
    sheets.maintain()
    assert days(database) == {digest(1): first + 8, digest(2): first}


def test_a_reading_process_marks_its_features_as_used(
    sheets: FeatureCache, calendar: Calendar, database: Database
) -> None:
    first = calendar.day
    sheets.write(some(1, 2))
    calendar.day = first + 8
    reader = FeatureCache(database, today=lambda: calendar.day)
    reader.record_uses()  # nothing was read
    assert days(database) == {digest(1): first, digest(2): first}
    reader.read([digest(1)])
    reader.record_uses()
    assert days(database) == {digest(1): first + 8, digest(2): first}
    calendar.day = first + UNUSED_DAYS + 1
    sheets.maintain()
    assert {*sheets.read([digest(1), digest(2)])} == {digest(1)}


def test_long_unused_features_are_removed(sheets: FeatureCache, calendar: Calendar) -> None:
    sheets.write(some(1, 2))
    calendar.day += UNUSED_DAYS
    sheets.read([digest(1)])
    sheets.maintain()
    calendar.day += 1
    sheets.maintain()
    assert {*sheets.read([digest(1), digest(2)])} == {digest(1)}


def test_above_the_limit_the_longest_unused_are_removed(
    sheets: FeatureCache, calendar: Calendar, database: Database
) -> None:
    sheets.write(some(*range(60)))
    calendar.day += 1
    sheets.write(some(*range(60, 120)))
    sheets.maintain()
    assert len(days(database)) == 90
    assert all(digest(number) in days(database) for number in range(60, 120))


def test_concurrent_writers_of_the_same_rows_lose_nothing(
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
    assert FeatureCache(database).read(every) == dict.fromkeys(every, CardFeatures(b"words", b"vector"))


def test_an_unusable_store_loses_the_cache_and_raises_no_error(sheets: FeatureCache, database: Database) -> None:
    sheets.write(some(1))
    with database.transaction() as transaction:
        transaction.write("alter table sheets rename to elsewhere")
    assert sheets.read([digest(1)]) == {}
    assert sheets.fault is not None
    sheets.write(some(2))
    sheets.maintain()
    assert sheets.fault is not None
    with database.transaction() as transaction:
        transaction.write("alter table elsewhere rename to sheets")
    assert sheets.read([digest(1)]) == some(1)
    assert sheets.fault is None


def test_another_writer_is_waited_for(sheets: FeatureCache, beside: Database) -> None:
    waiting = Thread(target=sheets.write, args=(some(1),))
    with beside.transaction():
        waiting.start()
        assert sheets.read([digest(1)]) == {}
    waiting.join(120)
    assert sheets.read([digest(1)]) == some(1)


def test_storing_features_does_not_invalidate_the_registry(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    before = database.stamp()
    FeatureCache(database).write(some(1))
    assert database.stamp() == before
    database.close()
