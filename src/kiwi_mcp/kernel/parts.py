"""The parts that one kernel is joined of, and what each is for whoever calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Protocol

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import KiwiError, Unavailable
from kiwi_mcp.domain.grants import Rights
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.offers import Offers
from kiwi_mcp.kernel.catalogs import Catalogs
from kiwi_mcp.kernel.confining import Judge
from kiwi_mcp.kernel.context.tally import Tally
from kiwi_mcp.kernel.ledger import Ledger
from kiwi_mcp.kernel.looking import Looking
from kiwi_mcp.kernel.provenance import Authorship, Origins
from kiwi_mcp.kernel.remembering import Remembering
from kiwi_mcp.kernel.requests import McpRequest
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.kernel.trail import Recorder
from kiwi_mcp.policy.authority import Authority, ask
from kiwi_mcp.store.definitions import Definitions
from kiwi_mcp.store.runs import Runs
from kiwi_mcp.store.tasks import Tasks


class McpDesk(Protocol):
    """What is done about MCP servers; it is loaded when one is first used."""

    async def attend(self, chain: Chain, catalog: Catalog) -> Unavailable | None:
        """Look at the server of a chain before it is run, where it may have changed unseen; give why it cannot be."""

    def used(self, identity: str) -> None:
        """Note that a server was used."""

    def look(self, request: McpRequest, catalog: Catalog, *, is_owner: bool) -> JsonObject:
        """Do what a request says that asks no server: tell what is known of them, or accept it."""

    async def act(self, request: McpRequest, catalog: Catalog, caller: Caller, *, is_owner: bool) -> JsonObject:
        """Do what any other request says."""

    async def aclose(self) -> None:
        """Let go of everything."""


class Parts:
    """What verbs are answered with. `is_owner` says whether requests come from the owner's own hand, `surface` how."""

    def __init__(
        self, project: Path | None, user: Path, cache: Path, authority: Authority, *, is_owner: bool, surface: str
    ) -> None:
        self.user = user
        self.authority = authority
        self.surface = surface
        self._is_owner = is_owner
        self.store = Store(user)
        self.origins = Origins(self.store)
        self.ledger = Ledger(user, self.store, surface)
        self.catalogs = Catalogs(project, user, cache, self.store)
        self.tally = Tally(cache, surface)
        self.remembering = Remembering(self.store, cache / "searches.json" if surface == "cli" else None)
        self.looking = Looking(self.store, self.remembering)
        self.readers: set[str] = set()
        """Who was given words from outside since this kernel began, by name; the owner has none."""
        self.desk_if_any: McpDesk | None = None

    def is_own_hand(self, caller: Caller) -> bool:
        """Whether a caller is the owner's own hand: here, and in nobody else's name."""
        return self._is_owner and not caller.name

    def rights(self, caller: Caller) -> Callable[[], Rights]:
        """Return what gives the rules that hold for a caller, as they stand when it is asked."""
        return partial(ask, self.authority, caller.identity)

    async def offers(self, project_path: str | None) -> Offers:
        """Return what a client sees without searching; where no project is known, what it sees in every one."""
        return await asyncio.to_thread(self.catalogs.offering(project_path).now)

    def authorship(self, caller: Caller) -> Authorship:
        """Return a caller as the author of what they write: the owner's own hand, or somebody else's."""
        return Authorship(self.origins, caller.name or self.surface, is_owner=self.is_own_hand(caller))

    def runs(self, caller: Caller) -> Runs:
        """Return the runs of a caller, who sees no others: the owner's, unless it says who else it is."""
        runs = self.store.runs()
        return runs.of(caller.name) if caller.name else runs

    def recorder(self, caller: Caller) -> Recorder:
        """Return where runs are recorded, or why they cannot be: a tool runs all the same."""
        try:
            runs = self.runs(caller)
        except KiwiError as error:
            return error
        self.store.hold()
        return runs

    def tasks(self) -> Tasks:
        """Return the tasks in the store; opening it may take a while."""
        registry = self.store.registry()
        return Tasks(registry.database, registry.actor.name)

    def desk(self) -> McpDesk:
        """Return what is done about MCP servers."""
        if self.desk_if_any is None:
            make: Callable[[Path, Callable[[], Definitions], Callable[[], Iterable[Catalog]], Judge], McpDesk]
            make = import_module("kiwi_mcp.kernel.mcp.verbs").McpVerb
            self.desk_if_any = make(self.user, self.catalogs.definitions, self.catalogs.kept, self.origins.held)
        return self.desk_if_any

    async def aclose(self) -> None:
        """Let go of everything that is held open."""
        await self.catalogs.stand_still()
        if self.desk_if_any is not None:
            await self.desk_if_any.aclose()
            self.desk_if_any = None
        await asyncio.to_thread(self.remembering.close)
        await asyncio.to_thread(self.looking.close)
        self.catalogs.clear()
        self.tally.settle()
        await self.ledger.aclose()
        self.store.close()
        self.origins.forget()
