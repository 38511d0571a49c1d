"""A head start for the encoder: it is loaded while the first search imports and reads all else that it needs.

Loading it is mostly work outside Python, so that both go on at once where there are two cores.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from threading import Thread

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.kernel.settings import named_half
from kiwi_mcp.kernel.store import Store


def load_ahead(store: Store) -> None:
    """Begin to load the encoder, in a thread that nobody waits for, if the owner wants it."""
    if half_of(store) == "meaning":
        Thread(target=_load, name="kiwi-encoder", daemon=True).start()


def half_of(store: Store) -> str:
    """Return by what items are found, `words` or `meaning`; KIWI_SEARCH may say another than the owner's file does."""
    try:
        return named_half([]) or store.settings.search
    except KiwiError:  # whatever needs the settings tells of it
        return "meaning"


def _load() -> None:
    # Whoever searches imports the same, and tells why it cannot be.
    with suppress(ImportError):
        import_module("kiwi_mcp.search.encoder").load_encoder()
