"""publish: store an item and its executors as immutable versions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from kiwi_mcp.catalog.item_reader import load_bytes
from kiwi_mcp.catalog.lockfile import lost_signatures
from kiwi_mcp.catalog.release import check_release, release_of
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import (
    IntegrityMismatch,
    InvalidManifest,
    InvalidRequest,
    KiwiError,
    NamespaceDenied,
    VersionConflict,
    VersionSealed,
)
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain, ItemType, Tool
from kiwi_mcp.domain.names import Version
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.domain.registry import (
    BUILTIN_NAMESPACE,
    Pin,
    PublishResult,
    RegistryEvent,
    VersionName,
    Visibility,
    is_same_content,
    is_user_namespace,
)
from kiwi_mcp.kernel.context import Context, VerbContext
from kiwi_mcp.kernel.remotes import open_remote
from kiwi_mcp.kernel.signer import Signer, signed_files
from kiwi_mcp.kernel.validation import Verdict, examine
from kiwi_mcp.kernel.verb import AUTHOR, OF_TYPE, AnyJson, DryRun, NameText, Option, PlaceToWrite, Response, verb
from kiwi_mcp.kernel.verbs.registry.versions import Address, PublishedItemRequest, save_namespaces
from kiwi_mcp.kernel.view import Data, Hint, Notice, ViewItem, warning_rows
from kiwi_mcp.manifest.signatures import DETACHED, signature_form
from kiwi_mcp.manifest.trust import TrustFile
from kiwi_mcp.policy.authorize import refuse_lost
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease
from kiwi_mcp.store.remote.sync import LocalRegistry, RemoteRegistry, VersionQuery, pull, snapshot_of


class PublishRequest(PublishedItemRequest, frozen=True, kw_only=True):
    """Which item to publish, where, and for whom."""

    item_type: Annotated[ItemType | None, Option(OF_TYPE, "--type", metavar="TYPE")] = None
    namespace: Annotated[NameText | None, Option("One of yours; the first of them otherwise.")] = None
    visibility: Annotated[Visibility | None, Option("public, unlisted or private.")] = None
    changelog: Annotated[
        Annotated[str, Meta(max_length=20_000)],
        Option("What changed, in a line or two.", "--changelog", "-m", metavar="TEXT"),
    ] = ""
    to: Annotated[
        Address | None, Option("A remote that gets it as well: a name, a folder, an address.", metavar="REMOTE")
    ] = None
    location: PlaceToWrite = None
    dry_run: DryRun = False

    def remote_of(self) -> str:
        """Return the remote that gets the version."""
        return self.to or ""


class PublishResponse(Response, frozen=True, kw_only=True):
    """The published version. `also_published` lists its executors that were not published yet."""

    tool_id: str
    action: str = "publish"
    status: str
    message: str
    identity: str
    version: str
    namespace: str
    visibility: str
    digest: str
    files: list[str]
    next: str
    closure: str | UnsetType = UNSET
    also_published: list[str] | UnsetType = UNSET
    signer: str | UnsetType = UNSET
    warnings: list[dict[str, AnyJson]] | UnsetType = UNSET
    to: str | UnsetType = UNSET
    pushed: list[str] | UnsetType = UNSET


def _view(response: PublishResponse) -> Iterator[ViewItem]:
    yield from warning_rows(response.warnings)
    yield Data(response.message)
    yield Notice(f"  digest: {response.digest}")
    if response.closure:
        yield Notice(f"  closure: {response.closure}")
    for name in response.also_published or ():
        yield Notice(f"  with: {name}")
    if response.to:
        yield Notice(f"  to: {response.to}")
    yield Hint(response.next)


@verb(
    "publish",
    group="registry",
    wire=("execute", "publish"),
    needs_receipt=True,
    access=AUTHOR,
    writes_registry=True,
    aliases=("publish",),
    everyday="publish",
    shows=_view,
)
async def publish(request: PublishRequest, context: VerbContext) -> PublishResponse:
    """Publish an item and what it depends on as an immutable version."""
    services, caller = context.services, context.caller
    catalog = services.catalogs.for_item(request.item_id, request.project_path)
    registry, authorship = context.registry(), services.authorship(caller)
    signer = Signer.of(catalog.space.user) if authorship.is_owner else None
    caller.report(Progress(f"checking {request.item_id}"))
    async with save_namespaces(context, is_planned=request.dry_run):
        publication = await _prepare(request, services.context(caller, catalog), registry, signer)
        if signer and not request.dry_run:
            TrustFile(catalog.space.user).published(signer.key, publication.name.namespace)
        response = await _publish(request, publication, catalog.space, context)
    if not request.dry_run:
        authorship.vouches(publication.links)  # not what is there now: it may have changed during a push
    return response


async def _publish(
    request: PublishRequest, publication: Publication, space: Space, context: VerbContext
) -> PublishResponse:
    registry, do = context.registry(), _preview if request.dry_run else _seal
    if request.to is None:
        published = await asyncio.to_thread(do, publication, registry)
        return _response(publication, published, is_planned=request.dry_run)
    # A remote that is not there, or that has other content, is an error before anything is published here.
    target = open_remote(request.to, context.services.store.settings, space)
    async with aclosing(target):
        await _refuse_taken(publication, target)
        published = await asyncio.to_thread(do, publication, registry)
        response = replace(_response(publication, published, is_planned=request.dry_run), to=target.key)
        if request.dry_run:
            return response
        names = (*publication.others, publication.name)
        pushed = [new for name in names for new in await _push(name, request.to, target, registry, context)]
        return replace(response, pushed=pushed)


async def _push(
    name: VersionName, address: str, target: RemoteRegistry, registry: Registry, context: VerbContext
) -> list[str]:
    """Copy a version that is published here to a remote, and return the versions that are new there."""
    source, query = LocalRegistry(registry, registry.database.url), VersionQuery.parse(str(name))
    order, report = registry.actor.order, context.caller.report
    try:
        pushed = await pull(source, target, query, check=check_release, namespaces=order, report=report)
    except KiwiError as error:
        error.message = f"{name} is published here, and was not sent to {address}: {error.message}"
        again = f"`kiwi publish {name.tool_id} --namespace {name.namespace} --to {address}`"
        error.suggestion = f"{error.suggestion} Then send it with {again}; what is published here stays as it is."
        raise
    return [str(one.name) for one in pushed if one.is_new]


async def _refuse_taken(publication: Publication, target: RemoteRegistry) -> None:
    """Refuse to publish a version that a remote has with other content."""
    for release in publication.releases:
        name, digest = release.name, release.digest
        there = await snapshot_of(target, VersionQuery.parse(str(name)))
        if (known := there.versions.get(name)) and known.digest != digest:
            error = VersionConflict([str(name)])
            error.message = f"{target.key} has {name} already, with other content; nothing was published."
            raise error


class Publication(Struct, frozen=True):
    """What will be published: the item, its executors that are not published yet, and what to report."""

    tool: Tool
    links: tuple[Tool, ...]
    """The item and what it runs on, as they are published."""
    releases: tuple[CheckedRelease, ...]
    verdict: Verdict
    visibility_before: Visibility | None = None
    """The visibility of the item until now, if any version of it is published."""
    signer: Signer | None = None
    """The key that it is signed with."""
    others: tuple[VersionName, ...] = ()
    """The versions of the items that it names."""

    @property
    def name(self) -> VersionName:
        """The name of the item's own version."""
        return self.releases[-1].name

    @property
    def visibility(self) -> Visibility:
        """The new visibility of the item, in all its versions."""
        return self.releases[-1].visibility

    @property
    def changes_visibility(self) -> bool:
        """Whether a published item gets another visibility."""
        return self.visibility_before not in {None, self.visibility}


