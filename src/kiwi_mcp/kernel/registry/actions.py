"""The actions on a registry, each from its words to its answer."""

from __future__ import annotations

import asyncio
from functools import partial

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, NamespaceDenied, ToolNotFound, VersionConflict
from kiwi_mcp.domain.json import Json, JsonObject, as_list
from kiwi_mcp.domain.outcome import Progress, Report
from kiwi_mcp.domain.registry import VersionName
from kiwi_mcp.kernel.answers import Answer
from kiwi_mcp.kernel.keys.signer import Signer
from kiwi_mcp.kernel.keys.store import TrustFile
from kiwi_mcp.kernel.provenance import Authorship
from kiwi_mcp.kernel.reading import read
from kiwi_mcp.kernel.registry.admission import Admission, Leave
from kiwi_mcp.kernel.registry.compare import compare
from kiwi_mcp.kernel.registry.history import (
    mark,
    markable,
    planned_mark,
    planned_rollback,
    rollback,
    verify,
    versions,
    way_back,
)
from kiwi_mcp.kernel.registry.listing import list_items
from kiwi_mcp.kernel.registry.missing import (
    another_here,
    choose,
    demand_exact,
    half_published,
    refuse_taken,
    unpublished,
)
from kiwi_mcp.kernel.registry.port import RegistryRemote, Remote
from kiwi_mcp.kernel.registry.publish import Publication, foresee, prepare_publication, publish, told
from kiwi_mcp.kernel.registry.remotes import open_remote, open_source
from kiwi_mcp.kernel.registry.sync import pull, told_of
from kiwi_mcp.kernel.registry.told import Wanted
from kiwi_mcp.kernel.registry.words import (
    DiffWords,
    ListWords,
    MarkWords,
    NoWords,
    PublishWords,
    PullWords,
    RollbackWords,
)
from kiwi_mcp.kernel.requests import ExecuteRequest
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.store.registry import Registry

_EXIT_DAMAGED = 5


async def act(
    request: ExecuteRequest, catalog: Catalog, store: Store, caller: Caller, authorship: Authorship | None = None
) -> Answer:
    """Do what the request's action says to the registry; only the owner signs, and takes what nobody vouches for."""
    report, is_owner = caller.report, authorship is not None and authorship.is_owner
    match request.action:
        case "publish":
            signer = Signer.of(catalog.space.user) if is_owner else None
            answer = await _publish(request, catalog, store, report, signer)
            if authorship and not request.dry_run:
                authorship.vouches(catalog.resolve(_item(request)).links)
            return Answer(answer)
        case "pull":
            return Answer(await _pull(request, catalog, store, caller, is_owner=is_owner))
        case "verify":
            read(NoWords, request.action, request.parameters)
            report(Progress("reading every version again"))
            found = await asyncio.to_thread(verify, request.item_id, store.registry())
            return Answer(found, exit_code=_EXIT_DAMAGED if found["issues"] else 0)
        case _:
            return Answer(await asyncio.to_thread(_told, request, catalog, store))


def _told(request: ExecuteRequest, catalog: Catalog, store: Store) -> JsonObject:
    registry = store.registry()
    if request.action == "list":
        return list_items(read(ListWords, "list", request.parameters), catalog, registry)
    try:
        return _told_of(_item(request), request, catalog, registry)
    except ToolNotFound as error:
        raise unpublished(_item(request), catalog, registry) from error


def _told_of(item: str, request: ExecuteRequest, catalog: Catalog, registry: Registry) -> JsonObject:
    action, written = request.action, request.parameters
    match action:
        case "versions":
            read(NoWords, action, written)
            return versions(item, registry)
        case "diff":
            return compare(item, read(DiffWords, action, written), catalog, registry)
        case "yank" | "deprecate":
            words = read(MarkWords, action, written)
            found = markable(item, action, registry)
            if action == "yank":
                demand_exact(item, found)
            return planned_mark(found, action, words) if request.dry_run else mark(found, action, words, registry)
        case "rollback":
            chosen = read(RollbackWords, action, written)
            target, newer = way_back(item, chosen, registry)
            return planned_rollback(target, newer) if request.dry_run else rollback(target, newer, chosen, registry)
        case _:
            raise TypeError(action)


async def _publish(
    request: ExecuteRequest, catalog: Catalog, store: Store, report: Report, signer: Signer | None
) -> JsonObject:
    words = read(PublishWords, "publish", request.parameters)
    registry, item = store.registry(), _item(request)
    report(Progress(f"checking {item}"))
    publication = await prepare_publication(item, words, catalog, registry, signer)
    if signer and not request.dry_run:
        TrustFile(catalog.space.user).published(signer.key, publication.name.namespace)
    if words.to is None:
        return await _sealed(publication, registry, is_planned=request.dry_run)
    # A remote that is not there, or has other content, is found out before anything is sealed here.
    target = await open_remote(words.to, store.settings, catalog.space)
    try:
        await refuse_taken(publication, target)
        answer = await _sealed(publication, registry, is_planned=request.dry_run)
        if request.dry_run:
            return {**answer, "to": target.key}
        pushed = await _sent(publication.name, words.to, target, registry, report)
    finally:
        await target.aclose()
    return {**answer, "to": target.key, "pushed": pushed}


