"""registry show and move, pull, and registry remote add, remove, push, pull: this store, and registries elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import aclosing, closing, nullcontext, suppress
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.references import references_in
from kiwi_mcp.catalog.release import check_release, trust_of_release
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, NamespaceDenied, NotFound, VersionConflict
from kiwi_mcp.domain.json import as_list, as_text
from kiwi_mcp.domain.names import is_namespace
from kiwi_mcp.domain.registry import BUILTIN_NAMESPACE, Cursor, VersionName
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.remotes import absolute_address, add_remote, open_remote, open_source, remove_remote
from kiwi_mcp.kernel.settings import FILE_NAME, RemoteSettings, registry_settings
from kiwi_mcp.kernel.store import Store, last_url, note_url
from kiwi_mcp.kernel.verb import (
    ANYONE,
    AUTHOR,
    OWNER,
    AnyJson,
    Argument,
    DryRun,
    LongText,
    NameText,
    Option,
    ProjectRequest,
    Request,
    Response,
    verb,
)
from kiwi_mcp.kernel.verbs.registry.versions import (
    SHORT_DIGEST,
    AcceptUnsigned,
    Address,
    Only,
    PublishedItemRequest,
    TrustKey,
    save_namespaces,
    store_path,
)
from kiwi_mcp.kernel.view import Data, Notice, ViewItem, next_hint, warning_rows
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.manifest.owner_file import rewrite_keys
from kiwi_mcp.policy.admission import Admission, PullConsent
from kiwi_mcp.store.move import copy_store
from kiwi_mcp.store.open import connect_to, masked, open_database
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.remote.sync import (
    LocalRegistry,
    RegistrySnapshot,
    RemoteRegistry,
    SyncReport,
    VersionQuery,
    copy,
    cursor_name,
    everything,
    snapshot_of,
)
from kiwi_mcp.store.remote.sync import pull as copy_version

_SHOWN = 100
_ASK = "Ask the owner to type `kiwi registry remote add NAME URL`."

Remote = Annotated[LongText, Argument("A remote's name, a folder such as ./shelf, or an address.", "REMOTE")]
Private = Annotated[bool, Option("Private items too.")]


class RemoteLine(Struct, frozen=True, kw_only=True):
    """A remote that has a name. `token` names the variable with its token."""

    url: str
    token: str | UnsetType = UNSET


class RegistryShowResponse(Response, frozen=True, kw_only=True):
    """The store in use, the actor, and the known remotes."""

    action: str = "show"
    registry: str
    actor: str
    namespaces: list[str]
    versions: int
    remotes: dict[str, RemoteLine]


def _show_view(response: RegistryShowResponse) -> Iterator[ViewItem]:
    yield Data(f"store: {store_path(response.registry)} ({response.versions} versions)")
    yield Data(f"as: {response.actor}, in {', '.join(response.namespaces)}")
    for name, remote in response.remotes.items():
        yield Data(f"remote: {name}  {remote.url}")


@verb("show", group="registry", access=ANYONE, records=False, shows=_show_view)
async def show(request: ProjectRequest, context: VerbContext) -> RegistryShowResponse:
    """Show which store is used, as which actor, and the known remotes."""
    context.services.catalogs.at(request.project_path)  # refuses a folder that is no project
    registry, settings = context.registry(), context.services.store.settings
    return RegistryShowResponse(
        registry=registry.database.url,
        actor=registry.actor.name,
        namespaces=[*registry.actor.namespaces],
        versions=await asyncio.to_thread(registry.count),
        remotes={
            name: RemoteLine(url=masked(remote.url), token=remote.token or UNSET)
            for name, remote in settings.remotes.items()
        },
    )


class RemoteAddRequest(ProjectRequest, frozen=True, kw_only=True):
    """The name of a remote, where it is, and the variable with its token, as `${NAME}`."""

    remote: Annotated[LongText, Argument("Its new name.", "NAME")]
    url: Annotated[LongText, Argument("Its address.", "URL")]
    token: Annotated[
        NameText | None, Option("The NAME of the variable that holds its token.", metavar="NAME", kind="variable")
    ] = None


class RemoteAddResponse(Response, frozen=True, kw_only=True):
    """The remote that has a name now."""

    action: str = "add"
    status: str = "added"
    message: str
    remote: str
    url: str
    next: str


@verb("add", group="registry remote", wire=("registry", "add"), access=OWNER, hint=_ASK, aliases=("registry add",))
async def add(request: RemoteAddRequest, context: VerbContext) -> RemoteAddResponse:
    """Give a remote a name."""
    space, name = context.services.catalogs.at(request.project_path).space, request.remote
    if masked(request.url) != request.url:
        raise InvalidRequest(
            "The address holds a password, which would be written to a file that others can read.",
            suggestion="Leave it out. A token belongs in a variable, which `--token` names.",
        )
    url = absolute_address(request.url, space)
    add_remote(space.user, name, RemoteSettings(url, request.token or ""))
    return RemoteAddResponse(
        message=f"{name} is {url}",
        remote=name,
        url=url,
        next=f"`kiwi registry remote pull {name}` copies from it, `kiwi registry remote push {name}` to it.",
    )


class RemoteRemoveRequest(Request, frozen=True, kw_only=True):
    """The name of a remote."""

    remote: Annotated[LongText, Argument("Its name.", "NAME")]


class RemoteRemoveResponse(Response, frozen=True, kw_only=True):
    """The remote that has no name any more."""

    action: str = "remove"
    status: str = "removed"
    remote: str


@verb(
    "remove",
    group="registry remote",
    wire=("registry", "remove"),
    access=OWNER,
    hint="Ask the owner to type `kiwi registry remote remove NAME`.",
    aliases=("registry remove",),
    shows=lambda response: [Data(f"{response.remote} is forgotten")],
)
async def remove(request: RemoteRemoveRequest, context: VerbContext) -> RemoteRemoveResponse:
    """Forget a remote; nothing there or here is deleted."""
    remove_remote(context.services.user, request.remote)
    return RemoteRemoveResponse(remote=request.remote)


class SyncCounts(Struct, frozen=True):
    """How many versions are new, are unchanged, and have another status."""

    new: int
    unchanged: int
    marked: int


class SyncResponse(Response, frozen=True, kw_only=True):
    """What was copied. `left_out` says what was not, each with the reason."""

    action: str
    status: str
    remote: str
    new: list[str]
    counts: SyncCounts
    left_out: list[str]
    message: str
    acknowledged: list[dict[str, AnyJson]] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


def _sync_view(response: SyncResponse) -> Iterator[ViewItem]:
    yield from warning_rows(response.warnings)
    would = "would be " if response.status == "planned" else ""
    yield Data(f"{response.remote}: {would}{response.message}")
    for name in response.new:
        yield Notice(f"  + {name}")
    for reason in response.left_out:
        yield Notice(f"warning: left out {reason}")


class RemotePushRequest(ProjectRequest, frozen=True, kw_only=True):
    """To which remote, and what."""

    remote: Remote
    only: Only = None
    with_private: Private = False
    dry_run: DryRun = False

    def remote_of(self) -> str:
        """Return the remote."""
        return self.remote


_sync_verb = partial(
    verb, group="registry remote", access=AUTHOR, needs_receipt=True, writes_registry=True, shows=_sync_view
)


@_sync_verb("push", wire=("registry", "push"), aliases=("registry push",))
async def push(request: RemotePushRequest, context: VerbContext) -> SyncResponse:
    """Copy to a remote the versions that it does not have; a folder gets an OCI image layout."""
    services = context.services
    remote = open_remote(request.remote, services.store.settings, services.catalogs.at(request.project_path).space)
    async with aclosing(remote):
        done = await _copy(request, context)(_own(context), remote)
    return _sync_response("push", "planned" if request.dry_run else "pushed", remote, done)


class RemotePullRequest(RemotePushRequest, frozen=True, kw_only=True):
    """From which remote, and what. Accepting unsigned items and trusting a key are the owner's options."""

    accept_unsigned: AcceptUnsigned = False
    trust_key: TrustKey = None

    def brings(self) -> str:
        """Return all versions of a namespace, or of every one."""
        return f"registry/{self.only or '*'}/*@*"


