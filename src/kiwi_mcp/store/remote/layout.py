"""A version as an OCI artifact, and a folder in OCI image layout: its index, its blobs, and how both are written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TypeAlias, cast, get_args

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from kiwi_mcp.domain.errors import ArtifactRefused, Conflict, NotFound, TooLarge, VersionConflict
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import (
    Json,
    JsonObject,
    NotJson,
    as_list,
    as_object,
    as_text,
    canonical,
    most_values,
    read_json,
)
from kiwi_mcp.domain.registry import (
    ItemName,
    Op,
    Pin,
    PublishResult,
    RegistryEvent,
    Release,
    ReleaseFile,
    StatusNote,
    VersionInfo,
    VersionName,
    Visibility,
    is_digest,
    is_same_content,
    pins_from_json,
    pins_to_json,
)
from kiwi_mcp.store.folder import NEW, below, lock, make_below, opened, put_file, read_file, unusable
from kiwi_mcp.store.registry.release_check import (
    MAX_BYTES,
    MAX_FILES,
    MAX_ISSUES,
    MAX_STATEMENT,
    MAX_WORD,
    CheckedRelease,
    bad_name,
    bad_pins,
    bad_status_note,
    bad_text,
    bad_time,
    bad_visibility,
    closures,
    order,
    require_checked,
    unsafe_files,
)

StatusNotes: TypeAlias = Mapping[Op, StatusNote]
"""The latest status note of a version after it was sealed, by operation. The reason of a visibility note is its value.

