"""Releases in, immutable versions out, one transaction."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice

from msgspec import Struct

from kiwi_mcp.domain.errors import (
    ArtifactRefused,
    ChainTooDeep,
    InvalidRequest,
    MissingLink,
    NamespaceDenied,
    VersionConflict,
)
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import as_text
from kiwi_mcp.domain.names import Version
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.registry import (
    BUILTIN_NAMESPACE,
    Actor,
    ItemName,
    Op,
    Pin,
    PublishResult,
    Release,
    StatusNote,
    VersionName,
    closure_below,
    closure_of,
    is_same_content,
)
from kiwi_mcp.domain.times import moment
from kiwi_mcp.store.database import Database, Transaction, Value
from kiwi_mcp.store.registry import log
from kiwi_mcp.store.registry.files import FILE_COLUMNS, column_json, file_rows, is_stated, manifest_text, store_blobs
from kiwi_mcp.store.registry.release_check import MAX_ISSUES, MAX_LINKS, CheckedRelease, order, require_checked
from kiwi_mcp.store.registry.rows import (
    ItemRow,
    PublishedRows,
    SealedVersion,
    VersionRank,
    VisibilityFilter,
    chunks,
    filled,
    item_columns,
    latest_of,
    look_up,
    new_id,
    placeholders,
    update_item,
)

_TYPE = lazy_pattern(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
_NUL = lazy_pattern(r"(?<!\\)(?:\\\\)*\\u0000")
_AGAIN = "Publish it again from its source."


class VersionDraft(Struct, frozen=True):
    """A checked release, and what follows from it alone."""

    release: CheckedRelease
    name: VersionName
    executor: Pin | None
    digest: str
    key: str
    """The version as it is ordered."""
    is_prerelease: bool
    tool_type: str
    manifest: str
    """The manifest as JSON."""
    text: str | None
    """The manifest's own file, where it is a file of its own."""

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
        elif not is_same_content(found, drafts.setdefault(found.name, found)):
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
        manifest, text = column_json(release.manifest), manifest_text(release)
        manifest.encode()
    except (ValueError, TypeError, RecursionError, StopIteration):
        issues.append(Issue("manifest", "it cannot be read", _AGAIN))
    issues += _manifest_faults(release, manifest, text)
    version = Version.parse(release.name.version)
    if issues or version is None:
        return [Issue(f"{release.name}: {one.place}"[:400], one.reason, one.fix) for one in issues]
    tool_type = as_text(release.manifest.get("tool_type"))
    order_of = (version.key, bool(version.pre))
    return VersionDraft(release, release.name, release.executor, release.digest, *order_of, tool_type, manifest, text)


def _manifest_faults(release: Release, manifest: str, text: str | None) -> Iterator[Issue]:
    # PostgreSQL keeps a NUL in no text, be it escaped.
    if ("\\u0000" in manifest and _NUL.search(manifest)) or (text is not None and "\0" in text):
        yield Issue("manifest", "it holds a NUL", "Write it as plain text.")
    if _TYPE.fullmatch(as_text(release.manifest.get("tool_type"))) is None:
        yield Issue("manifest.tool_type", "it names no type", _AGAIN)
    if release.is_official and release.name.namespace != BUILTIN_NAMESPACE:
        yield Issue("is_official", f"nothing in {release.name.namespace[:64]!r} is official", _AGAIN)
    if not is_stated(release):
        yield Issue("statement", "its file with the manifest is not the one that was stated", _AGAIN)


_TOOL_COLUMNS = (
    "id", "tool_id", "namespace", "name", "description", "tool_type", "executor_id", "category", "subcategory", "tags",
    "is_official", "is_builtin", "visibility", "latest_version", "created_at", "updated_at",
)  # fmt: skip
_VERSION_COLUMNS = (
    "id", "tool_id", "version", "version_key", "place", "manifest", "manifest_yaml", "manifest_sha256",
    "manifest_canon", "content_hash", "executor_ref", "executor_namespace", "executor_tool_id", "executor_version",
    "executor_hash", "executor_version_id", "closure_hash", "depth", "changelog", "is_latest", "is_prerelease",
    "published_by", "created_at", "sealed_at", "yanked_at", "yanked_reason", "deprecated_at", "deprecated_reason",
)  # fmt: skip


class NewVersion(Struct, frozen=True):
    """A draft and the row it becomes."""

    draft: VersionDraft
    tool: str
    """The id of the item."""
    row: SealedVersion
    below: str | None
    """The id of its executor's version."""

    @property
    def standing(self) -> VersionRank:
        """What decides whether it is the latest."""
        draft = self.draft
        return VersionRank(
            self.row.id, draft.key, draft.is_prerelease, draft.release.yanked is not None, is_latest=False
        )


def publish(
    transaction: Transaction, database: Database, sight: VisibilityFilter, drafts: Sequence[VersionDraft]
) -> Mapping[VersionName, PublishResult]:
    """Store the drafts that are not published yet, and return the result for each draft, by its name."""
    stored = look_up(transaction, _items(drafts))
    closures = _closures(drafts, stored)
    conflicts = [
        str(draft.name)
        for draft in drafts
        if (known := stored.versions.get(draft.name))
        and (known.digest, known.closure) != (draft.digest, closures[draft.name])
    ]
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


