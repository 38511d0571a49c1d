"""A folder in OCI image layout: its index, its blobs, and how both are written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp.domain.errors import ArtifactRefused, Conflict, NotFound, TooLarge, VersionConflict
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, NotJson, as_list, as_object, canonical, most_values, read_json
from kiwi_mcp.domain.registry import (
    ItemName,
    Pin,
    PublishResult,
    RegistryEvent,
    Release,
    VersionName,
    is_digest,
    is_same_content,
)
from kiwi_mcp.store.folder import NEW, below, lock, make_below, opened, put_file, read_file, unusable
from kiwi_mcp.store.registry.release_check import MAX_ISSUES, CheckedRelease, closures, order, require_checked
from kiwi_mcp.store.remote.artifact import (
    ARTIFACT_TYPE,
    CLOSURE,
    DIGEST,
    MANIFEST_TYPE,
    MAX_MANIFEST,
    REF_NAME,
    Artifact,
    Descriptor,
    Read,
    StatusNotes,
    VersionAnnotations,
    add_status,
    bad_status_notes,
    decode,
    digest_of,
    encode,
    read_status,
    status_notes_of,
    visibility_in,
)

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MAX_INDEX = 128_000_000
_MAX_VALUES = 4_000_000
_AGAIN = "Write the folder again from the registry it came from."


class LayoutEntry(Struct, frozen=True):
    """One version in an index: where its artifact is, its digest, and its status notes."""

    annotations: VersionAnnotations
    digest: str
    artifact: str
    """The digest of the artifact's manifest."""
    size: int
    status: StatusNotes = field(default_factory=dict)
    closure: str = ""
    """The closure that a server states; a folder holds every executor, so it states none."""

    @classmethod
    def of(cls, release: Release, artifact: Artifact) -> LayoutEntry:
        """Return the entry of a release."""
        annotations = VersionAnnotations.of(release)
        return cls(annotations, release.digest, artifact.digest, len(artifact.manifest), status_notes_of(release))

    @classmethod
    def read(cls, value: Json, place: str, issues: list[Issue]) -> LayoutEntry:
        """Return the entry in a descriptor, and add its faults to `issues`."""
        found = Descriptor.read(value)
        entry = cls(
            VersionAnnotations.read(found.annotations),
            found.annotations.get(DIGEST, ""),
            found.digest,
            found.size,
            read_status(found.annotations),
            found.annotations.get(CLOSURE, ""),
        )
        wrong = [
            *found.issues(place, MANIFEST_TYPE, MAX_MANIFEST),
            *entry.annotations.issues(),
            *bad_status_notes(entry.status),
        ]
        issues += (replace(issue, place=f"{place} {issue.place}") for issue in wrong)
        if not is_digest(entry.digest):
            issues.append(Issue(place, f"it has no {DIGEST}", _AGAIN))
        if entry.closure and not is_digest(entry.closure):
            issues.append(Issue(place, f"its {CLOSURE} is not a digest", _AGAIN))
        return entry

    @property
    def name(self) -> VersionName:
        """The name of the version."""
        return self.annotations.name

    @property
    def executor(self) -> Pin | None:
        """The version's executor."""
        return self.annotations.executor

    @property
    def references(self) -> tuple[Pin, ...]:
        """The versions of the items that it names."""
        return self.annotations.references

    def status_events(self) -> Iterator[RegistryEvent]:
        """Yield the status changes after the version was published; a visibility note without a time is none."""
        visibility = visibility_in(self.status)
        for op, note in self.status.items():
            if op != "visibility" or note.at:
                name = replace(self.name, version="") if op == "visibility" else self.name
                yield RegistryEvent(0, op, name, self.digest, self.closure, "", note.at, note.reason, visibility)

    def to_json(self) -> JsonObject:
        """Return the entry as a descriptor."""
        name, notes = self.name, self.status.items()
        annotations = {
            **self.annotations.to_annotations(),
            **{f"vnd.kiwi.{op}.at": note.at for op, note in notes},
            **{f"vnd.kiwi.{op}.reason": note.reason for op, note in notes if note.reason},
            DIGEST: self.digest,
            REF_NAME: f"{name.namespace}/{name.tool_id}/{name.version}",
            **({CLOSURE: self.closure} if self.closure else {}),
        }
        return {
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "digest": self.artifact,
            "size": self.size,
            "annotations": annotations,
        }


