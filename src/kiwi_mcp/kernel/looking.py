"""Looking for items: what searches have indexed, loaded at the first of them, and what is remembered of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from importlib import import_module
from threading import Lock
from typing import Protocol

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.grants import Rights
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.outcome import Progress, Report
from kiwi_mcp.kernel.permitting import demand_rules
from kiwi_mcp.kernel.remembering import Remembering
from kiwi_mcp.kernel.requests import SearchRequest
from kiwi_mcp.kernel.searching.ahead import load_ahead
from kiwi_mcp.kernel.store import Store

_LOOK = 0.25
"""For how many seconds whoever waits for the index does not hear how far it is."""


class LibraryPort(Protocol):
    """What searches have indexed."""

    def progress(self) -> tuple[int, int, int]:
        """Return how many items there are, and how many are found by words, and by meaning."""

    def settle(self, seconds: float) -> bool:
        """Wait, for so long at the most, until nothing is left to be indexed; return whether that is so."""

    def close(self) -> None:
        """End what is done in the background."""


class Looking:
    """The searches of one kernel; it may be used from several threads."""

    def __init__(self, store: Store, remembering: Remembering) -> None:
        self._store = store
        self._remembering = remembering
        self._library: LibraryPort | None = None
        self._opening = Lock()

    def found(
        self, request: SearchRequest, caller: Caller, rights: Callable[[], Rights], catalog: Catalog
    ) -> JsonObject:
        """Search, in a thread beside the loop: the first time, loading what searches need takes a moment."""
        demand_rules(caller, rights)
        if self._library is None:
            load_ahead(self._store)
        find = import_module("kiwi_mcp.kernel.find").find
        recall = self._remembering.recall(catalog.space, caller)
        told: JsonObject = find(request, catalog, self._opened(), rights=rights, recall=recall)
        self._remembering.asked(request.query, told, catalog.space, caller)
        return told

    def told(self, catalog: Catalog) -> str:
        """Return how searches are answered here, as doctor tells it."""
        tell: Callable[[Catalog, LibraryPort, Store], str]
        tell = import_module("kiwi_mcp.kernel.searching.opening").told_of_search
        return tell(catalog, self._opened(), self._store)

    async def index(self, report: Report, *, seconds: float) -> None:
        """Wait, for so long at the most, until what was searched is indexed; it goes on by itself, too."""
        until = time.monotonic() + seconds
        while self._library is not None and time.monotonic() < until:
            known, worded, encoded = self._library.progress()
            report(Progress("indexing", worded if worded < known else encoded, known))
            if await asyncio.to_thread(self._library.settle, _LOOK):
                return

    def close(self) -> None:
        """End what is done in the background."""
        if self._library is not None:
            self._library.close()

    def _opened(self) -> LibraryPort:
        with self._opening:
            if self._library is None:
                make: Callable[[Store], LibraryPort]
                make = import_module("kiwi_mcp.kernel.searching.opening").open_library
                self._library = make(self._store)
            return self._library
