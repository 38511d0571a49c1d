"""What changes a registry: publishing, yank, deprecation, visibility, and the hash-chained log of it all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import groupby, islice
from typing import Literal, TypeAlias, cast

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.errors import (
    ArtifactRefused,
    ChainTooDeep,
    InvalidRequest,
    MissingLink,
    NamespaceDenied,
    ToolNotFound,
    VersionConflict,
    VersionNotFound,
    listing,
)
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import as_text, canonical
from kiwi_mcp.domain.names import Version
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.registry import (
    BUILTIN_NAMESPACE,
    Actor,
    Op,
    Pin,
    PublishResult,
    RegistryEvent,
    StatusNote,
    VersionName,
    closure_in,
    is_same_content,
    pins_from_json,
    pins_of,
    pins_to_json,
)
from kiwi_mcp.domain.times import moment
from kiwi_mcp.store.database import Database, Transaction, Value
from kiwi_mcp.store.registry.release_check import (
    MAX_ISSUES,
    MAX_LINKS,
    CheckedRelease,
    bad_text,
    bad_time,
    bad_visibility,
    order,
    require_checked,
)
from kiwi_mcp.store.registry.rows import (
    FILE_COLUMNS,
    ItemRow,
    PublishedRows,
    SealedVersion,
    VersionRank,
    VisibilityFilter,
    chunks,
    file_rows,
    filled,
    is_stated,
    item_columns,
    latest_of,
    look_up,
    manifest_json,
    manifest_text,
    new_id,
    placeholders,
    read_by,
    store_blobs,
    update_item,
    update_latest,
)

_LOG_COLUMNS = (
    "seq", "op", "namespace", "tool_id", "version", "content_hash", "closure_hash", "actor", "reason", "created_at",
    "prev_hash", "hash",
)  # fmt: skip
_FIRST = "-"  # what the first entry has in place of a hash before it


class LogEntry(Struct, frozen=True):
    """One change, not yet numbered."""

    op: Op
    name: VersionName
    digest: str
    closure: str
    at: str
    reason: str = ""


def append_log(transaction: Transaction, actor: str, entries: Iterable[LogEntry]) -> None:
    """Append entries to the log. The transaction keeps other writers out until it ends."""
    last = transaction.read("select seq, hash from registry_log order by seq desc limit 1")
    seq, before = (int(str(last[0][0])), str(last[0][1])) if last else (0, _FIRST)
    rows = []
    for seq, entry in enumerate(entries, seq + 1):  # noqa: B020 - numbered on from the last one
        name = entry.name
        values: list[Value] = [
            seq, entry.op, name.namespace, name.tool_id, name.version, entry.digest, entry.closure, actor, entry.reason,
            entry.at, before,
        ]  # fmt: skip
        before = _log_hash(values)
        rows.append((*values, before))
    transaction.insert("registry_log", _LOG_COLUMNS, rows)


def broken_log(database: Database) -> Iterator[Issue]:
    """Yield where the log is not what was written: an entry changed, missing or added."""
    expected, before = 1, _FIRST
    while page := database.read("select * from registry_log where seq > ? order by seq limit 1000", (expected - 1,)):
        for row in page:
            if row[0] != expected:
                fault = f"it is missing; the next one is {row[0]!s}"
            elif row[-2] != before:
                fault = "it does not follow the entry before it"
            elif _log_hash(row[:-1]) != row[-1]:
                fault = "it was changed after it was written"
            else:
                expected, before = expected + 1, str(row[-1])
                continue
            fix = "Compare it with a remote or a backup: nothing before this entry was changed."
            yield Issue(f"log entry {expected}", fault, fix)
            return


def _log_hash(values: Sequence[Value]) -> str:
    return f"sha256:{sha256(canonical(cast('Sequence[str | int]', values))).hexdigest()}"


_TYPE = lazy_pattern(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
_NUL = lazy_pattern(r"(?<!\\)(?:\\\\)*\\u0000")
_AGAIN = "Publish it again from its source."


class VersionDraft(Struct, frozen=True):
    """A checked release, and what follows from it alone."""

    release: CheckedRelease
    name: VersionName
    executor: Pin | None
    references: tuple[Pin, ...]
    digest: str
    key: str  # the version as it is ordered
    is_prerelease: bool
    tool_type: str
    manifest: str  # the manifest as JSON
    text: str | None  # the manifest's own file, where it is a file of its own

    @property
    def text_hash(self) -> str | None:
        """The hash of the manifest's own file."""
        return sha256(self.text.encode()).hexdigest() if self.text is not None else None


