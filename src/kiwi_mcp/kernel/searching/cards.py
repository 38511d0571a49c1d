"""Cards: items of a catalog as searches see them."""

from __future__ import annotations

from kiwi_mcp.catalog.entry import Entry
from kiwi_mcp.search.port import Card


def card_of(entry: Entry) -> Card:
    """Return the card of an item."""
    return Card(
        identity=entry.identity,
        tool_id=entry.tool_id,
        name=entry.name,
        description=entry.description,
        tags=entry.tags,
        category=entry.category,
        parameters=entry.parameters,
        source=entry.source,
        tool_type=entry.tool_type,
        path=entry.path,
        modified=entry.modified,
        namespace=entry.namespace,
        server=entry.namespace if entry.source == "mcp" else "",
    )
