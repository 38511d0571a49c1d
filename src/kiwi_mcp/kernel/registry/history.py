"""The history of an item: its versions, what was said of them since, and whether all of it is still whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Literal

from kiwi_mcp.catalog.refs import Ref
from kiwi_mcp.domain.errors import InvalidRequest, ToolNotFound, VersionNotFound
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.registry import Listed
from kiwi_mcp.domain.version import Version
from kiwi_mcp.kernel.registry.words import ListWords, MarkWords, RollbackWords
from kiwi_mcp.store.marks import MarkOp
from kiwi_mcp.store.registry import Registry

_MAX_ISSUES = 1_000
_Kind = Literal["yank", "deprecate"]
_OPS: Mapping[tuple[_Kind, bool], tuple[MarkOp, str]] = MappingProxyType(
    {
        ("yank", False): ("yank", "yanked"),
        ("yank", True): ("unyank", "taken up again"),
        ("deprecate", False): ("deprecate", "deprecated"),
        ("deprecate", True): ("undeprecate", "no longer deprecated"),
    }
)
"""What is done for a kind of mark, or to take it back, and how it is told."""


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


def markable(item: str, kind: _Kind, registry: Registry) -> Sequence[Listed]:
    """Return what a mark is about: one version, or all that a reference covers."""
    ref = Ref.parse(item)
    if kind == "yank" and ref.version is None:
        raise InvalidRequest(
            "Yanking takes one version out of use, and none is named.",
            suggestion=f"Name it: `{item}@1.2.3`. `kiwi rollback {item}` goes back to the version before.",
        )
    return covered(ref, registry)


def mark(found: Sequence[Listed], kind: _Kind, words: MarkWords, registry: Registry) -> JsonObject:
    """Say of versions that they should not be used any more, or take it back."""
    op, told = _OPS[kind, words.undo]
    registry.mark([listed.name for listed in found], op, words.reason)
    names = ", ".join(str(listed.name) for listed in found)
    return {
        "tool_id": found[0].name.tool_id,
        "action": kind,
        "status": told,
        "message": f"{names} {'is' if len(found) == 1 else 'are'} {told}",
        "versions": [listed.name.version for listed in found],
        "latest": _latest(found[0], registry),
    }


def way_back(item: str, words: RollbackWords, registry: Registry) -> tuple[Listed, Sequence[Listed]]:
    """Return the version that a rollback leads to, and the newer ones that it takes out of use."""
    ref = Ref.parse(item)
    found = every_version(ref, registry)
    standing = [listed for listed in found if listed.yanked is None]
    target = _target(ref, words.to, standing, found)
    newer = [listed for listed in standing if _order(listed) > _order(target)]
    if not newer and target.yanked is None:
        raise InvalidRequest(
            f"{target.name} is the newest version that is in use already.",
            suggestion=f"`kiwi versions {item}` lists what there is.",
        )
    return target, newer


def rollback(target: Listed, newer: Sequence[Listed], words: RollbackWords, registry: Registry) -> JsonObject:
    """Make an earlier version the latest again, by yanking every one that is newer."""
    tool_id = target.name.tool_id
    reason = words.reason or f"rolled back to {target.name.version}"
    if target.yanked is not None:
        registry.mark([target.name], "unyank")
    if newer:
        registry.mark([listed.name for listed in newer], "yank", reason)
    back = f"{newer[0].name} --undo" if newer else str(target.name)
    return {
        "tool_id": tool_id,
        "action": "rollback",
        "status": "rolled back",
        "message": f"{target.name} is the latest again",
        "latest": _latest(target, registry),
        "yanked": [listed.name.version for listed in newer],
        "next": f"Take it back with `kiwi yank {back}`.",
    }


def planned_mark(found: Sequence[Listed], kind: _Kind, words: MarkWords) -> JsonObject:
    """Return which versions a mark would be made on, with nothing done."""
    return _planned(kind, found, _OPS[kind, words.undo][1])


def planned_rollback(target: Listed, newer: Sequence[Listed]) -> JsonObject:
    """Return which version would be the latest again, and which would be yanked for it, with nothing done."""
    return {**_planned("rollback", newer or [target], "yanked" if newer else "taken up again"), "to": str(target.name)}


def _planned(action: str, found: Sequence[Listed], word: str) -> JsonObject:
    return {
        "tool_id": found[0].name.tool_id,
        "action": action,
        "status": "planned",
        "message": f"{', '.join(str(listed.name) for listed in found)} would be {word}",
        "versions": [_version(listed) for listed in found],
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
    latest = next((_order(one) for one in standing if one.is_latest), Version(0, 0, 0))
    earlier = [one for one in standing if _order(one) < latest]
    if not earlier:
        raise InvalidRequest(
            f"{ref.name!r} has no earlier version to go back to.",
            suggestion=f"Yank the only one with `kiwi yank {found[0].name}`, or publish a new one.",
        )
    # As for the latest version, a pre-release counts only where there is no release.
    return next((one for one in earlier if not _order(one).pre), earlier[0])


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
        **_marks(listed),
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
    return {**told, **_marks(listed)}


def _marks(listed: Listed) -> JsonObject:
    marks = (("yanked", listed.yanked), ("deprecated", listed.deprecated))
    return {word: {"at": said.at, "reason": said.reason} for word, said in marks if said is not None}
