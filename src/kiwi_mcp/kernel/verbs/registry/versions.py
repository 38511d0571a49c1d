"""registry list, versions, diff, verify; deprecate, yank, rollback; and how requests name published versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from difflib import unified_diff
from functools import partial
from itertools import islice
from typing import Annotated, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, field
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.item_reader import load_bytes
from kiwi_mcp.catalog.references import Ref
from kiwi_mcp.catalog.release import trust_of_release
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, NotFound, ToolNotFound, VersionNotFound
from kiwi_mcp.domain.items import ItemType, Source, Tool
from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.names import Range, Version
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE, StatusNote, VersionInfo
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.permission import ItemVisibility
from kiwi_mcp.kernel.tool_names import write_namespaces
from kiwi_mcp.kernel.verb import (
    ANYONE,
    AUTHOR,
    AnyJson,
    Argument,
    DryRun,
    Item,
    NameText,
    Option,
    ProjectRequest,
    Response,
    Where,
    filled,
    verb,
)
from kiwi_mcp.kernel.view import Data, Notice, TableRow, ViewItem, issue_text, next_hint
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.manifest.signatures import fingerprint
from kiwi_mcp.manifest.trust import TrustFile
from kiwi_mcp.policy.admission import lookalikes
from kiwi_mcp.store.registry.publish import StatusOp
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.remote.sync import read_named

SHORT_DIGEST = 19
"""How much of a digest is shown: `sha256:` and twelve digits."""
_MAX_DIFF = 200_000
"""The maximum number of characters of differences in one response."""
_MAX_TEXT = 1_000_000
_MAX_ISSUES = 1_000
_LOOKED_AT = 10_000
_SIGNERS = 200
"""For how many items the response names the signer: each of these items is read for it."""
_EXIT_DAMAGED = 5
_FOLDERS: tuple[Where, ...] = ("project", "user")

Address = Annotated[str, Meta(max_length=2_000)]
Only = Annotated[NameText | None, Option("Only this namespace.", "--namespace", metavar="NAMESPACE")]
AcceptUnsigned = Annotated[bool, Option("Accept items without a signature.")]
TrustKey = Annotated[NameText | None, Option("Trust the publisher's key with this fingerprint.", metavar="FINGERPRINT")]
Reason = Annotated[
    Annotated[str, Meta(max_length=1_000)], Option("Why; everyone who reads the history sees it.", "--reason", "-m")
]
Undo = Annotated[bool, Option("Take it back.")]


class PublishedItemRequest(ProjectRequest, frozen=True, kw_only=True):
    """The request of a verb about one published item."""

    item_id: Item
    item_type: ItemType | None = None

    def named_item(self) -> str:
        """Return the item."""
        return self.item_id

    def named_kind(self) -> tuple[ItemType | None, Source | None]:
        """Return the type of the item."""
        return self.item_type, None


class VersionLine(Struct, frozen=True, kw_only=True):
    """A version as lists show it."""

    version: str
    is_latest: bool
    digest: str
    closure: str
    published_at: str
    published_by: str
    executor: str | None
    changelog: str | UnsetType = UNSET
    yanked: StatusNote | UnsetType = UNSET
    deprecated: StatusNote | UnsetType = UNSET

    @classmethod
    def of(cls, listed: VersionInfo) -> VersionLine:
        """Return the line of a version."""
        return filled(
            cls,
            listed,
            version=listed.name.version,
            published_at=listed.created_at,
            executor=str(listed.executor.name) if listed.executor else None,
        )


_lookup = partial(verb, group="registry", access=ANYONE, records=False)


class RegistryListRequest(ProjectRequest, frozen=True, kw_only=True):
    """Which items of the registry to list."""

    namespace: Only = None
    tool_type: Annotated[NameText | None, Option("Only this type of tool.", "--type", metavar="TYPE")] = None
    limit: Annotated[int, Meta(ge=1, le=10_000), Option("At most this many.")] = 100


class PublishedItemLine(Struct, frozen=True, kw_only=True):
    """A published item as lists show it: its latest version, its signer, and publishers with a similar name."""

    name: str
    namespace: str
    version: str
    tool_type: str
    description: str
    visibility: str
    identity: str
    digest: str
    yanked: StatusNote | UnsetType = UNSET
    deprecated: StatusNote | UnsetType = UNSET
    trust: str | UnsetType = UNSET
    signer: str | UnsetType = UNSET
    looks_like: list[str] | UnsetType = UNSET


class RegistryListResponse(Response, frozen=True, kw_only=True):
    """Items of the registry, the user's own first. `total` is missing if there are more than the limit."""

    action: str = "list"
    registry: str
    items: list[PublishedItemLine]
    suggestion: str | UnsetType = UNSET
    total: int | UnsetType = UNSET


