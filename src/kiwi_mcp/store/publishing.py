"""Publishing: drafts in, sealed versions out, all of them in one transaction or none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kiwi_mcp.domain.errors import ArtifactRefused, ChainTooDeep, InvalidRequest, MissingLink, VersionConflict
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.registry import Mark, Pin, Published, VersionName, closure_below, closure_of
from kiwi_mcp.domain.times import moment
from kiwi_mcp.store import log
from kiwi_mcp.store.contents import FILE_COLUMNS, file_rows, keep_blobs
from kiwi_mcp.store.database import Database, Transaction, Value
from kiwi_mcp.store.drafts import Draft
from kiwi_mcp.store.latest import Standing, latest_of, show, words_of
from kiwi_mcp.store.order import MAX_LINKS
from kiwi_mcp.store.rows import Sight, chunks, filled, marks_for, new_id
from kiwi_mcp.store.stored import Item, ItemName, Sealed, Stored, look_up

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


class Sealing(NamedTuple):
    """A draft and the row it becomes."""

    draft: Draft
    tool: str
    """The id of the item."""
    row: Sealed
    below: str | None
    """The id of the version it stands on."""

    @property
    def standing(self) -> Standing:
        """What decides whether it is the latest."""
        draft = self.draft
        return Standing(self.row.id, draft.key, draft.is_prerelease, draft.release.yanked is not None, is_latest=False)


def publish(
    transaction: Transaction, database: Database, sight: Sight, drafts: Sequence[Draft]
) -> Mapping[VersionName, Published]:
    """Keep what is not there yet, and return what came of each draft, by its name."""
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
        draft.name: Published(draft.name, draft.digest, stored.versions[draft.name].closure, draft.name in new)
        for draft in drafts
    }


def _closures(drafts: Sequence[Draft], stored: Stored) -> Mapping[VersionName, str]:
    """Return the closure of each draft, which stands behind its executor or finds it in the store."""
    found = {name: row.closure for name, row in stored.versions.items()}
    for draft in drafts:
        found[draft.name] = closure_of(draft.digest, closure_below(draft.executor, found))
    return found


def _items(drafts: Sequence[Draft]) -> Iterator[ItemName]:
    for draft in drafts:
        yield draft.name.namespace, draft.name.tool_id
        if draft.executor is not None:
            yield draft.executor.name.namespace, draft.executor.name.tool_id


def _check_types(transaction: Transaction, drafts: Sequence[Draft]) -> None:
    """Refuse executors where a type has none, and their absence where it needs one; keep types that are new."""
    rows = transaction.read("select tool_type, executor_rule from tool_types")
    rules = {str(word): str(rule) for word, rule in rows}
    issues: list[Issue] = []
    for draft in drafts:
        rule = rules.get(draft.tool_type)
        if (draft.executor is None and rule == "required") or (draft.executor is not None and rule == "forbidden"):
            reason = f"for a {draft.tool_type} an executor is {rule}"
            issues.append(Issue(f"{draft.name}: executor", reason, "Mend `executor` in its manifest."))
    if issues:
        raise ArtifactRefused("The set of versions", issues[:100])
    new = {draft.tool_type for draft in drafts} - rules.keys()
    transaction.insert("tool_types", ("tool_type",), [(word,) for word in sorted(new)])


def _seal(
    drafts: Sequence[Draft], stored: Stored, sight: Sight, closures: Mapping[VersionName, str]
) -> Sequence[Sealing]:
    """Give every draft its row; drafts stand behind their executors, so each finds the one it is pinned to."""
    for draft in drafts:
        home = (draft.name.namespace, draft.name.tool_id)
        stored.items.setdefault(home, Item(new_id(), draft.release.visibility, is_new=True))
    sealings = []
    for draft in drafts:
        below = _executor(draft, draft.executor, stored, sight) if draft.executor else None
        row = Sealed(new_id(), draft.digest, closures[draft.name], below.depth + 1 if below else 1)
        stored.versions[draft.name] = row
        tool = stored.items[draft.name.namespace, draft.name.tool_id].id
        sealings.append(Sealing(draft, tool, row, below.id if below else None))
    return sealings


def _executor(draft: Draft, pin: Pin, stored: Stored, sight: Sight) -> Sealed | None:
    """Return the row that a draft stands on; there need not be one for another release of what ships with Kiwi."""
    found, home = stored.versions.get(pin.name), stored.items.get((pin.name.namespace, pin.name.tool_id))
    if pin.is_builtin:
        return found if found and found.digest == pin.digest else None
    if (
        found is None
        or home is None
        or found.digest != pin.digest
        or not sight.sees(pin.name.namespace, home.visibility)
    ):
        raise MissingLink(str(pin.name), chain=[draft.name.tool_id])
    item = stored.items[draft.name.namespace, draft.name.tool_id]
    if home.visibility == "private" and (draft.name.namespace, item.visibility) != (pin.name.namespace, "private"):
        raise seen_further(str(draft.name), str(pin.name))
    if found.depth >= MAX_LINKS:
        raise ChainTooDeep([draft.name.tool_id, pin.name.tool_id], limit=MAX_LINKS)
    return found


def seen_further(name: str, executor: str) -> InvalidRequest:
    """Return the refusal of an item that others would see while they cannot see what it stands on."""
    return InvalidRequest(
        f"{name} stands on {executor}, which is private: those who see the one could not see the other.",
        suggestion="Make it private in the same namespace, or make what it stands on public or unlisted first.",
    )


def _write(
    transaction: Transaction, database: Database, sight: Sight, stored: Stored, sealings: Sequence[Sealing]
) -> None:
    now, actor = moment(), sight.actor.name
    latest = _choose(stored, sealings)
    blobs: dict[str, bytes] = {}
    files = [row for one in sealings for row in file_rows(one.draft.release, one.row.id, now, blobs)]
    _keep_namespaces(transaction, sealings, actor, now)
    transaction.insert("tools", _TOOL_COLUMNS, _new_tools(database, stored, latest.values(), now))
    keep_blobs(transaction, blobs, now)
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
            show(transaction, database, tool, one.draft.name.version, one.draft.release.manifest, now)
    log.append(transaction, actor, _entries(sealings, now))


def _choose(stored: Stored, sealings: Sequence[Sealing]) -> Mapping[str, Sealing]:
    """Return the new versions that become the latest of their items, by the item's id."""
    standings: dict[str, list[Standing]] = {}
    for one in sealings:
        standings.setdefault(one.tool, [*stored.standings.get(one.tool, [])]).append(one.standing)
    ids = {latest_of(group).id for group in standings.values()}
    return {one.tool: one for one in sealings if one.row.id in ids}


