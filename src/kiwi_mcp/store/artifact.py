"""Artifacts: one version as an OCI image manifest with a blob for each file, and back with everything checked."""

from __future__ import annotations

from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice

from kiwi_mcp.domain.errors import ArtifactRefused
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.registry import Release, ReleaseFile, is_digest
from kiwi_mcp.store.json_bytes import NotJson, canonical, read_json
from kiwi_mcp.store.order import MAX_ISSUES
from kiwi_mcp.store.soundness import MAX_BYTES, MAX_FILES, MAX_STATEMENT, MAX_WORD, unsafe_files, unsound
from kiwi_mcp.store.words import (
    CHANGELOG,
    EXECUTABLE,
    IS_BUILTIN,
    IS_OFFICIAL,
    PLACE,
    TITLE,
    Facts,
    Marks,
    bad_marks,
    marks_from_json,
    marks_to_json,
    read_words,
    with_marks,
)

ARTIFACT_TYPE = "application/vnd.kiwi.item.v1"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
STATEMENT_TYPE = "application/vnd.kiwi.statement.v1+json"
FILE_TYPE = "application/vnd.kiwi.file.v1"
MAX_MANIFEST = 4_000_000

_MAX_VALUES = 1_000_000
_AGAIN = "Take it from its registry again."


@dataclass(frozen=True, slots=True)
class Artifact:
    """The bytes of a version's manifest, and its blobs by digest."""

    manifest: bytes
    blobs: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """The digest of the manifest, which names the artifact."""
        return digest_of(self.manifest)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a document says of a blob: its type, digest, size and annotations."""

    media_type: str
    digest: str
    size: int
    words: Mapping[str, str]

    @classmethod
    def read(cls, value: Json) -> Descriptor:
        """Return the descriptor in a JSON value; what is missing is empty or negative, which the check finds."""
        row = as_object(value)
        size = row.get("size")
        return cls(
            as_text(row.get("mediaType")),
            as_text(row.get("digest")),
            size if isinstance(size, int) and not isinstance(size, bool) else -1,
            read_words(row.get("annotations")),
        )

    def issues(self, place: str, media_type: str, limit: int) -> Iterator[Issue]:
        """Yield what is wrong with it, for a blob of that type and no more than that many bytes."""
        if self.media_type != media_type:
            yield Issue(place, f"its type is {self.media_type[:MAX_WORD]!r}, not {media_type}", _AGAIN)
        if not is_digest(self.digest):
            yield Issue(place, f"{self.digest[:MAX_WORD]!r} is not a digest", _AGAIN)
        if not 0 <= self.size <= limit:
            yield Issue(place, f"its size is not between 0 and {limit:,} bytes", _AGAIN)


Read = Callable[[str, int], bytes]
"""Gives the blob of a digest, at most one byte more than the size; LookupError says that, and why, it is not there."""


def digest_of(data: bytes) -> str:
    """Return the digest of some bytes."""
    return f"sha256:{sha256(data).hexdigest()}"


def encode(release: Release) -> Artifact:
    """Return a version as an artifact: the same bytes for the same version, wherever it is done.

    What may be said of it later (marks, its visibility) is not part of it, so that a yank leaves it as it is.
    """
    blobs = {digest_of(release.statement): release.statement}
    layers: list[Json] = []
    for file in sorted(release.files, key=lambda file: file.path):
        words = {TITLE: file.path} | ({EXECUTABLE: "true"} if file.is_executable else {})
        layers.append({**_descriptor(FILE_TYPE, file.data), "annotations": words})
        blobs[digest_of(file.data)] = file.data
    manifest: JsonObject = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": _descriptor(STATEMENT_TYPE, release.statement),
        "layers": layers,
        "annotations": _words(release),
    }
    return Artifact(canonical(manifest), blobs)


def decode(manifest: bytes, read: Read, *, marks: Marks | None = None) -> Release:
    """Return the version in an artifact, its manifest's text unread; a single fault refuses it, and all are listed."""
    document = _document(manifest)
    config = Descriptor.read(document.get("config"))
    layers = [Descriptor.read(row) for row in as_list(document.get("layers"))[: MAX_FILES + 1]]
    words, marks = read_words(document.get("annotations")), marks or {}
    what = _named(words)
    _refuse(what, [*_misfits(document), *_bad_descriptors(config, layers), *bad_marks(marks)])
    issues: list[Issue] = []
    statement = _blob(config, "config", read, issues)
    files = tuple(_file(layer, read, issues) for layer in layers)
    _refuse(what, issues)
    release = with_marks(_release(words, statement, files), marks)
    _refuse(what, unsound(release))
    return release


