"""What a registry holds, from its events; `VersionQuery`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.errors import ArtifactRefused, InvalidRequest, NotFound
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.names import Range, Version, is_namespace, is_tool_id
from kiwi_mcp.domain.registry import ItemName, RegistryEvent, VersionName, Visibility, is_digest

_ASPECTS = {
    "yank": "yank",
    "unyank": "yank",
    "deprecate": "deprecate",
    "undeprecate": "deprecate",
    "visibility": "visibility",
}
"""The kind of status that each event changes; the last event of a kind is valid."""
_EXAMPLES = "Write `name`, `namespace/name`, `name@^1.2`, `name@1.2.3` or a digest `sha256:…`."
_MAX_LENGTH = 400

StatusKey = tuple[str, str, str, str]
"""What a status event changes: the kind of status, and the version or, for visibility, the whole item."""


class RegistrySnapshot(Struct, frozen=True):
    """A registry without its contents: the hashes, the visibility and the latest status of each version."""

    versions: Mapping[VersionName, str]
    """The digests, by name, in the order in which they were published."""
    closures: Mapping[VersionName, str]
    visibilities: Mapping[ItemName, Visibility]
    statuses: Mapping[StatusKey, RegistryEvent]

    @classmethod
    def by(cls, events: Iterable[RegistryEvent]) -> RegistrySnapshot:
        """Return the snapshot that a log describes. Refuse a log that publishes one version with two contents."""
        versions: dict[VersionName, str] = {}
        closures: dict[VersionName, str] = {}
        visibilities: dict[ItemName, Visibility] = {}
        statuses: dict[StatusKey, RegistryEvent] = {}
        twice = []
        for event in events:
            visibilities[event.name.item] = event.visibility
            if event.op != "publish":
                statuses.pop(status_key(event), None)  # the order of the last events is one in which they were possible
                statuses[status_key(event)] = event
            elif (versions.setdefault(event.name, event.digest), closures.setdefault(event.name, event.closure)) != (
                event.digest,
                event.closure,
            ):
                twice.append(Issue(str(event.name), "is in the log twice, with two contents", "Ask its owner."))
        if twice:
            raise ArtifactRefused("The log of the registry", twice)
        return cls(versions, closures, visibilities, statuses)

    def is_private(self, name: VersionName) -> bool:
        """Whether only members of its namespace see a version."""
        return self.visibilities.get(name.item) == "private"

    def is_yanked(self, name: VersionName) -> bool:
        """Whether a version is yanked, so that it is no longer selected."""
        event = self.statuses.get(("yank", *name.item, name.version))
        return event is not None and event.op == "yank"

    def is_news(self, event: RegistryEvent) -> bool:
        """Whether a status event from elsewhere changes the status known here, and is not older."""
        known = self.statuses.get(status_key(event))
        if event.op == "visibility" and event.reason == self.visibilities.get(event.name.item):
            return False
        if known is None:
            return event.op not in {"unyank", "undeprecate"}
        is_same = event.op == known.op and event.op != "visibility"
        return not is_same and _moment(event.at) >= _moment(known.at)


def _moment(text: str) -> datetime:
    # A status without a time was there from the beginning.
    return datetime.fromisoformat(text) if text else datetime.min.replace(tzinfo=UTC)


def status_key(event: RegistryEvent) -> StatusKey:
    """Return the key of a status event."""
    aspect, name = _ASPECTS[event.op], event.name
    return (aspect, *name.item, "" if aspect == "visibility" else name.version)


class VersionQuery(Struct, frozen=True):
    """One version of an item: by name, by range or exact version, and by digest or closure."""

    tool_id: str = ""
    namespace: str = ""
    version: str = ""
    digest: str = ""
    """Its digest, which names its own bytes, or its closure, which names those of its executors too."""

    @classmethod
    def parse(cls, text: str) -> VersionQuery:
        """Return the query in a text; refuse a text that cannot name anything."""
        if is_digest(text):
            return cls(digest=text)
        place, at, version = text[:_MAX_LENGTH].partition("@")
        namespace, slash, tool_id = place.rpartition("/")
        is_hash = is_digest(version)
        is_range = Version.parse(version) is not None or Range.parse(version) is not None
        is_named = is_tool_id(tool_id) and (not slash or is_namespace(namespace))
        if not is_named or len(text) > _MAX_LENGTH or (at and not is_hash and not is_range):
            raise InvalidRequest(f"{text[:100]!r} names no version.", suggestion=_EXAMPLES)
        return cls(tool_id, namespace, "" if is_hash else version, version if is_hash else "")

    def exactly(self, name: VersionName) -> VersionQuery:
        """Return the query for a chosen version, which still has to have the requested hash."""
        return replace(self, tool_id=name.tool_id, namespace=name.namespace, version=name.version)

    def __str__(self) -> str:
        place = f"{self.namespace}/{self.tool_id}" if self.namespace else self.tool_id
        return "@".join(filter(None, (place, self.version or self.digest)))

    def choose(self, snapshot: RegistrySnapshot, namespaces: Sequence[str]) -> VersionName:
        """Return the version: in the first of the namespaces that has one, the highest that fits.

        A yanked version, and without a range a pre-release, is chosen only where nothing else was asked for.
        """
        for namespace in (self.namespace,) if self.namespace else namespaces:
            fitting = [
                name for name in snapshot.versions if name.namespace == namespace and self._covers(name, snapshot)
            ]
            in_use = [name for name in fitting if not snapshot.is_yanked(name)] or (fitting if self._is_exact else [])
            if in_use:
                return max(in_use, key=self._rank)
        raise self._missing(snapshot, namespaces)

    @property
    def name(self) -> VersionName | None:
        """The one version that fits, if the query names it exactly."""
        is_whole = self.namespace and Version.parse(self.version) is not None
        return VersionName(self.namespace, self.tool_id, self.version) if is_whole else None

    @property
    def _is_exact(self) -> bool:
        return bool(self.digest) or Version.parse(self.version) is not None

    def _covers(self, name: VersionName, snapshot: RegistrySnapshot) -> bool:
        if self.tool_id and name.tool_id != self.tool_id:
            return False
        if self.digest and self.digest not in {snapshot.versions[name], snapshot.closures[name]}:
            return False
        if not self.version or self.version == name.version:
            return True
        wanted, version = Range.parse(self.version), Version.parse(name.version)
        return wanted is not None and version is not None and wanted.covers(version)

    def _rank(self, name: VersionName) -> tuple[bool, Version]:
        version = Version.parse(name.version) or Version(0, 0, 0)
        return (bool(self.version) or not version.pre, version)

    def _missing(self, snapshot: RegistrySnapshot, namespaces: Sequence[str]) -> NotFound:
        found = [name for name in snapshot.versions if name.tool_id == self.tool_id]
        near = ", ".join(f"`{name}`" for name in found[-5:])
        where = "" if self.namespace else f" in {', '.join(namespaces)}"
        return NotFound(
            f"The registry has no {str(self)!r}{where}.",
            suggestion=f"{f'It has {near}. ' if near else ''}{_EXAMPLES}",
            wanted=str(self),
        )
