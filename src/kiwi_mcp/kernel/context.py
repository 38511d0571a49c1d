"""What verbs and the pipeline work with: the services of a kernel, its catalogs, and their threads."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cached_property, partial, reduce
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

import kiwi_mcp.kernel.tool_list as tool_list  # noqa: PLR0402 - the package itself imports this module
from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.calls import Caller, Served, Space
from kiwi_mcp.domain.errors import KiwiError, PolicyDenied, Unavailable
from kiwi_mcp.domain.grants import ALL, Rights, Rules, hiding, narrow
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.mcp import Offers
from kiwi_mcp.domain.outcome import Progress, Report
from kiwi_mcp.domain.registry import PUBLIC_ACTOR, Actor
from kiwi_mcp.drivers import Drivers
from kiwi_mcp.kernel.paths import folder_identity, no_project_space, project_space
from kiwi_mcp.kernel.prepared import PreparedItems
from kiwi_mcp.kernel.provenance import AuthorshipLog, Provenances
from kiwi_mcp.kernel.recorder import CallRecord, Recorder
from kiwi_mcp.kernel.settings import search_mode
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.kernel.token_meter import ResponseSizes
from kiwi_mcp.kernel.verb import Answer
from kiwi_mcp.manifest.files import OwnerStamp, owner_stamp
from kiwi_mcp.manifest.home_config import FILE_NAME as CONFIG
from kiwi_mcp.policy import secret_access
from kiwi_mcp.policy.policy_files import Authority, ask
from kiwi_mcp.policy.tokens import TokenStore
from kiwi_mcp.search.recall_log import RecallAccess, RecallLog
from kiwi_mcp.store.mcp_definitions import McpDefinitions
from kiwi_mcp.store.principals import is_token_principal
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.runs import Runs
from kiwi_mcp.store.search_index.recall import RecallStore
from kiwi_mcp.store.tasks import Tasks

if TYPE_CHECKING:
    from kiwi_mcp.search.indexes import SearchIndexes

Kept = TypeVar("Kept")
Result = TypeVar("Result")

_SPACES_KEPT = 32
_PRIVACY = "the registry"
"""The name of the rules that hide private items."""


class CatalogThread:
    """One thread with its own catalogs: only one thread at a time may use a catalog."""

    def __init__(self, make: Callable[[Space], Catalog]) -> None:
        self._make = make
        self._catalogs: dict[Space, Catalog] = {}
        self._thread: ThreadPoolExecutor | None = None

    async def do(self, space: Space, work: Callable[[Catalog], Result]) -> Result:
        """Return the result of work on the catalog of a space; the work does not block the event loop."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="kiwi-catalog")
        context = copy_context()
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: context.run(lambda: work(for_space(self._catalogs, space, self._make)))
        )

    async def aclose(self) -> None:
        """Wait for what is being done, and do nothing else."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.shutdown, cancel_futures=True)
        self._catalogs.clear()


def for_space(kept: dict[Space, Kept], space: Space, make: Callable[[Space], Kept]) -> Kept:
    """Return what is kept for a space, made where it is not; few are kept, and those that were used last."""
    found = kept.pop(space, None)
    kept[space] = make(space) if found is None else found  # the newest comes last, the least recently used first
    if len(kept) > _SPACES_KEPT:
        del kept[next(iter(kept))]
    return kept[space]


_OF_PROJECT = "project/"
"""How the full names of items begin that are of one project."""


class Catalogs:
    """The catalogs of one kernel; `project` is the catalog of requests that name no project.

    `near` and `far` search catalogs in threads outside the event loop. Published items may be far away, so a search for
    local items does not wait for them.
    """

    def __init__(self, project: Path | None, user: Path, cache: Path, store: Store) -> None:
        self.project = project
        self._user = user
        self._cache = cache
        self._store = store
        self._catalogs: dict[Space, Catalog] = {}
        self._offerings: dict[Space, tool_list.ToolListCache] = {}
        self._spaces: dict[str | None, tuple[str, tuple[int, int, int], Space, OwnerStamp]] = {}
        self._last: Catalog | None = None
        self._definitions: McpDefinitions | None = None
        self.near, self.far = CatalogThread(self._made), CatalogThread(self._made)

    def space(self, project_path: str | None) -> Space:
        """Return the space of a project; refuse the request if there is no project."""
        known, config = self._spaces.get(project_path), owner_stamp(f"{self._user}/{CONFIG}")
        if known is not None and known[3] == config and known[1] == folder_identity(known[0]):
            return known[2]
        space = project_space(project_path, self.project, user=self._user, cache=self._cache)
        path = project_path or str(self.project)
        identity = folder_identity(path)
        # Whether a folder of another user may be used is asked each time: the owner may take the permission back.
        if identity is not None and identity[2] == os.geteuid():
            if len(self._spaces) >= _SPACES_KEPT:
                self._spaces.clear()
            self._spaces[project_path] = (path, identity, space, config)
        return space

    def space_if_any(self, project_path: str | None) -> Space:
        """Return the space of a project, or of what belongs to none where no project is known."""
        is_known = project_path is not None or self.project is not None
        return self.space(project_path) if is_known else no_project_space(self._user, self._cache)

    def of(self, project_path: str | None) -> Catalog:
        """Return the catalog of a project."""
        return self.for_item(_OF_PROJECT, project_path)

    def at(self, project_path: str | None) -> Catalog:
        """Return the catalog of a project, or of what belongs to none where no project is known."""
        return self.for_item("", project_path)

    def for_item(self, item_id: str, project_path: str | None) -> Catalog:
        """Return the catalog of a project for one item; an item of a project needs to know which project that is."""
        is_known = project_path is not None or self.project is not None or item_id.startswith(_OF_PROJECT)
        space = self.space(project_path) if is_known else no_project_space(self._user, self._cache)
        last = self._last  # most calls are about the same project as the call before
        if last is None or last.space is not space:
            last = self._last = for_space(self._catalogs, space, self._made)
        return last

    def offering(self, project_path: str | None) -> tool_list.ToolListCache:
        """Return what clients see without searching, in a project or where none is known."""
        return for_space(
            self._offerings, self.space_if_any(project_path), lambda space: tool_list.ToolListCache(self._made(space))
        )

    def kept(self) -> Iterable[Catalog]:
        """Return the catalogs that the loop has used."""
        return self._catalogs.values()

    def definitions(self) -> McpDefinitions:
        """Return what is remembered of MCP servers."""
        return self._definitions_in(self._store.registry())

    def clear(self) -> None:
        """Keep no catalog any longer."""
        self._catalogs.clear()
        self._offerings.clear()
        self._last = None

    def _made(self, space: Space) -> Catalog:
        store = self._store

        def definitions() -> McpDefinitions | None:  # a store that was never used is not made to find out
            registry = store.registry_if_any()
            return self._definitions_in(registry) if registry else None

        return Catalog(space, registry=store.registry, definitions=definitions, store_state=store.state)

    def _definitions_in(self, registry: Registry) -> McpDefinitions:
        known = self._definitions
        if known is None or known.database is not registry.database:
            known = self._definitions = McpDefinitions(registry.database, registry.actor.name)
        return known


_REPORT = 0.25
"""How many seconds pass between two progress reports to a caller that waits for the index."""


class SearchService:
    """The search indexes of one kernel, once a search has opened them; several threads may use it."""

    def __init__(self) -> None:
        self._indexes: SearchIndexes | None = None
        self._opening = Lock()

    def open(self, make: Callable[[], SearchIndexes]) -> SearchIndexes:
        """Return the indexes; the first call makes them."""
        with self._opening:
            self._indexes = self._indexes or make()
            return self._indexes

    async def index(self, report: Report, *, seconds: float) -> None:
        """Wait at most `seconds` until what was searched is indexed; indexing also continues in the background."""
        until = time.monotonic() + seconds
        while self._indexes is not None and time.monotonic() < until:
            known, worded, encoded = self._indexes.progress()
            report(Progress("indexing", worded if worded < known else encoded, known))
            if await asyncio.to_thread(self._indexes.wait_until_indexed, _REPORT):
                return

    def close(self) -> None:
        """End the background work."""
        if self._indexes is not None:
            self._indexes.close()


def recall_access(store: Store) -> RecallAccess:
    """Return what recall uses of a user's store."""

    def is_enabled() -> bool:
        try:
            return store.settings.remember
        except KiwiError:  # the code that needs the settings reports it
            return False

    def open_store_if_any() -> RecallStore | None:
        registry = store.registry_if_any()
        return RecallStore(registry.database, store.actor.name) if registry else None

    return RecallAccess(
        is_enabled=is_enabled,
        uses_meaning=lambda: search_mode(store.user) == "meaning",
        open_store=lambda: RecallStore(store.registry().database, store.actor.name),
        open_store_if_any=open_store_if_any,
        secrets=lambda space: secret_access.every_value(space),  # noqa: PLW0108 - loaded with the first secret
    )


