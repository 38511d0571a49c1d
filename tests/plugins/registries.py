"""Helpers that publish and pull in one call."""

from __future__ import annotations

from kiwi_mcp.domain.registry import ChainRow, RegistryEvent, VersionName, Visibility
from kiwi_mcp.store.registry.registry import Registry


def latest_chain(registry: Registry, tool_id: str) -> tuple[ChainRow, ...]:
    """Return the latest version of a short name and all that it depends on, top first."""
    return registry.resolve(registry.named(tool_id)[0].id)


def set_visibility(registry: Registry, namespace: str, tool_id: str, visibility: Visibility) -> None:
    """Change who sees an item, as a copy from another registry does."""
    registry.publish(
        (), [RegistryEvent(0, "visibility", VersionName(namespace, tool_id, ""), "", "", "", "", visibility)]
    )
