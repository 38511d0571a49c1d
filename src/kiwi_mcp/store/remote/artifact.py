"""A version as OCI manifest, blobs and annotations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import islice
from typing import TypeAlias, cast, get_args

from msgspec import Struct
from msgspec.structs import asdict

from kiwi_mcp.domain.errors import ArtifactRefused
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, NotJson, as_list, as_object, as_text, canonical, read_json
from kiwi_mcp.domain.registry import (
    Op,
    Pin,
    RegistryEvent,
    Release,
    ReleaseFile,
    StatusNote,
    VersionInfo,
    VersionName,
    Visibility,
    is_digest,
    pins_from_json,
    pins_to_json,
)
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
_VERSION = "org.opencontainers.image.version"
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
        name = VersionName(*(annotations.get(key, "") for key in (_NAMESPACE, _TOOL_ID, _VERSION)))
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
            _VERSION: self.name.version,
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


def status_notes_of(release: Release) -> StatusNotes:
    """Return the status notes of a release."""
    hidden = StatusNote("", release.visibility) if release.visibility != "public" else None
    status: Mapping[Op, StatusNote | None] = {
        "yank": release.yanked,
        "deprecate": release.deprecated,
        "visibility": hidden,
    }
    return {op: note for op, note in status.items() if note is not None}


def visibility_in(status: StatusNotes) -> Visibility:
    """Return the last visibility; it is checked where status notes are read."""
    return cast("Visibility", status["visibility"].reason) if "visibility" in status else "public"


def add_status(status: StatusNotes, event: RegistryEvent) -> StatusNotes:
    """Return the status notes after one more event; it replaces the opposite note."""
    others = {op: note for op, note in status.items() if op != _OPPOSITE.get(event.op)}
    return {**others, event.op: StatusNote(event.at, event.reason)}


def read_status(annotations: Mapping[str, str]) -> StatusNotes:
    """Return the status notes among annotations."""
    return {
        op: StatusNote(annotations[f"vnd.kiwi.{op}.at"], annotations.get(f"vnd.kiwi.{op}.reason", ""))
        for op in _STATUS_OPS
        if f"vnd.kiwi.{op}.at" in annotations
    }


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

_MAX_VALUES = 1_000_000
_AGAIN = "Take it from its registry again."


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
            yield Issue(place, f"its type is {self.media_type[:MAX_WORD]!r}, not {media_type}", _AGAIN)
        if not is_digest(self.digest):
            yield Issue(place, f"{self.digest[:MAX_WORD]!r} is not a digest", _AGAIN)
        if not 0 <= self.size <= limit:
            yield Issue(place, f"its size is not between 0 and {limit:,} bytes", _AGAIN)


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
        path, is_executable = layer.annotations.get(TITLE, ""), layer.annotations.get(EXECUTABLE) == "true"
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
        return as_object(read_json(manifest, max_bytes=MAX_MANIFEST, max_values=_MAX_VALUES))
    except NotJson as fault:
        raise ArtifactRefused("An artifact", [Issue("manifest", str(fault), _AGAIN)]) from None


def _blob(wanted: Descriptor, place: str, read: Read, issues: list[Issue]) -> bytes:
    """Return the blob of a descriptor; if it is another one, return nothing and add the issue."""
    try:
        data = read(wanted.digest, wanted.size)
    except LookupError as fault:
        issues.append(Issue(place, f"the blob {wanted.digest} cannot be read: {fault.args[0]}", _AGAIN))
        return b""
    if len(data) != wanted.size:
        issues.append(Issue(place, f"the blob {wanted.digest} does not have its stated size", _AGAIN))
    elif digest_of(data) != wanted.digest:
        issues.append(Issue(place, f"the blob {wanted.digest} has another hash: its bytes were changed", _AGAIN))
    return data


def _named(annotations: Mapping[str, str]) -> str:
    return str(VersionAnnotations.read(annotations).name)[:MAX_WORD] if annotations else "An artifact"


def _refuse(what: str, issues: Iterator[Issue] | list[Issue]) -> None:
    if found := tuple(islice(issues, MAX_ISSUES)):
        raise ArtifactRefused(what, found)
