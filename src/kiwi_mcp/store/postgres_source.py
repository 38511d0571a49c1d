"""A store on somebody else's PostgreSQL server, only read: nothing is made there where it is not a store already."""

from __future__ import annotations

from kiwi_mcp.domain.errors import StoreDamaged
from kiwi_mcp.store.migrate import FOLDER, read_migrations
from kiwi_mcp.store.postgres import PostgresDatabase, check_url

_READ_ONLY = {"default_transaction_read_only": "on"}
_APPLIED = "select number, checksum from schema_migrations"


def connect_source(url: str, shown: str) -> PostgresDatabase:
    """Open the database of a `postgresql://user@host/database` URL to read from it; it has to be a store."""
    check_url(url, shown)
    database = PostgresDatabase(url, shown, _READ_ONLY)
    try:
        _refuse_foreign(database)
    except BaseException:
        database.close()
        raise
    return database


def check_target(url: str, shown: str) -> None:
    """Refuse what is not the URL of a database; a database of a server is its owner's to make, and may be empty."""
    check_url(url, shown)


def _refuse_foreign(database: PostgresDatabase) -> None:
    known = {(step.number, step.checksum) for step in read_migrations(FOLDER / database.dialect)}
    if {*database.read(_APPLIED)} != known:
        raise StoreDamaged(
            f"{database.url} is not a store with the schema of this Kiwi. Nothing was read from it.",
            suggestion="Open it with this Kiwi as a store first, or let its owner push to a folder.",
        )