def version_drafts(releases: Sequence[CheckedRelease], actor: Actor, *, is_seeding: bool) -> tuple[VersionDraft, ...]:
    """Return releases as drafts, executors first, or refuse them all with everything that is wrong with any."""
    require_checked(releases)
    for namespace in {release.name.namespace: None for release in releases}:
        if not (is_seeding if namespace == BUILTIN_NAMESPACE else actor.is_member(namespace)):
            raise NamespaceDenied(namespace, namespaces=actor.namespaces)
    issues: list[Issue] = []
    drafts: dict[VersionName, VersionDraft] = {}
    conflicts: list[str] = []
    for release in releases:
        found = _draft(release)
        if not isinstance(found, VersionDraft):
            issues += found
        elif not is_same_content(drafts.setdefault(found.name, found), found):
            conflicts.append(str(found.name))
    if issues:
        what = str(releases[0].name) if len(releases) == 1 else "The set of versions"
        raise ArtifactRefused(what[:400], islice(issues, MAX_ISSUES))
    if conflicts:
        raise VersionConflict(conflicts)
    return order(drafts.values())


def _draft(release: CheckedRelease) -> VersionDraft | list[Issue]:
    issues: list[Issue] = []
    manifest, text = "", None
    try:
        manifest, text = manifest_json(release.manifest), manifest_text(release)
        manifest.encode()
    except (ValueError, TypeError, RecursionError, StopIteration):
        issues.append(Issue("manifest", "it cannot be read", _AGAIN))
    # PostgreSQL keeps a NUL in no text, be it escaped.
    if ("\\u0000" in manifest and _NUL.search(manifest)) or (text is not None and "\0" in text):
        issues.append(Issue("manifest", "it holds a NUL", "Write it as plain text."))
    tool_type = as_text(release.manifest.get("tool_type"))
    if _TYPE.fullmatch(tool_type) is None:
        issues.append(Issue("manifest.tool_type", "it names no type", _AGAIN))
    if release.is_official and release.name.namespace != BUILTIN_NAMESPACE:
        issues.append(Issue("is_official", f"nothing in {release.name.namespace[:64]!r} is official", _AGAIN))
    if not is_stated(release):
        issues.append(Issue("statement", "its file with the manifest is not the one that was stated", _AGAIN))
    version = Version.parse(release.name.version)
    if issues or version is None:
        return [Issue(f"{release.name}: {one.place}"[:400], one.reason, one.fix) for one in issues]
    return VersionDraft(
        release, release.name, release.executor, release.references, release.digest,
        version.key, bool(version.pre), tool_type, manifest, text,
    )  # fmt: skip


_TOOL_COLUMNS = (
    "id", "tool_id", "namespace", "name", "description", "tool_type", "executor_id", "category", "subcategory", "tags",
    "is_official", "is_builtin", "visibility", "latest_version", "created_at", "updated_at",
)  # fmt: skip
_VERSION_COLUMNS = (
    "id", "tool_id", "version", "version_key", "place", "manifest", "manifest_yaml", "manifest_sha256",
    "manifest_canon", "content_hash", "executor_ref", "executor_namespace", "executor_tool_id", "executor_version",
    "executor_hash", "executor_version_id", "closure_hash", "depth", "changelog", "is_latest", "is_prerelease",
    "published_by", "created_at", "sealed_at", "yanked_at", "yanked_reason", "deprecated_at", "deprecated_reason",
    "item_references",
)  # fmt: skip