A visibility note has no time if the version was published with that visibility.
"""

CHANGELOG = "vnd.kiwi.changelog"
CLOSURE = "vnd.kiwi.closure"
DIGEST = "vnd.kiwi.digest"
EXECUTABLE = "vnd.kiwi.executable"
IS_BUILTIN = "vnd.kiwi.is_builtin"
IS_OFFICIAL = "vnd.kiwi.is_official"
PLACE = "vnd.kiwi.place"
REF_NAME = "org.opencontainers.image.ref.name"
TITLE = "org.opencontainers.image.title"

_NAMESPACE = "vnd.kiwi.namespace"
_TOOL_ID = "vnd.kiwi.tool_id"
_VERSION_NAME = "org.opencontainers.image.version"
_CREATED = "org.opencontainers.image.created"
_PUBLISHED_BY = "vnd.kiwi.published_by"
_EXECUTOR = "vnd.kiwi.executor"
_REFERENCES = "vnd.kiwi.references"
_PIN_PARTS = ("namespace", "tool_id", "version", "digest")
_STATUS_OPS: tuple[Op, ...] = tuple(op for op in get_args(Op) if op != "publish")
_OPPOSITE: Mapping[Op, Op] = {
    "yank": "unyank",
    "unyank": "yank",
    "deprecate": "undeprecate",
    "undeprecate": "deprecate",
}


class VersionAnnotations(Struct, frozen=True):
    """The annotations of a version that an artifact and the index both have. They must be equal."""

    name: VersionName
    executor: Pin | None
    published_by: str
    created_at: str
    references: tuple[Pin, ...] = ()

    @classmethod
    def of(cls, release: Release | VersionInfo) -> VersionAnnotations:
        """Return the annotations of a version."""
        return cls(release.name, release.executor, release.published_by, release.created_at, release.references)

    @classmethod
    def read(cls, annotations: Mapping[str, str]) -> VersionAnnotations:
        """Return what annotations say about a version. A missing one is empty, which the check finds."""
        name = VersionName(*(annotations.get(key, "") for key in (_NAMESPACE, _TOOL_ID, _VERSION_NAME)))
        pin = None
        if any(key.startswith(_EXECUTOR) for key in annotations):
            *below, digest = (annotations.get(f"{_EXECUTOR}.{part}", "") for part in _PIN_PARTS)
            pin = Pin(annotations.get(_EXECUTOR, ""), VersionName(*below), digest)
        named = pins_from_json(annotations[_REFERENCES]) if _REFERENCES in annotations else ()
        return cls(name, pin, annotations.get(_PUBLISHED_BY, ""), annotations.get(_CREATED, ""), named)

    def to_annotations(self) -> Mapping[str, str]:
        """Return the annotations, without empty ones."""
        annotations = {
            _NAMESPACE: self.name.namespace,
            _TOOL_ID: self.name.tool_id,
            _VERSION_NAME: self.name.version,
            _PUBLISHED_BY: self.published_by,
            _CREATED: self.created_at,
            _REFERENCES: pins_to_json(self.references) if self.references else "",
        }
        if (pin := self.executor) is not None:
            parts = zip(_PIN_PARTS, (*pin.name.item, pin.name.version, pin.digest), strict=True)
            annotations |= {_EXECUTOR: pin.ref} | {f"{_EXECUTOR}.{part}": text for part, text in parts}
        return {key: text for key, text in annotations.items() if text}

    def issues(self) -> Iterator[Issue]:
        """Yield the faults of the annotations."""
        yield from bad_name(self.name, "")
        yield from bad_pins(self.name.namespace, self.executor, self.references)
        yield from bad_text(self.published_by, "published_by", limit=MAX_WORD)
        yield from bad_time(self.created_at, "created_at")


def read_annotations(annotations: Json) -> Mapping[str, str]:
    """Return annotations; values that are not text are left out."""
    return {key: text for key, text in as_object(annotations).items() if isinstance(text, str)}


def visibility_in(status: StatusNotes) -> Visibility:
    """Return the last visibility; it is checked where status notes are read."""
    return cast("Visibility", status["visibility"].reason) if "visibility" in status else "public"


def add_status(status: StatusNotes, event: RegistryEvent) -> StatusNotes:
    """Return the status notes after one more event; it replaces the opposite note."""
    others = {op: note for op, note in status.items() if op != _OPPOSITE.get(event.op)}
    return {**others, event.op: StatusNote(event.at, event.reason)}


def bad_status_notes(status: StatusNotes) -> Iterator[Issue]:
    """Yield the faults of status notes."""
    for op, note in status.items():
        if op != "visibility" or note.at:
            yield from bad_status_note(note, op)
        if _OPPOSITE.get(op) in status:
            yield Issue(op, f"it is set together with {_OPPOSITE[op]}", "Take it from its registry again.")
    yield from bad_visibility(visibility_in(status))


ARTIFACT_TYPE = "application/vnd.kiwi.item.v1"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
STATEMENT_TYPE = "application/vnd.kiwi.statement.v1+json"
FILE_TYPE = "application/vnd.kiwi.file.v1"
MAX_MANIFEST = 4_000_000

_MAX_MANIFEST_VALUES = 1_000_000
_TAKE_AGAIN = "Take it from its registry again."


class Artifact(Struct, frozen=True):
    """The bytes of a version's manifest, and its blobs by digest."""

    manifest: bytes
    blobs: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """The digest of the manifest, which names the artifact."""
        return digest_of(self.manifest)


class Descriptor(Struct, frozen=True):
    """A blob as a document describes it: type, digest, size and annotations."""

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str]

    @classmethod
    def read(cls, value: Json) -> Descriptor:
        """Return the descriptor in a JSON value. A missing field is empty or negative, which the check finds."""
        row = as_object(value)
        size = row.get("size")
        return cls(
            as_text(row.get("mediaType")),
            as_text(row.get("digest")),
            size if isinstance(size, int) and not isinstance(size, bool) else -1,
            read_annotations(row.get("annotations")),
        )

    def issues(self, place: str, media_type: str, limit: int) -> Iterator[Issue]:
        """Yield its faults, for a blob of this media type and at most `limit` bytes."""
        if self.media_type != media_type:
            yield Issue(place, f"its type is {self.media_type[:MAX_WORD]!r}, not {media_type}", _TAKE_AGAIN)
        if not is_digest(self.digest):
            yield Issue(place, f"{self.digest[:MAX_WORD]!r} is not a digest", _TAKE_AGAIN)
        if not 0 <= self.size <= limit:
            yield Issue(place, f"its size is not between 0 and {limit:,} bytes", _TAKE_AGAIN)


Read = Callable[[str, int], bytes]
"""Returns the blob of a digest, at most one byte more than the size; a LookupError says why there is none."""


def digest_of(data: bytes) -> str:
    """Return the digest of some bytes."""
    return f"sha256:{sha256(data).hexdigest()}"


