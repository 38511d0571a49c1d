"""Which version of an item is its latest, and how the store shows it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.store.database import Database, Transaction, Value
from kiwi_mcp.store.rows import tags_in

_ORDERED = "select id, version_key, is_prerelease, yanked_at, is_latest from tool_versions where tool_id = ?"
_SHOW = """update tools set name = ?, description = ?, tool_type = ?, executor_id = ?, category = ?, subcategory = ?,
  tags = ?, latest_version = ?, updated_at = ? where id = ?"""


class Standing(NamedTuple):
    """What decides whether a version is the latest one."""

    id: str
    key: str
    is_prerelease: bool
    is_yanked: bool
    is_latest: bool

    @property
    def rank(self) -> tuple[bool, bool, str]:
        """Releases stand above pre-releases, and both above what was yanked, which is ordered by version alone."""
        return (not self.is_yanked, not self.is_yanked and not self.is_prerelease, self.key)


def latest_of(standings: Iterable[Standing]) -> Standing:
    """Return the latest of an item's versions; there is always one."""
    return max(standings, key=lambda standing: standing.rank)


def choose_again(transaction: Transaction, database: Database, tool: Value, at: str) -> None:
    """Make the right version of an item its latest, after something was said of one."""
    standings = [
        Standing(str(id_), str(key), bool(is_pre), yanked is not None, bool(is_latest))
        for id_, key, is_pre, yanked, is_latest in transaction.read(_ORDERED, (tool,))
    ]
    latest = latest_of(standings)
    if latest.is_latest:
        return
    transaction.write("update tool_versions set is_latest = false where tool_id = ? and is_latest = true", (tool,))
    transaction.write("update tool_versions set is_latest = true where id = ?", (latest.id,))
    ((version, text),) = transaction.read("select version, manifest from tool_versions where id = ?", (latest.id,))
    show(transaction, database, tool, str(version), as_object(json.loads(str(text))), at)


def show(
    transaction: Transaction, database: Database, tool: Value, version: str, manifest: JsonObject, at: str
) -> None:
    """Let the item's own row speak of its latest version."""
    transaction.write(_SHOW, (*words_of(manifest, database), version, at, tool))


def words_of(manifest: JsonObject, database: Database) -> tuple[Value, ...]:
    """Return what an item's row says of its latest version: name, description, type, executor, category, tags."""
    executor = as_text(manifest.get("executor")).partition("@")[0].rpartition("/")[2]
    return (
        as_text(manifest.get("name")),
        as_text(manifest.get("description")),
        as_text(manifest.get("tool_type")),
        executor or None,
        as_text(manifest.get("category")),
        as_text(manifest.get("subcategory")),
        database.encode_list(tags_in(manifest)),
    )