class NewVersion(Struct, frozen=True):
    """A draft and the row it becomes."""

    draft: VersionDraft
    tool: str  # the id of the item
    row: SealedVersion
    below: str | None  # the id of its executor's version


def publish(
    transaction: Transaction, database: Database, sight: VisibilityFilter, drafts: Sequence[VersionDraft]
) -> Mapping[VersionName, PublishResult]:
    """Store the drafts that are not published yet, and return the result for each draft, by its name."""
    names = [name for draft in drafts for name in (draft.name, *(pin.name for pin in pins_of(draft)))]
    stored = look_up(transaction, (name.item for name in names))
    # A draft comes after what it depends on, or that is in the store.
    closures = {name: row.closure for name, row in stored.versions.items()}
    conflicts: list[str] = []
    for draft in drafts:
        closure, known = closure_in(draft, closures), stored.versions.get(draft.name)
        if known is None:
            closures[draft.name] = closure
        # A version that was sealed before references were recorded stays as it is.
        elif known.digest != draft.digest or known.closure not in {
            closure,
            closure_in(replace(draft, references=()), closures),
        }:
            conflicts.append(str(draft.name))
    if conflicts:
        raise VersionConflict(conflicts)
    fresh = [draft for draft in drafts if draft.name not in stored.versions]
    if fresh:
        _check_types(transaction, fresh)
        _write(transaction, database, sight, stored, _seal(fresh, stored, sight, closures))
    new = {draft.name for draft in fresh}
    return {
        draft.name: PublishResult(draft.name, draft.digest, stored.versions[draft.name].closure, draft.name in new)
        for draft in drafts
    }


def _check_types(transaction: Transaction, drafts: Sequence[VersionDraft]) -> None:
    """Refuse executors where a type has none, and their absence where it needs one; keep types that are new."""
    rows = transaction.read("select tool_type, executor_rule from tool_types")
    rules = {str(name): str(rule) for name, rule in rows}
    issues: list[Issue] = []
    for draft in drafts:
        rule = rules.get(draft.tool_type)
        if (draft.executor is None and rule == "required") or (draft.executor is not None and rule == "forbidden"):
            reason = f"for a {draft.tool_type} an executor is {rule}"
            issues.append(Issue(f"{draft.name}: executor", reason, "Fix `executor` in its manifest."))
    if issues:
        raise ArtifactRefused("The set of versions", issues[:100])
    new = {draft.tool_type for draft in drafts} - rules.keys()
    transaction.insert("tool_types", ("tool_type",), [(name,) for name in sorted(new)])


def _seal(
    drafts: Sequence[VersionDraft], stored: PublishedRows, sight: VisibilityFilter, closures: Mapping[VersionName, str]
) -> Sequence[NewVersion]:
    """Return the row of every draft. Executors come before their users in `drafts`, so each draft finds its own."""
    for draft in drafts:
        stored.items.setdefault(draft.name.item, ItemRow(new_id(), draft.release.visibility, is_new=True))
    sealings = []
    for draft in drafts:
        below = _pinned(draft, draft.executor, stored, sight) if draft.executor else None
        for pin in draft.references:
            _pinned(draft, pin, stored, sight)
        if below and below.depth >= MAX_LINKS and draft.executor:
            raise ChainTooDeep([draft.name.tool_id, draft.executor.name.tool_id], limit=MAX_LINKS)
        row = SealedVersion(new_id(), draft.digest, closures[draft.name], below.depth + 1 if below else 1)
        stored.versions[draft.name] = row
        tool = stored.items[draft.name.item].id
        sealings.append(NewVersion(draft, tool, row, below.id if below else None))
    return sealings


