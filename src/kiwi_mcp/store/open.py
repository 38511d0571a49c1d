"""Opening a store by its URL, whose scheme is the name of the module that speaks to it."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

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


def open_source(url: str) -> Database:
    """Open the store that somebody else has at a URL, to read from it and no more."""
    connect: Callable[[str, str], Database] = _module(url, "_source").connect_source
    return connect(url, masked(url))


def open_target(url: str) -> Database:
    """Open the store that somebody else has at a URL to write to it, or make one where there is nothing."""
    check: Callable[[str, str], None] = _module(url, "_source").check_target
    check(url, masked(url))
    return open_database(url)


def masked(url: str) -> str:
    """Return a URL without its password, fit to be shown."""
    return _PASSWORD_WORD.sub(r"\1", _PASSWORD.sub(r"\1@", url)).rstrip("?&")


def connect_to(url: str) -> Database:
    """Open the store at a URL, whatever schema it has."""
    connect: Callable[[str, str], Database] = _module(url).connect
    return connect(url, masked(url))


def _module(url: str, kind: str = "") -> ModuleType:
    """Return the module that speaks to the store at a URL."""
    dialect = DIALECTS.get(url.partition("://")[0])
    if dialect is None:
        raise InvalidRequest(
            f"{masked(url)!r} is not the URL of a store.",
            suggestion="Use `sqlite:///absolute/path/registry.db` or `postgresql://user@host/database`.",
        )
    try:
        return import_module(f"kiwi_mcp.store.{dialect}{kind}")
    except ImportError as error:
        raise StoreUnavailable(
            f"{masked(url)} needs a package that is not installed: {error.name}.",
            suggestion=f"Install it: pip install 'kiwi-mcp[{dialect}]'.",
        ) from error
