"""Yank, deprecate, visibility."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal, TypeAlias, cast

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.errors import InvalidRequest, NamespaceDenied, ToolNotFound, VersionNotFound, listing
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.registry import RegistryEvent, VersionName
from kiwi_mcp.domain.times import moment
from kiwi_mcp.store.database import Database, Transaction
from kiwi_mcp.store.registry import log
from kiwi_mcp.store.registry.publish import visibility_conflict
from kiwi_mcp.store.registry.release_check import bad_text, bad_time, bad_visibility
from kiwi_mcp.store.registry.rows import VisibilityFilter, filled, update_latest

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
_STOOD_ON = """select 1 from tool_versions e cross join tool_versions v cross join tools t
where e.tool_id = ? and v.executor_version_id = e.id and t.id = v.tool_id
and t.id <> e.tool_id and (t.visibility <> 'private' or t.namespace <> ?) limit 1"""


class StatusRow(Struct, frozen=True):
    """A version with a status that the actor may change."""

    tool: str
    id: str
    name: VersionName
    digest: str
    closure: str


def set_status(
    database: Database, sight: VisibilityFilter, names: Sequence[VersionName], op: StatusOp, *, reason: str, at: str
) -> None:
    """Set or clear a status of versions. Versions that already have it stay as they are."""
    with database.transaction() as transaction:
        _set(transaction, database, sight, names, op, reason=reason, at=at)


def apply_visibilities(
    transaction: Transaction, sight: VisibilityFilter, events: Sequence[RegistryEvent]
) -> Sequence[RegistryEvent]:
    """Apply the visibility events to items that are stored already, and return the remaining events."""
    rest = []
    for event in events:
        name = event.name
        if event.op == "visibility" and transaction.read(_HERE, name.item):
            _show(transaction, sight, name, event.reason)
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
                    _show(transaction, sight, name, reason)
            case "yank" | "unyank" | "deprecate" | "undeprecate":
                _set(transaction, database, sight, names, op, reason=reason, at=at)


def _set(
    transaction: Transaction,
    database: Database,
    sight: VisibilityFilter,
    names: Sequence[VersionName],
    op: StatusOp,
    *,
    reason: str,
    at: str,
) -> None:
    if op not in _SET:
        raise InvalidRequest(f"{str(op)[:64]!r} cannot be done to a version.", suggestion=f"Use {', '.join(_SET)}.")
    _check([*bad_text(reason, "reason"), *bad_time(at, "at")])
    now, is_set = moment(), op in {"yank", "deprecate"}
    time = moment(at or now)
    found = [_find(transaction, sight, name) for name in names]
    values = (time, reason) if is_set else (None, None)
    changed = [one for one in found if transaction.write(_SET[op], (*values, one.id))]
    for tool in {one.tool: None for one in changed}:
        update_latest(transaction, database, tool, now)
    entries = [log.LogEntry(op, one.name, one.digest, one.closure, time, reason) for one in changed]
    log.append(transaction, sight.actor.name, entries)


def _show(transaction: Transaction, sight: VisibilityFilter, name: VersionName, visibility: str) -> None:
    _check([*bad_visibility(visibility)])
    tool, current = _item(transaction, sight, name)
    if current == visibility:
        return
    _check_sight(transaction, tool, name, visibility)
    now = moment()
    transaction.write("update tools set visibility = ?, updated_at = ? where id = ?", (visibility, now, tool))
    entry = log.LogEntry("visibility", replace(name, version=""), "", "", now, visibility)
    log.append(transaction, sight.actor.name, [entry])


def _check(issues: Sequence[Issue]) -> None:
    if issues:
        raise InvalidRequest(listing("The request has", issues), suggestion=issues[0].fix)


def _find(transaction: Transaction, sight: VisibilityFilter, name: VersionName) -> StatusRow:
    tool, _ = _item(transaction, sight, name)
    rows = cast("list[tuple[str, str, str, str]]", transaction.read(_VERSIONS, (tool,)))
    for id_, version, digest, closure in rows:
        if version == name.version:
            return StatusRow(tool, id_, name, digest, closure)
    raise VersionNotFound(name.tool_id, name.version, found=[row[1] for row in rows])


def _item(transaction: Transaction, sight: VisibilityFilter, name: VersionName) -> tuple[str, str]:
    """Return an item's id and visibility. For actors who cannot see it, it does not exist."""
    rows = transaction.read(filled(_ITEM, sees=sight.named), (*name.item, *sight.members))
    if not rows:
        raise ToolNotFound(name.tool_id)
    if not sight.actor.is_member(name.namespace):
        raise NamespaceDenied(name.namespace, namespaces=sight.actor.namespaces)
    ((tool, visibility),) = cast("list[tuple[str, str]]", rows)
    return tool, visibility


def _check_sight(transaction: Transaction, tool: str, name: VersionName, visibility: str) -> None:
    """Refuse a visibility that would show an item to actors who cannot see its executor."""
    if visibility == "private":
        if transaction.read(_STOOD_ON, (tool, name.namespace)):
            raise InvalidRequest(
                f"{'/'.join(name.item)} cannot become private: published versions that others see depend on it.",
                suggestion="Make it unlisted, which keeps it out of lists and searches.",
            )
    elif rows := transaction.read(_STANDS_ON, (tool,)):
        version, *executor = (str(part) for part in rows[0])
        raise visibility_conflict(str(replace(name, version=version)), str(VersionName(*executor)))
