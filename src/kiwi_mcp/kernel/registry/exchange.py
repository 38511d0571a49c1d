"""Exchange with other registries: push what they lack, pull what is lacking here, and say where they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.outcome import Report
from kiwi_mcp.domain.registry import START, Event, Published, Release, VersionName
from kiwi_mcp.kernel.registry.admission import Admission, Leave
from kiwi_mcp.kernel.registry.port import RegistryRemote, Remote
from kiwi_mcp.kernel.registry.remotes import lasting, open_remote, open_source
from kiwi_mcp.kernel.registry.sync import copy, cursor_name, everything
from kiwi_mcp.kernel.requests import RegistryRequest
from kiwi_mcp.kernel.settings import RemoteSettings, add_remote
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.store.open import masked

_SHOWN = 100


async def exchange(
    request: RegistryRequest, catalog: Catalog, store: Store, report: Report, *, is_owner: bool = False
) -> JsonObject:
    """Do what the request says; only the owner says what is taken although nobody vouches for it."""
    leave = Leave(request.accept_unsigned, request.trust_key or "")
    leave.demand_owner(is_owner=is_owner)
    match request.action:
        case "show":
            return _shown(store)
        case "add":
            return _added(request, catalog)
        case "push" | "pull":
            return await _copied(request, catalog, store, report, leave)


def _shown(store: Store) -> JsonObject:
    registry, settings = store.registry(), store.settings
    return {
        "action": "show",
        "registry": registry.database.url,
        "actor": settings.actor.name,
        "namespaces": list(settings.actor.namespaces),
        "versions": registry.count(),
        "remotes": {
            name: {"url": masked(remote.url), **({"token": remote.token} if remote.token else {})}
            for name, remote in settings.remotes.items()
        },
    }


def _added(request: RegistryRequest, catalog: Catalog) -> JsonObject:
    if not request.remote or not request.url:
        raise InvalidRequest(
            "A remote needs a name and an address.",
            suggestion="Send `remote` and `url`: `kiwi registry add team https://kiwi.example.com`.",
        )
    url = masked(request.url)
    if url != request.url:
        raise InvalidRequest(
            "The address holds a password, which would stand in a file for all to read.",
            suggestion="Leave it out: PostgreSQL's own `~/.pgpass` or PGPASSWORD supplies it.",
        )
    url = lasting(url, catalog.space)
    add_remote(catalog.space.user, request.remote, RemoteSettings(url, request.token or ""))
    return {
        "action": "add",
        "status": "added",
        "message": f"{request.remote} is {url}",
        "remote": request.remote,
        "url": url,
        "next": f"Copy from it with `kiwi registry pull {request.remote}`, to it with `kiwi registry push "
        f"{request.remote}`.",
    }


async def _copied(request: RegistryRequest, catalog: Catalog, store: Store, report: Report, leave: Leave) -> JsonObject:
    if not request.remote:
        raise InvalidRequest(
            "The request names no remote.",
            suggestion="Send `remote`: a name, a folder, or an address.",
        )
    registry = store.registry()
    own = RegistryRemote(registry, registry.database.url, is_own=True)
    is_push = request.action == "push"
    remote = await (open_remote if is_push else open_source)(request.remote, store.settings, catalog.space)
    source, target = (own, remote) if is_push else (remote, own)
    # A push compares what both sides hold; a pull goes on from where the last one ended.
    is_followed = not is_push and not request.only
    cursor = cursor_name(remote, registry.actor, with_private=request.with_private)
    admission = Admission(catalog.space.user, leave, own=registry.actor.namespaces, is_planned=request.dry_run)
    try:
        done = await copy(
            source,
            _Blind(target) if request.dry_run else target,
            after=await asyncio.to_thread(registry.cursor, cursor) if is_followed else START,
            only=_within(request.only) if request.only else everything,
            with_private=request.with_private,
            report=report,
            sieve=None if is_push else admission.sieve,
        )
    finally:
        await remote.aclose()
    await asyncio.to_thread(admission.settle)
    if admission.kept_out and not (done.new or done.unchanged or done.marked):
        raise admission.refusal()
    # What was left out lies before the cursor, and may be had the next time.
    if is_followed and not request.dry_run and not done.left_out:
        await asyncio.to_thread(registry.set_cursor, cursor, done.cursor)
    shown: list[Json] = [str(name) for name in done.new[:_SHOWN]]
    return {
        "action": request.action,
        "status": "planned" if request.dry_run else ("pushed" if is_push else "pulled"),
        "remote": remote.key,
        "new": shown,
        "counts": {"new": len(done.new), "unchanged": done.unchanged, "marked": done.marked},
        "left_out": list(done.left_out[:_SHOWN]),
        "message": f"{len(done.new)} new, {done.unchanged} unchanged, {done.marked} marked",
        **admission.told,
        **({"warnings": [*admission.warnings]} if admission.warnings else {}),
    }


class _Blind:
    """A remote to which nothing is written, for a look at what would be."""

    def __init__(self, remote: Remote) -> None:
        self.key = remote.key
        self._remote = remote

    async def events(self, after: int = 0) -> Sequence[Event]:
        """Return what the remote tells."""
        return await self._remote.events(after)

    async def history(self, tool_id: str) -> Sequence[Event]:
        """Return what the remote tells of one name."""
        return await self._remote.history(tool_id)

    async def read(self, names: Sequence[VersionName]) -> Sequence[Release]:
        """Return what the remote holds."""
        return await self._remote.read(names)

    async def write(self, releases: Sequence[Release], marks: Sequence[Event]) -> Sequence[Published]:  # noqa: ARG002 - nothing is said again either
        """Return what would be published."""
        return [Published(one.name, one.digest, "", is_new=True) for one in releases]

    async def aclose(self) -> None:
        """Close nothing: whoever opened the remote closes it."""


def _within(namespace: str) -> Callable[[VersionName], bool]:
    return lambda name: name.namespace == namespace
