"""pull: get a published version and everything it depends on, verified."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.references import references_in
from kiwi_mcp.catalog.release import check_release, trust_of_release
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, NamespaceDenied, NotFound, VersionConflict
from kiwi_mcp.domain.json import as_list, as_text
from kiwi_mcp.domain.names import is_namespace
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE, PublishResult, VersionName
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.remotes import open_source
from kiwi_mcp.kernel.verb import AUTHOR, AnyJson, Argument, DryRun, NameText, Option, Response, verb
from kiwi_mcp.kernel.verbs.registry.versions import (
    SHORT_DIGEST,
    AcceptUnsigned,
    Address,
    PublishedItemRequest,
    TrustKey,
    save_namespaces,
)
from kiwi_mcp.kernel.view import Data, Notice, ViewItem, next_hint, warning_rows
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.policy.admission import Admission, PullConsent
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.remote.port import LocalRegistry, RemoteRegistry
from kiwi_mcp.store.remote.sync import RegistrySnapshot, VersionQuery, snapshot_of
from kiwi_mcp.store.remote.sync import pull as pull_version


class PullRequest(PublishedItemRequest, frozen=True, kw_only=True):
    """Which version to pull, and from where. Only the owner may accept versions without a trusted signature."""

    item_id: Annotated[NameText, Argument("name, namespace/name, name@range, name@version or sha256:digest.", "ITEM")]
    remote: Annotated[
        Address | None,
        Option("The remote to pull it from: a name, a folder such as ./shelf, an address.", "--from", metavar="REMOTE"),
    ] = msgspec.field(default=None, name="from")
    accept_unsigned: AcceptUnsigned = False
    trust_key: TrustKey = None
    allow_rollback: Annotated[bool, Option("Accept a version that is older than the one pulled before.")] = False
    dry_run: DryRun = False

    def remote_of(self) -> str:
        """Return the remote that the version comes from."""
        return self.remote or ""

    def brings(self) -> str:
        """Return the version, with any number if none is named."""
        return f"registry/{self.item_id.removeprefix('registry/')}{'' if '@' in self.item_id else '@*'}"


class PulledLink(Struct, frozen=True):
    """One link of a chain."""

    identity: str
    digest: str


class PullResponse(Response, frozen=True, kw_only=True):
    """The version that is here now, with its chain; `new` lists the versions that were not here before."""

    tool_id: str
    action: str = "pull"
    message: str
    identity: str
    digest: str
    source: str | UnsetType = msgspec.field(default=UNSET, name="from")
    new: list[str] | UnsetType = UNSET
    acknowledged: list[dict[str, AnyJson]] | UnsetType = UNSET
    status: str
    closure: str
    trust: str | UnsetType = UNSET
    signer: str | UnsetType = UNSET
    chain: list[PulledLink] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    next: str | UnsetType = UNSET


def _view(response: PullResponse) -> Iterator[ViewItem]:
    yield from warning_rows(response.warnings)
    yield Data(response.message)
    for depth, link in enumerate(response.chain or ()):
        branch = "   " * (depth - 1) + "└─ " if depth else ""
        yield Notice(f"  {branch}{link.identity}  {link.digest[:SHORT_DIGEST]}")
    yield Notice(f"  closure: {response.closure}")
    yield from next_hint(response.next)


@verb(
    "pull",
    group="registry",
    wire=("execute", "pull"),
    needs_receipt=True,
    access=AUTHOR,
    writes_registry=True,
    aliases=("pull",),
    everyday="pull",
    asks=True,
    shows=_view,
)
async def pull(request: PullRequest, context: VerbContext) -> PullResponse:
    """Get a published version and what it depends on, verified, ready to run."""
    consent = PullConsent(request.accept_unsigned, request.trust_key or "", request.allow_rollback)
    consent.demand_owner(is_owner=context.is_owner)
    registry = context.registry()
    query = VersionQuery.parse(request.item_id.removeprefix("registry/"))
    async with save_namespaces(context, is_planned=request.dry_run):
        if request.remote is not None:
            return await _pull_from(request.remote, query, request, consent, context)
        own = LocalRegistry(registry, registry.database.url, is_own=True)
        return await _pulled(await _choose(query, own, registry.actor.order), request, context)


async def _pull_from(
    remote: str, query: VersionQuery, request: PullRequest, consent: PullConsent, context: VerbContext
) -> PullResponse:
    """Copy a version and everything it depends on from a remote, if its signatures are accepted."""
    services = context.services
    registry, catalog = context.registry(), services.catalogs.for_item(request.item_id, request.project_path)
    order, own = registry.actor.order, LocalRegistry(registry, registry.database.url, is_own=True)
    admission = Admission(
        catalog.space.user,
        consent,
        trust_of_release,
        own=registry.actor.namespaces,
        published=await asyncio.to_thread(registry.namespaces),
        is_latest=not (query.version or query.digest),
    )
    source = open_source(remote, services.store.settings, catalog.space)

    async def copied(wanted: VersionQuery, name: VersionName) -> Sequence[PublishResult]:
        return await pull_version(
            source,
            own,
            wanted.exactly(name),
            check=check_release,
            namespaces=order,
            report=context.caller.report,
            admit=partial(admission.admit, caller=context.caller),
        )

    absent: list[str] = []
    try:
        name = await _choose(query, source, order)
        there = await snapshot_of(source, query.exactly(name))
        if there.is_private(name) and not registry.actor.is_member(name.namespace):
            raise NamespaceDenied(name.namespace, namespaces=registry.actor.namespaces)
        if request.dry_run:
            return _planned(name, there, source)
        published = [*await copied(query, name)]
        waiting = [one.name for one in published if one.name.namespace != BUILTIN_NAMESPACE]
        seen = {*waiting}
        for one in waiting:  # what an item named when it was published came with it; this is the rest
            for wanted in await asyncio.to_thread(_named_by, one, catalog):
                try:
                    other = await _choose(wanted, source, order)
                except NotFound:
                    absent.append(f"{one} names {wanted}, which {source.key} does not have")
                    continue
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
                    published += await copied(wanted, other)
    except VersionConflict as error:
        raise _conflict_here(error, registry) from error
    finally:
        await source.aclose()
    response = await _pulled(name, request, context)
    return replace(
        response,
        source=source.key,
        new=[str(one.name) for one in published if one.is_new],
        acknowledged=[dict(one) for one in admission.acknowledgement] or UNSET,
        warnings=[*admission.warnings, *absent, *(response.warnings or ())],
    )


def _named_by(name: VersionName, catalog: Catalog) -> Sequence[VersionQuery]:
    """Return the versions that a pulled item names, besides those that ship with Kiwi or were published with it."""
    tool = catalog.find(f"registry/{name}")
    found: list[VersionQuery] = []
    for reference in references_in(tool, catalog.sheets):
        place, at, version = reference.ref.removeprefix("registry/").partition("@")
        namespace, _, tool_id = place.rpartition("/")
        if not catalog.is_shipped(tool_id) and catalog.pin(tool, reference.ref) is None:
            home = namespace if is_namespace(namespace) else name.namespace
            found.append(VersionQuery.parse(f"{home}/{tool_id}{at}{version}"))
    return found


def _planned(name: VersionName, there: RegistrySnapshot, source: RemoteRegistry) -> PullResponse:
    return PullResponse(
        tool_id=name.tool_id,
        message=f"{name} would be pulled",
        identity=f"registry/{name}",
        digest=there.versions[name],
        closure=there.closures[name],
        source=source.key,
        status="planned",
    )


async def _pulled(name: VersionName, request: PullRequest, context: VerbContext) -> PullResponse:
    """Return a version that is in the registry, opened and checked against its digest with its whole chain."""
    services = context.services
    registry, catalog = context.registry(), services.catalogs.for_item(request.item_id, request.project_path)
    (listed, *_) = [one for one in registry.named(name.tool_id, namespace=name.namespace) if one.name == name]
    if listed.is_builtin:
        raise InvalidRequest(f"{name} is built in, so it is here already.", suggestion="Name an item that is not.")
    chain = await asyncio.to_thread(catalog.resolve, f"registry/{name}")
    if not request.dry_run:
        await asyncio.to_thread(registry.count_download, listed.id)
    shown = name.tool_id if _has_short_name(name, catalog) else str(name)
    return PullResponse(
        tool_id=name.tool_id,
        message=f"{name} is here, whole and verified",
        identity=f"registry/{name}",
        digest=listed.digest,
        status="planned" if request.dry_run else "pulled",
        closure=listed.closure,
        trust=chain.tool.trust,
        signer=chain.tool.signer or UNSET,
        chain=[PulledLink(link.identity, f"sha256:{link.digest}") for link in chain.links],
        warnings=[*chain.notes, *chain.drift],
        next=f"Run it with `kiwi run {shown}`, or copy it here with `kiwi load {shown} --destination project`.",
    )


def _has_short_name(name: VersionName, catalog: Catalog) -> bool:
    """Whether the short name means this version; an item of an unknown publisher never has it."""
    try:
        return catalog.find(name.tool_id).identity == f"registry/{name}"
    except KiwiError:
        return False


async def _choose(query: VersionQuery, source: RemoteRegistry, namespaces: Sequence[str]) -> VersionName:
    """Return the version of a source that a query means; the error suggests other names."""
    snapshot = await snapshot_of(source, query)
    try:
        return query.choose(snapshot, namespaces)
    except NotFound as error:
        # The versions that would match if they were not yanked, the newest first.
        spaces = (query.namespace,) if query.namespace else namespaces
        found = [name for name in snapshot.versions if name.tool_id == query.tool_id and name.namespace in spaces]
        if yanked := [name for name in reversed(found) if snapshot.is_yanked(name)]:
            raise NotFound(
                f"The registry has no {str(query)!r} that is in use; yanked: {', '.join(map(str, yanked))}.",
                suggestion=f"Name one exactly to have it all the same: `kiwi pull {yanked[0]}`.",
                wanted=str(query),
            ) from error
        if not snapshot.versions and query.tool_id:
            names = {name.tool_id for name in RegistrySnapshot.by(await source.events()).versions}
            error.suggestion = did_you_mean(query.tool_id, names) + error.suggestion
        raise


def _conflict_here(error: VersionConflict, registry: Registry) -> VersionConflict:
    """Return a conflict from the point of view of a pull: this registry has other content under that name."""
    names = [as_text(name) for name in as_list(error.details.get("conflicts"))]
    described = ", ".join(_described(name, registry) for name in names)
    error.message = f"You have another {described} here, and it stays."
    error.suggestion = (
        "One registry cannot hold both. Pull another version, or ask its publisher for one with a number of its own; "
        "if yours is the one that should change, publish it under a new version and tell others to use that."
    )
    return error


def _described(name: str, registry: Registry) -> str:
    query = VersionQuery.parse(name)
    for listed in registry.named(query.tool_id, namespace=query.namespace):
        if listed.name.version == query.version:
            by = f" by {listed.published_by}" if listed.published_by else ""
            return f"{name} (published{by} on {listed.created_at[:10]})"
    return name