async def _prepare(request: PublishRequest, context: Context, registry: Registry, signer: Signer | None) -> Publication:
    """Return an item as it will be published, validated and signed; nothing is written yet."""
    catalog = context.catalog
    tool = catalog.find(request.item_id, source=request.location, item_type=request.item_type)
    if not tool.origin.is_editable:
        raise VersionSealed(tool.identity)
    verdict = await examine(tool, context)
    verdict.demand(tool.id)
    chain = catalog.resolve(tool.identity, item_type=tool.item_type)
    if chain.faults:
        raise InvalidManifest(tool.id, chain.faults)
    namespace = request.namespace or next(iter(registry.actor.namespaces), "")
    if not is_user_namespace(namespace) or not registry.actor.is_member(namespace):
        raise NamespaceDenied(namespace, namespaces=registry.actor.namespaces)
    own = [one.tool for one in chain.references if not one.tool.origin.server]  # what a server offers stays with it
    named = [catalog.resolve(tool.identity, item_type=tool.item_type) for tool in own]
    links = (*chain.links, *(link for other in named for link in other.links))
    releases: dict[VersionName, CheckedRelease] = {}
    sent: dict[VersionName, None] = {}
    for other in reversed(named):  # what the item names is published with it, and before it
        made = _releases(other, request, namespace, registry, signer, is_asked=False)
        releases |= {one.name: one for one in made}
        known_as = _published(other.tool, namespace, registry)
        sent[known_as[0] if known_as else made[-1].name] = None
    releases |= {one.name: one for one in _releases(chain, request, namespace, registry, signer, is_asked=True)}
    refuse_lost(lost_signatures(links, catalog.space))
    # The digest of the item does not say which version a name without one means.
    for one in (one for one in chain.references if one.by == chain.tool.identity):
        if one.tool.origin.server:
            reason = f"names `{one.ref}` of an MCP server, which is not published"
            fix = f"To use it, one needs the MCP server {one.tool.origin.server!r}."
            verdict = verdict.with_issue(Issue("config", reason, fix, "warning"))
        elif "@" not in one.ref and not one.tool.origin.is_built_in:
            reason = f"names `{one.ref}` without a version, so a later one would be used too"
            fix = f"Write `{one.ref}@{one.tool.manifest.version}`."
            verdict = verdict.with_issue(Issue("config", reason, fix, "warning"))
    known = _visibility(tool.id, namespace, registry)
    all_links = tuple({(link.identity, link.item_type): link for link in links}.values())
    others = tuple(name for name in sent if name.namespace != BUILTIN_NAMESPACE)
    return Publication(tool, all_links, tuple(releases.values()), verdict, known, signer, others)


