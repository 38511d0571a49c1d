"""`McpServers`: list, refresh with back-off on `list_changed`, check before a call, complete; pinned definitions.

Whatever starts a server or sends it something is prepared by the pipeline and judged by its rules first.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from difflib import unified_diff
from functools import partial
from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.mcp_source import PUBLISHED
from kiwi_mcp.domain.calls import NO_CALLER, Call, Space
from kiwi_mcp.domain.errors import (
    DriverMissing,
    InvalidRequest,
    KiwiError,
    NotFound,
    PolicyDenied,
    ToolNotFound,
    Unavailable,
)
from kiwi_mcp.domain.grants import Rights
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain, Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text, text_of
from kiwi_mcp.domain.mcp import (
    Definition,
    Era,
    OfferKind,
    ServerKey,
    ServerListing,
    ServerRecord,
    State,
    id_of,
    name_of,
    pinned,
    variables_of,
    version_of,
)
from kiwi_mcp.domain.outcome import Outcome, Progress, Report
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.domain.secret import is_secret, looks_secret
from kiwi_mcp.domain.times import moment
from kiwi_mcp.kernel.approvals import ApprovalGate
from kiwi_mcp.kernel.context import Context, Services
from kiwi_mcp.kernel.pipeline import (
    judge_plan,
    plan_call,
    prepare,
    sandbox_is_available,
    secrets_of,
    with_client_requests,
)
from kiwi_mcp.kernel.recorder import Run
from kiwi_mcp.kernel.tool_names import touch_server_names
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.manifest.signatures import canonical, sha256_hex
from kiwi_mcp.manifest.templates import defaulted, variables
from kiwi_mcp.policy.authorize import permit
from kiwi_mcp.policy.isolation import Judge, server_profile
from kiwi_mcp.policy.policy_files import rights_of
from kiwi_mcp.policy.secret_access import holder_of, secrets_for
from kiwi_mcp.primitives.secrets.redaction import redacted
from kiwi_mcp.primitives.secrets.reveal import Revealed
from kiwi_mcp.store.mcp_definitions import McpDefinitions, ServerDefinitions

if TYPE_CHECKING:  # the driver is loaded by its name when a server is first used, and with it the MCP SDK
    from kiwi_mcp.drivers.mcp.driver import McpDriver

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds before a server that keeps reporting list changes is listed again: at first, and at most."""
_PAUSE_FOR_OTHERS = 60.0
"""Seconds before a server is listed again for callers other than the owner."""
_STALE = 300.0
"""Seconds for which a server's list is taken to be unchanged, unless the server says otherwise."""
_RECENT = timedelta(minutes=1)
"""How old a list may be that another process stored, so that a server is called without listing it again."""
_MAX_TEXT = 16_000
_NAMES_SHOWN = 20
_AT_ONCE = 4
T = TypeVar("T")


async def complete(
    item_id: str, context: Context, argument: str, value: str, known: Mapping[str, str]
) -> Sequence[str]:
    """Return the proposals for an argument of which `value` is typed; nothing where the item could not be called."""
    try:
        chain = context.catalog.resolve(item_id)
        if chain.server is None:
            return ()
        # The rules of a call apply, although the other arguments of the call are not known yet.
        wanted = as_object(chain.tool.manifest.parameters.get("properties"))
        call = Call(item_id, context.space, {name: known.get(name, "x") for name in wanted})
        planned = plan_call(call, context)
        # The owner is not asked for a proposal, so a server that waits for the owner is not started.
        approval = await asyncio.to_thread(ApprovalGate(context).preview, planned)
        if approval["needed"] or await context.services.check_server(chain, context.catalog):
            return ()
        await sandbox_is_available(planned, context)
        driver = cast("McpDriver", planned.prepared.driver)
        secrets = secrets_of(planned.plan, planned.chain, context, is_accepted=planned.prepared.is_accepted)
        return await driver.complete(planned.plan, planned.chain, call.space, secrets, argument, value, known)
    except KiwiError:
        return ()


