"""A registry in a database as an OCI image layout: its index, its blobs, and a push, as one actor may."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import cast

from kiwi_mcp.domain.errors import InvalidRequest, NamespaceDenied, NotFound, TooLarge, VersionConflict
from kiwi_mcp.domain.registry import (
    ItemName,
    PublishResult,
    RegistryEvent,
    StatusNote,
    VersionInfo,
    VersionName,
    is_digest,
    is_same_content,
)
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.rows import EXECUTABLE, VisibilityFilter, chunks, filled, placeholders, read_blob
from kiwi_mcp.store.remote.artifact import (
    BlobFile,
    Read,
    StatusNotes,
    VersionAnnotations,
    add_status,
    digest_of,
    encode_manifest,
)
from kiwi_mcp.store.remote.http import MAX_PUSHED
from kiwi_mcp.store.remote.layout import LayoutEntry, index_bytes, read_entries, read_release
from kiwi_mcp.store.remote.sync import Check, RegistrySnapshot, all_events

_CLOCK_SKEW = timedelta(minutes=5)
"""How far the clock of a machine that pushes may be ahead."""
_STATEMENTS = "select id, manifest_canon, manifest_yaml, manifest_sha256 from tool_versions where id in ($marks)"
_FILES = """select tool_version_id, path, sha256, size_bytes, mode from tool_version_files
where tool_version_id in ($marks)"""
_STATEMENT = """select v.manifest_canon from tool_versions v cross join tools t
where v.content_hash = ? and t.id = v.tool_id and $sees limit 1"""
_MANIFEST = """select v.manifest_yaml from tool_versions v cross join tools t
where v.manifest_sha256 = ? and t.id = v.tool_id and $sees limit 1"""
_FILE = """select f.content_text, f.storage_key
from tool_version_files f cross join tool_versions v cross join tools t
where f.sha256 = ? and v.id = f.tool_version_id and t.id = v.tool_id and $sees limit 1"""


class ArtifactCache:
    """The artifacts of stored versions by version id; a version is sealed, so an entry stays true."""

    def __init__(self) -> None:
        self._artifacts: dict[str, tuple[str, int]] = {}
        """The digest and the size of the manifest of each artifact."""
        self.versions: dict[str, str] = {}
        """The id of the version with the artifact of a digest."""

    def artifacts_of(self, registry: Registry, versions: Sequence[VersionInfo]) -> Mapping[str, tuple[str, int]]:
        """Return the artifacts of versions, by version id."""
        for version, manifest in _manifests(registry, [one for one in versions if one.id not in self._artifacts]):
            digest = digest_of(manifest)
            self._artifacts[version.id] = (digest, len(manifest))
            self.versions[digest] = version.id
        return self._artifacts


class RegistryLayout:
    """The layout that one actor sees in a registry. Other actors' private versions are not in it."""

    def __init__(self, registry: Registry, cache: ArtifactCache) -> None:
        self._registry = registry
        self._cache = cache

    def index(self, tool_id: str = "") -> bytes:
        """Return `index.json`: every listed version, or all versions of one name, unlisted ones included."""
        registry = self._registry
        versions = registry.named_anywhere(tool_id) if tool_id else registry.find(is_all_versions=True)
        artifacts = self._cache.artifacts_of(registry, versions)
        status = _status(versions, all_events(registry, tool_id=tool_id))
        entries = (
            LayoutEntry(VersionAnnotations.of(one), one.digest, *artifacts[one.id], status[one.name], one.closure)
            for one in versions
        )
        return index_bytes(entries, "the registry")

    def blob(self, digest: str) -> bytes:
        """Return the bytes of a digest, if a version that the actor may see has them."""
        database, sight = self._registry.database, VisibilityFilter(self._registry.actor)
        name = digest.removeprefix("sha256:")
        for statement, value in ((_FILE, name), (_MANIFEST, name), (_STATEMENT, digest)):
            rows = database.read(filled(statement, sees=sight.named), (value, *sight.members))
            if is_digest(digest) and rows:
                text, *key = cast("tuple[str | None, ...]", rows[0])
                return text.encode() if text is not None else read_blob(database, str(key[0]))
        registry = self._registry
        if digest not in self._cache.versions:  # the server started again since the index was read
            self._cache.artifacts_of(registry, registry.find(is_all_versions=True))
        try:
            if (version := self._cache.versions.get(digest)) is not None:
                ((_, manifest),) = _manifests(registry, [registry.get(version)])
                return manifest
        except NotFound:
            pass  # the actor may not see it
        raise NotFound(f"The registry has no blob {digest[:80]}.", suggestion="Read the index again.")

    def push(self, data: bytes, read: Read, check: Check) -> Sequence[PublishResult]:
        """Publish what is new in an index, and apply its status notes; `read` returns blobs that were sent."""

        def read_any(digest: str, size: int) -> bytes:
            try:
                return read(digest, size)
            except LookupError as error:
                try:
                    return self.blob(digest)
                except NotFound:
                    raise error from None

        entries = read_entries(data, "The index that was sent")
        if len(entries) > MAX_PUSHED:
            raise TooLarge("The index", size=len(entries), limit=MAX_PUSHED, unit="versions")
        registry = self._registry
        for namespace in {entry.name.namespace for entry in entries}:
            if not registry.actor.is_member(namespace):
                raise NamespaceDenied(namespace, namespaces=registry.actor.namespaces)
        known = {
            one.name: one
            for namespace, tool_id in {entry.name.item for entry in entries}
            for one in registry.named(tool_id, namespace=namespace)
        }
        if conflicts := [str(one.name) for one in entries if not is_same_content(one, known.get(one.name, one))]:
            raise VersionConflict(conflicts)
        releases = [check(read_release(entry, read_any)) for entry in entries if entry.name not in known]
        published = {one.name: one for one in registry.publish(releases, self._news(entries))}
        return [
            published.get(entry.name)
            or PublishResult(entry.name, entry.digest, known[entry.name].closure, is_new=False)
            for entry in entries
        ]

    def _news(self, entries: Sequence[LayoutEntry]) -> Sequence[RegistryEvent]:
        """Return the status events of entries that the registry does not have yet, the oldest first."""
        tool_ids = {entry.name.tool_id for entry in entries}
        here = RegistrySnapshot.by(event for one in tool_ids for event in all_events(self._registry, tool_id=one))
        events = {event: None for entry in entries for event in entry.status_events() if here.is_news(event)}
        latest = datetime.now(UTC) + _CLOCK_SKEW
        for event in events:
            if datetime.fromisoformat(event.at) > latest:  # no later change could replace it
                raise InvalidRequest(
                    f"{event.name} has a status ({event.op}) with a time in the future: {event.at}.",
                    suggestion="Set the clock of the machine that made it, then change the status again.",
                )
        return sorted(events, key=lambda event: event.at)


