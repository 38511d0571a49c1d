"""Cards: items as lists and searches show them, and the search features of a card."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.items import Source
from kiwi_mcp.domain.json import Json, as_object, as_text
from kiwi_mcp.domain.names import Version
from kiwi_mcp.domain.registry import VersionInfo

TEXT_LIMIT = 2_000
"""How many characters of a description a card holds."""
_PARAMETER_LIMIT = 64
_PART = "#part-"


class Card(Struct, frozen=True, array_like=True):
    """What is known of an item without opening it; the order of the fields is that of the columns in caches on disk."""

    source: Source
    namespace: str
    tool_id: str
    version: str = ""
    path: str = ""
    """The file of its manifest; its identity where it is in no file."""
    kind: str = "tools"
    """The folder it was found under: `tools`, `directives`, `knowledge`, `scripts`."""
    tool_type: str = ""
    name: str = ""
    description: str = ""
    category: str = ""
    tags: tuple[str, ...] = ()
    parameters: tuple[tuple[str, str], ...] = ()
    """Names and descriptions of the parameters."""
    modified: float = 0.0
    """When its manifest was last written, in seconds since 1970."""
    server: str = ""
    """The MCP server that offers it, if one does."""

    @property
    def identity(self) -> str:
        """The full name: `source/namespace/name@version`."""
        return f"{self.source}/{self.namespace}/{self.tool_id}@{self.version}"

    @property
    def semver(self) -> Version:
        """The version to compare by; an invalid version is lower than all valid ones."""
        return Version.parse(self.version) or Version(0, 0, 0, ("0",))


def part_of_card(card: Card, number: int, text: str) -> Card:
    """Return the card of a part of a text, by which the text is found; only its path tells it from the whole one."""
    return replace(card, path=f"{card.path}{_PART}{number}", description=text[:TEXT_LIMIT])


def part_number(card: Card) -> int:
    """Return which part of a text a card is about; 0 for the whole item."""
    head, mark, number = card.path.rpartition(_PART)
    return int(number) if mark and head and number.isdecimal() else 0


def whole_path(card: Card) -> str:
    """Return the file of an item, also for the card of a part of it."""
    return card.path.rpartition(_PART)[0] if part_number(card) else card.path


class CardFeatures(NamedTuple):
    """The stored features of a card's text: its words with their impacts, and its vector (empty until encoded)."""

    words: bytes
    vector: bytes


def card_of_version(listed: VersionInfo) -> Card:
    """Return the card of a published version; its path is its identity, since it is in no folder."""
    name, manifest = listed.name, listed.manifest
    return Card(
        source="registry",
        namespace=name.namespace,
        tool_id=name.tool_id,
        version=name.version,
        path=f"registry/{name}",
        kind=listed.place.partition("/")[0],
        tool_type=listed.tool_type,
        name=listed.title,
        description=listed.description[:TEXT_LIMIT],
        category=listed.category,
        tags=listed.tags,
        parameters=described(as_object(manifest.get("parameters")).get("properties")),
        modified=datetime.fromisoformat(listed.created_at).timestamp() if listed.created_at else 0.0,
    )


def described(properties: Json) -> tuple[tuple[str, str], ...]:
    """Return names and descriptions of the parameters that a schema declares."""
    listed = list(as_object(properties).items())[:_PARAMETER_LIMIT]
    return tuple((name, as_text(as_object(schema).get("description"))[:TEXT_LIMIT]) for name, schema in listed)