@_sync_verb("pull", wire=("registry", "pull"))
async def pull_all(request: RemotePullRequest, context: VerbContext) -> SyncResponse:
    """Copy from a remote the versions that are missing here."""
    consent = PullConsent(request.accept_unsigned, request.trust_key or "")
    consent.demand_owner(is_owner=context.is_owner)
    services = context.services
    registry, space = context.registry(), services.catalogs.at(request.project_path).space
    admission = Admission(
        space.user,
        consent,
        trust_of_release,
        own=registry.actor.namespaces,
        published=await asyncio.to_thread(registry.namespaces),
        is_planned=request.dry_run,
    )
    remote = open_source(request.remote, services.store.settings, space)
    cursor = cursor_name(remote, registry.actor, with_private=request.with_private)
    # A pull of one namespace says nothing about the others, so its state is not stored.
    last = "" if request.only else (await asyncio.to_thread(registry.cursor, cursor)).hash
    async with save_namespaces(context, is_planned=request.dry_run):
        async with aclosing(remote):
            do = _copy(request, context)
            done = await do(remote, _own(context), unless=last, accept=admission.filter_releases)
        await asyncio.to_thread(admission.store_versions)
        if admission.refused and not (done.new or done.unchanged or done.status_changes):
            raise admission.refusal()
        # A version that was left out may be available the next time.
        if done.etag and not request.only and not request.dry_run and not done.left_out:
            await asyncio.to_thread(registry.set_cursor, cursor, Cursor(1, done.etag))
    return _sync_response("pull", "planned" if request.dry_run else "pulled", remote, done, admission)


