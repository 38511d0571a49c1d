"""Rows of the registry: their columns and visibility, versions and files as rows, and the latest version."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import chain, islice
from random import getrandbits
from time import time_ns
from typing import TypeVar, cast

from msgspec import Struct, field

from kiwi_mcp.domain.errors import ArtifactRefused
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.registry import (
    Actor,
    ItemName,
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
)
from kiwi_mcp.store.database import Database, Row, Transaction, Value
from kiwi_mcp.store.registry.release_check import CheckedRelease

CHUNK = 500  # how many names or ids one query asks for

LISTED = """select v.id, t.namespace, t.tool_id, v.version, v.content_hash, v.closure_hash, v.place, t.tool_type,
  t.name, t.description, t.category, t.tags, v.manifest, v.executor_ref, v.executor_namespace, v.executor_tool_id,
  v.executor_version, v.executor_hash, t.visibility, v.is_latest, t.is_official, t.is_builtin, v.changelog,
  v.published_by, v.created_at,
  v.yanked_at, v.yanked_reason, v.deprecated_at, v.deprecated_reason, v.item_references
from $tables where v.tool_id = t.id and """
"""Select every field of a version; a condition follows."""

# SQLite keeps the order of a CROSS JOIN, so the table of the condition comes first.
BY_ITEM = "tools t cross join tool_versions v"
BY_VERSION = "tool_versions v cross join tools t"

FIRST_ID = "00000000-0000-0000-0000-000000000000"  # an id before all others

_SHOWN = ("name", "description", "tool_type", "category")
"""The keys of the latest manifest that the row of an item repeats."""
LATEST_ORDER = " order by t.namespace, t.tool_id, v.version_key desc"

_Any = TypeVar("_Any")


class VisibilityFilter:
    """Limits queries to what an actor may see: conditions for the WHERE clause, and their values."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.members: tuple[Value, ...] = actor.namespaces or ("",)
        marks = placeholders(self.members)
        self.named = f"(t.visibility <> 'private' or t.namespace in ({marks}))"
        """Holds for what the actor may use once they know its name."""
        self.listed = f"(t.visibility = 'public' or t.namespace in ({marks}))"  # holds for what lists show to the actor

    def sees(self, namespace: str, visibility: str) -> bool:
        """Whether the actor may use an item once they know its name."""
        return visibility != "private" or namespace in self.members


def placeholders(values: Sequence[Value]) -> str:
    """Return one `?` for each value."""
    return ", ".join("?" * len(values))


def filled(statement: str, **parts: str) -> str:
    """Return a statement with its `$names` replaced by our own SQL. Never pass a caller's values here."""
    for name, part in parts.items():
        statement = statement.replace(f"${name}", part)
    return statement


def chunks(values: Iterable[_Any], size: int = CHUNK) -> Iterator[list[_Any]]:
    """Yield values in lists that fit into one query."""
    rest = iter(values)
    while chunk := list(islice(rest, size)):
        yield chunk


def read_by(source: Database | Transaction, statement: str, values: Iterable[Value], *given: Value) -> Iterator[Row]:
    """Yield the rows of a query for all of some values, for which `$marks` stands; a query has a limited number."""
    for some in chunks(values):
        yield from source.read(filled(statement, marks=placeholders(some)), (*given, *some))


def new_id() -> str:
    """Return a new id that sorts after all older ones, so that rows of one time are neighbours."""
    time, chance = f"{time_ns() // 1_000_000:012x}", f"{getrandbits(72):018x}"
    return f"{time[:8]}-{time[8:]}-7{chance[:3]}-a{chance[3:6]}-{chance[6:]}"


def is_id(text: str) -> bool:
    """Whether the text can be the id of a row."""
    parts = text.split("-")
    return [len(part) for part in parts] == [8, 4, 4, 4, 12] and not text.strip("-0123456789abcdef")