def _pinned(draft: VersionDraft, pin: Pin, stored: PublishedRows, sight: VisibilityFilter) -> SealedVersion | None:
    """Return the row of what a draft depends on. None is valid for an item that ships with another Kiwi release."""
    found, home = stored.versions.get(pin.name), stored.items.get(pin.name.item)
    if pin.is_builtin:
        return found if found and found.digest == pin.digest else None
    if (
        found is None
        or home is None
        or found.digest != pin.digest
        or not sight.sees(pin.name.namespace, home.visibility)
    ):
        raise MissingLink(str(pin.name), chain=[draft.name.tool_id])
    item = stored.items[draft.name.item]
    if home.visibility == "private" and (draft.name.namespace, item.visibility) != (pin.name.namespace, "private"):
        raise visibility_conflict(str(draft.name), str(pin.name))
    return found


def visibility_conflict(name: str, executor: str) -> InvalidRequest:
    """Return the error for an item that is visible to actors who cannot see its executor."""
    return InvalidRequest(
        f"{name} depends on {executor}, which is private, so some users would see the item and not its executor.",
        suggestion="Make it private in the same namespace, or make what it depends on public or unlisted first.",
    )


def _write(
    transaction: Transaction,
    database: Database,
    sight: VisibilityFilter,
    stored: PublishedRows,
    sealings: Sequence[NewVersion],
) -> None:
    now, actor = moment(), sight.actor.name
    latest = _choose(stored, sealings)
    blobs: dict[str, bytes] = {}
    files = [row for one in sealings for row in file_rows(one.draft.release, one.row.id, now, blobs)]
    spaces = dict.fromkeys(one.draft.name.namespace for one in sealings)
    known = "select namespace from namespaces where namespace in ($marks)"
    here = {row[0] for row in read_by(transaction, known, spaces)}
    new = [(name, actor, now) for name in spaces if name not in here]
    transaction.insert("namespaces", ("namespace", "owner", "created_at"), new)
    transaction.insert("tools", _TOOL_COLUMNS, _new_tools(database, stored, latest.values(), now))
    store_blobs(transaction, blobs, now)
    # Files come before their version: from the moment it is there, it is sealed.
    transaction.insert("tool_version_files", FILE_COLUMNS, files)
    # Each item has at most one latest version.
    for some in chunks([tool for tool in latest if stored.ranks.get(tool)]):
        statement = "update tool_versions set is_latest = false where is_latest = true and tool_id in ($marks)"
        transaction.write(filled(statement, marks=placeholders(some)), some)
    transaction.insert(
        "tool_versions",
        _VERSION_COLUMNS,
        [_version_row(one, latest.get(one.tool) is one, actor, now) for one in sealings],
    )
    for tool, one in latest.items():
        if stored.ranks.get(tool):
            update_item(transaction, database, tool, one.draft.name.version, one.draft.release.manifest, now)
    append_log(transaction, actor, _entries(sealings, now))


def _choose(stored: PublishedRows, sealings: Sequence[NewVersion]) -> Mapping[str, NewVersion]:
    """Return the new versions that become the latest of their items, by the item's id."""
    ranks: dict[str, list[VersionRank]] = {}
    for one in sealings:
        is_yanked = one.draft.release.yanked is not None
        rank = VersionRank(one.row.id, one.draft.key, one.draft.is_prerelease, is_yanked, is_latest=False)
        ranks.setdefault(one.tool, [*stored.ranks.get(one.tool, [])]).append(rank)
    ids = {latest_of(group).id for group in ranks.values()}
    return {one.tool: one for one in sealings if one.row.id in ids}


def _new_tools(
    database: Database, stored: PublishedRows, latest: Iterable[NewVersion], now: str
) -> Iterator[tuple[Value, ...]]:
    for one in latest:
        name, release = one.draft.name, one.draft.release
        if (item := stored.items[name.item]).is_new:
            yield (
                one.tool, name.tool_id, name.namespace, *item_columns(release.manifest, database), release.is_official,
                release.is_builtin, item.visibility, name.version, moment(release.created_at or now), now,
            )  # fmt: skip