def _list_view(response: RegistryListResponse) -> Iterator[ViewItem]:
    items = response.items
    width = max((len(f"{one.namespace}/{one.name}") for one in items), default=0)
    for one in items:
        notes = [word for word in ("yanked", "deprecated") if getattr(one, word)]
        if one.signer:
            notes.append(f"{(one.trust or '').replace('_', ' ')}, {one.signer}")
        notes += [f"looks like {near}" for near in one.looks_like or ()]
        text = f"{one.description}{''.join(f' ({note})' for note in notes)}"
        yield TableRow(f"{f'{one.namespace}/{one.name}'.ljust(width)}  {one.version:<10} {one.tool_type:<12} {text}")
    yield Notice(f"{len(items)} item{'s' * (len(items) != 1)} in {store_path(response.registry)}")
    yield from next_hint(response.suggestion)


@_lookup("list", wire=("execute", "list"), needs_rules=True, shows=_list_view)
def list_items(request: RegistryListRequest, context: VerbContext) -> RegistryListResponse:
    """List the items in the registry."""
    catalog = context.services.catalogs.at(request.project_path)
    registry, limit = context.registry(), request.limit
    # As many more as ship with Kiwi, so that none of those takes the place of a user's own item.
    spare = len(registry.find(namespace=BUILTIN_NAMESPACE, tool_type=request.tool_type))
    permission = ItemVisibility(catalog, context.services.rights(context.caller))
    most = None if permission.hides else limit + spare + 1
    listed = registry.find(namespace=request.namespace, tool_type=request.tool_type, limit=most)
    found = _visible(listed, permission)[: limit + spare]
    if not found:
        _refuse_unknown(request, catalog, registry, permission)
    ordered = sorted(found, key=lambda one: one.name.namespace == BUILTIN_NAMESPACE)
    more = f"There are more than {limit}: raise `limit`, or search with `source: registry`."
    return RegistryListResponse(
        registry=registry.database.url,
        items=[*_with_signers(ordered[:limit], catalog, registry)],
        suggestion=more if len(found) > limit else UNSET,
        total=UNSET if len(found) > limit else len(found),
    )


def _visible(found: Sequence[VersionInfo], permission: ItemVisibility) -> Sequence[VersionInfo]:
    """Return the versions that are not hidden from the caller."""
    return [one for one in found if not permission.is_hidden(f"registry/{one.name}")]


def _with_signers(items: Sequence[VersionInfo], catalog: Catalog, registry: Registry) -> Iterator[PublishedItemLine]:
    """Yield items with the signer of each, and publishers with names that look like its publisher."""
    trusted, published = TrustFile(catalog.space.user).now(), registry.namespaces()
    for number, item in enumerate(items):
        namespace = item.name.namespace
        line = filled(
            PublishedItemLine,
            item,
            name=item.name.tool_id,
            namespace=namespace,
            version=item.name.version,
            description=item.description.partition("\n")[0][:200],
            identity=f"registry/{item.name}",
        )
        if namespace != BUILTIN_NAMESPACE and number < _SIGNERS:
            with suppress(KiwiError):  # it is damaged, which `kiwi verify` reports
                found = trust_of_release(read_named(registry, [item.name])[0], trusted, catalog.sheets)
                signer = fingerprint(found.signature.key) if found.signature and found.signature.key else UNSET
                near = lookalikes(namespace, trusted, registry.actor.namespaces, published)
                line = replace(line, trust=found.trust, signer=signer, looks_like=[*near] or UNSET)
        yield line


def _refuse_unknown(
    request: RegistryListRequest, catalog: Catalog, registry: Registry, permission: ItemVisibility
) -> None:
    found = _visible(registry.find(limit=_LOOKED_AT), permission)
    namespaces = {*registry.actor.order, *(listed.name.namespace for listed in found)}
    types = {*catalog.sheets.by_type, *(listed.tool_type for listed in found)}
    for what, name, known in (("namespace", request.namespace, namespaces), ("type", request.tool_type, types)):
        if name is not None and name not in known:
            raise NotFound(
                f"There is no {what} {name!r}.",
                suggestion=f"{did_you_mean(name, known)}Known: {', '.join(sorted(known))}.",
            )


