"""Progress of a call, as the client may hear it: not too often, and always forward."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self, TypeAlias

from kiwi_mcp.domain.outcome import Progress

Send: TypeAlias = Callable[[float, float | None, str | None], Awaitable[None]]
"""Sends one note: how much is done, of how much, and in words where there are any."""

INTERVAL = 0.1
"""The least time between two notes, in seconds. Of what is reported meanwhile, the latest is told."""


class Relay:
    """Passes on what a call reports while the block lasts; the last report goes out before it ends."""

    def __init__(self, send: Send, *, interval: float = INTERVAL) -> None:
        self._send = send
        self._interval = interval
        self._latest: Progress | None = None
        self._news = asyncio.Event()
        self._told: float | None = None

    def report(self, progress: Progress) -> None:
        """Take note of progress, without waiting."""
        self._latest = progress
        self._news.set()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._pass_on())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        if kind is None:  # a call that was cancelled has nobody listening any more
            await self._tell()

    async def _pass_on(self) -> None:
        while True:
            await self._news.wait()
            await self._tell()
            await asyncio.sleep(self._interval)

    async def _tell(self) -> None:
        progress, self._latest = self._latest, None
        self._news.clear()
        if progress is not None:
            self._told = ahead_of(self._told, progress)
            await self._send(self._told, progress.total, progress.message or None)


def ahead_of(told: float | None, progress: Progress) -> float:
    """Return how much is done, as a number above the last one told: the protocol lets it only grow.

    A report that says something new without having come further moves a small step, never up to the total.
    """
    if told is None or progress.done > told:
        return progress.done
    if progress.total is None:
        return told + 1
    return told + (progress.total - told) / 1_000 if told < progress.total else told + progress.total / 1_000