def _manifests(registry: Registry, versions: Sequence[VersionInfo]) -> Iterator[tuple[VersionInfo, bytes]]:
    """Yield versions with the manifests of their artifacts, from rows alone: no file is read."""
    for some in chunks(versions):
        ids = [one.id for one in some]
        marks = placeholders(ids)
        files: dict[str, list[BlobFile]] = {id_: [] for id_ in ids}
        rows = registry.database.read(filled(_FILES, marks=marks), ids)
        for id_, path, sha256, size, mode in cast("list[tuple[str, str, str, int, int]]", rows):
            files[id_].append(BlobFile(path, f"sha256:{sha256}", int(size), mode == EXECUTABLE))
        stated = {str(row[0]): row for row in registry.database.read(filled(_STATEMENTS, marks=marks), ids)}
        for version in some:
            own = files[version.id]
            _, statement, text, sha256 = cast("tuple[str, str, str | None, str]", stated[version.id])
            if text is not None:  # a manifest that is a file of its own
                own.append(BlobFile(version.place.rpartition("/")[2], f"sha256:{sha256}", len(text.encode())))
            yield version, encode_manifest(version, len(statement.encode()), own)


def _status(versions: Sequence[VersionInfo], events: Iterator[RegistryEvent]) -> Mapping[VersionName, StatusNotes]:
    """Return the status notes of versions, from the log: a status that was taken back has a note too."""
    notes: dict[VersionName, StatusNotes] = {
        one.name: {} if one.visibility == "public" else {"visibility": StatusNote("", one.visibility)}
        for one in versions
    }
    by_item: dict[ItemName, list[VersionName]] = {}
    for name in notes:
        by_item.setdefault(name.item, []).append(name)
    for event in events:
        affected = by_item.get(event.name.item, []) if event.op == "visibility" else [event.name]
        for name in affected if event.op != "publish" else ():
            if name in notes:
                notes[name] = add_status(notes[name], event)
    return notes