class BlobFile(Struct, frozen=True):
    """A file of a version as its manifest lists it: without its bytes."""

    path: str
    digest: str
    size: int
    is_executable: bool = False


def encode(release: Release) -> Artifact:
    """Return a version as an artifact: always the same bytes, since status and visibility are no part of it."""
    blobs = {release.digest: release.statement, **{f"sha256:{file.sha256}": file.data for file in release.files}}
    files = [BlobFile(one.path, f"sha256:{one.sha256}", len(one.data), one.is_executable) for one in release.files]
    return Artifact(encode_manifest(release, len(release.statement), files), blobs)


def encode_manifest(version: Release | VersionInfo, statement_size: int, files: Iterable[BlobFile]) -> bytes:
    """Return the manifest of a version's artifact, for which the bytes of its files are not needed."""
    about = {
        PLACE: version.place,
        CHANGELOG: version.changelog,
        IS_OFFICIAL: "true" if version.is_official else "",
        IS_BUILTIN: "true" if version.is_builtin else "",
    }
    annotations = {**VersionAnnotations.of(version).to_annotations(), **{key: one for key, one in about.items() if one}}
    layers: list[Json] = [
        {
            **_descriptor(FILE_TYPE, file.digest, file.size),
            "annotations": {TITLE: file.path} | ({EXECUTABLE: "true"} if file.is_executable else {}),
        }
        for file in sorted(files, key=lambda file: file.path)
    ]
    return canonical(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": _descriptor(STATEMENT_TYPE, version.digest, statement_size),
            "layers": layers,
            "annotations": annotations,
        }
    )


def decode(manifest: bytes, read: Read, *, status: StatusNotes | None = None) -> CheckedRelease:
    """Return the version in an artifact, its manifest's text unread; a single fault refuses it, and all are listed."""
    config, *layers = read_descriptors(manifest)
    annotations, status = read_annotations(_document(manifest).get("annotations")), status or {}
    _refuse(_named(annotations), bad_status_notes(status))
    issues: list[Issue] = []
    statement = _blob(config, "config", read, issues)
    files: list[ReleaseFile] = []
    for layer in layers:
        path = layer.annotations.get(TITLE, "")
        is_executable = layer.annotations.get(EXECUTABLE) == "true"
        files.append(ReleaseFile(path, _blob(layer, path, read, issues), is_executable))
    _refuse(_named(annotations), issues)
    return CheckedRelease(
        **asdict(VersionAnnotations.read(annotations)),
        place=annotations.get(PLACE, ""),
        statement=statement,
        manifest={},
        files=tuple(files),
        changelog=annotations.get(CHANGELOG, ""),
        visibility=visibility_in(status),
        yanked=status.get("yank"),
        deprecated=status.get("deprecate"),
        is_official=annotations.get(IS_OFFICIAL) == "true",
        is_builtin=annotations.get(IS_BUILTIN) == "true",
    )


def read_descriptors(manifest: bytes) -> list[Descriptor]:
    """Return the descriptors of the blobs that a manifest lists, the statement first; any fault refuses them all."""
    document = _document(manifest)
    config = Descriptor.read(document.get("config"))
    layers = [Descriptor.read(row) for row in as_list(document.get("layers"))[: MAX_FILES + 1]]
    issues: list[Issue] = []
    expected = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "artifactType": ARTIFACT_TYPE}
    for key, value in expected.items():
        if (found := document.get(key)) != value:
            reason = f"it is {str(found)[:MAX_WORD]!r}, not {value!r}"
            issues.append(Issue(key, reason, "Name an artifact that Kiwi wrote."))
    issues += config.issues("config", STATEMENT_TYPE, MAX_STATEMENT)
    for index, layer in enumerate(layers[:MAX_FILES]):
        issues += layer.issues(f"layers[{index}]", FILE_TYPE, MAX_BYTES)
    issues += unsafe_files([(layer.annotations.get(TITLE, ""), layer.size) for layer in layers])
    _refuse(_named(read_annotations(document.get("annotations"))), issues)
    return [config, *layers]


def _descriptor(media_type: str, digest: str, size: int) -> JsonObject:
    return {"mediaType": media_type, "digest": digest, "size": size}