def _version_row(one: NewVersion, is_latest: bool, actor: str, now: str) -> tuple[Value, ...]:
    draft, release, pin = one.draft, one.draft.release, one.draft.executor
    executor = (pin.ref, *pin.name.item, pin.name.version, pin.digest) if pin else (None,) * 5
    return (
        one.row.id, one.tool, draft.name.version, draft.key, release.place, draft.manifest, draft.text,
        draft.text_hash, release.statement.decode(), draft.digest, *executor, one.below, one.row.closure,
        one.row.depth, release.changelog, is_latest, draft.is_prerelease,
        release.published_by or actor, moment(release.created_at or now), now,
        *_status_values(release.yanked, now), *_status_values(release.deprecated, now), pins_to_json(draft.references),
    )  # fmt: skip


def _status_values(note: StatusNote | None, now: str) -> tuple[Value, Value]:
    return (moment(note.at or now), note.reason) if note else (None, None)


def _entries(sealings: Sequence[NewVersion], now: str) -> Iterator[LogEntry]:
    op: Op
    for one in sealings:
        draft, row = one.draft, one.row
        yield LogEntry("publish", draft.name, row.digest, row.closure, now)
        for op, note in (("yank", draft.release.yanked), ("deprecate", draft.release.deprecated)):
            if note is not None:
                yield LogEntry(op, draft.name, row.digest, row.closure, moment(note.at or now), note.reason)


StatusOp: TypeAlias = Literal["yank", "unyank", "deprecate", "undeprecate"]

_SET: Mapping[StatusOp, str] = {
    "yank": "update tool_versions set yanked_at = ?, yanked_reason = ? where yanked_at is null and id = ?",
    "unyank": "update tool_versions set yanked_at = ?, yanked_reason = ? where yanked_at is not null and id = ?",
    "deprecate": "update tool_versions set deprecated_at = ?, deprecated_reason = ?"
    " where deprecated_at is null and id = ?",
    "undeprecate": "update tool_versions set deprecated_at = ?, deprecated_reason = ?"
    " where deprecated_at is not null and id = ?",
}
_HERE = "select 1 from tools where namespace = ? and tool_id = ?"
_ITEM = "select t.id, t.visibility from tools t where t.namespace = ? and t.tool_id = ? and $sees"
_VERSIONS = """select id, version, content_hash, closure_hash from tool_versions where tool_id = ?
order by version_key desc"""
_STANDS_ON = """select v.version, et.namespace, et.tool_id, e.version
from tool_versions v cross join tool_versions e cross join tools et
where v.tool_id = ? and e.id = v.executor_version_id and et.id = e.tool_id and et.visibility = 'private' limit 1"""
_DEPENDENTS = """select 1 from tool_versions e cross join tool_versions v cross join tools t
where e.tool_id = ? and v.executor_version_id = e.id and t.id = v.tool_id
and t.id <> e.tool_id and (t.visibility <> 'private' or t.namespace <> ?) limit 1"""
_NAMED_BY = """select 1 from tool_versions v cross join tools t
where t.id = v.tool_id and t.id <> ? and (t.visibility <> 'private' or t.namespace <> ?)
and replace(v.item_references, ?, '') <> v.item_references limit 1"""
_NAMES = "select item_references from tool_versions where tool_id = ?"


def apply_visibilities(
    transaction: Transaction, sight: VisibilityFilter, events: Sequence[RegistryEvent]
) -> Sequence[RegistryEvent]:
    """Apply the visibility events to items that are stored already, and return the remaining events."""
    rest = []
    for event in events:
        name = event.name
        if event.op == "visibility" and transaction.read(_HERE, name.item):
            _set_visibility(transaction, sight, name, event.reason)
        else:
            rest.append(event)
    return rest


def replay_status(
    transaction: Transaction, database: Database, sight: VisibilityFilter, events: Sequence[RegistryEvent]
) -> None:
    """Repeat status events of another registry, in their order."""
    for (op, reason, at), group in groupby(events, key=lambda event: (event.op, event.reason, event.at)):
        names = [event.name for event in group]
        match op:
            case "visibility":
                for name in names:
                    _set_visibility(transaction, sight, name, reason)
            case "yank" | "unyank" | "deprecate" | "undeprecate":
                set_status(transaction, database, sight, names, op, reason=reason, at=at)