def _own(context: VerbContext) -> LocalRegistry:
    registry = context.registry()
    return LocalRegistry(registry, registry.database.url, is_own=True)


def _copy(request: RemotePushRequest, context: VerbContext) -> partial[Coroutine[Any, Any, SyncReport]]:
    """Return the copying of versions between registries, with what a request says of it."""
    namespace = request.only
    return partial(
        copy,
        check=check_release,
        only=(lambda name: name.namespace == namespace) if namespace else everything,
        with_private=request.with_private,
        report=context.caller.report,
        is_planned=request.dry_run,
    )


def _sync_response(
    action: str, status: str, remote: RemoteRegistry, done: SyncReport, admission: Admission | None = None
) -> SyncResponse:
    counts = SyncCounts(len(done.new), done.unchanged, done.status_changes)
    return SyncResponse(
        action=action,
        status=status,
        remote=remote.key,
        new=[str(name) for name in done.new[:_SHOWN]],
        counts=counts,
        left_out=[*done.left_out[:_SHOWN]],
        message=f"{counts.new} new, {counts.unchanged} unchanged, {counts.marked} marked",
        acknowledged=[dict(one) for one in admission.acknowledged] or UNSET if admission else UNSET,
        warnings=[*admission.warnings] or UNSET if admission else UNSET,
    )


class MoveRequest(Request, frozen=True, kw_only=True):
    """The new store."""

    url: Annotated[LongText, Argument("`postgresql://user@host/database` or `sqlite:///absolute/path`.", "URL")]
    empty: Annotated[bool, Option("Switch to it and copy nothing.")] = False


class MoveResponse(Response, frozen=True, kw_only=True):
    """Which store is used now, and which one was."""

    action: str = "move"
    status: str = "moved"
    message: str
    url: str
    before: str
    rows: int


