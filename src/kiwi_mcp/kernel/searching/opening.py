"""The library of one user, opened: where sheets are kept, and which half of search the owner wants."""

from __future__ import annotations

from functools import partial

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.kernel.naming import note_namespaces
from kiwi_mcp.kernel.searching.ahead import half_of
from kiwi_mcp.kernel.searching.library import Library
from kiwi_mcp.kernel.searching.memories import Memories
from kiwi_mcp.kernel.searching.sources import SOURCES
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.search.encoder import encoder_name, encoder_state, load_encoder
from kiwi_mcp.search.port import Encoder
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.registry import Registry
from kiwi_mcp.store.sheets import Sheets


class _Kept:
    """The sheets in a user's store, for as long as it is the same one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: tuple[Database, Sheets] | None = None

    def __call__(self) -> Sheets | None:
        """Return where sheets are kept; None where the store cannot be used, which costs time and nothing else."""
        try:
            registry = self._store.registry_if_any()
        except KiwiError:
            return None
        if registry is None:
            return None
        if self._known is None or self._known[0] is not registry.database:
            self._known = (registry.database, Sheets(registry.database))
        return self._known[1]

    def tend(self) -> None:
        """Let what was read count as used: a process that makes nothing new needs it no less."""
        if self._known is not None:
            self._known[1].tend_to_used()


def open_library(store: Store) -> Library:
    """Return the library of a user; the variable KIWI_SEARCH says another half than the owner's file does."""

    def load() -> Encoder | None:
        return load_encoder() if half_of(store) == "meaning" else None

    def server() -> Registry | None:
        try:
            registry = store.registry()
        except KiwiError:  # the catalog tells of it
            return None
        return None if registry.database.is_embedded else registry

    kept = _Kept(store)
    return Library(kept, load, server, kept.tend, partial(note_namespaces, store.user, store))


def open_memories(store: Store) -> Memories:
    """Return what a user's store remembers of searches."""
    return Memories(store, lambda: load_encoder() if half_of(store) == "meaning" else None, encoder_name())


def told_of_search(catalog: Catalog, library: Library, store: Store) -> str:
    """Return by what items are found here, if by words alone then why, and how far the index is."""
    state = encoder_state() if half_of(store) == "meaning" else "words only, as the owner chose"
    try:
        cards, worded, encoded = library.view(catalog, SOURCES["all"]).progress
    except KiwiError as fault:
        return f"{state}; how far the index is cannot be told: {fault.message}"
    meant = f", {encoded:,} by meaning" if state.startswith("words and") else ""
    return f"{state}; of {cards:,} items {worded:,} are found by words{meant}"
