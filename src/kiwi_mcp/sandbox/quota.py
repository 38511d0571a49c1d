"""A quota: what a confined process may add to the folders that it is given to write to, while it runs.

No file system here counts for one process, so the room that is left is looked at, which costs nothing; when it has
shrunk by as much as may be added the folders are gone through, for what was changed since the process began. Others may
make room meanwhile, so they are gone through now and then in any case.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR

from kiwi_mcp.domain.isolation import Limits

_BLOCK = 512
"""What `st_blocks` counts in, whatever the file system's own blocks are."""
_MOST_SEEN = 1_000_000
"""How many files are gone through before what cannot be counted is taken for too much."""
_PAUSE, _SHARE = 1.0, 20
"""How long the folders are left alone: a second, and so many times as long as it took to go through them."""
_STEPS = 4
"""A shrinking that was somebody else's is looked into again after this part of the quota."""


@dataclass(frozen=True, slots=True)
class _Room:
    free_bytes: int
    free_files: int


def quota(folders: Sequence[str], limits: Limits) -> Callable[[], str] | None:
    """Return what says why a process has to be stopped, or nothing; None where it may write nowhere."""
    return _Quota(folders, limits).exceeded if folders else None


class _Quota:
    """The folders that one process writes to, from the moment it begins."""

    def __init__(self, folders: Sequence[str], limits: Limits) -> None:
        self._folders = folders
        self._limits = limits
        # A file system may keep time in steps as long as the system's clock takes from tick to tick.
        self._began_ns = time.time_ns() - 20_000_000
        self._rooms = [_room(folder) for folder in folders]
        self._next = time.monotonic() + _PAUSE

    def exceeded(self) -> str:
        """Return why the process has to be stopped; nothing while it keeps to its quota."""
        began = time.monotonic()
        have_shrunk = [self._has_shrunk(index) for index in range(len(self._folders))]
        if not any(have_shrunk) and began < self._next:
            return ""
        size, count = self._added()
        ended = time.monotonic()
        self._next = ended + max(_PAUSE, _SHARE * (ended - began))
        if size > self._limits.workspace_bytes:
            return f"wrote more than {self._limits.workspace_bytes:,} bytes into the folders it was given"
        if count > self._limits.workspace_files:
            return f"made more than {self._limits.workspace_files:,} files in the folders it was given"
        return ""

    def _has_shrunk(self, index: int) -> bool:
        """Whether the room at a folder shrank by the quota; if so, the next look is after a part of it."""
        before, now = self._rooms[index], _room(self._folders[index])
        taken = before.free_bytes - now.free_bytes
        made = before.free_files - now.free_files
        if taken <= self._limits.workspace_bytes and made <= self._limits.workspace_files:
            return False
        parts = self._limits.workspace_bytes // _STEPS, self._limits.workspace_files // _STEPS
        self._rooms[index] = _Room(
            now.free_bytes + self._limits.workspace_bytes - parts[0],
            now.free_files + self._limits.workspace_files - parts[1],
        )
        return True

    def _added(self) -> tuple[int, int]:
        """Return the bytes and the number of what was changed since the process began, each file once."""
        size, seen = 0, set[tuple[int, int]]()
        for count, state in enumerate(_states(self._folders)):
            if count > _MOST_SEEN or len(seen) > self._limits.workspace_files or size > self._limits.workspace_bytes:
                return max(size, self._limits.workspace_bytes + 1 if count > _MOST_SEEN else 0), len(seen)
            if state.st_ctime_ns >= self._began_ns and (state.st_dev, state.st_ino) not in seen:
                seen.add((state.st_dev, state.st_ino))
                size += state.st_blocks * _BLOCK
        return size, len(seen)


def _room(folder: str) -> _Room:
    try:
        state = os.statvfs(folder)
    except OSError:  # it is gone, and nothing is added to it
        return _Room(0, 0)
    return _Room(state.f_bavail * state.f_frsize, state.f_favail)


def _states(paths: Sequence[str]) -> Iterator[os.stat_result]:
    """Give what is known of every file and folder at and below some paths, links not followed."""
    waiting = [*map(Path, paths)]
    while waiting:
        path = waiting.pop()
        with suppress(OSError):  # it is gone, or went while we looked
            state = path.stat(follow_symlinks=False)
            yield state
            if S_ISDIR(state.st_mode):
                waiting += path.iterdir()