def to_listed(row: Row, database: Database) -> VersionInfo:
    """Return the version info of a row of LISTED."""
    (
        id_, namespace, tool_id, version, digest, closure, place, tool_type, title, description, category, tags,
        manifest, ref, below, below_id, below_version, below_digest, visibility, is_latest, is_official, is_builtin,
        changelog, published_by, created_at, yanked_at, yanked_reason, deprecated_at, deprecated_reason, references,
    ) = cast("tuple[str, ...]", row)  # fmt: skip
    listed_tags = database.decode_list(tags) if is_latest else ()
    if not is_latest:  # the columns of the item are about its latest version
        try:
            written = as_object(json.loads(manifest))
        except ValueError:  # it was changed in the store, which `verify` reports
            written = {}
        title, description, tool_type, category = (as_text(written.get(word)) for word in _SHOWN)
        listed_tags = tags_in(written)
    return VersionInfo(
        id=id_,
        name=VersionName(namespace, tool_id, version),
        digest=digest,
        closure=closure,
        place=place,
        tool_type=tool_type,
        title=title or "",
        description=description or "",
        category=category or "",
        tags=listed_tags,
        manifest_text=manifest,
        executor=Pin(ref, VersionName(below, below_id, below_version), below_digest) if below_digest else None,
        references=pins_from_json(references),
        visibility=cast("Visibility", visibility),
        is_latest=bool(is_latest),
        is_official=bool(is_official),
        is_builtin=bool(is_builtin),
        changelog=changelog or "",
        published_by=published_by,
        created_at=created_at,
        yanked=StatusNote(yanked_at, yanked_reason or "") if yanked_at else None,
        deprecated=StatusNote(deprecated_at, deprecated_reason or "") if deprecated_at else None,
    )


def to_event(row: Row) -> RegistryEvent:
    """Return the log's entry in a row: seq, op, name, hashes, actor, time, reason, the item's visibility, seal."""
    seq, *texts = row
    op, namespace, tool_id, version, digest, closure, actor, at, reason, visibility, seal = map(str, texts)
    name = VersionName(namespace, tool_id, version)
    shown_to = cast("Visibility", visibility)
    return RegistryEvent(int(str(seq)), cast("Op", op), name, digest, closure, actor, at, reason, shown_to, seal)


def tags_in(manifest: JsonObject) -> tuple[str, ...]:
    """Return the tags of a manifest."""
    return tuple(tag for tag in as_list(manifest.get("tags")) if isinstance(tag, str))


_ORDERED = "select id, version_key, is_prerelease, yanked_at, is_latest from tool_versions where tool_id = ?"
_SHOW = """update tools set name = ?, description = ?, tool_type = ?, executor_id = ?, category = ?, subcategory = ?,
  tags = ?, latest_version = ?, updated_at = ? where id = ?"""


class VersionRank(Struct, frozen=True):
    """What decides whether a version is the latest one."""

    id: str
    key: str
    is_prerelease: bool
    is_yanked: bool
    is_latest: bool


def latest_of(ranks: Iterable[VersionRank]) -> VersionRank:
    """Return the latest of an item's versions; there is always one.

    Releases rank above pre-releases, and both above yanked versions, which are ordered by version alone.
    """
    return max(ranks, key=lambda one: (not one.is_yanked, not one.is_yanked and not one.is_prerelease, one.key))


def update_latest(transaction: Transaction, database: Database, tool: Value, at: str) -> None:
    """Choose the latest version of an item again after a status change."""
    latest = latest_of(
        VersionRank(str(id_), str(key), bool(is_pre), yanked is not None, bool(is_latest))
        for id_, key, is_pre, yanked, is_latest in transaction.read(_ORDERED, (tool,))
    )
    if latest.is_latest:
        return
    transaction.write("update tool_versions set is_latest = false where tool_id = ? and is_latest = true", (tool,))
    transaction.write("update tool_versions set is_latest = true where id = ?", (latest.id,))
    ((version, text),) = transaction.read("select version, manifest from tool_versions where id = ?", (latest.id,))
    update_item(transaction, database, tool, str(version), as_object(json.loads(str(text))), at)


def update_item(
    transaction: Transaction, database: Database, tool: Value, version: str, manifest: JsonObject, at: str
) -> None:
    """Write the fields of the latest version into the row of the item."""
    transaction.write(_SHOW, (*item_columns(manifest, database), version, at, tool))


