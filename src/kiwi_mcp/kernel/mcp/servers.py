"""Servers at work: each asked for what it offers, when the owner says so and when it says that its list has changed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Protocol, TypeVar, cast

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.mcp import PUBLISHED
from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import (
    DriverMissing,
    InvalidRequest,
    KiwiError,
    NotFound,
    PolicyDenied,
    ToolNotFound,
    Unavailable,
)
from kiwi_mcp.domain.grants import Deny, Rights, Rules
from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.mcp import Definition, ServerKey, ServerRecord, State, plain, version_of
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import HttpSpec, ProcessSpec
from kiwi_mcp.domain.times import moment
from kiwi_mcp.kernel.confining import Judge, jail_of_server
from kiwi_mcp.kernel.delivery import delivered, holder_of
from kiwi_mcp.kernel.mcp.clean import without_secrets
from kiwi_mcp.kernel.mcp.following import Following
from kiwi_mcp.kernel.mcp.pins import Listing, Offer, merged, offers_of, unlisted
from kiwi_mcp.kernel.pipeline import load_driver
from kiwi_mcp.kernel.reach import reaching
from kiwi_mcp.kernel.redaction import redacted
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.manifest.render import defaulted, variables
from kiwi_mcp.policy.authority import rights_of
from kiwi_mcp.policy.authorize import verify
from kiwi_mcp.primitives.secrets import Revealed
from kiwi_mcp.store.definitions import Definitions, Known

_STALE = 300.0
"""For how many seconds what a server offers is taken to be what it was, unless it says otherwise."""
_RECENT = timedelta(minutes=1)
"""For how long another process need not look at what a server offers before it calls it."""
_MAX_TEXT = 16_000
_TOLD = 20
Done = TypeVar("Done")


class Eras(Protocol):
    """How each server is spoken to."""

    def remember(self, identity: str, era: str) -> None:
        """Note the era of a server."""


class Lister(Protocol):
    """The driver that speaks to servers, as far as it is needed here."""

    on_change: Callable[[str], None] | None
    eras: Eras

    def spec_of(self, chain: Chain, space: Space) -> ProcessSpec | HttpSpec:
        """Return how a server is reached."""

    async def list_items(
        self,
        chain: Chain,
        space: Space,
        secrets: Mapping[str, str],
        *,
        hosts: Rules | None = None,
        jail: Jail | None = None,
    ) -> Listing:
        """Return everything that a server offers."""


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What came of asking a server."""

    server: ServerRecord
    definitions: tuple[Definition, ...]
    issues: tuple[Issue, ...]

    @property
    def states(self) -> Mapping[State, int]:
        """How many definitions are in each state."""
        return Counter(one.state for one in self.definitions)