class VersionsResponse(Response, frozen=True, kw_only=True):
    """Every version of an item, the newest first."""

    tool_id: str
    action: str = "versions"
    namespace: str
    visibility: str
    versions: list[VersionLine]


def version_rows(versions: Sequence[VersionLine]) -> Iterator[ViewItem]:
    """Yield a table of versions."""
    for one in versions:
        notes = {name: note for name in ("yanked", "deprecated") if (note := getattr(one, name))}
        state = ", ".join((["latest"] if one.is_latest else []) + [*notes])
        changelog = (one.changelog or "").partition("\n")[0]
        line = f"{one.version:<14} {one.published_at[:10]} {one.published_by:<12} {one.digest[:SHORT_DIGEST]}"
        yield TableRow(f"{line}  {state:<18} {changelog}".rstrip())
        for name, note in notes.items():
            if note.reason:
                yield TableRow(f"{'':<14} {name}: {note.reason}")


@_lookup(
    "versions", wire=("execute", "versions"), aliases=("versions",), shows=lambda found: version_rows(found.versions)
)
def versions(request: PublishedItemRequest, context: VerbContext) -> VersionsResponse:
    """List every published version of an item."""
    found = published_versions(request.item_id, request.project_path, context)
    return VersionsResponse(
        tool_id=found[0].name.tool_id,
        namespace=found[0].name.namespace,
        visibility=found[0].visibility,
        versions=[VersionLine.of(listed) for listed in found],
    )


class RegistryDiffRequest(PublishedItemRequest, frozen=True, kw_only=True):
    """Which two versions to compare; `project` and `user` mean the item in that folder."""

    first: Annotated[NameText | None, Argument("A version, project or user.", "FROM")] = field(
        default=None, name="from"
    )
    second: Annotated[NameText | None, Argument("A version, project or user.", "TO")] = field(default=None, name="to")


class ComparedVersion(Struct, frozen=True):
    """One of two versions that are compared."""

    identity: str
    digest: str


class RegistryDiffResponse(Response, frozen=True, kw_only=True):
    """What differs between two versions, file by file."""

    tool_id: str
    action: str = "diff"
    first: ComparedVersion = field(name="from")
    second: ComparedVersion = field(name="to")
    status: str
    changes: list[dict[str, AnyJson]]


_Files: TypeAlias = Mapping[str, tuple[bytes, bool]]
"""The bytes of each file of a version, and whether it is executable."""
_Side: TypeAlias = tuple[ComparedVersion, _Files]


def _diff_view(response: RegistryDiffResponse) -> Iterator[ViewItem]:
    yield Notice(f"{response.first.identity} → {response.second.identity}")
    for change in response.changes:
        path = change["path"]
        if "executable" in change:
            yield Notice(f"{path} {'is executable now' if change['executable'] else 'is not executable any more'}")
        if text := str(change.get("diff", "")).rstrip("\n"):
            yield Data(text)
        elif "from_bytes" in change:
            yield Data(f"{path} {change['change']} ({change['from_bytes']} → {change['to_bytes']} bytes)")
        elif change.get("truncated"):
            yield Data(f"{path} {change['change']} (too long to show)")
    if response.status == "same":
        yield Notice("Nothing differs.")


@_lookup("diff", wire=("execute", "diff"), aliases=("diff",), shows=_diff_view)
def diff(request: RegistryDiffRequest, context: VerbContext) -> RegistryDiffResponse:
    """Show what changed between two versions, or between the latest one and the one in your folders."""
    catalog = context.services.catalogs.for_item(request.item_id, request.project_path)
    registry = context.registry()
    ref = replace(Ref.parse(request.item_id), item_type=request.item_type)
    with suggesting_names(request.item_id, catalog, registry):
        (first, old), (second, new) = _sides(ref, request, catalog, registry)
    changes = list(_changes(old, new))
    # The changes, without the text of those for which there is no room.
    room, shown = _MAX_DIFF, list[dict[str, Json]]()
    for change in changes:
        size = len(str(change.get("diff", "")))
        shown.append(change if size <= room else {**change, "diff": "", "truncated": True})
        room -= min(size, room)
    return RegistryDiffResponse(
        tool_id=ref.name,
        first=first,
        second=second,
        status="different" if changes else "same",
        changes=shown,
    )


