"""What a registry holds from the first day: the links that ship with Kiwi, and servers that Kiwi vouches for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import kiwi_mcp
from kiwi_mcp.catalog.read import load_bytes, read_tool
from kiwi_mcp.catalog.release import release_of
from kiwi_mcp.domain.errors import VersionConflict
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE, Cursor, Pin, Release, VersionName, is_same_executor
from kiwi_mcp.manifest.sheets import load_sheets
from kiwi_mcp.store.registry import Registry

BUILTIN = Path(kiwi_mcp.__file__).parent / "data"
"""The folder of what ships with Kiwi."""

OFFICIAL = BUILTIN / "registry"
"""The folder of what is in every registry and in no installation's own catalog."""

_CREATED_AT = "2026-01-01T00:00:00.000Z"
"""The same in every registry, whenever it was seeded: so exports of the same versions are the same bytes."""


def seed(registry: Registry, release: str) -> None:
    """Publish what comes with this release of Kiwi, once for each registry.

    A name that is taken by something else is left as it is, which `unseeded` tells: nothing that stands in a registry
    can keep anybody from opening it, and what ships with Kiwi is never run from there.
    """
    source = f"kiwi:{release}"
    if registry.cursor(source).seq:
        return
    releases = tuple(seeds())
    try:
        registry.publish(releases, is_seeding=True)
    except VersionConflict:
        taken = {*unseeded(registry)}
        registry.publish([one for one in releases if one.name not in taken], is_seeding=True)
    registry.set_cursor(source, Cursor(registry.head()))


def unseeded(registry: Registry) -> Sequence[VersionName]:
    """Return the names of this release of Kiwi under which a registry holds something else."""
    held = {one.name: one for one in registry.find(namespace=BUILTIN_NAMESPACE, is_all_versions=True)}
    return [
        one.name
        for one in seeds()
        if (known := held.get(one.name))
        and not (known.digest == one.digest and is_same_executor(known.executor, one.executor))
    ]


@cache
def vouched() -> frozenset[str]:
    """Return the digests of all that this release of Kiwi brings along."""
    return frozenset(release.digest for release in seeds())


def seeds() -> Iterator[Release]:
    """Give a release of each item, executors before what stands on them."""
    links = [_tool(path, BUILTIN) for path in sorted((BUILTIN / "tools").rglob("*.yaml"))]
    servers = [_tool(path, OFFICIAL) for path in sorted((OFFICIAL / "tools").rglob("*.yaml"))]
    pins = {tool.id: _pin(tool) for tool in links}
    for tool in sorted(links, key=lambda link: link.manifest.executor is not None):
        yield replace(_release(tool, pins), is_builtin=True)
    for tool in servers:
        yield _release(tool, pins)


def _tool(path: Path, base: Path) -> Tool:
    return read_tool(path, source="builtin", base=base, sheets=load_sheets())


def _pin(tool: Tool) -> Pin:
    return Pin(tool.id, VersionName(BUILTIN_NAMESPACE, tool.id, tool.manifest.version), f"sha256:{tool.digest}")


def _release(tool: Tool, pins: dict[str, Pin]) -> Release:
    executor = tool.manifest.executor
    made = release_of(
        tool,
        {file.path: load_bytes(tool, file) for file in tool.files},
        namespace=BUILTIN_NAMESPACE,
        place=tool.origin.place,
        executor=replace(pins[tool.manifest.executor_id or ""], ref=executor) if executor else None,
    )
    return replace(made, is_official=True, published_by=BUILTIN_NAMESPACE, created_at=_CREATED_AT)