class Servers:
    """The MCP servers of one user."""

    def __init__(
        self,
        user: Path,
        remembered: Callable[[], Definitions],
        catalogs: Callable[[], Iterable[Catalog]],
        judge: Judge,
    ) -> None:
        self._user = user
        self.judge = judge
        self._catalogs = catalogs
        self._following = Following()
        self._asked_at: dict[str, float] = {}
        self._seen: set[ServerKey] = set()
        self._looks: dict[ServerKey, asyncio.Lock] = {}
        self.remembered = remembered

    def hear(self) -> None:
        """Ask servers anew, from now on, when they say that their list has changed; each as it last was asked."""
        lister = _lister()
        if self._following.start(lister, self._asked_anew):
            with suppress(KiwiError):  # a store that cannot be asked costs a question to each server, no more
                for record in self.remembered().servers():
                    if record.era:
                        lister.eras.remember(record.identity, record.era)

    async def attend(self, chain: Chain, catalog: Catalog) -> Unavailable | None:
        """Before the first call of a server in this process: list what it offers, and refuse an item that changed.

        What was listed within the last minute is taken as it is. A server that cannot be listed cannot be called, and
        why is returned.
        """
        self.hear()
        server, key = chain.executor, key_of(chain.executor, catalog.space)
        if key in self._seen:
            return None
        async with self._looks.setdefault(key, asyncio.Lock()):
            if key not in self._seen and _is_kept(server) and _is_old(self.remembered().find(key)):
                try:
                    await self.refresh(server, catalog)
                except Unavailable as fault:
                    return fault
        self._seen.add(key)
        catalog.resolve(chain.tool.identity.partition("@")[0])  # refuses what is not as it was accepted
        return None

    def used(self, identity: str) -> None:
        """Note that a server was used: one that was not asked for a while may be another one by now, and is asked."""
        if monotonic() - self._asked_at.get(identity, -_STALE) >= _STALE:
            self._asked_at[identity] = monotonic()
            self._following.heard(identity)

    async def refresh(self, server: Tool, catalog: Catalog) -> Refreshed:
        """Ask a server for everything it offers, and remember that; why it cannot be asked is remembered too."""
        self.hear()
        chain, rights = permitted(server, catalog, self._user)
        key = key_of(server, catalog.space)
        try:
            listing = await self._listed(chain, catalog, rights)
        except KiwiError as fault:
            work = partial(_failed, server, key, fault.message)
            await _beside(partial(self.remembered().change, key, work))
            raise
        self._asked_at[server.identity] = monotonic()
        self._seen.add(key)
        return await _beside(partial(_taken_in, listing, server, key, self.remembered()))

    async def aclose(self) -> None:
        """Ask no more."""
        await self._following.aclose()

    def _jail(self, chain: Chain, catalog: Catalog, rights: Rights) -> Jail | None:
        """Return how the process of a server is held; None where it is none of this machine's."""
        spec = _lister().spec_of(chain, catalog.space)
        if not isinstance(spec, ProcessSpec):
            return None
        try:
            process = Chain(chain.links, "mcp", project=chain.project)
            is_meant = catalog.is_meant(chain.tool)
            return jail_of_server(process, spec, catalog.space, self.judge, rights, is_meant=is_meant)
        except PolicyDenied as refused:
            server = chain.tool
            if not catalog.is_meant(server):
                refused.suggestion = (
                    f"Look at it: `kiwi mcp diff {server.id}`. If it is right, `kiwi mcp accept {server.id}`."
                )
            raise

    async def _listed(self, chain: Chain, catalog: Catalog, rights: Rights) -> Listing:
        space = catalog.space
        secrets = revealed(chain, space, self.judge)
        try:
            jail = self._jail(chain, catalog, rights)
            listing = await _lister().list_items(chain, space, secrets, hosts=rights.hosts, jail=jail)
            return await asyncio.to_thread(without_secrets, listing, secrets)
        except KiwiError as fault:
            fault.message = redacted(Outcome("error", message=fault.message), secrets).message
            raise

    async def _asked_anew(self, identity: str) -> None:
        # An identity does not say which project it is of, so every one that is in use is looked through.
        for catalog in tuple(self._catalogs()):
            with suppress(KiwiError):
                server = catalog.find(identity)
                record = self.remembered().find(key_of(server, catalog.space))
                # A manifest that was changed meanwhile would start something that the owner has not looked at.
                if record is not None and record.digest == server.digest:
                    await self.refresh(server, catalog)


def key_of(server: Tool, space: Space) -> ServerKey:
    """Return what a server is remembered by."""
    spaces = {"project": str(space.project_ai), "user": str(space.user)}
    return ServerKey(spaces.get(server.origin.source, PUBLISHED), server.id)


def fresh_record(server: Tool, key: ServerKey) -> ServerRecord:
    """Return what is known of a server that was never asked, and that no owner has spoken of."""
    path = "" if key.space == PUBLISHED else str(server.origin.path)
    return ServerRecord(key, server.identity, path, server.digest)


def names_of_servers(catalog: Catalog) -> list[str]:
    """Return the names of the servers that the project and the user have."""
    entries = catalog.all(("project", "user"))
    return sorted({entry.tool_id for entry in entries if catalog.sheets.carries(entry.tool_type, "mcp")})


def server_named(name: str, catalog: Catalog) -> Tool:
    """Return the server of a name, or refuse what is none."""
    try:
        found = catalog.find(name)
    except ToolNotFound:
        names = names_of_servers(catalog)
        there = f"there are: {', '.join(names[:_TOLD])}" if names else "there is none yet"
        raise NotFound(
            f"No MCP server {name!r}; {there}.",
            suggestion=f"{did_you_mean(name, names)}`kiwi mcp list` shows the servers.",
            server=name,
        ) from None
    if not catalog.sheets.carries(found.manifest.tool_type, "mcp"):
        raise InvalidRequest(
            f"{found.id!r} is a {found.manifest.tool_type}, not an MCP server.",
            suggestion="`kiwi mcp list` shows the servers.",
        )
    return found