def _closures(drafts: Sequence[VersionDraft], stored: PublishedRows) -> Mapping[VersionName, str]:
    """Return the closure of each draft, which is ordered after its executor or finds it in the store."""
    found = {name: row.closure for name, row in stored.versions.items()}
    for draft in drafts:
        found[draft.name] = closure_of(draft.digest, closure_below(draft.executor, found))
    return found


def _items(drafts: Sequence[VersionDraft]) -> Iterator[ItemName]:
    for draft in drafts:
        yield draft.name.item
        if draft.executor is not None:
            yield draft.executor.name.item


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
        below = _executor(draft, draft.executor, stored, sight) if draft.executor else None
        row = SealedVersion(new_id(), draft.digest, closures[draft.name], below.depth + 1 if below else 1)
        stored.versions[draft.name] = row
        tool = stored.items[draft.name.item].id
        sealings.append(NewVersion(draft, tool, row, below.id if below else None))
    return sealings


def _executor(draft: VersionDraft, pin: Pin, stored: PublishedRows, sight: VisibilityFilter) -> SealedVersion | None:
    """Return the row of a draft's executor. None is valid for an executor that ships with another Kiwi release."""
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
    if found.depth >= MAX_LINKS:
        raise ChainTooDeep([draft.name.tool_id, pin.name.tool_id], limit=MAX_LINKS)
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
    _keep_namespaces(transaction, sealings, actor, now)
    transaction.insert("tools", _TOOL_COLUMNS, _new_tools(database, stored, latest.values(), now))
    store_blobs(transaction, blobs, now)
    # Files come before their version: from the moment it is there, it is sealed.
    transaction.insert("tool_version_files", FILE_COLUMNS, files)
    _make_room(transaction, stored, latest)
    transaction.insert(
        "tool_versions",
        _VERSION_COLUMNS,
        [_version_row(one, latest.get(one.tool) is one, actor, now) for one in sealings],
    )
    for tool, one in latest.items():
        if stored.standings.get(tool):
            update_item(transaction, database, tool, one.draft.name.version, one.draft.release.manifest, now)
    log.append(transaction, actor, _entries(sealings, now))


def _choose(stored: PublishedRows, sealings: Sequence[NewVersion]) -> Mapping[str, NewVersion]:
    """Return the new versions that become the latest of their items, by the item's id."""
    standings: dict[str, list[VersionRank]] = {}
    for one in sealings:
        standings.setdefault(one.tool, [*stored.standings.get(one.tool, [])]).append(one.standing)
    ids = {latest_of(group).id for group in standings.values()}
    return {one.tool: one for one in sealings if one.row.id in ids}


def _keep_namespaces(transaction: Transaction, sealings: Sequence[NewVersion], actor: str, now: str) -> None:
    names = {one.draft.name.namespace: None for one in sealings}
    for some in chunks(names):
        statement = filled("select namespace from namespaces where namespace in ($marks)", marks=placeholders(some))
        here = {row[0] for row in transaction.read(statement, some)}
        new = [(name, actor, now) for name in some if name not in here]
        transaction.insert("namespaces", ("namespace", "owner", "created_at"), new)


def _new_tools(
    database: Database, stored: PublishedRows, latest: Iterable[NewVersion], now: str
) -> Iterator[tuple[Value, ...]]:
    for one in latest:
        name, release = one.draft.name, one.draft.release
        item = stored.items[name.item]
        if item.is_new:
            yield (
                one.tool, name.tool_id, name.namespace, *item_columns(release.manifest, database), release.is_official,
                release.is_builtin, item.visibility, name.version, moment(release.created_at or now), now,
            )  # fmt: skip


def _make_room(transaction: Transaction, stored: PublishedRows, latest: Mapping[str, NewVersion]) -> None:
    """Clear `is_latest` of the versions that lose it: each item has at most one latest version."""
    tools = [tool for tool in latest if stored.standings.get(tool)]
    for some in chunks(tools):
        statement = "update tool_versions set is_latest = false where is_latest = true and tool_id in ($marks)"
        transaction.write(filled(statement, marks=placeholders(some)), some)


def _version_row(one: NewVersion, is_latest: bool, actor: str, now: str) -> tuple[Value, ...]:
    draft, release = one.draft, one.draft.release
    return (
        one.row.id, one.tool, draft.name.version, draft.key, release.place, draft.manifest, draft.text,
        draft.text_hash, release.statement.decode(), draft.digest, *_pin(draft.executor), one.below, one.row.closure,
        one.row.depth, release.changelog, is_latest, draft.is_prerelease,
        release.published_by or actor, moment(release.created_at or now), now,
        *_status_values(release.yanked, now), *_status_values(release.deprecated, now),
    )  # fmt: skip


def _pin(pin: Pin | None) -> tuple[Value, ...]:
    if pin is None:
        return (None,) * 5
    return (pin.ref, *pin.name.item, pin.name.version, pin.digest)


def _status_values(note: StatusNote | None, now: str) -> tuple[Value, Value]:
    return (moment(note.at or now), note.reason) if note else (None, None)


def _entries(sealings: Sequence[NewVersion], now: str) -> Iterator[log.LogEntry]:
    op: Op
    for one in sealings:
        draft, row = one.draft, one.row
        yield log.LogEntry("publish", draft.name, row.digest, row.closure, now)
        for op, note in (("yank", draft.release.yanked), ("deprecate", draft.release.deprecated)):
            if note is not None:
                yield log.LogEntry(op, draft.name, row.digest, row.closure, moment(note.at or now), note.reason)
