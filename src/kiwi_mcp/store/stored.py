"""What a registry holds already of the names that somebody is about to publish."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, cast

from kiwi_mcp.domain.registry import VersionName, Visibility
from kiwi_mcp.store.database import Transaction
from kiwi_mcp.store.latest import Standing
from kiwi_mcp.store.rows import chunks, filled, marks_for

ItemName: TypeAlias = tuple[str, str]
"""A namespace and a short name."""

_TOOLS = "select id, tool_id, visibility from tools where namespace = ? and tool_id in ($marks)"
_VERSIONS = """select tool_id, id, version, content_hash, closure_hash, depth, version_key, is_prerelease, yanked_at,
  is_latest from tool_versions where tool_id in ($marks)"""


class Item(NamedTuple):
    """An item's row."""

    id: str
    visibility: Visibility
    is_new: bool = False


class Sealed(NamedTuple):
    """A version's row, as far as what stands on it needs to know."""

    id: str
    digest: str
    closure: str
    depth: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The rows of some items and all of their versions."""

    items: dict[ItemName, Item] = field(default_factory=dict)
    versions: dict[VersionName, Sealed] = field(default_factory=dict)
    standings: dict[str, list[Standing]] = field(default_factory=dict)
    """By the id of the item."""


def look_up(transaction: Transaction, names: Iterable[ItemName]) -> Stored:
    """Return what is there of some items, in as few queries as there can be."""
    stored = Stored()
    spaces: dict[str, dict[str, None]] = {}
    for namespace, tool_id in names:
        spaces.setdefault(namespace, {})[tool_id] = None
    for namespace, tool_ids in spaces.items():
        for some in chunks(tool_ids):
            rows = transaction.read(filled(_TOOLS, marks=marks_for(some)), (namespace, *some))
            for id_, tool_id, visibility in cast("list[tuple[str, str, Visibility]]", rows):
                stored.items[namespace, tool_id] = Item(id_, visibility)
    _add_versions(transaction, stored, {item.id: name for name, item in stored.items.items()})
    return stored


def _add_versions(transaction: Transaction, stored: Stored, names: Mapping[str, ItemName]) -> None:
    for some in chunks(names):
        rows = transaction.read(filled(_VERSIONS, marks=marks_for(some)), some)
        for row in rows:
            tool, id_, version, digest, closure, depth, key, is_pre, yanked, is_latest = cast(
                "tuple[str, str, str, str, str, int, str, bool, str | None, bool]", row
            )
            stored.versions[VersionName(*names[tool], version)] = Sealed(id_, digest, closure, depth)
            standing = Standing(id_, key, bool(is_pre), yanked is not None, bool(is_latest))
            stored.standings.setdefault(tool, []).append(standing)
