"""The benchmark cache: damaged files are rebuilt, and files that are only unusable now are left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from kiwi_mcp.domain.errors import StoreNewer
from kiwi_mcp.store.open import open_database

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def warming(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("warming")


def test_a_damaged_file_is_rebuilt_and_its_neighbours_stay(warming: ModuleType, tmp_path: Path) -> None:
    keep, neighbour = tmp_path / "kept.db", tmp_path / "kept.db.backup"
    for path in (keep, neighbour, tmp_path / "kept.db-wal"):
        path.write_text("this is no database, and was none before " * 100)
    database = warming.open_kept(keep)
    assert database.read("select count(*) from sheets") == [(0,)]
    database.close()
    assert neighbour.read_text().startswith("this is no database")


def test_an_intact_file_that_cannot_be_used_now_stays(warming: ModuleType, tmp_path: Path) -> None:
    keep = tmp_path / "kept.db"
    database = open_database(f"sqlite://{keep}")
    with database.transaction() as transaction:
        transaction.write("insert into schema_migrations values (9999, 'later', '', '2026-01-28T12:00:00.000Z')")
    database.close()
    with pytest.raises(StoreNewer):
        warming.open_kept(keep)
    assert keep.stat().st_size