def _sides(ref: Ref, request: RegistryDiffRequest, catalog: Catalog, registry: Registry) -> tuple[_Side, _Side]:
    def side(version: str) -> _Side:
        return _side(ref, version, catalog, registry)

    if request.first and request.second:
        return side(request.first), side(request.second)
    published = every_version(ref, registry)
    latest = next((listed for listed in published if listed.is_latest), published[0]).name.version
    if request.first:
        return side(request.first), side(latest)
    if request.second:
        return side(latest), side(request.second)
    here = _here(ref, catalog)
    if here is not None:
        return side(latest), here
    if len(published) < 2:  # noqa: PLR2004 - it takes two
        raise InvalidRequest(
            f"{ref.name!r} has one published version and is in no folder here: there is nothing to compare it with.",
            suggestion="Name two versions with `from` and `to`, or load it into the project and change it.",
        )
    return side(published[1].name.version), side(published[0].name.version)


def _side(ref: Ref, version: str, catalog: Catalog, registry: Registry) -> _Side:
    """Return a version of the registry, or the item in a folder if it is `project` or `user`."""
    name = ref.name
    match version:
        case "project" | "user":
            try:
                return _read(catalog.find(name, source=version, item_type=ref.item_type))
            except ToolNotFound as error:
                raise NotFound(
                    f"There is no {name!r} in the {version} space.",
                    suggestion=f"Copy it there with `kiwi load {name} --destination {version}`, or name two versions.",
                ) from error
    if Version.parse(version) is None and Range.parse(version) is None and not Ref(name, version=version).digest:
        raise InvalidRequest(
            f"{version[:60]!r} is neither a version nor `project` or `user`.",
            suggestion=f"{did_you_mean(version, _FOLDERS)}`kiwi versions {name}` lists the versions.",
        )
    home = f"registry/{ref.published_namespace}/" if ref.published_namespace else ""
    every_version(ref, registry)  # not found if the caller may not see it
    tool = catalog.find(f"{home}{name}@{version}", source="registry", item_type=ref.item_type)
    if not registry.named(tool.id, namespace=tool.origin.namespace):
        raise ToolNotFound(name)
    return _read(tool)


def _here(ref: Ref, catalog: Catalog) -> _Side | None:
    for source in _FOLDERS:
        with suppress(KiwiError):
            return _read(catalog.find(ref.name, source=source, item_type=ref.item_type))
    return None


def _read(tool: Tool) -> _Side:
    files = {file.path: (load_bytes(tool, file), file.is_executable) for file in tool.files}
    return ComparedVersion(tool.identity, f"sha256:{tool.digest}"), files


def _changes(first: _Files, second: _Files) -> Iterator[dict[str, Json]]:
    for path in sorted({*first, *second}):
        was, now = first.get(path), second.get(path)
        if was == now:
            continue
        change = "added" if was is None else "removed" if now is None else "changed"
        found: dict[str, Json] = {"path": path, "change": change}
        if was and now and was[1] != now[1]:
            found["executable"] = now[1]
        before, after = was[0] if was else b"", now[0] if now else b""
        if before != after and (b"\0" in before + after or max(len(before), len(after)) > _MAX_TEXT):
            found |= {"from_bytes": len(before), "to_bytes": len(after)}
        elif before != after:
            old, new = (data.decode(errors="replace").splitlines(keepends=True) for data in (before, after))
            lines = unified_diff(old, new, f"a/{path}", f"b/{path}")
            found["diff"] = "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
        yield found


class RegistryVerifyRequest(ProjectRequest, frozen=True, kw_only=True):
    """Which item to check; everything if none is named."""

    item_id: Annotated[NameText | None, Argument("One item; the whole registry otherwise.", "ITEM")] = None

    def named_item(self) -> str:
        """Return the item."""
        return self.item_id or ""


class RegistryVerifyResponse(Response, frozen=True, kw_only=True):
    """Every difference from the published content."""

    tool_id: str | UnsetType = UNSET
    action: str = "verify"
    status: str
    registry: str
    checked: int
    issues: list[dict[str, AnyJson]]
    message: str

    def exit_status(self) -> int:
        """Return 5 for a damaged registry."""
        return _EXIT_DAMAGED if self.issues else 0


def _verify_view(response: RegistryVerifyResponse) -> Iterator[ViewItem]:
    for issue in response.issues:
        yield Data(issue_text(issue))
    count, place = response.checked, store_path(response.registry)
    yield Notice(f"{response.message}: {count} version{'s' * (count != 1)} in {place}")