class LayoutIndex(Struct, frozen=True):
    """All entries, executors first, and the closure of each."""

    what: str
    """What a refusal calls it."""
    entries: Mapping[VersionName, LayoutEntry] = field(default_factory=dict)
    closures: Mapping[VersionName, str] = field(default_factory=dict)

    @classmethod
    def read_partial(cls, data: bytes, what: str) -> LayoutIndex:
        """Return the index of a server, which may leave out executors and states closures; copying compares those."""
        entries = read_entries(data, what)
        if not all(entry.closure for entry in entries):
            return _ordered(what, entries)
        ordered = {entry.name: entry for entry in order(entries, what=what)}
        return cls(what, ordered, {name: entry.closure for name, entry in ordered.items()})

    def grown(self, entries: Sequence[LayoutEntry], events: Sequence[RegistryEvent]) -> LayoutIndex:
        """Return the index with more entries and status events; a version with another closure is a conflict."""
        by_name = dict(self.entries)
        conflicts = [str(one.name) for one in entries if not is_same_content(by_name.setdefault(one.name, one), one)]
        if conflicts:
            raise VersionConflict(conflicts)
        apply_status(by_name, events, self.what)
        return self if by_name == self.entries else _ordered(self.what, by_name.values())

    def events(self) -> Iterator[RegistryEvent]:
        """Yield the events that lead to this index: all versions, executors first, then status changes."""
        for entry in self.entries.values():
            by, at, closure = entry.annotations.published_by, entry.annotations.created_at, self.closures[entry.name]
            visibility = visibility_in(entry.status)
            yield RegistryEvent(0, "publish", entry.name, entry.digest, closure, by, at, "", visibility)
        shown = set[ItemName]()
        for entry in self.entries.values():
            for event in entry.status_events():
                if event.op == "visibility":
                    if entry.name.item in shown:
                        continue
                    shown.add(entry.name.item)
                yield replace(event, closure=self.closures[entry.name])