def _lister() -> Lister:
    driver = load_driver("mcp")
    if driver is None:
        raise DriverMissing("an MCP server", "mcp")
    return cast("Lister", driver)


def revealed(chain: Chain, space: Space, judge: Judge) -> Revealed:
    """Return the values of all variables by which a server is reached."""
    config = chain.tool.manifest.config
    spare = defaulted(config)
    needed = [name for name in variables(config) if name not in spare]
    return delivered(needed, holder_of(chain, space, judge), space, optional=spare, needed_by=chain.tool.id)


def permitted(server: Tool, catalog: Catalog, user: Path) -> tuple[Chain, Rights]:
    """Return what a server stands on and what its owner grants, or refuse one that may not be used."""
    chain = catalog.resolve(server.identity)
    rights = reaching(rights_of(user), server, catalog)
    verify(chain, (), is_frozen=False)
    verdict = rights.item_verdict([link.identity for link in chain.links])
    if isinstance(verdict, Deny):
        raise PolicyDenied(
            f"{chain.tool.id!r} may not be started: {verdict.reason}.",
            suggestion="Ask the owner: the rule stands in the policy.yaml of the user space.",
            tool_id=chain.tool.id,
            rule=verdict.rule,
        )
    return chain, rights


def _is_kept(server: Tool) -> bool:
    return server.manifest.config.get("schema_cache") is not False


def _is_old(record: ServerRecord | None) -> bool:
    """Whether what a server offers was listed, and so long ago that it may be another one by now."""
    if record is None or not record.seen_at:
        return False
    age = datetime.now(UTC) - datetime.fromisoformat(record.seen_at)
    return not timedelta(0) <= age < _RECENT


async def _beside(work: Callable[[], Done]) -> Done:
    """Write to the store beside the loop; whoever is cancelled meanwhile waits, as the store may be closed then."""
    writing = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait({writing})
        raise


def _taken_in(listing: Listing, server: Tool, key: ServerKey, remembered: Definitions) -> Refreshed:
    """Remember what a server says that it offers, and return that."""
    issues = [*listing.issues]
    offers = offers_of(server.id, listing, issues)
    kept = offers if _is_kept(server) else ()

    def work(record: ServerRecord | None, known: Sequence[Definition]) -> Known:
        return _listed_now(record or fresh_record(server, key), tuple(known), server, listing, kept)

    record, definitions = remembered.change(key, work)
    if not _is_kept(server):
        definitions, issues = merged((), offers, is_accepted=False, now=moment()), [*listing.issues]
    return Refreshed(record, tuple(definitions), tuple(issues))


def _failed(
    server: Tool, key: ServerKey, fault: str, record: ServerRecord | None, known: Sequence[Definition]
) -> Known:
    now = record or fresh_record(server, key)
    return replace(now, fault=_text(fault), fault_at=moment()), tuple(known)


def _listed_now(
    record: ServerRecord, known: tuple[Definition, ...], server: Tool, listing: Listing, offers: tuple[Offer, ...]
) -> Known:
    now = moment()
    # What the owner added is accepted first; a manifest that was changed since is not what the owner added.
    is_first = record.accepts_first and record.digest == server.digest
    current = replace(fresh_record(server, record.key), digest=record.digest, words=record.words)
    after = merged(known, offers, is_accepted=is_first, now=now, untouched=unlisted(listing))
    return (
        replace(
            current,
            version=version_of(listing.server_info),
            era=listing.era,
            protocol_version=_text(listing.protocol_version),
            info=listing.server_info,
            instructions=_text(listing.instructions),
            seen_at=now,
        ),
        after if _is_kept(server) else (),
    )


def _text(text: str) -> str:
    """Return a text that every database holds."""
    return plain(text[:_MAX_TEXT]).encode(errors="replace").decode().replace("\0", "\ufffd")