@_lookup("verify", wire=("execute", "verify"), aliases=("verify",), shows=_verify_view)
async def verify(request: RegistryVerifyRequest, context: VerbContext) -> RegistryVerifyResponse:
    """Check that everything published is unchanged."""
    context.caller.report(Progress("reading every version again"))
    return await asyncio.to_thread(_verified, request.item_id, context.registry())


def _verified(item: str | None, registry: Registry) -> RegistryVerifyResponse:
    ref = Ref.parse(item) if item else None
    chosen = matching(ref, every_version(ref, registry)) if ref else None
    found = list(islice(registry.verify([one.id for one in chosen] if chosen else None), _MAX_ISSUES))
    return RegistryVerifyResponse(
        tool_id=chosen[0].name.tool_id if chosen else UNSET,
        status="damaged" if found else "verified",
        registry=registry.database.url,
        checked=len(chosen) if chosen is not None else registry.count(),
        issues=[dict(issue.to_json()) for issue in found],
        message=f"{len(found)} fault{'s' * (len(found) != 1)} found" if found else "Everything is as it was sealed",
    )


def published_versions(item: str, project_path: str | None, context: VerbContext) -> Sequence[VersionInfo]:
    """Return all versions of an item, the newest first; the error says where else the name is used."""
    registry = context.registry()
    catalog = context.services.catalogs.for_item(item, project_path)
    with suggesting_names(item, catalog, registry):
        return every_version(Ref.parse(item), registry)


def every_version(ref: Ref, registry: Registry) -> Sequence[VersionInfo]:
    """Return all versions of the item that a reference names, the newest first; those of one namespace only."""
    found = registry.named(ref.name, namespace=ref.published_namespace)
    if not found:
        raise ToolNotFound(ref.name)
    home = found[0].name.namespace
    return [listed for listed in found if listed.name.namespace == home]


def matching(ref: Ref, found: Sequence[VersionInfo]) -> Sequence[VersionInfo]:
    """Return the versions among some that a reference covers."""
    matches = [one for one in found if ref.is_exactly(one) or (not ref.digest and ref.covers(one.name.version))]
    if not matches:
        raise VersionNotFound(ref.name, ref.version or "", found=[one.name.version for one in found])
    return matches


@contextmanager
def suggesting_names(item: str, catalog: Catalog, registry: Registry) -> Iterator[None]:
    """Turn "not found" into an error that says where the name is used: another namespace, a folder, or nowhere."""
    try:
        yield
    except ToolNotFound as error:
        raise _not_published(item, catalog, registry) from error


def _not_published(item: str, catalog: Catalog, registry: Registry) -> KiwiError:
    ref = Ref.parse(item)
    if elsewhere := registry.named(ref.name):
        home = elsewhere[0].name
        return NotFound(
            f"The namespace {ref.namespace!r} has no {ref.name!r}.",
            suggestion=f"Did you mean `{home.namespace}/{home.tool_id}`?",
            tool_id=ref.name,
        )
    for source in _FOLDERS:
        with suppress(KiwiError):
            tool = catalog.find(ref.name, source=source)
            return NotFound(
                f"{ref.name!r} is not published yet ({tool.origin.path}).",
                suggestion=f"Publish it with `kiwi publish {ref.name}`.",
                tool_id=ref.name,
            )
    published = {listed.name.tool_id for listed in registry.find(limit=_LOOKED_AT)}
    near = did_you_mean(ref.name, published).split("`")[1:2]
    return ToolNotFound(ref.name, near=near or catalog.near(ref.name))


@asynccontextmanager
async def save_namespaces(context: VerbContext, *, is_planned: bool) -> AsyncIterator[None]:
    """Save the namespaces of the registry, for descriptions, after something may have changed them."""
    try:
        yield
    finally:
        if not is_planned:
            await asyncio.to_thread(write_namespaces, context.services.user, context.services.store)


def store_path(url: str) -> str:
    """Return a store's address as a sentence shows it: a file by its path."""
    return url.removeprefix("sqlite:///")


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


def _status_view(response: VersionStatusResponse) -> Iterator[ViewItem]:
    if response.status == "planned":
        yield from version_rows([one for one in response.versions or () if isinstance(one, VersionLine)])
        yield Notice(response.message)
        return
    yield Data(response.message)
    yield from next_hint(response.next)
    if response.latest:
        yield Notice(f"  latest: {response.latest}")


_change = partial(verb, group="registry", access=AUTHOR, needs_receipt=True, writes_registry=True, shows=_status_view)


