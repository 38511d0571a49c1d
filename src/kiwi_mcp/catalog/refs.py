"""References: how an item is asked for."""

from __future__ import annotations

from typing import get_args

from msgspec import Struct

from kiwi_mcp.catalog.item_reader import bad_name
from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.items import NO_SOURCE, SOURCE_TRAITS, ItemType, Source
from kiwi_mcp.domain.names import Range, Version, is_tool_id
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.registry import VersionInfo

_SOURCES: tuple[Source, ...] = get_args(Source)
_MAX_LENGTH = 400
_DIGEST = lazy_pattern(r"sha256:([0-9a-f]{64})")
_EXAMPLES = (
    "Write `name`, `name@^1.2`, `name@sha256:…`, `namespace/name` for a published one, `server/name` for one of an MCP "
    "server, or a full identity such as `project/local/name@1.0.0`."
)


class Ref(Struct, frozen=True):
    """An item by short name, by full identity, or by name and range of versions or digest."""

    name: str
    source: Source | None = None
    namespace: str | None = None
    version: str | None = None
    """An exact version, a range, or `sha256:` and a digest; None lets every version through."""
    item_type: ItemType | None = None
    """Only items of that type. If no tool is found, items of other types count too."""

    @classmethod
    def parse(cls, text: str) -> Ref:
        """Return the reference in a text; refuse a text that cannot name anything."""
        place, at, wanted = text[:_MAX_LENGTH].partition("@")
        *home, name = place.split("/")
        issue = bad_name(name if not home else place)
        version = wanted if at else None
        if len(text) > _MAX_LENGTH or not is_tool_id(name):
            raise InvalidRequest(f"{issue.reason}.", suggestion=_EXAMPLES)
        if not home:
            return cls(name, version=version)
        source = next((word for word in _SOURCES if word == home[0]), None)
        match home:
            case [namespace] if source is None and is_tool_id(namespace):
                return cls(name, "registry", namespace, version)  # as lists of what is published name it
            case [_, namespace] if source is not None:
                return cls(name, source, namespace, version)
            case _:
                raise InvalidRequest(f"{issue.reason}.", suggestion=_EXAMPLES)

    def is_from(self, source: Source, namespace: str | None) -> bool:
        """Whether an item of that source and namespace may be meant."""
        return self.source in {None, source} and self.namespace in {None, namespace}

    @property
    def published_namespace(self) -> str | None:
        """The namespace in the registry that was asked for; None where none was."""
        return self.namespace if SOURCE_TRAITS.get(self.source or "", NO_SOURCE).is_published else None

    def is_exactly(self, listed: VersionInfo) -> bool:
        """Whether a published version was asked for by its exact number or by its digest."""
        return self.version in {listed.name.version, listed.digest}

    @property
    def digest(self) -> str:
        """The digest that was asked for, as 64 hexadecimal digits; empty where none was."""
        found = _DIGEST.fullmatch(self.version or "")
        return found[1] if found else ""

    def covers(self, version: str) -> bool:
        """Whether an item of that version may be what was asked for."""
        if self.version in {None, version} or self.digest:
            return True
        wanted, given = Range.parse(self.version or ""), Version.parse(version)
        return wanted is not None and given is not None and wanted.covers(given)
