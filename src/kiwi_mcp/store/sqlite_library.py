"""The one SQLite of this process: two copies of the library would break each other's locks on a file."""

from __future__ import annotations

from importlib.util import find_spec

# Before its `SOUND` release SQLite may damage a file that several processes write, and most Pythons have an older one.
if find_spec("pysqlite3") is None:
    import sqlite3 as library
else:
    from pysqlite3 import dbapi2 as library  # type: ignore[import-untyped,no-redef]  # a copy of the standard module

__all__ = ["SOUND", "is_standard_library", "library", "version"]

SOUND = (3, 51, 3)
"""The first release that several processes may write with."""

version: tuple[int, ...] = tuple(int(part) for part in library.sqlite_version.split("."))
is_standard_library: bool = library.__name__ == "sqlite3"