def index_bytes(entries: Iterable[LayoutEntry], what: str) -> bytes:
    """Return entries as the document that `index.json` is."""
    rows: list[Json] = [entry.to_json() for entry in sorted(entries, key=lambda entry: str(entry.name))]
    data = canonical({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": rows})
    if len(data) > MAX_INDEX or most_values(data) > _MAX_VALUES:
        raise TooLarge(f"The index of {what}", size=len(data), limit=MAX_INDEX)
    return data


def read_entries(data: bytes, what: str) -> list[LayoutEntry]:
    """Return the entries of an index; any fault refuses them all."""
    issues: list[Issue] = []
    document: JsonObject = {}
    try:
        document = as_object(read_json(data, max_bytes=MAX_INDEX, max_values=_MAX_VALUES))
        # Some programs that copy layouts leave out the type, which may be left out.
        if document.get("schemaVersion") != 2 or document.get("mediaType", INDEX_TYPE) != INDEX_TYPE:  # noqa: PLR2004 - the specification's number
            issues.append(Issue("", f"it is not of the type {INDEX_TYPE}", _AGAIN))
    except NotJson as fault:
        issues.append(Issue("", str(fault), _AGAIN))
    rows = enumerate(as_list(document.get("manifests")))
    entries = [LayoutEntry.read(row, f"manifests[{number}]", issues) for number, row in rows]
    if len({entry.name for entry in entries}) != len(entries):
        issues.append(Issue("manifests", "it lists a version twice", _AGAIN))
    if issues:
        raise ArtifactRefused(what, islice(issues, MAX_ISSUES))
    return entries


def _ordered(what: str, entries: Iterable[LayoutEntry]) -> LayoutIndex:
    ordered = order(entries, what=what)
    return LayoutIndex(what, {entry.name: entry for entry in ordered}, closures(ordered, what=what))


def apply_status(by_name: dict[VersionName, LayoutEntry], events: Sequence[RegistryEvent], what: str) -> None:
    """Apply status events to the entries. A visibility event applies to the whole item."""
    versions: dict[ItemName, list[VersionName]] = {}
    for name in by_name if events else ():
        versions.setdefault(name.item, []).append(name)
    issues: list[Issue] = []
    for event in events:
        meant = versions.get(event.name.item, []) if event.op == "visibility" else [event.name]
        if event.op == "publish" or not meant or any(name not in by_name for name in meant):
            raise NotFound(
                f"{event.name} is not there, so it cannot get a status ({event.op}).",
                suggestion="Write the version first.",
            )
        for name in meant:
            by_name[name] = entry = replace(by_name[name], status=add_status(by_name[name].status, event))
            issues += (replace(issue, place=f"{name} {issue.place}") for issue in bad_status_notes(entry.status))
    if issues:
        raise ArtifactRefused(what, islice(issues, MAX_ISSUES))


_LAYOUT_FILE = "oci-layout"
_INDEX = "index.json"
_BLOBS = ("blobs", "sha256")
_VERSION = "1.0.0"
_MAX_LAYOUT_FILE = 4_096

LayoutStamp = tuple[int, int, int, int]


class Layout:
    """A folder in OCI image layout. One that is not there yet, or is empty, holds nothing and can be written to.

    The index is replaced last, so that a version is in the folder whole or not at all. Files that are not in the
    index stay as they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: tuple[LayoutStamp, LayoutIndex] | None = None

    @property
    def is_there(self) -> bool:
        """Whether the folder is a layout; one that holds other things is refused."""
        try:
            names = {path.name for path in self.folder.iterdir()}
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            raise _not_a_layout(self.folder, "it is a file") from None
        except OSError as error:
            raise unusable(self.folder, error) from error
        if _LAYOUT_FILE not in names and names - {NEW}:
            raise _not_a_layout(self.folder, "it holds other things")
        return _LAYOUT_FILE in names

    def events(self) -> tuple[RegistryEvent, ...]:
        """Return the events of all versions, executors first, then of status changes. This reads only the index."""
        return tuple(self._index().events())

    def read(self, names: Sequence[VersionName]) -> tuple[CheckedRelease, ...]:
        """Return versions with all their files, every byte of which is checked; any fault refuses them all."""
        entries = self._index().entries
        if absent := [str(name) for name in names if name not in entries]:
            raise NotFound(
                f"{self.folder} does not hold {', '.join(absent[:10])}.",
                suggestion="List what it holds, and ask for that.",
                absent=list(absent),
            )
        if not names:
            return ()
        with opened(self.folder) as folder:
            return self._releases(folder, [entries[name] for name in names])

    def write(
        self, releases: Sequence[CheckedRelease], events: Sequence[RegistryEvent] = ()
    ) -> tuple[PublishResult, ...]:
        """Add checked versions, then apply status events; other content for a stored version is a conflict."""
        require_checked(releases)
        encoded = [encode(release) for release in releases]
        entries = [LayoutEntry.of(release, artifact) for release, artifact in zip(releases, encoded, strict=True)]
        before = self._index()
        grown = before.grown(entries, events)
        if grown is not before or not self.is_there:
            before, grown = self._grow(entries, {artifact.digest: artifact for artifact in encoded}, events)
        return tuple(
            PublishResult(entry.name, entry.digest, grown.closures[entry.name], entry.name not in before.entries)
            for entry in entries
        )

    def _grow(
        self, entries: Sequence[LayoutEntry], artifacts: Mapping[str, Artifact], events: Sequence[RegistryEvent]
    ) -> tuple[LayoutIndex, LayoutIndex]:
        """Write the missing artifacts as the only writer, and return the index before and after."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unusable(self.folder, error) from error
        with opened(self.folder) as folder:
            lock(folder, self.folder)
            if not self.is_there:
                put_file(folder, _LAYOUT_FILE, canonical({"imageLayoutVersion": _VERSION}), is_durable=True)
            make_below(folder, *_BLOBS)
            before = self._index()
            grown = before.grown(entries, events)
            new = [artifacts[entry.artifact] for name, entry in grown.entries.items() if name not in before.entries]
            data = index_bytes(grown.entries.values(), grown.what)
            with below(folder, *_BLOBS) as blobs:
                _put_blobs(blobs, new)
            put_file(folder, _INDEX, data, is_durable=True)
            self._known = (_stamp(folder), grown)
        return before, grown

    def _index(self) -> LayoutIndex:
        """Return the index as it is now, read again only where it was replaced."""
        if not self.is_there:
            return LayoutIndex(str(self.folder))
        with opened(self.folder) as folder:
            stamp = _stamp(folder)
            if self._known is None or self._known[0] != stamp:
                self._known = (stamp, self._read_index(folder))
            return self._known[1]

    def _read_index(self, folder: int) -> LayoutIndex:
        try:
            layout = read_json(
                read_file(folder, _LAYOUT_FILE, limit=_MAX_LAYOUT_FILE), max_bytes=_MAX_LAYOUT_FILE, max_values=100
            )
        except (LookupError, NotJson) as fault:
            raise self._refused(_LAYOUT_FILE, str(fault.args[0])) from None
        if as_object(layout).get("imageLayoutVersion") != _VERSION:
            raise self._refused(_LAYOUT_FILE, f"it is not of version {_VERSION}")
        try:
            data = read_file(folder, _INDEX, limit=MAX_INDEX)
        except LookupError as fault:
            if _stamp(folder) == _ABSENT:  # a first write was ended before its last step
                return LayoutIndex(str(self.folder))
            raise self._refused(_INDEX, str(fault.args[0])) from None
        what = f"{self.folder}/{_INDEX}"
        return _ordered(what, read_entries(data, what))

    def _releases(self, folder: int, entries: Sequence[LayoutEntry]) -> tuple[CheckedRelease, ...]:
        releases: list[CheckedRelease] = []
        issues: list[Issue] = []
        try:
            with below(folder, *_BLOBS) as blobs:

                def read(digest: str, size: int) -> bytes:
                    return read_file(blobs, digest.removeprefix("sha256:"), limit=size)

                for entry in entries:
                    try:
                        releases.append(read_release(entry, read))
                    except ArtifactRefused as fault:
                        issues += (replace(issue, place=f"{entry.name} {issue.place}") for issue in fault.issues)
        except OSError as error:
            raise self._refused("/".join(_BLOBS), f"it is no folder with files in it: {error.strerror}") from error
        if issues:
            raise ArtifactRefused(str(self.folder), islice(issues, MAX_ISSUES))
        return tuple(releases)

    def _refused(self, place: str, reason: str) -> ArtifactRefused:
        return ArtifactRefused(str(self.folder), [Issue(place, reason, _AGAIN)])


_ABSENT: LayoutStamp = (0, 0, 0, 0)


def _stamp(folder: int) -> LayoutStamp:
    """Return a value that changes whenever the index does."""
    try:
        state = os.stat(_INDEX, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return _ABSENT
    return (state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino)


def read_release(entry: LayoutEntry, read: Read) -> CheckedRelease:
    """Return the version of an entry with every byte checked. Every version from elsewhere passes this check."""
    what = str(entry.name)
    try:
        manifest = read(entry.artifact, entry.size)
    except LookupError as fault:
        raise ArtifactRefused(what, [Issue(entry.artifact, str(fault.args[0]), _AGAIN)]) from None
    if digest_of(manifest) != entry.artifact:
        raise ArtifactRefused(what, [Issue(entry.artifact, "its bytes were changed", _AGAIN)])
    release = decode(manifest, read, status=entry.status)
    if (VersionAnnotations.of(release), release.digest) != (entry.annotations, entry.digest):
        raise ArtifactRefused(what, [Issue(_INDEX, "it differs from the artifact", _AGAIN)])
    return release


def _put_blobs(folder: int, artifacts: Sequence[Artifact]) -> None:
    # Not made durable one by one: what the disk lost of them when the power went is found missing when it is read.
    blobs = {digest: data for artifact in artifacts for digest, data in artifact.blobs.items()}
    there = set(os.listdir(folder))
    for digest, data in {**blobs, **{artifact.digest: artifact.manifest for artifact in artifacts}}.items():
        name = digest.removeprefix("sha256:")
        try:
            is_whole = name in there and read_file(folder, name, limit=len(data)) == data
        except LookupError:
            is_whole = False
        if not is_whole:
            put_file(folder, name, data)


def _not_a_layout(folder: Path, reason: str) -> Conflict:
    return Conflict(
        f"{folder} is not a folder in OCI image layout: {reason}.",
        suggestion="Name a folder that Kiwi wrote, or one that is empty or not there yet.",
    )
