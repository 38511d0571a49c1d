"""registry show and move, and registry remote add, remove, push, pull: this store, and registries elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from typing import Annotated, Any

from msgspec import UNSET, Struct, UnsetType

from kiwi_mcp.catalog.release import check_release, trust_of_release
from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.registry import Cursor, VersionName
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
from kiwi_mcp.kernel.verbs.registry.versions import AcceptUnsigned, Only, TrustKey, save_namespaces, store_path
from kiwi_mcp.kernel.view import Data, Notice, ViewItem, warning_rows
from kiwi_mcp.manifest.owner_yaml import rewrite_keys
from kiwi_mcp.policy.admission import Admission, PullConsent
from kiwi_mcp.store.move import copy_store
from kiwi_mcp.store.open import connect_to, masked, open_database
from kiwi_mcp.store.remote.port import LocalRegistry, RemoteRegistry
from kiwi_mcp.store.remote.sync import SyncReport, copy, cursor_name, everything

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


def _remove_view(response: RemoteRemoveResponse) -> Iterator[ViewItem]:
    yield Data(f"{response.remote} is forgotten")


@verb(
    "remove",
    group="registry remote",
    wire=("registry", "remove"),
    access=OWNER,
    hint="Ask the owner to type `kiwi registry remote remove NAME`.",
    aliases=("registry remove",),
    shows=_remove_view,
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


@verb(
    "push",
    group="registry remote",
    wire=("registry", "push"),
    needs_receipt=True,
    access=AUTHOR,
    writes_registry=True,
    aliases=("registry push",),
    shows=_sync_view,
)
async def push(request: RemotePushRequest, context: VerbContext) -> SyncResponse:
    """Copy to a remote the versions that it does not have; a folder gets an OCI image layout."""
    services = context.services
    remote = open_remote(request.remote, services.store.settings, services.catalogs.at(request.project_path).space)
    try:
        done = await copy(
            _own(context),
            remote,
            check=check_release,
            only=_within(request.only),
            with_private=request.with_private,
            report=context.caller.report,
            is_planned=request.dry_run,
        )
    finally:
        await remote.aclose()
    return _response("push", "planned" if request.dry_run else "pushed", remote, done)


class RemotePullRequest(RemotePushRequest, frozen=True, kw_only=True):
    """From which remote, and what. Accepting unsigned items and trusting a key are the owner's options."""

    accept_unsigned: AcceptUnsigned = False
    trust_key: TrustKey = None

    def brings(self) -> str:
        """Return all versions of a namespace, or of every one."""
        return f"registry/{self.only or '*'}/*@*"


@verb(
    "pull",
    group="registry remote",
    wire=("registry", "pull"),
    access=AUTHOR,
    needs_receipt=True,
    writes_registry=True,
    shows=_sync_view,
)
async def pull(request: RemotePullRequest, context: VerbContext) -> SyncResponse:
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
        try:
            done = await copy(
                remote,
                _own(context),
                check=check_release,
                unless=last,
                only=_within(request.only),
                with_private=request.with_private,
                report=context.caller.report,
                accept=admission.filter_releases,
                is_planned=request.dry_run,
            )
        finally:
            await remote.aclose()
        await asyncio.to_thread(admission.store_versions)
        if admission.refused and not (done.new or done.unchanged or done.status_changes):
            raise admission.refusal()
        # A version that was left out may be available the next time.
        if done.etag and not request.only and not request.dry_run and not done.left_out:
            await asyncio.to_thread(registry.set_cursor, cursor, Cursor(1, done.etag))
    return _response("pull", "planned" if request.dry_run else "pulled", remote, done, admission)


def _own(context: VerbContext) -> LocalRegistry:
    registry = context.registry()
    return LocalRegistry(registry, registry.database.url, is_own=True)


def _within(namespace: str | None) -> Callable[[VersionName], bool]:
    return (lambda name: name.namespace == namespace) if namespace else everything


def _response(
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
        acknowledged=[dict(one) for one in admission.acknowledgement] or UNSET if admission else UNSET,
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
        rows = _copy(store, before, url)
        done = f"{rows} rows were copied and compared"
    message = f"The store is {url} now; {done}. {masked(before)} stays as it was."
    return MoveResponse(message=message, url=url, before=masked(before), rows=rows)


def _copy(store: Store, before: str, url: str) -> int:
    is_used = registry_settings(store.user).url == before
    opened = nullcontext(store.registry().database) if is_used else closing(connect_to(before))
    with opened as source, closing(open_database(url)) as target:
        return copy_store(source, target, lambda: _switch(store, url))


def _switch(store: Store, url: str) -> None:
    """Write into the owner's file which store is used from now on."""

    def change(written: dict[str, Any]) -> None:
        written["url"] = url

    rewrite_keys(store.user / FILE_NAME, change, check=lambda: registry_settings(store.user))
    note_url(store.user, url)
    store.try_again()
