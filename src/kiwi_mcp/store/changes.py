"""What changed in a registry since an entry of its log, item by item."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kiwi_mcp.domain.registry import Listed
from kiwi_mcp.store.registry import Registry

Item = tuple[str, str]
"""The namespace and the name of an item."""

MOST = 500
"""How many items are looked at one by one; where more changed, all are listed again."""

# Whatever the actor sees: of an item that was hidden from them, the log tells them nothing any more.
_CHANGED = "select distinct namespace, tool_id from registry_log where seq > ? limit ?"


def changed_items(registry: Registry, after: int) -> frozenset[Item] | None:
    """Return the items that the log names behind an entry, or None where they are too many."""
    rows = registry.database.read(_CHANGED, (after, MOST + 1))
    return None if len(rows) > MOST else frozenset((str(namespace), str(tool_id)) for namespace, tool_id in rows)


def listed_now(registry: Registry, items: Iterable[Item]) -> Mapping[Item, Listed]:
    """Return the latest versions of items, of those that lists may show to the actor."""
    found = (one for namespace, tool_id in items for one in registry.named(tool_id, namespace=namespace))
    return {(one.name.namespace, one.name.tool_id): one for one in found if _is_listed(registry, one)}


def _is_listed(registry: Registry, one: Listed) -> bool:
    return one.is_latest and (one.visibility == "public" or registry.actor.is_member(one.name.namespace))