def _keep_namespaces(transaction: Transaction, sealings: Sequence[Sealing], actor: str, now: str) -> None:
    names = {one.draft.name.namespace: None for one in sealings}
    for some in chunks(names):
        statement = filled("select namespace from namespaces where namespace in ($marks)", marks=marks_for(some))
        here = {row[0] for row in transaction.read(statement, some)}
        new = [(name, actor, now) for name in some if name not in here]
        transaction.insert("namespaces", ("namespace", "owner", "created_at"), new)


def _new_tools(database: Database, stored: Stored, latest: Iterable[Sealing], now: str) -> Iterator[tuple[Value, ...]]:
    for one in latest:
        name, release = one.draft.name, one.draft.release
        item = stored.items[name.namespace, name.tool_id]
        if item.is_new:
            yield (
                one.tool, name.tool_id, name.namespace, *words_of(release.manifest, database), release.is_official,
                release.is_builtin, item.visibility, name.version, moment(release.created_at or now), now,
            )  # fmt: skip


def _make_room(transaction: Transaction, stored: Stored, latest: Mapping[str, Sealing]) -> None:
    """Let go of the latest versions that are no longer so: there is never a second one."""
    tools = [tool for tool in latest if stored.standings.get(tool)]
    for some in chunks(tools):
        statement = "update tool_versions set is_latest = false where is_latest = true and tool_id in ($marks)"
        transaction.write(filled(statement, marks=marks_for(some)), some)


def _version_row(one: Sealing, is_latest: bool, actor: str, now: str) -> tuple[Value, ...]:
    draft, release = one.draft, one.draft.release
    return (
        one.row.id, one.tool, draft.name.version, draft.key, release.place, draft.manifest, draft.text,
        draft.text_hash, release.statement.decode(), draft.digest, *_pin(draft.executor), one.below, one.row.closure,
        one.row.depth, release.changelog, is_latest, draft.is_prerelease,
        release.published_by or actor, moment(release.created_at or now), now,
        *_mark(release.yanked, now), *_mark(release.deprecated, now),
    )  # fmt: skip


def _pin(pin: Pin | None) -> tuple[Value, ...]:
    if pin is None:
        return (None,) * 5
    return (pin.ref, pin.name.namespace, pin.name.tool_id, pin.name.version, pin.digest)


def _mark(mark: Mark | None, now: str) -> tuple[Value, Value]:
    return (moment(mark.at or now), mark.reason) if mark else (None, None)


def _entries(sealings: Sequence[Sealing], now: str) -> Iterator[log.Entry]:
    for one in sealings:
        draft, row = one.draft, one.row
        yield log.Entry("publish", draft.name, row.digest, row.closure, now)
        if (mark := draft.release.yanked) is not None:
            yield log.Entry("yank", draft.name, row.digest, row.closure, moment(mark.at or now), mark.reason)
        if (mark := draft.release.deprecated) is not None:
            yield log.Entry("deprecate", draft.name, row.digest, row.closure, moment(mark.at or now), mark.reason)
