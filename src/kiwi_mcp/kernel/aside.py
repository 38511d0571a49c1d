"""Aside: work that looks through a whole catalog, done in a thread beside the loop, one piece after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.call import Space

Kept = TypeVar("Kept")
Told = TypeVar("Told")

_SPACES_KEPT = 32


class Aside:
    """One thread, with catalogs that nobody else uses: a catalog is used by one thread at a time."""

    def __init__(self, make: Callable[[Space], Catalog]) -> None:
        self._make = make
        self._catalogs: dict[Space, Catalog] = {}
        self._thread: ThreadPoolExecutor | None = None

    async def do(self, space: Space, work: Callable[[Catalog], Told]) -> Told:
        """Return what comes of some work on the catalog of a space, while the loop goes on."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="kiwi-aside")
        context = copy_context()
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: context.run(lambda: work(kept_for(self._catalogs, space, self._make)))
        )

    async def aclose(self) -> None:
        """Wait for what is being done, and do nothing else."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.shutdown, cancel_futures=True)
        self._catalogs.clear()


def kept_for(kept: dict[Space, Kept], space: Space, make: Callable[[Space], Kept]) -> Kept:
    """Return what is kept for a space, made where it is not; few are kept, and those that were used last."""
    found = kept.pop(space, None)
    kept[space] = make(space) if found is None else found  # the newest stands last, the one unused for longest first
    if len(kept) > _SPACES_KEPT:
        del kept[next(iter(kept))]
    return kept[space]
