"""What is said of a version or an item after it was sealed: yanked, deprecated, seen by whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias, cast

from kiwi_mcp.domain.errors import (
    InvalidRequest,
    NamespaceDenied,
    ToolNotFound,
    VersionNotFound,
    listing,
)
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.registry import Event, VersionName, Visibility
from kiwi_mcp.domain.times import moment
from kiwi_mcp.store import log
from kiwi_mcp.store.database import Database, Transaction
from kiwi_mcp.store.latest import choose_again
from kiwi_mcp.store.publishing import seen_further
from kiwi_mcp.store.rows import Sight, filled
from kiwi_mcp.store.soundness import bad_text, bad_time, bad_visibility

MarkOp: TypeAlias = Literal["yank", "unyank", "deprecate", "undeprecate"]

_SET: Mapping[MarkOp, str] = {
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


class Found(NamedTuple):
    """A version that somebody may speak of."""

    tool: str
    id: str
    name: VersionName
    digest: str
    closure: str


def mark(database: Database, sight: Sight, names: Sequence[VersionName], op: MarkOp, *, reason: str, at: str) -> None:
    """Say something of versions, or take it back; what is so already is left as it is."""
    with database.transaction() as transaction:
        _mark(transaction, database, sight, names, op, reason=reason, at=at)


def settle_visibilities(transaction: Transaction, sight: Sight, said: Sequence[Event]) -> Sequence[Event]:
    """Let the items that are here be seen by whom it was said, and return what is left to be said."""
    rest = []
    for event in said:
        name = event.name
        if event.op == "visibility" and transaction.read(_HERE, (name.namespace, name.tool_id)):
            _show(transaction, sight, name.namespace, name.tool_id, event.reason)
        else:
            rest.append(event)
    return rest


def repeat(transaction: Transaction, database: Database, sight: Sight, said: Sequence[Event]) -> None:
    """Say again what was said elsewhere, in that order."""
    for (op, reason, at), group in groupby(said, key=lambda event: (event.op, event.reason, event.at)):
        names = [event.name for event in group]
        match op:
            case "visibility":
                for name in names:
                    _show(transaction, sight, name.namespace, name.tool_id, reason)
            case "yank" | "unyank" | "deprecate" | "undeprecate":
                _mark(transaction, database, sight, names, op, reason=reason, at=at)


def _mark(
    transaction: Transaction,
    database: Database,
    sight: Sight,
    names: Sequence[VersionName],
    op: MarkOp,
    *,
    reason: str,
    at: str,
) -> None:
    if op not in _SET:
        raise InvalidRequest(f"{str(op)[:64]!r} cannot be done to a version.", suggestion=f"Use {', '.join(_SET)}.")
    _check([*bad_text(reason, "reason"), *bad_time(at, "at")])
    now, is_said = moment(), op in {"yank", "deprecate"}
    time = moment(at or now)
    found = [_find(transaction, sight, name) for name in names]
    values = (time, reason) if is_said else (None, None)
    changed = [one for one in found if transaction.write(_SET[op], (*values, one.id))]
    for tool in {one.tool: None for one in changed}:
        choose_again(transaction, database, tool, now)
    entries = [log.Entry(op, one.name, one.digest, one.closure, time, reason) for one in changed]
    log.append(transaction, sight.actor.name, entries)


def set_visibility(database: Database, sight: Sight, namespace: str, tool_id: str, visibility: Visibility) -> None:
    """Let an item be seen by everybody, by whoever knows its name, or by members only."""
    with database.transaction() as transaction:
        _show(transaction, sight, namespace, tool_id, visibility)


def _show(transaction: Transaction, sight: Sight, namespace: str, tool_id: str, visibility: str) -> None:
    _check([*bad_visibility(visibility)])
    tool, current = _item(transaction, sight, namespace, tool_id)
    if current == visibility:
        return
    _check_sight(transaction, tool, namespace, tool_id, visibility)
    now = moment()
    transaction.write("update tools set visibility = ?, updated_at = ? where id = ?", (visibility, now, tool))
    entry = log.Entry("visibility", VersionName(namespace, tool_id, ""), "", "", now, visibility)
    log.append(transaction, sight.actor.name, [entry])


def _check(issues: Sequence[Issue]) -> None:
    if issues:
        raise InvalidRequest(listing("The request has", issues), suggestion=issues[0].fix)


def _find(transaction: Transaction, sight: Sight, name: VersionName) -> Found:
    tool, _ = _item(transaction, sight, name.namespace, name.tool_id)
    rows = cast("list[tuple[str, str, str, str]]", transaction.read(_VERSIONS, (tool,)))
    for id_, version, digest, closure in rows:
        if version == name.version:
            return Found(tool, id_, name, digest, closure)
    raise VersionNotFound(name.tool_id, name.version, found=[row[1] for row in rows])


def _item(transaction: Transaction, sight: Sight, namespace: str, tool_id: str) -> tuple[str, str]:
    """Return an item's id and visibility; to those who cannot see it, it is not there."""
    rows = transaction.read(filled(_ITEM, sees=sight.named), (namespace, tool_id, *sight.members))
    if not rows:
        raise ToolNotFound(tool_id)
    if not sight.actor.is_member(namespace):
        raise NamespaceDenied(namespace, namespaces=sight.actor.namespaces)
    ((tool, visibility),) = cast("list[tuple[str, str]]", rows)
    return tool, visibility


def _check_sight(transaction: Transaction, tool: str, namespace: str, tool_id: str, visibility: str) -> None:
    """Refuse to let an item be seen by anybody who cannot see what it stands on."""
    if visibility == "private":
        if transaction.read(_STOOD_ON, (tool, namespace)):
            raise InvalidRequest(
                f"{namespace}/{tool_id} cannot become private: published versions that others see stand on it.",
                suggestion="Make it unlisted, which keeps it out of lists and searches.",
            )
    elif rows := transaction.read(_STANDS_ON, (tool,)):
        version, *executor = (str(part) for part in rows[0])
        raise seen_further(str(VersionName(namespace, tool_id, version)), str(VersionName(*executor)))