def item_columns(manifest: JsonObject, database: Database) -> tuple[Value, ...]:
    """Return the fields of an item's row from its latest version: name, description, type, executor, category, tags."""
    executor = as_text(manifest.get("executor")).partition("@")[0].rpartition("/")[2]
    name, description, tool_type, category = (as_text(manifest.get(word)) for word in _SHOWN)
    subcategory, tags = as_text(manifest.get("subcategory")), database.encode_list(tags_in(manifest))
    return (name, description, tool_type, executor or None, category, subcategory, tags)


_TOOLS = "select id, tool_id, visibility from tools where namespace = ? and tool_id in ($marks)"
_VERSIONS = """select tool_id, id, version, content_hash, closure_hash, depth, version_key, is_prerelease, yanked_at,
  is_latest from tool_versions where tool_id in ($marks)"""


class ItemRow(Struct, frozen=True):
    """An item's row."""

    id: str
    visibility: Visibility
    is_new: bool = False


class SealedVersion(Struct, frozen=True):
    """The fields of a version's row that its dependents need."""

    id: str
    digest: str
    closure: str
    depth: int


class PublishedRows(Struct, frozen=True):
    """The rows of some items and all of their versions."""

    items: dict[ItemName, ItemRow] = field(default_factory=dict)
    versions: dict[VersionName, SealedVersion] = field(default_factory=dict)
    ranks: dict[str, list[VersionRank]] = field(default_factory=dict)  # by the id of the item


def look_up(source: Database | Transaction, names: Iterable[ItemName]) -> PublishedRows:
    """Return the stored rows of some items, in as few queries as possible."""
    stored = PublishedRows()
    spaces: dict[str, dict[str, None]] = {}
    for namespace, tool_id in names:
        spaces.setdefault(namespace, {})[tool_id] = None
    for namespace, tool_ids in spaces.items():
        rows = cast("Iterator[tuple[str, str, Visibility]]", read_by(source, _TOOLS, tool_ids, namespace))
        for id_, tool_id, visibility in rows:
            stored.items[namespace, tool_id] = ItemRow(id_, visibility)
    by_id = {item.id: name for name, item in stored.items.items()}
    for row in read_by(source, _VERSIONS, by_id):
        tool, id_, version, digest, closure, depth, key, is_pre, yanked, is_latest = cast(
            "tuple[str, str, str, str, str, int, str, bool, str | None, bool]", row
        )
        stored.versions[VersionName(*by_id[tool], version)] = SealedVersion(id_, digest, closure, depth)
        rank = VersionRank(id_, key, bool(is_pre), yanked is not None, bool(is_latest))
        stored.ranks.setdefault(tool, []).append(rank)
    return stored


FILE_COLUMNS = (
    "id", "tool_version_id", "path", "media_type", "sha256", "size_bytes", "mode", "is_entrypoint", "content_text",
    "storage_key", "created_at",
)  # fmt: skip
INLINE = 65_536  # files of at least this many bytes are stored outside their row

EXECUTABLE, _PLAIN = 0o755, 0o644
_TEXTUAL = (".yaml", ".yml", ".json")
_MEDIA = {
    "py": "text/x-python", "sh": "application/x-sh", "md": "text/markdown", "txt": "text/plain",
    "json": "application/json", "yaml": "application/yaml", "yml": "application/yaml", "toml": "application/toml",
    "js": "text/javascript", "mjs": "text/javascript", "ts": "text/x-typescript", "html": "text/html",
    "xml": "application/xml", "sql": "application/sql", "csv": "text/csv",
}  # fmt: skip
_FILES = """select tool_version_id, path, sha256, mode, content_text, storage_key from tool_version_files
where tool_version_id in ($marks) order by path"""
STATED = """select id, manifest_canon, manifest_yaml, manifest_sha256 from tool_versions where id in ($marks)"""
_SIGNATURE = lazy_pattern(
    rb"(?:#|//|--|;|%|!|\(\*|/\*|<!--|rem) (?:kiwi-mcp|rye):(?:validated|signed):[\w:.|@{}=+ -]{1,480}(?:-->|\*/|\*\))?"
)
manifest_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict).encode
"""Returns a manifest as the text of its column."""
_LINES = 3  # how many lines are searched for the signature line: a shebang and an opening tag may precede it
_SHARED = [name for name in Release.__struct_fields__ if name in VersionInfo.__struct_fields__]


