"""Recompute everything in a store, report differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from typing import cast

from kiwi_mcp.domain.errors import StoreDamaged
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.names import Version
from kiwi_mcp.domain.registry import VersionInfo, VersionName, closure_in
from kiwi_mcp.store.database import Database, Row
from kiwi_mcp.store.registry.publish import broken_log
from kiwi_mcp.store.registry.rows import (
    BY_VERSION,
    FIRST_ID,
    LISTED,
    SealedVersion,
    VersionRank,
    VisibilityFilter,
    as_bytes,
    chunks,
    filled,
    latest_of,
    look_up,
    placeholders,
    read_contents,
    to_listed,
)

_PAGE = "v.id > ? order by v.id limit 100"
_SEALED = """select v.id, v.version, v.version_key, v.is_prerelease, v.closure_hash, v.depth,
  et.namespace, et.tool_id, e.version, e.content_hash, e.closure_hash, e.depth
from tool_versions v left join tool_versions e on e.id = v.executor_version_id left join tools et on et.id = e.tool_id
where v.id in ($marks)"""
_TOOLS = """select t.id, t.namespace, t.tool_id, t.visibility, t.latest_version, v.id, v.version, v.version_key,
  v.is_prerelease, v.yanked_at, v.is_latest
from tools t left join tool_versions v on v.tool_id = t.id
where t.id in (select id from tools where id > ? order by id limit 500) order by t.id"""
_UNLOGGED = """select t.namespace, t.tool_id, v.version, t.visibility
from tool_versions v join tools t on t.id = v.tool_id
left join registry_log l on l.op = 'publish' and l.namespace = t.namespace and l.tool_id = t.tool_id
  and l.version = v.version and l.content_hash = v.content_hash and l.closure_hash = v.closure_hash
