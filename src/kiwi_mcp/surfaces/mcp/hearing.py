"""What a client hears of its call while it waits for it: progress, if it asked for that, and the lines of its log."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import mcp_types as types
from mcp.server.connection import allowed_log_levels
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from kiwi_mcp.domain.caller import Note, unheard
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.domain.outcome import Report, silent
from kiwi_mcp.surfaces.mcp.levels import is_wanted
from kiwi_mcp.surfaces.mcp.port import Context
from kiwi_mcp.surfaces.mcp.progress import Relay

_MOST_LINES = 256
"""How many lines may wait for a client that reads slowly; those beyond are dropped."""


class Lines:
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
    lines = Lines(context)
    note = lines.add if allowed_log_levels(context.protocol_version, context.meta) else unheard
    try:
        if "progress_token" in (context.meta or {}):
            async with Relay(context.session.report_progress) as relay:
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
