from __future__ import annotations

import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.errors import InvalidRequest, StoreUnavailable
from kiwi_mcp.store import sqlite
from kiwi_mcp.store.open import FOLDER, masked, open_database, read_migrations

Begin = Callable[..., subprocess.Popen[str]]


def test_a_store_file_and_its_folders_are_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    open_database(f"sqlite://{tmp_path}/a/b/registry.db").close()
    modes = {path: stat.S_IMODE((tmp_path / path).stat().st_mode) for path in ("a", "a/b", "a/b/registry.db", "")}
    assert modes == {"a": 0o700, "a/b": 0o700, "a/b/registry.db": 0o600, "": 0o755}


def test_a_file_is_opened_with_safe_settings(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    wanted = {"journal_mode": "wal", "synchronous": 1, "foreign_keys": 1, "trusted_schema": 0, "busy_timeout": 30_000}
    assert {name: database.read(f"PRAGMA {name}")[0][0] for name in wanted} == wanted
    with database.transaction() as transaction:
        # What is published is on the disk once it is said to be.
        assert {name: transaction.read(f"PRAGMA {name}")[0][0] for name in wanted} == {**wanted, "synchronous": 2}
    database.close()


def test_a_session_is_opened_with_safe_settings(postgres_url: str) -> None:
    database = open_database(postgres_url)
    wanted = {"TimeZone": "UTC", "statement_timeout": "1min", "lock_timeout": "30s", "application_name": "kiwi"}
    assert {name: database.read(f"show {name}")[0][0] for name in wanted} == wanted
    database.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "registry.db",
        "mysql://u:hunter2@h/d",
        "sqlite://relative.db",
        "sqlite:///",
        "sqlite:///a\0b",
        "postgres://u:hunter2%@h/d",
    ],
)
def test_an_invalid_store_url_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        open_database(url)
    assert "://" in refused.value.suggestion
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://kiwi:hunter2@host:5432/db", "postgresql://kiwi@host:5432/db"),
        ("postgresql://:hunter2@host/db", "postgresql://@host/db"),
        ("postgres://kiwi:hun/ter@2:x@host/db", "postgres://kiwi@host/db"),
        (
            "postgresql://host/db?user=kiwi&password=hunter2&sslmode=require",
            "postgresql://host/db?user=kiwi&sslmode=require",
        ),
        ("postgresql://host/db?PASSWORD=hunter2", "postgresql://host/db"),
        ("postgresql://host/db?sslpassword=hunter2", "postgresql://host/db"),
        ("sqlite:///home/a:b@c/registry.db", "sqlite:///home/a:b@c/registry.db"),
    ],
)
def test_a_password_is_removed_from_a_url(url: str, shown: str) -> None:
    assert masked(url) == shown


def test_a_password_is_never_shown(postgres_url: str) -> None:
    place = postgres_url.partition("@")[2]
    for wrong in (f"postgresql://guarded:hunter2@{place}", "postgresql://kiwi:hunter2@127.0.0.1:1/kiwi"):
        with pytest.raises(StoreUnavailable) as refused:
            open_database(wrong)
        assert "hunter2" not in f"{refused.value} {refused.value.suggestion} {refused.value.__cause__}"
    database = open_database(f"postgresql://kiwi:hunter2@{place}")
    assert "hunter2" not in f"{database!r} {database.url}"
    database.close()


def test_the_kernel_starts_without_any_database_library(begin: Begin) -> None:
    program = "import sys, kiwi_mcp.kernel; print(*{'sqlite3', 'pysqlite3', 'psycopg'} & {*sys.modules})"
    assert begin(program).communicate(timeout=120) == ("\n", "")


WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
from kiwi_mcp.domain.errors import StoreUnavailable
from kiwi_mcp.store.open import FOLDER, read_migrations
from kiwi_mcp.store.open import open_database
try:
    database = open_database(sys.argv[2])
except StoreUnavailable as error:
    print(error.suggestion)
else:
    print(len(database.read("select number from schema_migrations")), "sqlite3" in sys.modules)
    database.close()
"""


def test_the_sqlite_of_the_standard_library_works_too(sqlite_url: str, begin: Begin) -> None:
    said, failed = begin(WITHOUT, "pysqlite3", sqlite_url).communicate(timeout=120)
    assert failed == ""
    assert said == f"{len(read_migrations(FOLDER / 'sqlite'))} True\n"


def test_a_missing_driver_is_reported_with_the_command_to_install_it(begin: Begin) -> None:
    said, failed = begin(WITHOUT, "psycopg", "postgresql://127.0.0.1:1/kiwi").communicate(timeout=120)
    assert failed == ""
    assert "-m uv pip install 'psycopg[binary]>=3.2,<4'" in said


def test_the_whole_process_uses_one_sqlite_library(begin: Begin) -> None:
    program = "import sys, kiwi_mcp.store.sqlite; print(len({'_sqlite3', 'pysqlite3._sqlite3'} & {*sys.modules}))"
    assert begin(program).communicate(timeout=120) == ("1\n", "")
    assert sqlite.version >= (3, 40)
    assert sqlite.is_standard_library is (sqlite.library.__name__ == "sqlite3")