class ListRefresher:
    """Lists a server again when it reports a change: once at a time, and later the more often it reports one."""

    def __init__(self) -> None:
        self._refresh: Callable[[str], Awaitable[None]] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()

    def start(self, driver: McpDriver, refresh: Callable[[str], Awaitable[None]]) -> bool:
        """Listen to servers from now on, and return whether that is new."""
        if self._refresh is not None:
            return False
        self._refresh = refresh
        driver.on_change = self.schedule
        return True

    def schedule(self, identity: str) -> None:
        """List a server that reports a change of its list."""
        self._again.add(identity)
        if identity not in self._tasks:
            self._tasks[identity] = asyncio.get_running_loop().create_task(self._follow(identity))

    async def aclose(self) -> None:
        """Stop listing."""
        tasks, self._tasks, self._refresh = [*self._tasks.values()], {}, None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, identity: str) -> None:
        pause = _FIRST_PAUSE
        try:
            while identity in self._again and self._refresh is not None:
                self._again.discard(identity)
                await self._refresh(identity)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
        finally:
            self._tasks.pop(identity, None)


class RefreshResult(Struct, frozen=True):
    """What a server offers, after it was listed."""

    server: ServerRecord
    definitions: tuple[Definition, ...]
    issues: tuple[Issue, ...]

    @property
    def states(self) -> Mapping[State, int]:
        """How many definitions are in each state."""
        return Counter(one.state for one in self.definitions)