class Contents(Struct, frozen=True):
    """The stored content of one version, and its faults."""

    release: Release  # checked, where there is no issue
    digest: str  # what its digest was when it was sealed
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
        digest, text, key = file.sha256, None, None
        if len(file.data) < INLINE and b"\0" not in file.data:
            with suppress(UnicodeDecodeError):
                text = file.data.decode()
        if text is None:
            blobs[digest], key = file.data, f"sha256:{digest}"
        media = _MEDIA.get(file.path.rpartition(".")[2].lower(), "application/octet-stream")
        yield (
            new_id(), version, file.path, media, digest, len(file.data),
            EXECUTABLE if file.is_executable else _PLAIN, file.path == entrypoint, text, key, at,
        )  # fmt: skip


def store_blobs(transaction: Transaction, blobs: Mapping[str, bytes], at: str) -> None:
    """Keep the blobs that are not there yet."""
    here = {row[0] for row in read_by(transaction, "select sha256 from blobs where sha256 in ($marks)", blobs)}
    new = ((name, len(data), data, at) for name, data in blobs.items() if name not in here)
    transaction.insert("blobs", ("sha256", "size_bytes", "content", "created_at"), new)


def read_contents(database: Database, versions: Sequence[VersionInfo]) -> Iterator[Contents]:
    """Yield versions with all of their bytes, in the order of `versions`."""
    for some in chunks(versions, 100):
        ids = [version.id for version in some]
        stated = {row[0]: row for row in read_by(database, STATED, ids)}
        files: dict[Value, list[Row]] = {}
        for row in read_by(database, _FILES, ids):
            files.setdefault(row[0], []).append(row)
        for version in some:
            yield _contents(database, version, stated[version.id], files.get(version.id, []))


def _contents(database: Database, version: VersionInfo, stated: Row, rows: Iterable[Row]) -> Contents:
    _, statement, text, text_hash = cast("tuple[str, str, str | None, str | None]", stated)
    files, faults = [], []
    for row in rows:
        _, path, digest, mode, content, key = cast("tuple[str, str, str, int, str | None, str]", row)
        data = content.encode() if content is not None else read_blob(database, key)
        files.append(ReleaseFile(path, data, mode == EXECUTABLE))
        if files[-1].sha256 != digest:
            faults.append(f"{path} is not what was published")
    name = version.place.rpartition("/")[2]
    if text is not None:
        files.append(ReleaseFile(name, text.encode()))
        if files[-1].sha256 != text_hash:
            faults.append(f"{name} is not what was published")
    try:
        manifest = version.manifest
    except ValueError:
        manifest = {}
        faults.append("its manifest is not JSON")
    release = Release(
        statement=statement.encode(),
        manifest=manifest,
        files=tuple(sorted(files, key=lambda file: file.path)),
        **{name: getattr(version, name) for name in _SHARED},
    )
    if release.digest != version.digest:
        faults.append(f"its statement has the digest {release.digest}, not {version.digest}")
    if not is_stated(release):
        faults.append(f"{release.manifest_path} is not the file that was stated")
    try:
        release = CheckedRelease.of(release)
    except ArtifactRefused as refused:
        faults += (f"{issue.place}: {issue.reason}" for issue in refused.issues)
    fix = f"Do not run it: restore the store from a backup, or pull {version.name} from a remote into a new store."
    return Contents(release, version.digest, tuple(Issue(str(version.name), fault, fix) for fault in faults))


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


def is_stated(release: Release) -> bool:
    """Whether the file with the manifest is the one in the statement; a signature line in it does not count."""
    data = next((file.data for file in release.files if file.path == release.manifest_path), b"")
    data = data.replace(b"\r\n", b"\n")
    lines = data.split(b"\n", _LINES)
    signed = (at for at, line in enumerate(lines[:-1]) if _SIGNATURE.fullmatch(line))
    bodies = chain([data], (b"\n".join([*lines[:at], *lines[at + 1 :]]) for at in signed))
    # A canonical statement has these bytes at most once: within a text, the quotes would be escaped.
    return any(f'"manifest":"{sha256(body).hexdigest()}"'.encode() in release.statement for body in bodies)
