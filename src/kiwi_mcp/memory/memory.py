"""The memory as tools use it: one change at a time, each with an entry in the history."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.memory.files import Change, apply, cannot_open, parts_of, planned, version_of

_PATIENCE = 10.0
_PAUSE = 0.02


class History(Protocol):
    """The record of every change; the kernel provides it, because it starts `git`."""

    async def open(self) -> None:
        """Make the record if there is none; raise `Unavailable` if it cannot be kept."""

    async def record(self, path: str, message: str) -> None:
        """Record how a file, or the whole folder, is now; nothing if it is as it was recorded last."""

    async def versions(self, path: str, limit: int) -> Sequence[JsonObject]:
        """Return the changes of a file or a folder, the latest first."""

    async def content(self, path: str, commit: str) -> bytes:
        """Return a file as it was after a change."""


class Memory(Struct, frozen=True):
    """One memory folder and its history."""

    root: Path
    history: History

    async def change(self, action: str, given: JsonObject, by: str) -> JsonObject:
        """Write, edit or delete a file and record it; a change that cannot be recorded is taken back."""
        async with self.opened():
            change = await asyncio.to_thread(planned, self.root, action, given)
            if change.before != change.after:
                # What was changed with an editor, or by a process that was killed, gets an entry of its own.
                await self.history.record(change.path, f"Changed outside Kiwi: {change.path}")
                await self._apply(change)
                try:
                    await self.history.record(change.path, f"{action.capitalize()} {change.path}\n\nBy: {by}")
                except (Exception, asyncio.CancelledError):
                    await self._apply(Change(change.path, change.after, change.before))
                    raise
        if change.after is None:
            return {"path": change.path, "deleted": True}
        return {"path": change.path, "bytes_written": len(change.after), "version": version_of(change.after)}

    async def _apply(self, change: Change) -> None:
        try:
            await asyncio.to_thread(apply, self.root, change)
        except OSError as error:
            raise cannot_open(self.root / change.path, error) from error

    async def versions(self, path: str, limit: int, commit: str) -> JsonObject:
        """Return the history of a path, or a file as it was after one change."""
        parts_of(path)
        async with self.opened():
            await self.history.record(path or ".", f"Changed outside Kiwi: {path or 'memory'}")
            if commit:
                data = await self.history.content(path, commit)
                return {"path": path, "commit": commit, "content": data.decode(errors="replace")}
            return {"path": path or ".", "changes": [*await self.history.versions(path, limit)]}

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep other processes from changing the memory meanwhile; its folder and its history are made if need be."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise cannot_open(self.root, error) from error
        try:
            await _lock(folder)
            await self.history.open()
            yield
        finally:
            os.close(folder)


async def _lock(folder: int) -> None:
    for _ in range(round(_PATIENCE / _PAUSE)):
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(_PAUSE)
        else:
            return
    raise Unavailable("Another process has been changing the memory for ten seconds.", suggestion="Try again.")
