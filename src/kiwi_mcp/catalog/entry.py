"""Entries: what the catalog knows of an item without opening it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kiwi_mcp.catalog.folder import category_of, kind_of, stem_of
from kiwi_mcp.catalog.read import Head
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.items import Source
from kiwi_mcp.domain.json import Json, as_object, as_text
from kiwi_mcp.domain.version import Version

TEXT_LIMIT = 2_000
_PARAMETER_LIMIT = 64


class Entry(NamedTuple):
    """An item as lists and searches show it. A tuple, since ten thousand of them are made at once."""

    source: Source
    namespace: str
    path: str
    kind: str
    """The folder it was found under: `tools`, `directives`, `knowledge`, `scripts`."""
    tool_id: str
    version: str
    tool_type: str
    name: str
    description: str
    category: str
    tags: tuple[str, ...]
    parameters: tuple[tuple[str, str], ...]
    """Names and descriptions of the parameters."""
    modified: float
    """When its manifest was last written, in seconds of the epoch."""

    @property
    def identity(self) -> str:
        """The full name: `source/namespace/name@version`."""
        return f"{self.source}/{self.namespace}/{self.tool_id}@{self.version}"

    @property
    def semver(self) -> Version:
        """The version to compare by; what is not a version stands below all that are."""
        return Version.parse(self.version) or Version(0, 0, 0, ("0",))


@dataclass(frozen=True, slots=True)
class Broken:
    """A file that looks like an item and cannot be read as one, and why."""

    source: Source
    namespace: str
    path: str
    stem: str
    error: KiwiError


def entry_of(head: Head, path: Path, *, base: Path, source: Source, namespace: str) -> Entry:
    """Return the entry of an item from its manifest."""
    manifest = head.manifest
    return Entry(
        source,
        namespace,
        str(path),
        kind_of(path, base),
        manifest.tool_id,
        manifest.version,
        manifest.tool_type,
        manifest.name,
        manifest.description[:TEXT_LIMIT],
        category_of(path, base) or manifest.category,
        manifest.tags,
        declared(manifest.parameters.get("properties")),
        head.content.modified,
    )


def broken_of(path: str, error: KiwiError, *, source: Source, namespace: str) -> Broken:
    """Return the entry of a file that could not be read."""
    return Broken(source, namespace, path, stem_of(Path(path)), error)


def declared(properties: Json) -> tuple[tuple[str, str], ...]:
    """Return names and descriptions of the parameters that a schema declares."""
    listed = list(as_object(properties).items())[:_PARAMETER_LIMIT]
    return tuple((name, as_text(as_object(schema).get("description"))[:TEXT_LIMIT]) for name, schema in listed)