@verb("move", group="registry", access=OWNER, hint="Ask the owner to type `kiwi registry move URL`.", is_local=True)
def move(request: MoveRequest, context: VerbContext) -> MoveResponse:
    """Copy the store to another database, compare the copy, and use it from then on; the old one stays."""
    store, url = context.services.store, request.url
    if masked(url) != url:
        raise InvalidRequest(
            "The address holds a password, which other users of this machine can see.",
            suggestion="Leave it out, and put it into `~/.pgpass` or the variable PGPASSWORD.",
        )
    used = registry_settings(store.user).url
    before = used if used != url else last_url(store.user)
    if before == url:
        raise InvalidRequest(f"The store is {url} already.", suggestion="Name another database.")
    if request.empty:
        rows, done = 0, "nothing was copied"
        _switch(store, url)
    else:
        is_used = used == before
        opened = nullcontext(store.registry().database) if is_used else closing(connect_to(before))
        with opened as source, closing(open_database(url)) as target:
            rows = copy_store(source, target, lambda: _switch(store, url))
        done = f"{rows} rows were copied and compared"
    message = f"The store is {url} now; {done}. {masked(before)} stays as it was."
    return MoveResponse(message=message, url=url, before=masked(before), rows=rows)


def _switch(store: Store, url: str) -> None:
    """Write into the owner's file which store is used from now on."""

    def change(written: dict[str, Any]) -> None:
        written["url"] = url

    rewrite_keys(store.user / FILE_NAME, change, check=lambda: registry_settings(store.user))
    note_url(store.user, url)
    store.try_again()


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


def _pull_view(response: PullResponse) -> Iterator[ViewItem]:
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
    shows=_pull_view,
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
        return await _pulled(await _choose(query, _own(context), registry.actor.order), request, context)


async def _pull_from(
    remote: str, query: VersionQuery, request: PullRequest, consent: PullConsent, context: VerbContext
) -> PullResponse:
    """Copy a version and everything it depends on from a remote, if its signatures are accepted."""
    services = context.services
    registry = context.registry()
    catalog = services.catalogs.for_item(request.item_id, request.project_path)
    order, own = registry.actor.order, _own(context)
    admission = Admission(
        catalog.space.user,
        consent,
        trust_of_release,
        own=registry.actor.namespaces,
        published=await asyncio.to_thread(registry.namespaces),
        is_latest=not (query.version or query.digest),
    )
    source = open_source(remote, services.store.settings, catalog.space)
    copied = partial(
        copy_version,
        source,
        own,
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
            return PullResponse(
                tool_id=name.tool_id,
                message=f"{name} would be pulled",
                identity=f"registry/{name}",
                digest=there.versions[name].digest,
                closure=there.versions[name].closure,
                source=source.key,
                status="planned",
            )
        published = [*await copied(query.exactly(name))]
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
                    published += await copied(wanted.exactly(other))
    except VersionConflict as error:
        raise _conflict_here(error, registry) from error
    finally:
        await source.aclose()
    response = await _pulled(name, request, context)
    return replace(
        response,
        source=source.key,
        new=[str(one.name) for one in published if one.is_new],
        acknowledged=[dict(one) for one in admission.acknowledged] or UNSET,
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
    shown = str(name)
    with suppress(KiwiError):  # an item of an unknown publisher never has the short name
        if catalog.find(name.tool_id).identity == f"registry/{name}":
            shown = name.tool_id
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
    described: list[str] = []
    for name in map(as_text, as_list(error.details.get("conflicts"))):
        query = VersionQuery.parse(name)
        same = (
            f"{name} (published{f' by {one.published_by}' if one.published_by else ''} on {one.created_at[:10]})"
            for one in registry.named(query.tool_id, namespace=query.namespace)
            if one.name.version == query.version
        )
        described.append(next(same, name))
    error.message = f"You have another {', '.join(described)} here, and it stays."
    error.suggestion = (
        "One registry cannot hold both. Pull another version, or ask its publisher for one with a number of its own; "
        "if yours is the one that should change, publish it under a new version and tell others to use that."
    )
    return error