class McpServers:
    """The MCP servers of one user."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._user = services.user
        self._judge = services.provenance.held
        self._authored = services.provenance.authored
        self._catalogs = services.catalogs.kept
        self._refresher = ListRefresher()
        self._listed_at: dict[str, float] = {}
        self._listed_for_others: dict[ServerKey, float] = {}
        self._checked: set[ServerKey] = set()
        self._locks: dict[ServerKey, asyncio.Lock] = {}
        self.definitions = services.catalogs.definitions

    def driver(self) -> McpDriver:
        """Return the driver that speaks to servers."""
        driver = self._services.drivers.named("mcp")
        if driver is None:
            raise DriverMissing("an MCP server", "mcp")
        return cast("McpDriver", driver)

    def plan(self, server: Tool, catalog: Catalog, rights: Rights | None = None) -> tuple[Run, Revealed]:
        """Return how a server is started or reached, judged by every rule of a call, and its secrets."""
        space = catalog.space
        rights = rights_of(self._user) if rights is None else rights
        context = Context(self._services, NO_CALLER, catalog, rights, is_owner=False)
        call, chain, driver = Call(server.identity, space), catalog.resolve(server.identity), self.driver()
        prepared = prepare(chain, driver, call, context)
        plan = permit(driver.plan_server(chain, space), prepared.rights)
        if isinstance(plan.spec, ProcessSpec):
            is_accepted = catalog.is_meant(chain.tool)
            try:
                profile, _ = server_profile(chain, plan.spec, space, self._judge, prepared.rights, is_meant=is_accepted)
            except PolicyDenied as refused:
                if not is_accepted:
                    look = f"Look at it: `kiwi mcp diff {server.id}`."
                    refused.suggestion = f"{look} If it is right, `kiwi mcp accept {server.id}`."
                raise
            plan = replace(plan, profile=profile)
        run = judge_plan(with_client_requests(plan, server, catalog), prepared, call, context)
        return run, server_secrets(chain, space, self._authored, is_accepted=catalog.is_meant(server))

    def follow_changes(self) -> None:
        """From now on, list a server again when it reports that its list has changed."""
        driver = self.driver()
        if self._refresher.start(driver, self._refresh_by_identity):
            with suppress(KiwiError):  # a store that cannot be read costs only one request to each server
                for record in self.definitions().servers():
                    if record.era:
                        driver.eras[record.identity] = cast("Era", record.era)

    async def check(self, chain: Chain, catalog: Catalog) -> Unavailable | None:
        """Before the first call of a server in this process: list what it offers, and refuse an item that changed.

        A list that is younger than a minute is taken as it is. A server that cannot be listed cannot be called; the
        reason is returned.
        """
        server, key = chain.executor, key_of(chain.executor, catalog.space)
        if key in self._checked or not catalog.has_servers:
            return None
        self.follow_changes()
        async with self._locks.setdefault(key, asyncio.Lock()):
            record = self.definitions().find(key) if key not in self._checked and _stores_definitions(server) else None
            age = datetime.now(UTC) - datetime.fromisoformat(record.seen_at) if record and record.seen_at else None
            if age is not None and not timedelta(0) <= age < _RECENT:
                try:
                    await self.refresh(server, catalog)
                except Unavailable as fault:
                    return fault
        self._checked.add(key)
        catalog.resolve(chain.tool.identity.partition("@")[0])  # refuses what is not as it was accepted
        return None

    def note_use(self, identity: str) -> None:
        """Note that a server was used: one that was not listed for a while may have changed, and is listed again."""
        if monotonic() - self._listed_at.get(identity, -_STALE) >= _STALE:
            self._listed_at[identity] = monotonic()
            self._refresher.schedule(identity)

    def is_due(self, server: Tool, catalog: Catalog) -> bool:
        """Whether a server may be listed for a caller other than the owner; if so, it counts as listed."""
        key, now = key_of(server, catalog.space), monotonic()
        if now - self._listed_for_others.get(key, -_PAUSE_FOR_OTHERS) < _PAUSE_FOR_OTHERS:
            return False
        self._listed_for_others[key] = now
        return True

    async def refresh(self, server: Tool, catalog: Catalog, rights: Rights | None = None) -> RefreshResult:
        """List everything a server offers, and store it; why it cannot be listed is stored too."""
        self.follow_changes()
        key = key_of(server, catalog.space)
        try:
            run, secrets = self.plan(server, catalog, rights)
            listing = await self._list(run, secrets)
        except KiwiError as fault:
            work = partial(_failed, server, key, fault.message)
            await _write_in_thread(partial(self.definitions().change, key, work))
            raise
        self._listed_at[server.identity] = monotonic()
        self._checked.add(key)
        return await _write_in_thread(partial(_store_listing, listing, server, key, self.definitions()))

    async def try_refresh(
        self, server: Tool, catalog: Catalog, warnings: list[Json], rights: Rights | None = None
    ) -> RefreshResult | None:
        """List one server; why it cannot be listed becomes a warning."""
        try:
            return await self.refresh(server, catalog, rights)
        except KiwiError as fault:
            fix = f"{fault.suggestion} Then `kiwi mcp refresh {server.id}`."
            warnings.append(Issue(server.id, f"could not be asked: {fault.message}", fix, "warning").to_json())
            return None

    async def refresh_all(
        self,
        servers: Sequence[Tool],
        catalog: Catalog,
        warnings: list[Json],
        report: Report,
        rights: Rights | None = None,
    ) -> list[RefreshResult]:
        """List several servers at the same time, with a line of progress for each that answered or failed."""
        gate, done = asyncio.Semaphore(_AT_ONCE), 0

        async def refresh(server: Tool) -> RefreshResult | None:
            nonlocal done
            async with gate:
                report(Progress(f"starting {server.id}", done=done, total=len(servers)))
                result = await self.try_refresh(server, catalog, warnings, rights)
                done += 1
                count = f"{len(result.definitions)} items" if result else "failed"
                report(Progress(f"{server.id}: {count}", done=done, total=len(servers)))
                return result

        results = await asyncio.gather(*map(refresh, servers))
        return [one for one in results if one is not None]

    @contextmanager
    def changing(self, *, is_planned: bool = False) -> Iterator[None]:
        """Report that servers may be others after the block, also where only a part of it was done."""
        try:
            yield
        finally:
            if not is_planned:
                touch_server_names(self._user)

    async def aclose(self) -> None:
        """Stop listing servers."""
        await self._refresher.aclose()

    async def _list(self, run: Run, secrets: Revealed) -> ServerListing:
        driver = self.driver()
        try:
            await driver.prepare(run.plan, run.chain, run.call.space)
            listing = await driver.list_items(run.plan, run.chain, run.call.space, secrets)
            return await asyncio.to_thread(without_secrets, listing, secrets)
        except KiwiError as fault:
            fault.message = redacted(Outcome("error", message=fault.message), secrets).message
            raise

    async def _refresh_by_identity(self, identity: str) -> None:
        # An identity does not say which project it is of, so every project in use is searched.
        for catalog in tuple(self._catalogs()):
            with suppress(KiwiError):
                server = catalog.find(identity)
                # A manifest that was changed meanwhile would start something that the owner has not looked at.
                if is_owners(server, catalog, self.definitions()):
                    await self.refresh(server, catalog)


async def check_server(services: Services, chain: Chain, catalog: Catalog) -> Unavailable | None:
    """List the server of a chain again where that is due, and refuse an item that changed: gate 13 of the pipeline."""
    return await services.one(McpServers).check(chain, catalog)


def is_owners(server: Tool, catalog: Catalog, definitions: McpDefinitions) -> bool:
    """Whether the owner has added or accepted a server with the manifest that it has now."""
    record = definitions.find(key_of(server, catalog.space))
    return record is not None and record.digest == server.digest


def key_of(server: Tool, space: Space) -> ServerKey:
    """Return the key under which a server is stored."""
    spaces = {"project": str(space.project_ai), "user": str(space.user)}
    return ServerKey(spaces.get(server.origin.source, PUBLISHED), server.id)


def new_record(server: Tool, key: ServerKey) -> ServerRecord:
    """Return the record of a server that was never listed, added or accepted."""
    path = "" if key.space == PUBLISHED else str(server.origin.path)
    return ServerRecord(key, server.identity, path, server.digest)


def server_names(catalog: Catalog) -> list[str]:
    """Return the names of the servers that the project and the user have."""
    entries = catalog.all(("project", "user"))
    return sorted({entry.tool_id for entry in entries if catalog.sheets.is_server(entry.tool_type)})


def find_server(name: str, catalog: Catalog) -> Tool:
    """Return the server with a name, or refuse an item that is not a server."""
    try:
        found = catalog.find(name)
    except ToolNotFound:
        names = server_names(catalog)
        known = f"there are: {', '.join(names[:_NAMES_SHOWN])}" if names else "there is none yet"
        raise NotFound(
            f"No MCP server {name!r}; {known}.",
            suggestion=f"{did_you_mean(name, names)}`kiwi mcp list` shows the servers.",
            server=name,
        ) from None
    if not catalog.sheets.is_server(found.manifest.tool_type):
        raise InvalidRequest(
            f"{found.id!r} is a {found.manifest.tool_type}, not an MCP server.",
            suggestion="`kiwi mcp list` shows the servers.",
        )
    return found


def server_secrets(chain: Chain, space: Space, judge: Judge, *, is_accepted: bool) -> Revealed:
    """Return the values of all variables by which a server is reached, which the owner may have accepted as it is."""
    config = chain.tool.manifest.config
    spare = defaulted(config)
    needed = [name for name in variables(config) if name not in spare]
    holder = holder_of(chain, space, judge, is_accepted=is_accepted)
    return secrets_for(needed, holder, space, optional=spare, needed_by=chain.tool.id)


def _stores_definitions(server: Tool) -> bool:
    return server.manifest.config.get("schema_cache") is not False


async def _write_in_thread(work: Callable[[], T]) -> T:
    """Write to the store outside the event loop; a cancelled caller still waits, as the store may be closed next."""
    writing = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait({writing})
        raise


def _store_listing(listing: ServerListing, server: Tool, key: ServerKey, definitions: McpDefinitions) -> RefreshResult:
    """Store what a server offers, and return it."""
    issues = [*listing.issues]
    is_stored = _stores_definitions(server)
    offers = offers_of(server.id, listing, issues)

    def work(record: ServerRecord | None, known: Sequence[Definition]) -> ServerDefinitions:
        record = record or new_record(server, key)
        now = moment()
        # What the owner added is accepted first; a manifest that was changed since is not what the owner added.
        is_first = record.accepts_first and record.digest == server.digest
        listed = replace(
            new_record(server, record.key),
            digest=record.digest,
            words=record.words,
            version=version_of(listing.server_info),
            era=listing.era,
            protocol_version=_text(listing.protocol_version),
            info=listing.server_info,
            instructions=_text(listing.instructions),
            seen_at=now,
        )
        if not is_stored:
            return listed, ()
        return listed, merged(known, offers, is_accepted=is_first, now=now, untouched=unlisted(listing))

    record, known = definitions.change(key, work)
    if not is_stored:
        known, issues = merged((), offers, is_accepted=False, now=moment()), [*listing.issues]
    return RefreshResult(record, tuple(known), tuple(issues))


def _failed(
    server: Tool, key: ServerKey, fault: str, record: ServerRecord | None, known: Sequence[Definition]
) -> ServerDefinitions:
    now = record or new_record(server, key)
    return replace(now, fault=_text(fault), fault_at=moment()), tuple(known)


def _text(text: str) -> str:
    """Return a text that every database holds."""
    return strip_controls(text[:_MAX_TEXT]).encode(errors="replace").decode().replace("\0", "\ufffd")


def known_servers(catalog: Catalog, definitions: McpDefinitions) -> list[tuple[Tool, ServerKey]]:
    """Return the servers of the project, of the user, and of those that are published the ones that were asked."""
    names = {*server_names(catalog), *(one.key.server for one in definitions.servers() if not one.path)}
    found: list[tuple[Tool, ServerKey]] = []
    for name in sorted(names):
        try:
            server = find_server(name, catalog)
        except KiwiError:
            continue
        found.append((server, key_of(server, catalog.space)))
    return found


_KIND = "kiwi.mcp/1"
"""Which statement is hashed, so that a later one can never be taken for it."""
_MAX_BYTES = 256_000
"""The most that one definition may have, in bytes."""
_MAX_NAME = 1_000
"""The most that a name, an address or a template may have, in bytes."""


class ServerOffer(Struct, frozen=True):
    """One thing that a server offers now."""

    kind: OfferKind
    name: str
    definition: JsonObject
    digest: str


def offers_of(server: str, listing: ServerListing, issues: list[Issue]) -> tuple[ServerOffer, ...]:
    """Return what a server offers that can be pinned; what cannot becomes an issue."""
    offers: list[ServerOffer] = []
    kinds: tuple[tuple[OfferKind, tuple[JsonObject, ...]], ...] = (
        ("tool", listing.tools),
        ("prompt", listing.prompts),
        ("resource", listing.resources),
        ("template", listing.templates),
    )
    for kind, one in ((kind, one) for kind, definitions in kinds for one in definitions):
        definition = pinned(one)
        name = name_of(kind, definition)
        place = f"{kind} {name[:100]}"
        try:
            data = canonical({"kind": _KIND, "server": server, "type": kind, "definition": definition})
        except KiwiError as error:
            issues.append(Issue(place, error.message, "The server must fix it; the other definitions are stored."))
            continue
        if fault := _fault(kind, name, data):
            issues.append(Issue(place, fault, "It is left out; the rest is kept.", severity="warning"))
            continue
        offers.append(ServerOffer(kind, name, definition, sha256_hex(data)))
    return tuple(offers)


def unlisted(listing: ServerListing) -> AbstractSet[OfferKind]:
    """Return the kinds of things that a server could not list although it has them."""
    words: dict[str, OfferKind] = {
        "tools": "tool",
        "prompts": "prompt",
        "resources": "resource",
        "resourceTemplates": "template",
    }
    return {words[issue.place] for issue in listing.issues if issue.place in words}


def merged(
    known: Sequence[Definition],
    offers: Sequence[ServerOffer],
    *,
    is_accepted: bool,
    now: str,
    untouched: AbstractSet[OfferKind] = frozenset(),
) -> tuple[Definition, ...]:
    """Return what is known after a listing.

    What is as it was accepted stays accepted. What differs has changed, and what was never accepted is new, unless
    `is_accepted`. What is not offered any more is gone, and remembered; kinds that are `untouched` were not listed.
    """
    before = {(one.kind, one.name): one for one in known}
    taken = {one.tool_id for one in known}
    numbers: dict[str, int] = {}
    after: list[Definition] = []
    for offer in offers:
        old = before.pop((offer.kind, offer.name), None)
        if old is None:
            tool_id = id_of(offer.kind, offer.definition, taken, numbers)
            taken.add(tool_id)
            fresh = Definition(offer.kind, offer.name, tool_id, "new", offer.definition, offer.digest, seen_at=now)
            after.append(_accepted(fresh, now) if is_accepted else fresh)
        else:
            is_accepted_now = offer.digest == old.accepted_digest
            state: State = "new" if old.accepted is None else "accepted" if is_accepted_now else "changed"
            seen_at = old.seen_at if offer.digest == old.digest else now
            after.append(replace(old, state=state, offered=offer.definition, digest=offer.digest, seen_at=seen_at))
    left = (one if one.kind in untouched else replace(one, state="gone") for one in before.values())
    return tuple(sorted((*after, *left), key=lambda one: (one.kind, one.name)))


def accepted(known: Sequence[Definition], wanted: AbstractSet[str], *, now: str) -> tuple[Definition, ...]:
    """Return what is known once the owner has accepted some items, by their names, as they are offered now."""
    return tuple(
        _accepted(one, now) if one.tool_id in wanted and one.state in {"new", "changed"} else one for one in known
    )


def _fault(kind: OfferKind, name: str, data: bytes) -> str:
    if len(data) > _MAX_BYTES:
        return f"has a definition of more than {_MAX_BYTES:,} bytes"
    if len(name.encode()) > _MAX_NAME:
        return f"has a name of more than {_MAX_NAME:,} bytes"
    if kind == "template" and variables_of(as_text(name)) is None:
        return "is a template of a form that is not filled"
    return ""


def _accepted(one: Definition, now: str) -> Definition:
    return replace(one, state="accepted", accepted=one.offered, accepted_digest=one.digest, accepted_at=now)


def without_secrets(listing: ServerListing, secrets: Mapping[str, str]) -> ServerListing:
    """Return a listing without the value of any secret in it: a server may say what it was started with."""
    if not secrets:
        return listing

    def clean(value: JsonObject) -> JsonObject:
        return as_object(redacted(Outcome("success", result=value), secrets).result)

    def text(value: str) -> str:
        return redacted(Outcome("success", message=value), secrets).message

    return replace(
        listing,
        server_info=clean(listing.server_info),
        instructions=text(listing.instructions),
        tools=tuple(map(clean, listing.tools)),
        prompts=tuple(map(clean, listing.prompts)),
        resources=tuple(map(clean, listing.resources)),
        templates=tuple(map(clean, listing.templates)),
        issues=tuple(replace(one, place=text(one.place), reason=text(one.reason)) for one in listing.issues),
    )


_LAUNCH = ("transport", "command", "args", "env", "cwd", "url", "headers", "auth")
"""What of a config says how a server is reached; the rest are limits."""
_REFERENCE = lazy_pattern(r"\$\{[^{}]*\}")
_MASK = "…"


def launch_of(config: JsonObject) -> JsonObject:
    """Return how a server is reached, of all that its config says: two servers that are reached alike are one."""
    return {word: config[word] for word in _LAUNCH if config.get(word) not in (None, {}, [])}


def launch_summary(server: Tool) -> JsonObject:
    """Return what is kept of a manifest that the owner accepts: how the server is reached, with secrets masked."""
    words = {
        word: _masked(word, value) for word, value in server.manifest.config.items() if word in _LAUNCH
    }  # in the order of the manifest, as its owner reads it
    needs = server.manifest.needs.to_json()
    return {**words, "needs": needs} if needs else words


def difference(server: Tool, record: ServerRecord) -> str:
    """Return how a server is reached otherwise than when its manifest was accepted, as a person reads it."""
    if not record.words:
        return f"What it said before is not known. Look at {server.origin.path}."
    before, after = (
        json.dumps(words, indent=2, ensure_ascii=False) for words in (record.words, launch_summary(server))
    )
    lines = unified_diff(before.splitlines(), after.splitlines(), "accepted", "now", lineterm="", n=2)
    return "\n".join(lines) or f"It is reached as before; something else changed. Look at {server.origin.path}."


def _masked(name: str, value: Json) -> Json:
    match value:
        case str():
            literal = _REFERENCE.sub("", value)
            is_masked = is_secret(name, value) if literal == value else looks_secret(literal)
            return _MASK if is_masked else value
        case Mapping():
            return {word: _masked(word, inner) for word, inner in value.items()}
        case list() | tuple():
            pairs = pairwise(["", *map(text_of, value)])  # of a command: the word that follows on `--token` is a secret
            names = (before if _is_flag(before) and not _is_flag(word) else "" for before, word in pairs)
            return [_masked(name, word) for name, word in zip(names, value, strict=True)]
        case _:
            return value


def _is_flag(word: str) -> bool:
    return word.startswith("-") and "=" not in word
