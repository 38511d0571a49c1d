"""Opening a store by its URL, whose scheme is the name of the module that speaks to it."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module

from kiwi_mcp.domain.errors import InvalidRequest, StoreUnavailable
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.migrate import migrate

DIALECTS = {"sqlite": "sqlite", "postgres": "postgres", "postgresql": "postgres"}
_PASSWORD = re.compile(r"(?<=://)([^:/?#@]*):.*@", re.DOTALL)
_PASSWORD_WORD = re.compile(r"(?i)([?&])[a-z]*password=[^&]*&?")


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
    """Open the store at a URL, whatever schema it has."""
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
            suggestion=f"Install it: pip install 'kiwi-mcp[{dialect}]'.",
        ) from error
    return connect(url, masked(url))