where l.seq is null"""
_UNKEPT = """select l.namespace, l.tool_id, l.version, coalesce(t.visibility, 'private')
from registry_log l left join tools t on t.namespace = l.namespace and t.tool_id = l.tool_id
left join tool_versions v on v.tool_id = t.id and v.version = l.version
where l.op = 'publish' and v.id is null"""
_SEEN_FURTHER = """select t.namespace, t.tool_id, v.version, t.visibility
from tools et join tool_versions e on e.tool_id = et.id join tool_versions v on v.executor_version_id = e.id
join tools t on t.id = v.tool_id
where et.visibility = 'private' and (t.visibility <> 'private' or t.namespace <> et.namespace)"""
_ORPHANS = {
    "versions without an item": "tool_versions x left join tools y on y.id = x.tool_id where y.id is null",
    "files without a version": """tool_version_files x left join tool_versions y on y.id = x.tool_version_id
      where y.id is null""",
    "versions without what they depend on": """tool_versions x left join tool_versions y on y.id = x.executor_version_id
      where x.executor_version_id is not null and y.id is null""",
    "items without a namespace": """tools x left join namespaces y on y.namespace = x.namespace
      where y.namespace is null""",
}
_LOOSE_BLOBS = """select sha256, size_bytes, content from blobs where sha256 > ? and not exists
  (select 1 from tool_version_files where storage_key = 'sha256:' || blobs.sha256) order by sha256 limit 20"""
_RESTORE = "Restore the store from a backup, or pull from a remote into a new store."
_HIDDEN = Issue("a private version", "it is not what was published", "Let a member of its namespace verify it.")


def store(database: Database, sight: VisibilityFilter) -> Iterator[Issue]:
    """Yield every fault in a store. Faults in items that the actor cannot see are reported without details."""
    try:
        if database.dialect == "sqlite":
            faults = (str(row[0]) for row in database.read("PRAGMA integrity_check"))
            yield from (Issue("store", fault[:400], _RESTORE) for fault in faults if fault != "ok")
        yield from broken_log(database)
        for what, rows in _ORPHANS.items():
            ((count,),) = database.read(f"select count(*) from {rows}")  # noqa: S608 - our own words
            if count:
                yield Issue("store", f"{count!s} {what}", _RESTORE)
        yield from _all_versions(database, sight)
        yield from _latest(database, sight)
        yield from _pairs(database, sight)
        yield from _loose_blobs(database)
    except StoreDamaged as damage:
        yield Issue("store", damage.message, damage.suggestion)


def versions(database: Database, listed: Sequence[VersionInfo]) -> Iterator[Issue]:
    """Yield every fault of some versions: in their files, their hashes, and their executors."""
    for contents in read_contents(database, listed):
        yield from contents.issues
    by_id = {one.id: one for one in listed}
    named = look_up(database, (pin.name.item for one in listed for pin in one.references)).versions
    for some in chunks(by_id):
        for row in database.read(filled(_SEALED, marks=placeholders(some)), some):
            one = by_id[str(row[0])]
            yield from (Issue(str(one.name), fault, _RESTORE) for fault in _row_faults(row, one, named))


def _row_faults(row: Row, listed: VersionInfo, named: Mapping[VersionName, SealedVersion]) -> Iterator[str]:
    _, text, key, is_prerelease, closure, depth, *name, below_digest, below_closure, below_depth = cast(
        "tuple[str, str, str, bool, str, int, str, str, str, str | None, str | None, int | None]", row
    )
    pin, closures = listed.executor, {name: one.closure for name, one in named.items()}
    version = Version.parse(text)
    if version is None or (version.key, bool(version.pre)) != (key, bool(is_prerelease)):
        yield "its place in the order of versions is wrong"
    below = VersionName(*map(str, name))
    if any(not one.is_builtin and one.name not in named for one in listed.references) or (
        pin is not None and below_closure is None and not pin.is_builtin
    ):
        yield "what it depends on is missing"
    elif (
        (below_closure is not None and (pin is None or (pin.name, pin.digest) != (below, below_digest)))
        or any(not one.is_builtin and named[one.name].digest != one.digest for one in listed.references)
        or closure_in(listed, {**closures, below: below_closure or ""}) != closure
        or (below_depth or 0) + 1 != depth
    ):
        yield "it does not depend on what it was published with"


def _all_versions(database: Database, sight: VisibilityFilter) -> Iterator[Issue]:
    after = FIRST_ID
    while rows := database.read(filled(LISTED, tables=BY_VERSION) + _PAGE, (after,)):
        page = [to_listed(row, database) for row in rows]
        after = page[-1].id
        visible = {str(one.name): sight.sees(one.name.namespace, one.visibility) for one in page}
        for issue in versions(database, page):
            yield issue if visible.get(issue.place, True) else _HIDDEN


def _latest(database: Database, sight: VisibilityFilter) -> Iterator[Issue]:
    after = FIRST_ID
    while rows := database.read(_TOOLS, (after,)):
        for tool, group in groupby(rows, key=lambda row: row[0]):
            after = str(tool)
            yield from _tool_faults([*group], sight)


def _tool_faults(rows: Sequence[Row], sight: VisibilityFilter) -> Iterator[Issue]:
    _, namespace, tool_id, visibility, response = (str(value) for value in rows[0][:5])
    standings = {
        VersionRank(str(id_), str(key), bool(is_pre), yanked is not None, bool(is_latest)): str(version)
        for *_, id_, version, key, is_pre, yanked, is_latest in rows
        if id_ is not None
    }
    marked = [one for one in standings if one.is_latest]
    if not standings:
        fault = "it has no version"
    elif marked != [latest_of(standings)]:
        fault = f"{len(marked)} of its versions are marked as the latest, or another one should be"
    elif standings[marked[0]] != response:
        fault = f"its latest version is given as {response}"
    else:
        return
    is_seen = sight.sees(namespace, visibility)
    fix = "Yank and unyank one of its versions: the latest is then chosen again."
    yield Issue(f"{namespace}/{tool_id}", fault, fix) if is_seen else _HIDDEN


def _pairs(database: Database, sight: VisibilityFilter) -> Iterator[Issue]:
    for statement, fault in (
        (_UNLOGGED, "the log does not say that it was published as it is"),
        (_UNKEPT, "the log says that it was published, and it is missing"),
        (_SEEN_FURTHER, "it is visible to some who cannot see what it depends on"),
    ):
        for *name, visibility in database.read(statement):
            namespace, tool_id, version = (str(part) for part in name)
            is_seen = sight.sees(namespace, str(visibility))
            yield Issue(str(VersionName(namespace, tool_id, version)), fault, _RESTORE) if is_seen else _HIDDEN


def _loose_blobs(database: Database) -> Iterator[Issue]:
    after = ""
    while rows := database.read(_LOOSE_BLOBS, (after,)):
        for name, size, content in rows:
            after, data = str(name), as_bytes(content)
            if (sha256(data).hexdigest(), len(data)) != (name, size):
                yield Issue(f"blob {after}", "its bytes are not those it is named for", _RESTORE)
