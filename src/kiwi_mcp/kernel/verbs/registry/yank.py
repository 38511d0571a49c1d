"""registry yank, deprecate, rollback: the status of published versions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from kiwi_mcp.catalog.references import Ref
from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.names import Version
from kiwi_mcp.domain.registry import VersionInfo
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.verb import AUTHOR, Argument, DryRun, NameText, Option, Response, verb
from kiwi_mcp.kernel.verbs.registry.versions import (
    PublishedItemRequest,
    VersionLine,
    matching,
    published_versions,
    save_namespaces,
    version_rows,
)
from kiwi_mcp.kernel.view import Data, Notice, ViewItem, next_hint
from kiwi_mcp.store.registry.publish import StatusOp
from kiwi_mcp.store.registry.registry import Registry

Reason = Annotated[
    Annotated[str, Meta(max_length=1_000)], Option("Why; everyone who reads the history sees it.", "--reason", "-m")
]
Undo = Annotated[bool, Option("Take it back.")]


class VersionStatusResponse(Response, frozen=True, kw_only=True):
    """The versions with another status. A planned change lists the whole versions, a change only their numbers."""

    tool_id: str
    action: str
    status: str
    message: str
    versions: list[VersionLine | str] | UnsetType = UNSET
    latest: str | None | UnsetType = UNSET
    yanked: list[str] | UnsetType = UNSET
    to: str | UnsetType = UNSET
    next: str | UnsetType = UNSET


def _view(response: VersionStatusResponse) -> Iterator[ViewItem]:
    if response.status == "planned":
        yield from version_rows([one for one in response.versions or () if isinstance(one, VersionLine)])
        yield Notice(response.message)
        return
    yield Data(response.message)
    yield from next_hint(response.next)
    if response.latest:
        yield Notice(f"  latest: {response.latest}")


class DeprecateRequest(PublishedItemRequest, frozen=True, kw_only=True):
    """Which versions to deprecate, and why."""

    reason: Reason = ""
    undo: Undo = False
    dry_run: DryRun = False


@verb(
    "deprecate",
    group="registry",
    wire=("execute", "deprecate"),
    needs_receipt=True,
    access=AUTHOR,
    writes_registry=True,
    aliases=("deprecate",),
    shows=_view,
)
def deprecate(request: DeprecateRequest, context: VerbContext) -> VersionStatusResponse:
    """Warn the users of a version, of a range, or of every version. They still run."""
    op: StatusOp = "undeprecate" if request.undo else "deprecate"
    status = "no longer deprecated" if request.undo else "deprecated"
    every = published_versions(request.item_id, request.project_path, context)
    found = matching(Ref.parse(request.item_id), every)
    if request.dry_run:
        return _planned("deprecate", found, status)
    return _set_status("deprecate", found, op, status, request.reason, context.registry())


class YankRequest(DeprecateRequest, frozen=True, kw_only=True):
    """Which version to yank, and why."""

    item_id: Annotated[NameText, Argument("One exact version: name@1.2.3.", "ITEM")]


@verb(
    "yank",
    group="registry",
    wire=("execute", "yank"),
    access=AUTHOR,
    writes_registry=True,
    needs_receipt=True,
    aliases=("yank",),
    shows=_view,
)
async def yank(request: YankRequest, context: VerbContext) -> VersionStatusResponse:
    """Take a version out of use: only a request that names it exactly still gets it."""
    op: StatusOp = "unyank" if request.undo else "yank"
    status = "taken up again" if request.undo else "yanked"

    def work() -> VersionStatusResponse:
        found = _exact(request, context)
        if request.dry_run:
            return _planned("yank", found, status)
        return _set_status("yank", found, op, status, request.reason, context.registry())

    async with save_namespaces(context, is_planned=request.dry_run):
        return await asyncio.to_thread(work)


def _exact(request: YankRequest, context: VerbContext) -> Sequence[VersionInfo]:
    """Return the one version that a request names exactly, or refuse the request."""
    item, ref = request.item_id, Ref.parse(request.item_id)
    if ref.version is None:
        raise InvalidRequest(
            "Yanking takes one version out of use, and none is named.",
            suggestion=f"Name it: `{item}@1.2.3`. `kiwi rollback {item}` goes back to the version before.",
        )
    found = matching(ref, published_versions(item, request.project_path, context))
    if not ref.is_exactly(found[0]):
        raise InvalidRequest(
            f"Yanking takes one version out of use, and {item!r} is not the exact name of one.",
            suggestion=f"Name one of those that it covers: {', '.join(f'`{listed.name}`' for listed in found)}.",
        )
    return found


class RollbackRequest(PublishedItemRequest, frozen=True, kw_only=True):
    """Which version to return to, and why."""

    to: Annotated[NameText | None, Option("The version to return to; the one before otherwise.", metavar="VERSION")] = (
        None
    )
    reason: Reason = ""
    dry_run: DryRun = False


@verb(
    "rollback",
    group="registry",
    wire=("execute", "rollback"),
    access=AUTHOR,
    writes_registry=True,
    needs_receipt=True,
    aliases=("rollback",),
    shows=_view,
)
async def rollback(request: RollbackRequest, context: VerbContext) -> VersionStatusResponse:
    """Return to an earlier version: newer ones are yanked."""
    async with save_namespaces(context, is_planned=request.dry_run):
        return await asyncio.to_thread(_rolled_back, request, context)


def _rolled_back(request: RollbackRequest, context: VerbContext) -> VersionStatusResponse:
    registry = context.registry()
    target, newer = _rollback_target(request, context)
    if request.dry_run:
        planned = _planned("rollback", newer or [target], "yanked" if newer else "taken up again")
        return replace(planned, to=str(target.name))
    if target.yanked is not None:
        registry.set_status([target.name], "unyank")
    if newer:
        reason = request.reason or f"rolled back to {target.name.version}"
        registry.set_status([listed.name for listed in newer], "yank", reason)
    undo = f"{newer[0].name} --undo" if newer else str(target.name)
    return VersionStatusResponse(
        tool_id=target.name.tool_id,
        action="rollback",
        status="rolled back",
        message=f"{target.name} is the latest again",
        latest=_latest(target, registry),
        yanked=[listed.name.version for listed in newer],
        next=f"Take it back with `kiwi yank {undo}`.",
    )


def _rollback_target(request: RollbackRequest, context: VerbContext) -> tuple[VersionInfo, Sequence[VersionInfo]]:
    """Return the version that a rollback leads to, and the newer ones that are yanked for it."""
    found = published_versions(request.item_id, request.project_path, context)
    in_use = [listed for listed in found if listed.yanked is None]
    target = _target(Ref.parse(request.item_id), request.to, in_use, found)
    newer = [listed for listed in in_use if _order(listed) > _order(target)]
    if not newer and target.yanked is None:
        raise InvalidRequest(
            f"{target.name} is the newest version that is in use already.",
            suggestion=f"`kiwi versions {request.item_id}` lists what there is.",
        )
    return target, newer


def _target(ref: Ref, to: str | None, in_use: Sequence[VersionInfo], found: Sequence[VersionInfo]) -> VersionInfo:
    if to is not None:
        return matching(Ref(ref.name, version=to), found)[0]
    latest = next((_order(one) for one in in_use if one.is_latest), Version(0, 0, 0))
    earlier = [one for one in in_use if _order(one) < latest]
    if not earlier:
        raise InvalidRequest(
            f"{ref.name!r} has no earlier version to go back to.",
            suggestion=f"Yank the only one with `kiwi yank {found[0].name}`, or publish a new one.",
        )
    # As for the latest version, a pre-release counts only where there is no release.
    return next((one for one in earlier if not _order(one).pre), earlier[0])


def _set_status(
    action: str, found: Sequence[VersionInfo], op: StatusOp, status: str, reason: str, registry: Registry
) -> VersionStatusResponse:
    registry.set_status([listed.name for listed in found], op, reason)
    names = ", ".join(str(listed.name) for listed in found)
    return VersionStatusResponse(
        tool_id=found[0].name.tool_id,
        action=action,
        status=status,
        message=f"{names} {'is' if len(found) == 1 else 'are'} {status}",
        versions=[listed.name.version for listed in found],
        latest=_latest(found[0], registry),
    )


def _planned(action: str, found: Sequence[VersionInfo], status: str) -> VersionStatusResponse:
    return VersionStatusResponse(
        tool_id=found[0].name.tool_id,
        action=action,
        status="planned",
        message=f"{', '.join(str(listed.name) for listed in found)} would be {status}",
        versions=[VersionLine.of(listed) for listed in found],
    )


def _order(listed: VersionInfo) -> Version:
    return Version.parse(listed.name.version) or Version(0, 0, 0)


def _latest(listed: VersionInfo, registry: Registry) -> str | None:
    found = registry.named(listed.name.tool_id, namespace=listed.name.namespace)
    return next((one.name.version for one in found if one.is_latest), None)