def bundle(artifact: Artifact, marks: Marks) -> JsonObject:
    """Return an artifact and its marks as one JSON object."""
    return {
        "manifest": artifact.manifest.decode(),
        "blobs": {digest: b64encode(data).decode() for digest, data in sorted(artifact.blobs.items())},
        "marks": marks_to_json(marks),
    }


def unbundle(value: JsonObject) -> Release:
    """Return the version in a bundle, with the checks of every artifact and none of its blobs left over."""
    manifest = as_text(value.get("manifest")).encode(errors="surrogatepass")
    blobs, used = as_object(value.get("blobs")), set[str]()

    def read(digest: str, size: int) -> bytes:
        text = as_text(blobs.get(digest))
        if digest not in blobs or len(text) > 4 * (size // 3 + 2):
            raise LookupError("it is missing" if digest not in blobs else "it is larger than its size")
        used.add(digest)
        try:
            return b64decode(text, validate=True)
        except (NotBase64, ValueError):
            raise LookupError("it is not base64") from None

    release = decode(manifest, read, marks=marks_from_json(value.get("marks")))
    extra = sorted(blobs.keys() - used)
    _refuse(
        str(release.name), [Issue("blobs", f"{key[:MAX_WORD]!r} belongs to nothing in it", _AGAIN) for key in extra]
    )
    return release


def _descriptor(media_type: str, data: bytes) -> JsonObject:
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


def _words(release: Release) -> JsonObject:
    words = {
        PLACE: release.place,
        CHANGELOG: release.changelog,
        IS_OFFICIAL: "true" if release.is_official else "",
        IS_BUILTIN: "true" if release.is_builtin else "",
    }
    return {**Facts.of(release).to_words(), **{key: text for key, text in words.items() if text}}


def _release(words: Mapping[str, str], statement: bytes, files: tuple[ReleaseFile, ...]) -> Release:
    facts = Facts.read(words)
    return Release(
        name=facts.name,
        place=words.get(PLACE, ""),
        statement=statement,
        manifest={},
        files=files,
        executor=facts.executor,
        changelog=words.get(CHANGELOG, ""),
        published_by=facts.published_by,
        created_at=facts.created_at,
        is_official=words.get(IS_OFFICIAL) == "true",
        is_builtin=words.get(IS_BUILTIN) == "true",
    )


def _document(manifest: bytes) -> JsonObject:
    try:
        return as_object(read_json(manifest, max_bytes=MAX_MANIFEST, max_values=_MAX_VALUES))
    except NotJson as fault:
        raise ArtifactRefused("An artifact", [Issue("manifest", str(fault), _AGAIN)]) from None


def _misfits(document: JsonObject) -> Iterator[Issue]:
    """Yield where a document is not an image manifest of ours."""
    expected = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "artifactType": ARTIFACT_TYPE}
    for word, value in expected.items():
        if (found := document.get(word)) != value:
            yield Issue(word, f"it is {str(found)[:MAX_WORD]!r}, not {value!r}", "Name an artifact that Kiwi wrote.")


def _bad_descriptors(config: Descriptor, layers: list[Descriptor]) -> Iterator[Issue]:
    yield from config.issues("config", STATEMENT_TYPE, MAX_STATEMENT)
    for index, layer in enumerate(layers[:MAX_FILES]):
        yield from layer.issues(f"layers[{index}]", FILE_TYPE, MAX_BYTES)
    yield from unsafe_files([(layer.words.get(TITLE, ""), layer.size) for layer in layers])


def _file(layer: Descriptor, read: Read, issues: list[Issue]) -> ReleaseFile:
    path = layer.words.get(TITLE, "")
    data = _blob(layer, path, read, issues)
    return ReleaseFile(path, data, layer.words.get(EXECUTABLE) == "true")


def _blob(wanted: Descriptor, place: str, read: Read, issues: list[Issue]) -> bytes:
    """Return a blob that is what its descriptor says, or nothing and note why."""
    try:
        data = read(wanted.digest, wanted.size)
    except LookupError as fault:
        issues.append(Issue(place, f"the blob {wanted.digest} cannot be read: {fault.args[0]}", _AGAIN))
        return b""
    if len(data) != wanted.size:
        issues.append(Issue(place, f"the blob {wanted.digest} does not have the size that was said", _AGAIN))
    elif digest_of(data) != wanted.digest:
        issues.append(Issue(place, f"the blob {wanted.digest} has another hash: its bytes were changed", _AGAIN))
    return data


def _named(words: Mapping[str, str]) -> str:
    return str(Facts.read(words).name)[:MAX_WORD] if words else "An artifact"


def _refuse(what: str, issues: Iterator[Issue] | list[Issue]) -> None:
    if found := tuple(islice(issues, MAX_ISSUES)):
        raise ArtifactRefused(what, found)
