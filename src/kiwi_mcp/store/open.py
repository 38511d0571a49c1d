"""Opening a store by its URL: dialect, password masking, and migrations."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path

from msgspec import Struct

from kiwi_mcp.domain.errors import InvalidRequest, StoreDamaged, StoreNewer, StoreUnavailable, install_line
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.times import moment
from kiwi_mcp.store import migrations
from kiwi_mcp.store.database import Database, Transaction

FOLDER = Path(str(migrations.__file__)).parent
_NAME = lazy_pattern(r"(\d{4})_[a-z0-9_]+\.sql")
_APPLIED = "select number, checksum from schema_migrations order by number"
_TABLE = """create table if not exists schema_migrations (
  number integer primary key, name text not null, checksum text not null, applied_at text not null)"""


class Migration(Struct, frozen=True):
    """One step of a schema, and the hash by which a store remembers it."""

    number: int
    name: str
    script: str

    @property
    def checksum(self) -> str:
        """The hash of the script, as 64 hexadecimal digits."""
        return sha256(self.script.encode()).hexdigest()


@cache
def read_migrations(folder: Path) -> tuple[Migration, ...]:
    """Return the steps in a folder, in order."""
    paths = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    return tuple(Migration(int(path.name[:4]), path.stem, path.read_text(encoding="utf-8")) for path in paths)


def migrate(database: Database, folder: Path = FOLDER) -> None:
    """Apply the steps that a store has not seen, all or none; another process may be doing the same."""
    known = read_migrations(folder / database.dialect)
    try:
        applied = _applied(database)
    except StoreDamaged as error:
        if error.details.get("missing") != "table":
            raise
        database.check_extensions()
        applied = {}
    if not _missing(database.url, known, applied):
        return
    with database.transaction() as transaction:
        transaction.write(_TABLE)
        # Check again under the write lock: another process may have applied them first.
        for migration in _missing(database.url, known, _applied(transaction)):
            transaction.run_script(migration.script)
            transaction.write(
                "insert into schema_migrations (number, name, checksum, applied_at) values (?, ?, ?, ?)",
                (migration.number, migration.name, migration.checksum, moment()),
            )


def _applied(source: Database | Transaction) -> Mapping[int, str]:
    return {int(str(number)): str(checksum) for number, checksum in source.read(_APPLIED)}


def _missing(url: str, known: Sequence[Migration], applied: Mapping[int, str]) -> Sequence[Migration]:
    """Return the known steps that were not applied, once it is sure that the applied ones are known."""
    newest_known, newest_applied = (max(numbers, default=0) for numbers in ([step.number for step in known], applied))
    if newest_applied > newest_known:
        raise StoreNewer(url, found=newest_applied, known=newest_known)
    for step in known:
        if applied.get(step.number, step.checksum) != step.checksum:
            raise StoreDamaged(
                f"The store {url} was made with another {step.name} than this Kiwi has, and is left as it is.",
                suggestion="Use the Kiwi that made it to export it, then import that into a new store.",
                migration=step.name,
            )
    return [step for step in known if step.number not in applied]


DIALECTS = {"sqlite": "sqlite", "postgres": "postgres", "postgresql": "postgres"}
_PASSWORD = lazy_pattern(r"(?<=://)([^:/?#@]*):.*@", re.DOTALL)
_PASSWORD_WORD = lazy_pattern(r"(?i)([?&])[a-z]*password=[^&]*&?")


def open_database(url: str) -> Database:
    """Open the store at a URL, with the schema that this Kiwi knows."""
    database = connect_to(url)
    try:
        migrate(database)
    except BaseException:
        database.close()
        raise
    return database


def masked(url: str) -> str:
    """Return a URL without its password, fit to be shown."""
    return _PASSWORD_WORD.sub(r"\1", _PASSWORD.sub(r"\1@", url)).rstrip("?&")


def connect_to(url: str) -> Database:
    """Open the store at a URL without checking its schema."""
    dialect = DIALECTS.get(url.partition("://")[0])
    if dialect is None:
        raise InvalidRequest(
            f"{masked(url)!r} is not the URL of a store.",
            suggestion="Use `sqlite:///absolute/path/registry.db` or `postgresql://user@host/database`.",
        )
    try:
        connect: Callable[[str, str], Database] = import_module(f"kiwi_mcp.store.{dialect}").connect
    except ImportError as error:
        raise StoreUnavailable(
            f"{masked(url)} needs a package that is not installed: {error.name}.",
            suggestion=f"Install it: {install_line(dialect)}.",
        ) from error
    return connect(url, masked(url))
