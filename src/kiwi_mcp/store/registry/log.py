"""Append to and verify the hash-chained log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import cast

from msgspec import Struct

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import canonical
from kiwi_mcp.domain.registry import Op, VersionName
from kiwi_mcp.store.database import Database, Row, Transaction, Value

_COLUMNS = (
    "seq", "op", "namespace", "tool_id", "version", "content_hash", "closure_hash", "actor", "reason", "created_at",
    "prev_hash", "hash",
)  # fmt: skip
_PAGE = "select * from registry_log where seq > ? order by seq limit 1000"
_FIRST = "-"
"""What the first entry has in place of a hash before it."""


class LogEntry(Struct, frozen=True):
    """One change, not yet numbered."""

    op: Op
    name: VersionName
    digest: str
    closure: str
    at: str
    reason: str = ""


def append(transaction: Transaction, actor: str, entries: Iterable[LogEntry]) -> None:
    """Append entries to the log. The transaction keeps other writers out until it ends."""
    last = transaction.read("select seq, hash from registry_log order by seq desc limit 1")
    seq, before = (int(str(last[0][0])), str(last[0][1])) if last else (0, _FIRST)
    rows = []
    for seq, entry in enumerate(entries, seq + 1):  # noqa: B020 - numbered on from the last one
        name = entry.name
        values: list[Value] = [
            seq, entry.op, name.namespace, name.tool_id, name.version, entry.digest, entry.closure, actor, entry.reason,
            entry.at, before,
        ]  # fmt: skip
        before = _seal(values)
        rows.append((*values, before))
    transaction.insert("registry_log", _COLUMNS, rows)


def broken_log(database: Database) -> Iterator[Issue]:
    """Yield where the log is not what was written: an entry changed, missing or added."""
    expected, before = 1, _FIRST
    while page := database.read(_PAGE, (expected - 1,)):
        for row in page:
            if fault := _fault(row, expected, before):
                fix = "Compare it with a remote or a backup: nothing before this entry was changed."
                yield Issue(f"log entry {expected}", fault, fix)
                return
            expected, before = expected + 1, str(row[-1])


def _fault(row: Row, expected: int, before: str) -> str:
    if row[0] != expected:
        return f"it is missing; the next one is {row[0]!s}"
    if row[-2] != before:
        return "it does not follow the entry before it"
    return "" if _seal(row[:-1]) == row[-1] else "it was changed after it was written"


def _seal(values: Sequence[Value]) -> str:
    return f"sha256:{sha256(canonical(cast('Sequence[str | int]', values))).hexdigest()}"