async def _sent(name: VersionName, address: str, target: Remote, registry: Registry, report: Report) -> list[Json]:
    """Copy a version that is sealed here to a remote, and return what was new there."""
    source, wanted = RegistryRemote(registry, registry.database.url), Wanted.parse(str(name))
    try:
        sent = await pull(source, target, wanted, namespaces=registry.actor.order, report=report)
    except KiwiError as error:
        raise half_published(error, name, address) from error
    return [str(one.name) for one in sent if one.is_new]


async def _sealed(publication: Publication, registry: Registry, *, is_planned: bool) -> JsonObject:
    published = await asyncio.to_thread(foresee if is_planned else publish, publication, registry)
    return told(publication, published, is_planned=is_planned)


async def _pull(
    request: ExecuteRequest, catalog: Catalog, store: Store, caller: Caller, *, is_owner: bool
) -> JsonObject:
    words = read(PullWords, "pull", request.parameters)
    leave = Leave(words.accept_unsigned, words.trust_key or "", words.allow_rollback)
    leave.demand_owner(is_owner=is_owner)
    registry, wanted = store.registry(), Wanted.parse(_item(request).removeprefix("registry/"))
    order = registry.actor.order
    is_latest = not (wanted.version or wanted.digest)
    admission = Admission(catalog.space.user, leave, own=registry.actor.namespaces, is_latest=is_latest)
    own = RegistryRemote(registry, registry.database.url, is_own=True)
    if words.remote is None:
        name = await choose(wanted, own, order)
        return await _pulled(name, {}, catalog, store, request)
    source = await open_source(words.remote, store.settings, catalog.space)
    try:
        name = await choose(wanted, source, order)
        held = await told_of(source, wanted.exactly(name))
        if held.is_private(name) and not registry.actor.is_member(name.namespace):
            raise NamespaceDenied(name.namespace, namespaces=registry.actor.namespaces)
        if request.dry_run:
            about = _about(name, held.versions[name])
            about = {**about, "closure": held.closures[name], "from": source.key}
            return {**about, "status": "planned", "message": f"{name} would be pulled"}
        published = await pull(
            source,
            own,
            wanted.exactly(name),
            namespaces=order,
            report=caller.report,
            admit=partial(admission.admit, caller=caller),
        )
    except VersionConflict as error:
        raise another_here(error, registry) from error
    finally:
        await source.aclose()
    new: list[Json] = [str(one.name) for one in published if one.is_new]
    told = await _pulled(name, {"from": source.key, "new": new, **admission.told}, catalog, store, request)
    return {**told, "warnings": [*admission.warnings, *as_list(told.get("warnings"))]}


async def _pulled(
    name: VersionName, about: JsonObject, catalog: Catalog, store: Store, request: ExecuteRequest
) -> JsonObject:
    """Return a version that is in the registry by now, opened and held against its digest with all it stands on."""
    registry = store.registry()
    (listed, *_) = [one for one in registry.named(name.tool_id, namespace=name.namespace) if one.name == name]
    if listed.is_builtin:
        raise InvalidRequest(f"{name} is built in, so it is here already.", suggestion="Name an item that is not.")
    chain = await asyncio.to_thread(catalog.resolve, f"registry/{name}")
    if not request.dry_run:
        await asyncio.to_thread(registry.count_download, listed.id)
    shown = name.tool_id if _is_meant(name, catalog) else str(name)
    return {
        **_about(name, listed.digest),
        **about,
        "status": "planned" if request.dry_run else "pulled",
        "closure": listed.closure,
        "trust": chain.tool.trust,
        **({"signer": chain.tool.signer} if chain.tool.signer else {}),
        "chain": [{"identity": link.identity, "digest": f"sha256:{link.digest}"} for link in chain.links],
        "warnings": [*chain.notes, *chain.drift],
        "next": f"Run it with `kiwi run {shown}`, or copy it here with `kiwi load {shown} --destination project`.",
    }


def _is_meant(name: VersionName, catalog: Catalog) -> bool:
    """Whether the short name leads to a version: what a stranger published never answers to it."""
    try:
        return catalog.find(name.tool_id).identity == f"registry/{name}"
    except KiwiError:
        return False


def _about(name: VersionName, digest: str) -> JsonObject:
    return {
        "tool_id": name.tool_id,
        "action": "pull",
        "message": f"{name} is here, whole and verified",
        "identity": f"registry/{name}",
        "digest": digest,
    }


def _item(request: ExecuteRequest) -> str:
    if not request.item_id:
        raise InvalidRequest("The request names no item.", suggestion="Send `item_id`.")
    return request.item_id
