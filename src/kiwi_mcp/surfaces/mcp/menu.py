"""The menu: what clients see without searching, read again when it may have changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import TypeAlias

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.offers import Offer, Offers
from kiwi_mcp.kernel.verbs import VERBS
from kiwi_mcp.surfaces.mcp.port import KernelApi

_log = logging.getLogger("kiwi")

ONLY_META_TOOLS = Offers(meta_tools=tuple(verb.name for verb in VERBS if verb.is_meta_tool))
"""What is always there, also where nothing else can be found out."""

View: TypeAlias = Callable[[Offers], Offers]
"""Leaves out of the offers what is not for whoever asks to know of."""


def everything(offers: Offers) -> Offers:
    """Leave nothing out."""
    return offers


_FRESH = 1.0
"""For how many seconds the tool of a name is the one that it was."""
_PATIENCE, _FIRST_PATIENCE = 0.5, 10.0
"""For how many seconds a client waits for new offers where there are older ones, and where there are none yet."""


class Menu:
    """The offers of one kernel, kept for as long as their mark stays the same."""

    def __init__(self, kernel: KernelApi, view: View = everything) -> None:
        self._kernel = kernel
        self._view = view
        self._mark: str | None = None
        self._offers = ONLY_META_TOOLS
        self._is_read = False
        self._looked_at = 0.0
        self._tools: dict[str, Offer] = {}
        self._reading: asyncio.Task[None] | None = None

    async def now(self) -> Offers:
        """Return the offers that are for whoever asks."""
        return self._view(await self.read())

    async def read(self) -> Offers:
        """Return all offers; the same object as long as nothing changes, the older ones while new ones take long."""
        if self._reading is not None:  # begun before this was asked, so it may have missed what is asked for
            await self._wait_for(self._reading)
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        await self._wait_for(self._reading)
        return self._offers

    async def _wait_for(self, reading: asyncio.Task[None]) -> None:
        await asyncio.wait({reading}, timeout=_PATIENCE if self._is_read else _FIRST_PATIENCE)
        if reading.done():
            reading.result()

    async def _read(self) -> None:
        try:
            mark, self._looked_at = self._kernel.offers_mark(), monotonic()
            if mark != self._mark:
                self._serve(await self._kernel.offers())
                self._mark = mark
        except KiwiError as error:  # a project that is not there: each call says so, and the meta-tools stay
            _log.warning("what clients see cannot be found out: %s", error.message)
            self._serve(ONLY_META_TOOLS)
            self._mark = None
        finally:
            self._reading = None

    @property
    def last(self) -> Offers | None:
        """The offers as they were last read, if they ever were."""
        return self._offers if self._is_read else None

    async def tool(self, name: str) -> Offer | None:
        """Return the tool that clients call by a name, if one is offered."""
        # Every gate is passed again when it is called, so a name may mean for a moment what its caller was told of it.
        if name not in self._tools or monotonic() - self._looked_at > _FRESH:
            await self.read()
        return self.known_tool(name)

    def known_tool(self, name: str) -> Offer | None:
        """Return the tool of a name among the offers that were read last, if it is for whoever asks."""
        offer = self._tools.get(name)
        return offer if offer is None or self._view(Offers((), (offer,))).tools else None

    def _serve(self, offers: Offers) -> None:
        self._is_read = True
        if offers != self._offers:
            self._offers = offers
            self._tools = {offer.name: offer for offer in offers.tools}