class Service(Protocol):
    """A part of a kernel that is made when it is first used, and closed with the kernel."""

    async def aclose(self) -> None:
        """Release all resources."""


S = TypeVar("S", bound=Service)


class Services:
    """The services of one kernel: store, catalogs, drivers, search, recorder.

    `surface` names the way requests arrive. `is_owner` says whether they come directly from the owner.
    """

    def __init__(
        self,
        project: Path | None,
        user: Path,
        cache: Path,
        authority: Authority,
        *,
        is_owner: bool,
        surface: str,
        check_server: Callable[[Services, Chain, Catalog], Awaitable[Unavailable | None]],
        dispatch: Callable[[str, JsonObject, Caller], Awaitable[Answer]],
        is_short_lived: bool = False,
        served: Served | None = None,
    ) -> None:
        self.served = served
        self._check_server = check_server
        self.dispatch = dispatch
        """Answers a verb: threads and native items make their calls through it."""
        self.user = user
        self.authority = authority
        self.surface = surface
        self._is_owner = is_owner
        self.store = Store(user)
        self.tokens = TokenStore(user)
        self.provenance = Provenances(self.store)
        self.drivers = Drivers()
        self.prepared = PreparedItems(user, self.store)
        self.recorder = Recorder(user, self.store, surface)
        self.catalogs = Catalogs(project, user, cache, self.store)
        self.response_sizes = ResponseSizes(cache, is_counting=not is_owner)
        self.recall_log = RecallLog(recall_access(self.store), cache / "searches.json" if is_short_lived else None)
        self.search = SearchService()
        self.tainted_callers: set[str] = set()
        """The names of callers that were given text from outside since this kernel began; the owner has none."""
        self.is_ending = False
        """Whether this process is about to end: a thread that is stopped now is left to a worker, and not cancelled."""
        self._services: dict[Callable[[Services], Service], Service] = {}

    def context(self, caller: Caller, catalog: Catalog) -> Context:
        """Return what one call is made with; rules that cannot be read are an error."""
        return Context(self, caller, catalog, self.rights(caller)(), is_owner=self.is_owner(caller))

    def is_owner(self, caller: Caller) -> bool:
        """Whether a caller is the owner in person: in no other name, or at the API with a token that may manage."""
        is_manager = caller.is_direct and caller.can_manage and caller.identity.kind == "owner"
        return (is_manager or (self._is_owner and not caller.name)) and not (
            caller.origin.thread or caller.origin.tools
        )

    def rights(self, caller: Caller) -> Callable[[], Rights]:
        """Return a function that gives the current rules for a caller; a thread has those of its directives as well."""
        if caller.grants:
            own = self.rights(replace(caller, grants=()))
            return lambda: reduce(narrow, caller.grants, own())
        if self.serving(caller) is None or self.is_owner(caller):
            return partial(ask, self.authority.manage, caller.identity)
        return lambda: self._without_private(ask(self.authority.manage, caller.identity), caller.actor or PUBLIC_ACTOR)

    def serving(self, caller: Caller) -> Served | None:
        """Return how a caller is served: a thread as its starter was, in every process that runs it."""
        return caller.served if caller.origin.thread else self.served

    def check_starter(self, caller: Caller) -> None:
        """Refuse what a thread does for a starter whose token was removed or has expired."""
        if not caller.origin.thread:
            return
        is_removed = is_token_principal(caller.name) and not self.tokens.holds(caller.name)
        if is_removed or (caller.expires_at is not None and time.time() >= caller.expires_at):
            raise PolicyDenied(
                f"The token that started this thread {'was removed' if is_removed else 'has expired'}.",
                suggestion="Start the thread again with a token that is valid.",
            )

    def _without_private(self, rights: Rights, actor: Actor) -> Rights:
        """Return rights in which the private items of the registry that an actor may not see do not exist."""
        try:
            registry = self.store.registry_if_any()
            private = registry.hidden_from(actor) if registry else frozenset()
        except KiwiError:  # then nothing of the registry is shown
            return narrow(rights, hiding(frozenset(), _PRIVACY, Rules(ALL.allow, ("registry/*",))))
        if not private:
            return rights
        return narrow(rights, hiding(frozenset(f"registry/{space}/{name}" for space, name in private), _PRIVACY))

    async def offers(self, project_path: str | None) -> Offers:
        """Return what a client sees without searching; where no project is known, what it sees in every one."""
        return await asyncio.to_thread(self.catalogs.offering(project_path).now)

    def authorship(self, caller: Caller) -> AuthorshipLog:
        """Return the authorship log of a caller, who is either the owner in person or another author."""
        return AuthorshipLog(self.provenance, caller.name or self.surface, is_owner=self.is_owner(caller))

    async def check_server(self, chain: Chain, catalog: Catalog) -> Unavailable | None:
        """List the server of a chain again where that is due, and return why it cannot be reached, if so."""
        return await self._check_server(self, chain, catalog) if chain.server is not None else None

    def runs(self, caller: Caller) -> Runs:
        """Return the runs of a caller, who sees no others: the owner's, unless it says who else it is."""
        runs = self.store.runs()
        return runs.of(caller.name) if caller.name else runs

    def runs_or_error(self, caller: Caller) -> Runs | KiwiError:
        """Return where runs of a caller are recorded, or why they cannot be."""
        try:
            runs = self.store.open().runs
        except KiwiError as error:
            return error
        return runs.of(caller.name) if caller.name else runs

    def one(self, make: Callable[[Services], S]) -> S:
        """Return the one service of a class, which is made when it is first asked for."""
        if make not in self._services:
            self._services[make] = make(self)
        return cast("S", self._services[make])

    def tasks(self) -> Tasks:
        """Return the tasks in the store; opening it may take a while."""
        registry = self.store.registry()
        return Tasks(registry.database, registry.actor.name)

    async def aclose(self) -> None:
        """Release everything that is open."""
        self.is_ending = True
        await self.catalogs.near.aclose()
        await self.catalogs.far.aclose()
        while self._services:
            await self._services.popitem()[1].aclose()
        await asyncio.to_thread(self.recall_log.close)
        await asyncio.to_thread(self.search.close)
        self.catalogs.clear()
        self.response_sizes.flush()
        await self.recorder.aclose()
        self.store.close()
        self.provenance.forget()
        self.prepared.clear()
        await self.drivers.aclose()