class DeprecateRequest(PublishedItemRequest, frozen=True, kw_only=True):
    """Which versions to deprecate, and why."""

    reason: Reason = ""
    undo: Undo = False
    dry_run: DryRun = False


@_change("deprecate", wire=("execute", "deprecate"), aliases=("deprecate",))
def deprecate(request: DeprecateRequest, context: VerbContext) -> VersionStatusResponse:
    """Warn the users of a version, of a range, or of every version. They still run."""
    op: StatusOp = "undeprecate" if request.undo else "deprecate"
    status = "no longer deprecated" if request.undo else "deprecated"
    every = published_versions(request.item_id, request.project_path, context)
    found = matching(Ref.parse(request.item_id), every)
    return _set_status(request, found, op, status, context)


class YankRequest(DeprecateRequest, frozen=True, kw_only=True):
    """Which version to yank, and why."""

    item_id: Annotated[NameText, Argument("One exact version: name@1.2.3.", "ITEM")]


@_change("yank", wire=("execute", "yank"), aliases=("yank",))
async def yank(request: YankRequest, context: VerbContext) -> VersionStatusResponse:
    """Take a version out of use: only a request that names it exactly still gets it."""
    op: StatusOp = "unyank" if request.undo else "yank"
    status = "taken up again" if request.undo else "yanked"

    def work() -> VersionStatusResponse:
        return _set_status(request, _exact(request, context), op, status, context)

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


@_change("rollback", wire=("execute", "rollback"), aliases=("rollback",))
async def rollback(request: RollbackRequest, context: VerbContext) -> VersionStatusResponse:
    """Return to an earlier version: newer ones are yanked."""
    async with save_namespaces(context, is_planned=request.dry_run):
        return await asyncio.to_thread(_rolled_back, request, context)


def _rolled_back(request: RollbackRequest, context: VerbContext) -> VersionStatusResponse:
    registry = context.registry()
    found = published_versions(request.item_id, request.project_path, context)
    name = Ref.parse(request.item_id).name
    in_use = [listed for listed in found if listed.yanked is None]
    latest = next((_semver(one) for one in in_use if one.is_latest), Version(0, 0, 0))
    earlier = [one for one in in_use if _semver(one) < latest]
    if request.to is not None:
        target = matching(Ref(name, version=request.to), found)[0]
    elif earlier:
        # As for the latest version, a pre-release counts only where there is no release.
        target = next((one for one in earlier if not _semver(one).pre), earlier[0])
    else:
        raise InvalidRequest(
            f"{name!r} has no earlier version to go back to.",
            suggestion=f"Yank the only one with `kiwi yank {found[0].name}`, or publish a new one.",
        )
    newer = [listed for listed in in_use if _semver(listed) > _semver(target)]  # those are yanked
    if not newer and target.yanked is None:
        raise InvalidRequest(
            f"{target.name} is the newest version that is in use already.",
            suggestion=f"`kiwi versions {request.item_id}` lists what there is.",
        )
    if request.dry_run:
        planned = _planned_status("rollback", newer or [target], "yanked" if newer else "taken up again")
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


def _set_status(
    request: DeprecateRequest, found: Sequence[VersionInfo], op: StatusOp, status: str, context: VerbContext
) -> VersionStatusResponse:
    action = op.removeprefix("un")
    registry = context.registry()
    if request.dry_run:
        return _planned_status(action, found, status)
    registry.set_status([listed.name for listed in found], op, request.reason)
    names = ", ".join(str(listed.name) for listed in found)
    return VersionStatusResponse(
        tool_id=found[0].name.tool_id,
        action=action,
        status=status,
        message=f"{names} {'is' if len(found) == 1 else 'are'} {status}",
        versions=[listed.name.version for listed in found],
        latest=_latest(found[0], registry),
    )


def _planned_status(action: str, found: Sequence[VersionInfo], status: str) -> VersionStatusResponse:
    return VersionStatusResponse(
        tool_id=found[0].name.tool_id,
        action=action,
        status="planned",
        message=f"{', '.join(str(listed.name) for listed in found)} would be {status}",
        versions=[VersionLine.of(listed) for listed in found],
    )


def _semver(listed: VersionInfo) -> Version:
    return Version.parse(listed.name.version) or Version(0, 0, 0)


def _latest(listed: VersionInfo, registry: Registry) -> str | None:
    found = registry.named(listed.name.tool_id, namespace=listed.name.namespace)
    return next((one.name.version for one in found if one.is_latest), None)