def set_status(
    transaction: Transaction,
    database: Database,
    sight: VisibilityFilter,
    names: Sequence[VersionName],
    op: StatusOp,
    *,
    reason: str,
    at: str,
) -> None:
    """Set or clear a status of versions. Versions that already have it stay as they are."""
    if op not in _SET:
        raise InvalidRequest(f"{str(op)[:64]!r} cannot be done to a version.", suggestion=f"Use {', '.join(_SET)}.")
    _refuse_issues([*bad_text(reason, "reason"), *bad_time(at, "at")])
    now, is_set = moment(), op in {"yank", "deprecate"}
    time = moment(at or now)
    found: list[tuple[str, str, LogEntry]] = []
    for name in names:
        tool, _ = _find_item(transaction, sight, name)
        rows = cast("list[tuple[str, str, str, str]]", transaction.read(_VERSIONS, (tool,)))
        version = next((row for row in rows if row[1] == name.version), None)
        if version is None:
            raise VersionNotFound(name.tool_id, name.version, found=[row[1] for row in rows])
        id_, _, digest, closure = version
        found.append((tool, id_, LogEntry(op, name, digest, closure, time, reason)))
    values = (time, reason) if is_set else (None, None)
    changed = [one for one in found if transaction.write(_SET[op], (*values, one[1]))]
    for tool in {tool: None for tool, _, _ in changed}:
        update_latest(transaction, database, tool, now)
    append_log(transaction, sight.actor.name, [entry for _, _, entry in changed])


def _set_visibility(transaction: Transaction, sight: VisibilityFilter, name: VersionName, visibility: str) -> None:
    """Change the visibility of an item, unless some could then see it and not what it depends on."""
    _refuse_issues([*bad_visibility(visibility)])
    tool, current = _find_item(transaction, sight, name)
    if current == visibility:
        return
    if visibility == "private":
        named = '","{}","{}","'.format(*name.item)  # as in the JSON of a pin
        own = tool, name.namespace
        if transaction.read(_DEPENDENTS, own) or transaction.read(_NAMED_BY, (*own, named)):
            raise InvalidRequest(
                f"{'/'.join(name.item)} cannot become private: published versions that others see depend on it.",
                suggestion="Make it unlisted, which keeps it out of lists and searches.",
            )
    elif rows := transaction.read(_STANDS_ON, (tool,)):
        version, *executor = map(str, rows[0])
        raise visibility_conflict(str(replace(name, version=version)), str(VersionName(*executor)))
    else:
        pins = [pin for (text,) in transaction.read(_NAMES, (tool,)) for pin in pins_from_json(str(text))]
        items = look_up(transaction, {pin.name.item for pin in pins}).items
        for pin in pins:
            if pin.name.item in items and items[pin.name.item].visibility == "private":
                raise visibility_conflict("/".join(name.item), str(pin.name))
    now = moment()
    transaction.write("update tools set visibility = ?, updated_at = ? where id = ?", (visibility, now, tool))
    entry = LogEntry("visibility", replace(name, version=""), "", "", now, visibility)
    append_log(transaction, sight.actor.name, [entry])


def _refuse_issues(issues: Sequence[Issue]) -> None:
    if issues:
        raise InvalidRequest(listing("The request has", issues), suggestion=issues[0].fix)


def _find_item(transaction: Transaction, sight: VisibilityFilter, name: VersionName) -> tuple[str, str]:
    """Return an item's id and visibility. For actors who cannot see it, it does not exist."""
    rows = transaction.read(filled(_ITEM, sees=sight.named), (*name.item, *sight.members))
    if not rows:
        raise ToolNotFound(name.tool_id)
    if not sight.actor.is_member(name.namespace):
        raise NamespaceDenied(name.namespace, namespaces=sight.actor.namespaces)
    ((tool, visibility),) = cast("list[tuple[str, str]]", rows)
    return tool, visibility
