"""Files of a version as rows, and back with every byte checked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import cast

from msgspec import Struct

from kiwi_mcp.domain.errors import ArtifactRefused
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.registry import Release, ReleaseFile, VersionInfo, is_digest
from kiwi_mcp.store.database import Database, Row, Transaction, Value
from kiwi_mcp.store.registry.release_check import CheckedRelease
from kiwi_mcp.store.registry.rows import chunks, filled, new_id, placeholders

FILE_COLUMNS = (
    "id", "tool_version_id", "path", "media_type", "sha256", "size_bytes", "mode", "is_entrypoint", "content_text",
    "storage_key", "created_at",
)  # fmt: skip
INLINE = 65_536
"""Files of at least this many bytes are stored outside their row."""

EXECUTABLE, _PLAIN = 0o755, 0o644
_TEXTUAL = (".yaml", ".yml", ".json")
_FALLBACK = "application/octet-stream"
_MEDIA = {
    "py": "text/x-python", "sh": "application/x-sh", "md": "text/markdown", "txt": "text/plain",
    "json": "application/json", "yaml": "application/yaml", "yml": "application/yaml", "toml": "application/toml",
    "js": "text/javascript", "mjs": "text/javascript", "ts": "text/x-typescript", "html": "text/html",
    "xml": "application/xml", "sql": "application/sql", "csv": "text/csv",
}  # fmt: skip
_FILES = "select tool_version_id, path, sha256, mode, content_text, storage_key from tool_version_files where $where"
_STATED = """select id, manifest_canon, manifest_yaml, manifest_sha256 from tool_versions where id in ($marks)"""
_SIGNATURE = lazy_pattern(
    rb"(?:#|//|--|;|%|!|\(\*|/\*|<!--|rem) (?:kiwi-mcp|rye):(?:validated|signed):[\w:.|@{}=+ -]{1,480}(?:-->|\*/|\*\))?"
)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict)
_LINES = 3
"""How many lines are searched for the signature line: a shebang and an opening tag may precede it."""


class Contents(Struct, frozen=True):
    """The stored content of one version, and its faults."""

    release: Release
    """Checked, where there is no issue."""
    digest: str
    """What its digest was when it was sealed."""
    issues: tuple[Issue, ...]


def manifest_text(release: Release) -> str | None:
    """Return the text of a manifest that is a file of its own; None if it is part of another file."""
    if not release.manifest_path.endswith(_TEXTUAL):
        return None
    return next(file.data for file in release.files if file.path == release.manifest_path).decode()


def file_rows(release: Release, version: str, at: str, blobs: dict[str, bytes]) -> Iterator[tuple[Value, ...]]:
    """Yield a row for each file of a version. Content that does not fit into a row is added to the blobs."""
    entrypoint = as_object(release.manifest.get("config")).get("entrypoint", release.manifest_path)
    apart = release.manifest_path if release.manifest_path.endswith(_TEXTUAL) else ""
    for file in release.files:
        if file.path == apart:
            continue
        digest, text = file.sha256, _as_text(file.data)
        if text is None:
            blobs[digest] = file.data
        yield (
            new_id(), version, file.path, media_type(file.path), digest, len(file.data),
            EXECUTABLE if file.is_executable else _PLAIN, file.path == entrypoint, text,
            None if text is not None else f"sha256:{digest}", at,
        )  # fmt: skip


def media_type(path: str) -> str:
    """Return the media type of a path."""
    return _MEDIA.get(path.rpartition(".")[2].lower(), _FALLBACK)


def store_blobs(transaction: Transaction, blobs: Mapping[str, bytes], at: str) -> None:
    """Keep the blobs that are not there yet."""
    here: set[str] = set()
    for some in chunks(blobs):
        statement = filled("select sha256 from blobs where sha256 in ($marks)", marks=placeholders(some))
        here.update(str(name) for (name,) in transaction.read(statement, some))
    new = ((name, len(data), data, at) for name, data in blobs.items() if name not in here)
    transaction.insert("blobs", ("sha256", "size_bytes", "content", "created_at"), new)


def read_contents(database: Database, versions: Sequence[VersionInfo]) -> Iterator[Contents]:
    """Yield versions with all of their bytes, in the order of `versions`."""
    for some in chunks(versions, 100):
        ids = [version.id for version in some]
        stated = {row[0]: row for row in database.read(filled(_STATED, marks=placeholders(ids)), ids)}
        files: dict[Value, list[Row]] = {}
        where = filled(_FILES, where=f"tool_version_id in ({placeholders(ids)}) order by path")
        for row in database.read(where, ids):
            files.setdefault(row[0], []).append(row)
        for version in some:
            yield _contents(database, version, stated[version.id], files.get(version.id, []))


def _bodies(data: bytes) -> Iterator[bytes]:
    """Yield a file as it is, and without each possible signature line, which does not count in a digest."""
    yield data
    lines = data.split(b"\n", _LINES)
    for at, line in enumerate(lines[:-1]):
        if _SIGNATURE.fullmatch(line):
            yield b"\n".join([*lines[:at], *lines[at + 1 :]])


def _as_text(data: bytes) -> str | None:
    if len(data) >= INLINE or b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _contents(database: Database, version: VersionInfo, stated: Row, rows: Iterable[Row]) -> Contents:
    _, statement, text, text_hash = cast("tuple[str, str, str | None, str | None]", stated)
    files, faults = _files(database, rows)
    name = version.place.rpartition("/")[2]
    if text is not None:
        files.append(ReleaseFile(name, text.encode()))
        if files[-1].sha256 != text_hash:
            faults.append(f"{name} is not what was published")
    release = Release(
        name=version.name,
        place=version.place,
        statement=statement.encode(),
        manifest=_manifest(version, faults),
        files=tuple(sorted(files, key=lambda file: file.path)),
        executor=version.executor,
        changelog=version.changelog,
        visibility=version.visibility,
        published_by=version.published_by,
        created_at=version.created_at,
        yanked=version.yanked,
        deprecated=version.deprecated,
        is_official=version.is_official,
        is_builtin=version.is_builtin,
    )
    faults += _faults(release, version)
    try:
        release = CheckedRelease.of(release)
    except ArtifactRefused as refused:
        faults += (f"{issue.place}: {issue.reason}" for issue in refused.issues)
    return Contents(release, version.digest, tuple(_issues(version, faults)))


def _manifest(version: VersionInfo, faults: list[str]) -> JsonObject:
    try:
        return version.manifest
    except ValueError:
        faults.append("its manifest is not JSON")
        return {}


def _files(database: Database, rows: Iterable[Row]) -> tuple[list[ReleaseFile], list[str]]:
    files, faults = [], []
    for row in rows:
        _, path, digest, mode, text, key = cast("tuple[str, str, str, int, str | None, str]", row)
        data = text.encode() if text is not None else read_blob(database, key)
        file = ReleaseFile(path, data, mode == EXECUTABLE)
        if file.sha256 != digest:
            faults.append(f"{path} is not what was published")
        files.append(file)
    return files, faults


def read_blob(database: Database, key: str) -> bytes:
    """Return the content of a file that is stored outside its row."""
    # A key is looked up, never opened as a path; one that is no digest names nothing.
    if not is_digest(key):
        return b""
    found = database.read("select content from blobs where sha256 = ?", (key.removeprefix("sha256:"),))
    return as_bytes(found[0][0]) if found else b""


def as_bytes(value: Value) -> bytes:
    """Return the content of a blob as bytes. SQLite may return text if the value was written as text."""
    return value if isinstance(value, bytes) else str(value).encode()


def _faults(release: Release, version: VersionInfo) -> Iterator[str]:
    if release.digest != version.digest:
        yield f"its statement has the digest {release.digest}, not {version.digest}"
    if not is_stated(release):
        yield f"{release.manifest_path} is not the file that was stated"


def is_stated(release: Release) -> bool:
    """Whether the file with the manifest is the one in the statement."""
    data = next((file.data for file in release.files if file.path == release.manifest_path), b"")
    # A canonical statement has these bytes at most once: within a text, the quotes would be escaped.
    hashes = (sha256(body).hexdigest() for body in _bodies(data.replace(b"\r\n", b"\n")))
    return any(f'"manifest":"{one}"'.encode() in release.statement for one in hashes)


def _issues(version: VersionInfo, faults: Iterable[str]) -> Iterator[Issue]:
    fix = f"Do not run it: restore the store from a backup, or pull {version.name} from a remote into a new store."
    return (Issue(str(version.name), fault, fix) for fault in faults)


def column_json(value: JsonObject) -> str:
    """Return a manifest as the text of its column."""
    return _ENCODER.encode(value)