def _seal(publication: Publication, registry: Registry) -> Sequence[PublishResult]:
    """Publish all of it or nothing; if the version exists already, the error names the next free one."""
    name = replace(publication.name, version="")
    shown = RegistryEvent(0, "visibility", name, "", "", "", "", publication.visibility)
    try:
        return registry.publish(publication.releases, [shown] if publication.changes_visibility else ())
    except VersionConflict as error:
        raise _with_next(error, publication.name, registry) from error


def _preview(publication: Publication, registry: Registry) -> Sequence[PublishResult]:
    """Return the result of publishing, or raise the conflict; nothing is written."""
    known = {
        listed.name: listed
        for release in publication.releases
        for listed in registry.named(release.name.tool_id, namespace=release.name.namespace)
    }
    taken = [str(one.name) for one in publication.releases if not is_same_content(known.get(one.name, one), one)]
    if taken:
        raise _with_next(VersionConflict(taken), publication.name, registry)
    return [PublishResult(one.name, one.digest, "", is_new=one.name not in known) for one in publication.releases]


def _with_next(error: VersionConflict, name: VersionName, registry: Registry) -> VersionConflict:
    """Return a conflict that says which version is free."""
    known = [listed.name.version for listed in registry.named(name.tool_id, namespace=name.namespace)]
    if name.version in known:  # otherwise it is an executor that changed
        highest = max(filter(None, map(Version.parse, known)))
        free = Version(highest.major, highest.minor, highest.patch + (not highest.pre))
        error.suggestion = f"{error.suggestion} The next free one is {str(free)!r}."
    return error


def _releases(
    chain: Chain,
    request: PublishRequest,
    namespace: str,
    registry: Registry,
    signer: Signer | None,
    *,
    is_asked: bool,
) -> Sequence[CheckedRelease]:
    """Return a release for each link that is in a folder, each pinned to the one below it."""
    made: list[CheckedRelease] = []
    below: tuple[VersionName, str] | None = None
    for link in reversed(chain.links):
        is_top = is_asked and link is chain.tool
        ref = link.manifest.executor
        pin = Pin(ref, *below) if ref and below else None
        published = _published(link, namespace, registry)
        if published is not None and not is_top:
            below = published
            continue
        # The requested visibility applies to the item and to links that were not published before.
        known = _visibility(link.id, namespace, registry)
        visibility = (request.visibility or known if is_top else known or request.visibility) or "public"
        release = _release(link, namespace, pin, request.changelog if is_top else "", visibility, signer)
        if link is chain.tool:
            release = replace(release, references=_references(chain, namespace, registry))
        made.append(release)
        below = (release.name, release.digest)
    return made