def _document(manifest: bytes) -> JsonObject:
    try:
        return as_object(read_json(manifest, max_bytes=MAX_MANIFEST, max_values=_MAX_MANIFEST_VALUES))
    except NotJson as fault:
        raise ArtifactRefused("An artifact", [Issue("manifest", str(fault), _TAKE_AGAIN)]) from None


def _blob(wanted: Descriptor, place: str, read: Read, issues: list[Issue]) -> bytes:
    """Return the blob of a descriptor; if it is another one, return nothing and add the issue."""
    try:
        data = read(wanted.digest, wanted.size)
    except LookupError as fault:
        issues.append(Issue(place, f"the blob {wanted.digest} cannot be read: {fault.args[0]}", _TAKE_AGAIN))
        return b""
    if len(data) != wanted.size:
        issues.append(Issue(place, f"the blob {wanted.digest} does not have its stated size", _TAKE_AGAIN))
    elif digest_of(data) != wanted.digest:
        issues.append(Issue(place, f"the blob {wanted.digest} has another hash: its bytes were changed", _TAKE_AGAIN))
    return data


def _named(annotations: Mapping[str, str]) -> str:
    return str(VersionAnnotations.read(annotations).name)[:MAX_WORD] if annotations else "An artifact"


def _refuse(what: str, issues: Iterator[Issue] | list[Issue]) -> None:
    if found := tuple(islice(issues, MAX_ISSUES)):
        raise ArtifactRefused(what, found)


INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MAX_INDEX = 128_000_000
_MAX_VALUES = 4_000_000
_AGAIN = "Write the folder again from the registry it came from."


class LayoutEntry(Struct, frozen=True):
    """One version in an index: where its artifact is, its digest, and its status notes."""

    annotations: VersionAnnotations
    digest: str
    artifact: str  # the digest of the artifact's manifest
    size: int
    status: StatusNotes = field(default_factory=dict)
    closure: str = ""  # the closure that a server states; a folder holds every executor, so it states none

    @classmethod
    def of(cls, release: Release, artifact: Artifact) -> LayoutEntry:
        """Return the entry of a release."""
        hidden = StatusNote("", release.visibility) if release.visibility != "public" else None
        notes: Mapping[Op, StatusNote | None] = {
            "yank": release.yanked,
            "deprecate": release.deprecated,
            "visibility": hidden,
        }
        status = {op: note for op, note in notes.items() if note is not None}
        return cls(VersionAnnotations.of(release), release.digest, artifact.digest, len(artifact.manifest), status)

    @classmethod
    def read(cls, value: Json, place: str, issues: list[Issue]) -> LayoutEntry:
        """Return the entry in a descriptor, and add its faults to `issues`."""
        found = Descriptor.read(value)
        texts = found.annotations
        entry = cls(
            VersionAnnotations.read(texts),
            texts.get(DIGEST, ""),
            found.digest,
            found.size,
            {
                op: StatusNote(texts[f"vnd.kiwi.{op}.at"], texts.get(f"vnd.kiwi.{op}.reason", ""))
                for op in _STATUS_OPS
                if f"vnd.kiwi.{op}.at" in texts
            },
            texts.get(CLOSURE, ""),
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

    what: str  # what a refusal calls it
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
        names, reason = set[str](), ""
        try:
            names = {path.name for path in self.folder.iterdir()}
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            reason = "it is a file"
        except OSError as error:
            raise unusable(self.folder, error) from error
        if _LAYOUT_FILE not in names and names - {NEW}:
            reason = "it holds other things"
        if reason:
            raise Conflict(
                f"{self.folder} is not a folder in OCI image layout: {reason}.",
                suggestion="Name a folder that Kiwi wrote, or one that is empty or not there yet.",
            )
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
            artifacts = {artifact.digest: artifact for artifact in encoded}
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise unusable(self.folder, error) from error
            with opened(self.folder) as folder:
                lock(folder, self.folder)  # as the only writer; the index may have changed since
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
        return tuple(
            PublishResult(entry.name, entry.digest, grown.closures[entry.name], entry.name not in before.entries)
            for entry in entries
        )

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