class Context(Struct, frozen=True):
    """What one call is made with: the services, the caller, and what the caller sees and may do.

    `is_owner` says that the owner typed this call. That is not `Caller.answers_as_owner`, which says that an answer of
    this caller counts as the owner's.
    """

    services: Services
    caller: Caller
    catalog: Catalog
    rights: Rights
    is_owner: bool

    @property
    def space(self) -> Space:
        """The folders that the call sees."""
        return self.catalog.space


class VerbContext(Struct, frozen=True, dict=True):
    """What a verb works with: the services, the caller, and the record of the call if it leaves a receipt."""

    services: Services
    caller: Caller
    record: CallRecord | None
    strays: tuple[str, ...] = ()
    """The parameters of an item that were sent beside `parameters`."""

    @property
    def is_owner(self) -> bool:
        """Whether the owner makes this call in person."""
        return self.services.is_owner(self.caller)

    @cached_property
    def rights(self) -> Rights:
        """The rules for the caller as they were when the request arrived; rules that cannot be read are an error."""
        return self.services.rights(self.caller)()

    def registry(self) -> Registry:
        """Return the registry as the caller sees it; a caller of a gateway without an actor sees public items only."""
        registry = self.services.store.registry()
        # Every caller of a kernel that serves no others uses the registry as the owner.
        if self.services.serving(self.caller) is None or self.is_owner:
            return registry
        return registry.as_seen_by(self.caller.actor or PUBLIC_ACTOR)
