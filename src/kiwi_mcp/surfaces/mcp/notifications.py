"""Progress and log lines to the client during its call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Self, TypeAlias, get_args

import anyio
import mcp_types as types
from mcp.server.connection import allowed_log_levels
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from kiwi_mcp.domain.calls import Note, unheard
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.domain.outcome import Progress, Report, silent
from kiwi_mcp.surfaces.mcp.protocol import Context, connection_of

LEVELS: tuple[types.LoggingLevel, ...] = get_args(types.LoggingLevel)
"""From the least to the most urgent."""

_KEY = "kiwi.log_level"


async def set_level(context: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
    """Remember the minimum log level that a client wants, as long as it stays connected."""
    connection_of(context).state[_KEY] = params.level
    return types.EmptyResult()


def is_wanted(context: Context, level: str) -> bool:
    """Whether a client wants log lines of a level; the default is `info` and above."""
    least = connection_of(context).state.get(_KEY, "info")
    return level in LEVELS and LEVELS.index(level) >= LEVELS.index(least)


Send: TypeAlias = Callable[[float, float | None, str | None], Awaitable[None]]
"""Sends one note: how much is done, of how much, and in words where there are any."""

INTERVAL = 0.1
"""The minimum time between two notifications, in seconds. Of the reports in between, only the latest is sent."""


class ProgressRelay:
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
        if kind is None:  # a cancelled call has no listener any more
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


def ahead_of(last: float | None, progress: Progress) -> float:
    """Return the progress as a number above the last one sent, as the protocol requires, and below the total."""
    if last is None or progress.done > last:
        return progress.done
    if progress.total is None:
        return last + 1
    return last + (progress.total - last) / 1_000 if last < progress.total else last + progress.total / 1_000


_MOST_LINES = 256
"""How many lines may wait for a client that reads slowly; those beyond are dropped."""


class LogRelay:
    """Lines of a log on their way to a client, in the order in which they came."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting: deque[JsonObject] = deque()
        self._sending: asyncio.Task[None] | None = None

    def add(self, line: JsonObject) -> None:
        """Take a line, without waiting; one of a level that the client did not ask for is dropped."""
        if len(self._waiting) < _MOST_LINES and _is_wanted(self._context, as_text(line.get("level"))):
            self._waiting.append(line)
            if self._sending is None or self._sending.done():
                self._sending = asyncio.create_task(self._send())

    async def flush(self) -> None:
        """Wait until all was sent."""
        if self._sending is not None:
            await self._sending

    def close(self) -> None:
        """Send nothing more."""
        if self._sending is not None:
            self._sending.cancel()

    async def _send(self) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            while self._waiting:
                await self._context.session.send_notification(
                    _notification(self._waiting.popleft()), related_request_id=self._context.request_id
                )


@asynccontextmanager
async def hearing(context: Context) -> AsyncIterator[tuple[Report, Note]]:
    """Pass on what a call tells while the block lasts; the last of it goes out before it ends."""
    lines = LogRelay(context)
    note = lines.add if allowed_log_levels(context.protocol_version, context.meta) else unheard
    try:
        if "progress_token" in (context.meta or {}):
            async with ProgressRelay(context.session.report_progress) as relay:
                yield relay.report, note
        else:
            yield silent, note
        await lines.flush()
    finally:
        lines.close()


def _is_wanted(context: Context, level: str) -> bool:
    # A client of the new era says so with each request, one of the old era once for all of them.
    return level in allowed_log_levels(context.protocol_version, context.meta) and (
        context.protocol_version in MODERN_PROTOCOL_VERSIONS or is_wanted(context, level)
    )


def _notification(line: JsonObject) -> types.LoggingMessageNotification:
    return types.LoggingMessageNotification(
        params=types.LoggingMessageNotificationParams.model_validate(
            {"level": line["level"], "data": line.get("data"), "logger": as_text(line.get("logger")) or None}
        )
    )
