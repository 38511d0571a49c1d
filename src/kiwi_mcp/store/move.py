"""Moving a store: every row is copied into an empty store of any dialect, and compared before anything is committed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256

from kiwi_mcp.domain.errors import Conflict, StoreDamaged
from kiwi_mcp.store.database import Database, Row, Transaction, Value

# In an order in which every row finds the rows that it refers to. Files come before their version, by a trigger.
TABLES = (
    "namespaces", "tool_types", "tools", "blobs", "tool_version_files", "tool_versions", "registry_log", "remotes",
    "runs", "mcp_servers", "mcp_definitions", "tasks", "receipts", "authors", "relaxations", "approvals",
    "approval_rules", "approval_numbers", "first_runs", "remembered", "started_calls", "threads", "thread_events",
    "thread_blobs", "budget_ledger", "budget_days", "rate_calls", "questions", "thread_deltas",
    "schedules", "occurrences", "workers", "queue_starts",
)  # fmt: skip
REBUILT = frozenset({
    "schema_migrations", "change_counter", "sheets", "tool_embeddings", "embedding_models", "embedding_lexemes",
})  # fmt: skip
"""Tables that a store fills by itself."""
_LISTS = frozenset({("tools", "tags")})
_SCHEMA_ROWS = ("namespaces", "tool_types")  # tables that the schema itself puts rows into
_NAMES = {
    "sqlite": "select name from sqlite_master where type = 'table' and name not like 'sqlite_%'",
    "postgres": "select tablename from pg_tables where schemaname = current_schema()",
}
_COLUMNS = {
    "sqlite": "select name from pragma_table_info(?) order by name",
    "postgres": "select column_name::text from information_schema.columns "
    "where table_schema = current_schema() and table_name = ? order by 1",
}
_DATA = ("runs", "receipts", "mcp_servers", "authors", "threads")  # tables that show that a store was used


def has_data(database: Database) -> bool:
    """Whether a store was used: not one that is new, or has no schema yet."""
    named = {str(name) for (name,) in database.read(_NAMES[database.dialect])}
    return any(table in named and database.read(f"select 1 from {table} limit 1") for table in _DATA)  # noqa: S608 - names of ours


def copy_store(source: Database, target: Database, switch: Callable[[], None]) -> int:
    """Copy every row, compare, commit, then call `switch` while the source is locked against writers; return the rows.

    Nothing is changed in the source. A target that has rows of its own is refused, and stays as it is.
    """
    unknown = {str(name) for (name,) in source.read(_NAMES[source.dialect])} - {*TABLES, *REBUILT}
    if unknown:
        raise StoreDamaged(
            f"The store {source.url} has tables that Kiwi does not know: {', '.join(sorted(unknown))}.",
            suggestion="Move it with the Kiwi that made it.",
        )
    copied = 0
    with source.transaction() as old:
        with target.transaction() as new:
            if target.dialect == "sqlite":
                new.write("pragma defer_foreign_keys = on")
            if any(new.read(f"select 1 from {table} limit 1") for table in TABLES if table not in _SCHEMA_ROWS):  # noqa: S608 - names of ours
                raise Conflict(
                    f"The store {target.url} has data already, and is left as it is.",
                    suggestion="Name an empty one; `createdb -E UTF8 -T template0 kiwi` makes a PostgreSQL database.",
                )
            for table in TABLES:
                copied += _copy_table(table, (source, old), (target, new))
        switch()
    return copied


def _copy_table(table: str, source: tuple[Database, Transaction], target: tuple[Database, Transaction]) -> int:
    (old_store, old), (new_store, new) = source, target
    columns = [str(name) for (name,) in old.read(_COLUMNS[old_store.dialect], (table,))]
    if table in _SCHEMA_ROWS:
        new.write(f"delete from {table}")  # noqa: S608 - a name of ours
    is_list = [(table, name) in _LISTS for name in columns]
    converted = (
        [
            new_store.encode_list(old_store.decode_list(value)) if is_one else value
            for value, is_one in zip(row, is_list, strict=True)
        ]
        for row in _rows(old, table, columns)
    )
    new.insert(table, columns, converted)
    before = Counter(_digest(row, is_list, old_store) for row in _rows(old, table, columns))
    if before != Counter(_digest(row, is_list, new_store) for row in _rows(new, table, columns)):
        raise StoreDamaged(
            f"The rows of {table} in {new_store.url} are not those of {old_store.url}; nothing was moved.",
            suggestion="Run `kiwi verify`, then move again.",
        )
    return before.total()


def _rows(store: Transaction, table: str, columns: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a table; those with contents one by one, since they may be large."""
    every = f"select {', '.join(columns)} from {table}"  # noqa: S608 - names of ours
    if table != "blobs":
        yield from store.read(every)
        return
    for (key,) in store.read("select sha256 from blobs"):
        yield from store.read(f"{every} where sha256 = ?", (key,))


def _digest(row: Row, is_list: Sequence[bool], store: Database) -> bytes:
    """Return a hash of a row that is the same in every dialect."""
    pairs = zip(row, is_list, strict=True)
    plain = [store.decode_list(value) if is_one else _plain(value) for value, is_one in pairs]
    return sha256(repr(plain).encode(errors="surrogatepass")).digest()


def _plain(value: Value) -> object:
    match value:
        case bool() | int() | float():
            return float(value)
        case str() if value[:1] in "{[" and value:
            try:  # PostgreSQL writes JSON with other spaces, and keys in another order
                return json.dumps(json.loads(value), sort_keys=True)
            except ValueError:
                return value
        case bytes():
            return sha256(value).digest()
    return value