def _references(chain: Chain, namespace: str, registry: Registry) -> tuple[Pin, ...]:
    """Return which version each name in an item's config means; what an MCP server offers has none."""
    own = chain.tool.identity
    named = {
        one.ref: one.tool
        for one in chain.references
        if one.by == own and not one.tool.origin.server and one.tool.identity != own
    }
    return tuple(
        Pin(
            ref,
            *_published(tool, namespace, registry)
            or (VersionName(namespace, tool.id, tool.manifest.version), f"sha256:{tool.digest}"),
        )
        for ref, tool in sorted(named.items())
    )


def _published(tool: Tool, namespace: str, registry: Registry) -> tuple[VersionName, str] | None:
    """Return the name and digest under which a link is available to others: in the registry, or with Kiwi itself."""
    digest = f"sha256:{tool.digest}"
    if tool.origin.is_built_in:
        return VersionName(BUILTIN_NAMESPACE, tool.id, tool.manifest.version), digest
    wanted = tool.origin.namespace if tool.origin.is_published else namespace
    for listed in registry.by_digest(digest):
        if listed.name.namespace == wanted and listed.name.tool_id == tool.id:
            return listed.name, digest
    if tool.origin.is_published:
        raise InvalidRequest(
            f"{tool.identity} is not in the registry as it is here.",
            suggestion="Pull it from the remote that it came from.",
        )
    return None


def _release(
    tool: Tool, namespace: str, pin: Pin | None, changelog: str, visibility: Visibility, signer: Signer | None
) -> CheckedRelease:
    if tool.integrity == "modified":
        expected = tool.signature.hash if tool.signature else ""
        raise IntegrityMismatch(tool.id, expected=expected, actual=tool.digest, where=str(tool.origin.path))
    if Version.parse(tool.manifest.version) is None or "+" in tool.manifest.version:
        raise InvalidRequest(
            f"{tool.id!r} has the version {tool.manifest.version!r}, which is not a semantic version.",
            suggestion='Write a semantic version without build metadata, such as `version: "1.0.0"`.',
        )
    data = {file.path: load_bytes(tool, file) for file in tool.files}
    is_apart = signature_form(tool.origin.path).lower() in DETACHED
    # The signature in a folder is valid there only.
    if signer is not None or (tool.signature and (tool.signature.key or is_apart)):
        timestamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        own = data[tool.origin.path.name]
        data |= signed_files(tool, own, namespace=namespace, timestamp=timestamp, signer=signer)
    return CheckedRelease.of(
        release_of(
            tool,
            data,
            namespace=namespace,
            place=tool.origin.place,
            executor=pin,
            changelog=changelog,
            visibility=visibility,
        )
    )


def _visibility(tool_id: str, namespace: str, registry: Registry) -> Visibility | None:
    """Return the visibility that an item has already."""
    return next((listed.visibility for listed in registry.named(tool_id, namespace=namespace)), None)


def _response(publication: Publication, published: Sequence[PublishResult], *, is_planned: bool) -> PublishResponse:
    top, tool = publication.releases[-1], publication.tool
    by_name = {one.name: one for one in published}
    is_new = by_name[top.name].is_new
    done = ("would be published" if is_planned else "published") if is_new else "is published already, as it is"
    if publication.changes_visibility:
        now = f"{'would be' if is_planned else 'is'} {publication.visibility} now"
        done += f"; with all its versions it {now}, not {publication.visibility_before}"
    shown = f"{top.name.namespace}/{tool.id}"  # for others the short name may be another item
    warnings = [dict(issue.to_json()) for issue in publication.verdict.warnings]
    if publication.signer is None and tool.integrity == "unsigned":
        fix = f"Run `kiwi sign {tool.id}` before publishing, so that others can tell that nothing changed since."
        warnings.append({"place": "", "reason": "it is not signed", "fix": fix, "severity": "warning"})
    return PublishResponse(
        tool_id=tool.id,
        status="planned" if is_planned else ("published" if is_new else "unchanged"),
        message=f"{top.name} {done}",
        identity=f"registry/{top.name}",
        version=top.name.version,
        namespace=top.name.namespace,
        visibility=top.visibility,
        digest=top.digest,
        files=[file.path for file in top.files],
        next=f"Others get it with `kiwi pull {shown}`; `kiwi versions {shown}` lists its history.",
        closure=UNSET if is_planned else by_name[top.name].closure,
        also_published=[str(release.name) for release in publication.releases[:-1]] or UNSET,
        signer=publication.signer.key.fingerprint if publication.signer else UNSET,
        warnings=warnings or UNSET,
    )
