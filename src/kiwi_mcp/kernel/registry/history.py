"""The history of an item: its versions, what was said of them since, and whether all of it is still whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Literal

from kiwi_mcp.catalog.refs import Ref
from kiwi_mcp.domain.errors import InvalidRequest, ToolNotFound, VersionNotFound
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.registry import Listed
from kiwi_mcp.domain.version import Version
from kiwi_mcp.kernel.registry.words import ListWords, MarkWords, RollbackWords
from kiwi_mcp.store.registry import Registry

_MAX_ISSUES = 1_000
_PAST: dict[str, str] = {
    "yank": "yanked",
    "unyank": "taken up again",
    "deprecate": "deprecated",
    "undeprecate": "no longer deprecated",
}


def listing(words: ListWords, registry: Registry) -> JsonObject:
    """Return the items of a registry, the latest version of each."""
    found = registry.find(namespace=words.namespace, tool_type=words.tool_type, limit=words.limit + 1)
    shown = found[: words.limit]
    told: dict[str, Json] = {
        "action": "list",
        "registry": registry.database.url,
        "items": [_line(listed) for listed in shown],
        "total": len(shown),
    }
    if len(found) > words.limit:
        told["suggestion"] = f"There are more than {words.limit}: raise `limit`, or search with `source: registry`."
    return told


def versions(item: str, registry: Registry) -> JsonObject:
    """Return every version of an item, the newest first."""
    found = every_version(Ref.parse(item), registry)
    return {
        "tool_id": found[0].name.tool_id,
        "action": "versions",
        "namespace": found[0].name.namespace,
        "visibility": found[0].visibility,
        "versions": [_version(listed) for listed in found],
    }


def mark(item: str, kind: Literal["yank", "deprecate"], words: MarkWords, registry: Registry) -> JsonObject:
    """Say of one version, or of all that a reference covers, that it should not be used any more; or take it back."""
    ref = Ref.parse(item)
    if kind == "yank" and ref.version is None:
        raise InvalidRequest(
            "Yanking takes one version out of use, and none is named.",
            suggestion=f"Name it: `{ref.name}@1.2.3`. `kiwi rollback {ref.name}` goes back to the version before.",
        )
    found = covered(ref, registry)
    op: Literal["yank", "unyank", "deprecate", "undeprecate"] = kind
    if words.undo:
        op = "unyank" if kind == "yank" else "undeprecate"
    registry.mark([listed.name for listed in found], op, words.reason)
    names = ", ".join(str(listed.name) for listed in found)
    return {
        "tool_id": ref.name,
        "action": kind,
        "status": _PAST[op],
        "message": f"{names} {'is' if len(found) == 1 else 'are'} {_PAST[op]}",
        "versions": [listed.name.version for listed in found],
        "latest": _latest(found[0], registry),
    }


def rollback(item: str, words: RollbackWords, registry: Registry) -> JsonObject:
    """Make an earlier version the latest again, by yanking every one that is newer."""
    ref = Ref.parse(item)
    found = every_version(ref, registry)
    standing = [listed for listed in found if listed.yanked is None]
    target = _target(ref, words.to, standing, found)
    newer = [listed for listed in standing if _order(listed) > _order(target)]
    if not newer:
        raise InvalidRequest(
            f"{target.name} is the newest version that is in use already.",
            suggestion=f"`kiwi versions {ref.name}` lists what there is.",
        )
    reason = words.reason or f"rolled back to {target.name.version}"
    if target.yanked is not None:
        registry.mark([target.name], "unyank")
    registry.mark([listed.name for listed in newer], "yank", reason)
    return {
        "tool_id": ref.name,
        "action": "rollback",
        "status": "rolled back",
        "message": f"{target.name} is the latest again",
        "latest": _latest(target, registry),
        "yanked": [listed.name.version for listed in newer],
        "next": f"Take it back with `kiwi yank {ref.name}@{newer[0].name.version} --undo`.",
    }


def verify(item: str | None, registry: Registry) -> JsonObject:
    """Return all that is not as it was sealed: of one item's versions, or of the whole registry."""
    chosen = covered(Ref.parse(item), registry) if item else None
    found = list(islice(registry.verify([one.id for one in chosen] if chosen else None), _MAX_ISSUES))
    return {
        **({"tool_id": chosen[0].name.tool_id} if chosen else {}),
        "action": "verify",
        "status": "damaged" if found else "verified",
        "registry": registry.database.url,
        "checked": len(chosen) if chosen is not None else registry.count(),
        "issues": [issue.to_json() for issue in found],
        "message": f"{len(found)} fault{'s' * (len(found) != 1)} found" if found else "Everything is as it was sealed",
    }


def every_version(ref: Ref, registry: Registry) -> Sequence[Listed]:
    """Return all versions of the item that a reference names, the newest first; those of one namespace only."""
    found = registry.named(ref.name, namespace=ref.namespace if ref.source == "registry" else None)
    if not found:
        raise ToolNotFound(ref.name)
    home = found[0].name.namespace
    return [listed for listed in found if listed.name.namespace == home]


def covered(ref: Ref, registry: Registry) -> Sequence[Listed]:
    """Return the versions that a reference covers, the newest first."""
    return _fitting(ref, every_version(ref, registry))


def _fitting(ref: Ref, found: Sequence[Listed]) -> Sequence[Listed]:
    meant = [one for one in found if ref.is_exactly(one) or (not ref.digest and ref.covers(one.name.version))]
    if not meant:
        raise VersionNotFound(ref.name, ref.version or "", found=[one.name.version for one in found])
    return meant


def _target(ref: Ref, to: str | None, standing: Sequence[Listed], found: Sequence[Listed]) -> Listed:
    if to is not None:
        return _fitting(Ref(ref.name, version=to), found)[0]
    if len(standing) < 2:  # noqa: PLR2004 - the one in use and one before it
        raise InvalidRequest(
            f"{ref.name!r} has no earlier version to go back to.",
            suggestion=f"Yank the only one with `kiwi yank {ref.name}@{found[0].name.version}`, or publish a new one.",
        )
    return standing[1]


def _order(listed: Listed) -> Version:
    return Version.parse(listed.name.version) or Version(0, 0, 0)


def _latest(listed: Listed, registry: Registry) -> str | None:
    found = registry.named(listed.name.tool_id, namespace=listed.name.namespace)
    return next((one.name.version for one in found if one.is_latest), None)


def _line(listed: Listed) -> JsonObject:
    return {
        "name": listed.name.tool_id,
        "namespace": listed.name.namespace,
        "version": listed.name.version,
        "tool_type": listed.tool_type,
        "description": listed.description.partition("\n")[0][:200],
        "visibility": listed.visibility,
        "identity": f"registry/{listed.name}",
        "digest": listed.digest,
    }


def _version(listed: Listed) -> JsonObject:
    told: dict[str, Json] = {
        "version": listed.name.version,
        "is_latest": listed.is_latest,
        "digest": listed.digest,
        "closure": listed.closure,
        "published_at": listed.created_at,
        "published_by": listed.published_by,
        "executor": str(listed.executor.name) if listed.executor else None,
    }
    if listed.changelog:
        told["changelog"] = listed.changelog
    for word, said in (("yanked", listed.yanked), ("deprecated", listed.deprecated)):
        if said is not None:
            told[word] = {"at": said.at, "reason": said.reason}
    return told
